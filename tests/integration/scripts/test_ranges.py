"""What is said of the size of what enters a product."""

import dataclasses

import jax
import numpy as np
import pytest
from omegaconf import OmegaConf

from scalify_core import ScaledArray
from scripts.studies.ranges import AIM, operands_of_products, table
from trainer.config.composition import CONFIGS
from trainer.models.llama.spec import LlamaSpec
from trainer.precision.arrays import store_weights
from trainer.precision.policy import Policy
from trainer.workload import Model

SPEC = LlamaSpec(
    vocab_size=64, context=64, n_layer=2, n_head=4, n_kv_head=2, d_model=128, tied=True
)


def found(change=lambda params: None):
    fields = OmegaConf.merge(
        OmegaConf.load(f"{CONFIGS}/base/precision.yaml"),
        OmegaConf.load(f"{CONFIGS}/precision/scalify_fp8_fp16.yaml"),
    )
    plain = {
        k: tuple(v) if isinstance(v, list) else v
        for k, v in OmegaConf.to_container(fields).items()
    }
    names = [field.name for field in dataclasses.fields(Policy)]
    model = Model.make(SPEC, Policy(**{k: v for k, v in plain.items() if k in names}))
    params = store_weights(
        jax.jit(model.training.init)(jax.random.key(0)), model.policy
    )
    change(params)
    tokens = np.random.default_rng(0).integers(
        0, 64, (4, SPEC.context + 1), dtype=np.int32
    )
    operands = {}
    operands_of_products(model, params, tokens, None, operands)
    return operands


def test_all_that_enters_the_products_of_a_fresh_llama_is_near_1():
    operands = found()
    kinds = {(name, i) for name, i, _ in operands}
    assert kinds >= {
        ("fp8_dot_general.fwd", 0),
        ("fp8_dot_general.bwd", 2),
        ("attention.fwd", 2),
    }
    assert kinds >= {("attention.bwd", 5), ("linear_cross_entropy.fwd", 1)}
    products = sum(
        len(x)
        for (name, i, _), x in operands.items()
        if (name, i) == ("fp8_dot_general.fwd", 0)
    )
    assert products == 7 * SPEC.n_layer
    every = [x for values in operands.values() for x in values]
    assert AIM[0] <= min(every) <= max(every) <= AIM[1]


@pytest.mark.slow  # a second program; what is near 1: above
def test_a_weight_whose_scale_is_off_is_seen():
    def grow(params):
        linear = params["h"][1]["attn"]["o_proj"]
        linear["kernel"] = ScaledArray(
            linear["kernel"].data * 16, linear["kernel"].scale
        )

    operands = found(grow)
    kind = ("fp8_dot_general.fwd", 1, (128, 128))
    assert max(operands[kind]) == pytest.approx(16 * 1.28, rel=0.05)
    assert "outside" in table(operands, operands, 3)
    assert "outside" not in table({kind: [1.0]}, {kind: [0.5, 2.0]}, 3)
