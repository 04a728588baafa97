"""Barriers and platform cases: each is in the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalify_core.numerics import compiler_hints
from scalify_core.ops.functional import embedding, layer_norm
from scalify_core.ops.functional.embedding import materialized

X = jnp.asarray(np.random.default_rng(0).normal(size=(32, 16)), jnp.float16)
ONES = jnp.ones(16, jnp.float16)


def norm(x):
    return jax.grad(lambda x: jnp.sum(layer_norm(x, ONES, ONES) ** 2))(x)


def table(x):
    return jax.grad(lambda t: jnp.sum(embedding(t, jnp.arange(8)) ** 2))(x)


PROGRAMS = {
    "stored": materialized,
    "row_major": compiler_hints.row_major,
    "kept_in_both_orders": compiler_hints.kept_in_both_orders,
    "in_one_kernel": lambda x: compiler_hints.in_one_kernel(x[0, 0], x[0, 1]),
    "separate_buffers": lambda x: compiler_hints.separate_buffers(x[:, 0]),
    "materialize_once": lambda x: compiler_hints.materialize_once(x, x + 1),
    "norm_statistics": norm,
    "late_zeros": table,
}


def marks(fun, platform):
    text = jax.jit(fun).trace(X).lower(lowering_platforms=(platform,)).as_text()
    return text.count("optimization_barrier") + text.count("LayoutConstraint")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_case_is_in_the_program_of_its_platform(name):
    platform = "cpu" if name == "materialize_once" else "cuda"
    assert marks(PROGRAMS[name], platform) > 0
