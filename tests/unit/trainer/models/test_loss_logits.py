"""Logits of the loss in the dtype of the matmuls, in every family of models."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalify_core import asarray, scalify
from scalify_core.optim.weights import scaled_params
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.llama.spec import LlamaSpec
from trainer.models.registry import family_of

SIZES = {"vocab_size": 100, "context": 16, "n_layer": 1, "n_head": 2, "d_model": 16}
SPECS = {"gpt2": GPT2Spec(**SIZES), "llama": LlamaSpec(**SIZES, n_kv_head=1)}
TOKENS = np.random.default_rng(0).integers(0, 100, (2, 17)).astype(np.int32)
# of two sequences of 16 tokens, of a padded vocabulary
LOGITS = r":(\w+)\[32,128\][^=]*= dot_general"


def loss_of(spec, dtype):
    made = family_of(spec).build(spec, compute_dtype=dtype)
    return jax.jit(made.init)(jax.random.key(0)), lambda p: made.bind(p).loss(
        TOKENS[:, :-1], TOKENS[:, 1:]
    )


@pytest.mark.parametrize("family", SPECS)
def test_the_product_writes_logits_in_the_dtype_of_the_matmuls_on_demand(family):
    for how, dtype in ((None, "f32"), ("compute", "bf16")):
        params, loss = loss_of(
            dataclasses.replace(SPECS[family], loss_logits=how), jnp.bfloat16
        )
        actual = re.findall(LOGITS, str(jax.make_jaxpr(jax.grad(loss))(params)))
        assert actual
        assert actual[0] == dtype


# The test above shows that GPT-2's head is asked alike.
def test_logits_are_in_the_format_of_the_data_where_scales_propagate():
    params, loss = loss_of(
        dataclasses.replace(SPECS["llama"], loss_logits="compute"), jnp.float32
    )
    step = functools.partial(scalify, scales="static")(jax.value_and_grad(loss))
    scaled = scaled_params(params, jnp.float16)
    text = str(jax.make_jaxpr(lambda p: asarray(step(p)))(scaled))
    assert re.findall(LOGITS, text)[0] == "f16"
    narrow, wide = jax.jit(step)(scaled)[0], loss(params)
    # The weights are rounded to 11 bits, and so are values and logits: a fresh model's
    # loss is log(100).
    np.testing.assert_allclose(asarray(narrow), wide, rtol=2**-11)
