"""`config=FILE`: over the defaults, below the command line, checked as overrides are."""

import pytest

from trainer.config.composition import compose_config
from trainer.errors import UserError


@pytest.fixture
def write(tmp_path):
    def write(text):
        (tmp_path / "my.yaml").write_text(text)
        return f"config={tmp_path / 'my.yaml'}"

    return write


def test_a_file_is_over_the_defaults_and_below_the_command_line(write):
    file = write(
        "model: llama_nano\nmodel.n_layer: 3\nprecision: {name: bf16}\n"
        "train: {steps: 9, batch_tokens: 4096}\nseed: 5\n"
    )
    c = compose_config([file, "train.steps=4"])
    assert (c.model.name, c.model.n_layer) == ("llama_nano", 3)
    assert (c.precision.compute, c.seed) == ("bf16", 5)
    assert (c.train.steps, c.train.batch_tokens) == (4, 4096)
    # a group that is chosen on the command line takes nothing from the file
    c = compose_config([file, "model=gpt2_nano", "precision=fp32"])
    assert (c.model.n_layer, c.precision.compute) == (4, "fp32")


def test_a_choice_of_parallel_takes_no_replicas_from_the_file(write):
    """It sets the group diloco too, as `parallel=diloco` does."""
    file = write("parallel: diloco\ndiloco: {replicas: 2, sync_every: 5}\n")
    assert compose_config([file, "diloco.sync_every=7"]).diloco.replicas == 2
    assert compose_config([file, "parallel=data"]).diloco.replicas is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {stepz: 3}", "unknown key train.stepz; did you mean 'steps'"),
        ("precision: fp8", "precision=fp8: choose one of "),
        ("resume: auto", "resume belongs on the command line"),
        ("[1, 2]", "my.yaml"),
        ("seed: '${model.lr}'", "seed=${model.lr}: expected a whole"),
        ("train:\n", "train"),
        ("data: 5", "data=5: expected one of embedded, hf"),
        ("optimizer: true", "optimizer=true: expected one of adafactor"),
        ("optimizer: {name: [adamw]}", "optimizer"),
        (
            "train: {steps: 7}\nseed: 1\ntrain: {log_every: 2}",
            "'train' twice in line 3",
        ),
        ("train: {steps: 0100}", "'0100' is 64 in YAML; write it so, or in quotes"),
        ("seed: 1\nseed: 1:30", "'seed' twice in line 2"),
        ("seed: 1:30", "'1:30' is 90 in YAML; write it so, or in quotes in line 1"),
        ("optimizer.lr: 1:30.5", "'1:30.5' is 90.5 in YAML; write it so"),
        ("train: {steps: 7}\ntrain.steps: 8", "train.steps is there twice"),
        ("train.steps: 8\ntrain: {steps: 7}", "train.steps is there twice"),
        (
            "train.accum: 4\ntrain.grad_accum_steps: 2",
            "train.accum is the old name of train.grad_accum_steps, which is there",
        ),
        ("train: {<<: {steps: 7}, steps: 8}", "merge keys are not supported in line 1"),
    ],
)
def test_faults_of_a_file_are_one_line(write, text, message):
    with pytest.raises(UserError) as error:
        compose_config([write(text)])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_and_an_experiment_beside_one_are_refused(write):
    with pytest.raises(UserError, match=r"config=nowhere\.yaml: No such file"):
        compose_config(["config=nowhere.yaml"])
    with pytest.raises(UserError, match="put experiment into the file"):
        compose_config([write("seed: 1"), "experiment=fishman"])


@pytest.mark.parametrize("choice", ["${oc.env:HOME}", "../../../../tmp/evil", "a,b"])
def test_a_choice_is_one_of_ours_and_nothing_that_hydra_resolves(write, choice):
    with pytest.raises(UserError, match="is not a choice; valid"):
        compose_config([write(f"optimizer: {choice!r}")])
