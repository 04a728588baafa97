"""Barriers and platform cases: each is in the program, each can be turned off, and none
changes a number."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from scalify_core import as_scaled_array, asarray, scalify
from scalify_core.numerics import compiler_hints
from scalify_core.ops.functional import embedding, layer_norm
from scalify_core.ops.functional.embedding import materialised
from scalify_core.optim.stacking import Stacks
from scalify_core.static import dynamic_rescale_rms_grad

X = jnp.asarray(np.random.default_rng(0).normal(size=(32, 16)), jnp.float16)
ONES = jnp.ones(16, jnp.float16)


def norm(x):
    return jax.grad(lambda x: jnp.sum(layer_norm(x, ONES, ONES) ** 2))(x)


def table(x):
    return jax.grad(lambda t: jnp.sum(embedding(t, jnp.arange(8)) ** 2))(x)


def bias_gradient(x):
    return jax.grad(lambda b: jnp.sum(dynamic_rescale_rms_grad(x + b[None]) * x))(ONES)


def scaled(fun):
    return lambda x: asarray(
        scalify(fun, scales="static")(as_scaled_array(x, scale=jnp.float32(1)))
    )


PROGRAMS = {
    "stored": materialised,
    "row_major": compiler_hints.row_major,
    "stored_both_ways": compiler_hints.stored_both_ways,
    "in_one_kernel": lambda x: compiler_hints.in_one_kernel(x[0, 0], x[0, 1]),
    "separate_buffers": lambda x: compiler_hints.separate_buffers(x[:, 0]),
    "rows": lambda x: Stacks.of([x[0], x[1]], [0, 0]).stack([x[0], x[1]])[0],
    "sums_at_once": lambda x: compiler_hints.column_sums(
        x, lambda xs, axes: [held_sum(y, axes) for y in xs]
    ),
    "materialize_once": lambda x: compiler_hints.materialize_once(x, x + 1),
    "norm_statistics": norm,
    "late_zeros": table,
}


def held_sum(x, axes):
    return jax.lax.optimization_barrier(jnp.sum(x, axes))


def marks(fun, platform):
    text = jax.jit(fun).trace(X).lower(lowering_platforms=(platform,)).as_text()
    return text.count("optimization_barrier") + text.count("LayoutConstraint")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_case_is_in_the_program_of_its_platform_and_can_be_turned_off(name):
    fun, platform = PROGRAMS[name], "cpu" if name == "materialize_once" else "cuda"
    there = marks(lambda x: fun(x), platform)
    with compiler_hints.without(name):
        without = marks(lambda x: fun(x), platform)
    assert without < there


@pytest.mark.parametrize("fun", [norm, table, scaled(norm), scaled(bias_gradient)])
def test_no_case_changes_a_number(fun):
    expected = jax.jit(lambda x: fun(x))(X)
    with compiler_hints.without(*compiler_hints.CASES):
        actual = jax.jit(lambda x: fun(x))(X)
    assert_array_equal(np.asarray(actual), np.asarray(expected))


def test_cases_are_turned_off_by_the_environment():
    code = (
        "from scalify_core.numerics import compiler_hints as hints;"
        " print(*sorted(hints.turned_off()))"
    )
    env = os.environ | {"SCALIFY_LOWERING_OFF": "separate_buffers,in_one_kernel"}
    output = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.split() == ["in_one_kernel", "separate_buffers"]


def test_an_unknown_case_is_named():
    with (
        pytest.raises(ValueError, match="no case of lowering; valid: stored"),
        compiler_hints.without("nothing"),
    ):
        pass
