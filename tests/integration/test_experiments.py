"""The experiments: settings of papers in the fields of this configuration."""

from pathlib import Path

import pytest

from trainer.assembly.build import build_diloco
from trainer.config.composition import CONFIGS, compose_config

# Compute, operands of the matmuls forward and backward, master weights, weight
# gradients, m, v.
EXPERIMENTS = {
    "scalify_paper_0": ("fp32", None, None, "fp32", "fp32", "fp32", "fp32"),
    "scalify_paper_1": ("fp16", None, None, "fp32", "fp16", "fp32", "fp32"),
    "scalify_paper_2": ("fp16", "e4m3", "e5m2", "fp32", "fp16", "fp32", "fp32"),
    "scalify_paper_3": ("fp16", "e4m3", "e5m2", "fp16", "fp16", "fp32", "fp32"),
    "scalify_paper_4": ("fp16", "e4m3", "e5m2", "fp16", "e5m2", "fp16", "fp16"),
    "fishman": ("fp16", "e4m3", "e5m2", "fp16", "fp16", "e4m3", "e5m2"),
    "federated_fp8": ("fp16", "e4m3", "e5m2", "fp16", "e5m2", "fp16", "fp16"),
}


def test_every_experiment_is_in_the_table():
    assert {path.stem for path in Path(CONFIGS, "experiment").iterdir()} == set(
        EXPERIMENTS
    )


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_the_policy_of_its_paper(name):
    config = compose_config([f"experiment={name}"])
    policy = config.precision.policy
    fields = ("compute", "forward", "backward", "weights", "weight_grad", "mu", "nu")
    assert tuple(getattr(policy, field) for field in fields) == EXPERIMENTS[name]
    assert policy.scaling == ("none" if name == "scalify_paper_0" else "propagate")
    assert config.precision.name == name  # what the start-up line calls it
    if name.startswith("scalify"):  # nothing is rounded stochastically
        assert policy.weights_rounding == "nearest"
        moments = (policy.moments_rounding, policy.update)
        assert policy.mu == "fp32" or moments == ("nearest", "propagate")


def test_the_experiment_on_swiglu_is_a_llama_and_smooths_it():
    for more in ([], ["model=llama2_7b", "train.batch_tokens=4096"]):
        model = compose_config(["experiment=fishman", *more]).model
        assert (model.family, model.mlp) == ("llama", "smooth_swiglu")


def test_the_federated_experiment_averages_three_of_eight_clients_in_fp8():
    c = compose_config(["experiment=federated_fp8"])
    diloco = build_diloco(c)
    assert (diloco.num_replicas, diloco.participants, diloco.format) == (8, 3, "fp8")
    assert (diloco.lr, diloco.momentum) == (1.0, 0.0)
    assert diloco.last_step == c.train.steps
