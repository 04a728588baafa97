"""What is said of the size of what enters a product."""

import jax
import numpy as np
import pytest
from precisions import policy

from scripts.studies.ranges import AIM, operands_of_products, table
from trainer.models.llama.spec import LlamaSpec
from trainer.precision.arrays import store_weights
from trainer.workload import Model

SPEC = LlamaSpec(
    vocab_size=64, context=64, n_layer=2, n_head=4, n_kv_head=2, d_model=128, tied=True
)


def test_a_weight_whose_scale_is_off_is_outside():
    kind = ("fp8_dot_general.fwd", 1, (128, 128))
    assert "outside" in table({kind: [16.0]}, {kind: [16.0]}, 3)
    assert "outside" not in table({kind: [1.0]}, {kind: [0.5, 2.0]}, 3)


@pytest.mark.slow  # a study; the scales: unit/scalify_core
def test_all_that_enters_the_products_of_a_fresh_llama_is_near_1():
    model = Model.make(SPEC, policy("scalify_fp8_fp16"))
    params = store_weights(
        jax.jit(model.training.init)(jax.random.key(0)), model.policy
    )
    tokens = np.random.default_rng(0).integers(
        0, 64, (4, SPEC.context + 1), dtype=np.int32
    )
    operands = {}
    operands_of_products(model, params, tokens, None, operands)
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
