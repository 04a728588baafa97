"""Caches of programs forget them: programs hold the arrays that they close over."""

import gc
import time
import weakref

import jax
import jax.numpy as jnp
import pytest
from beside_plain import HALF, normal
from jax import lax

from scalify_core import as_scaled_array, scalify
from scalify_core.static import composite


@composite
def cubed(x):
    return x**3


def program(large):
    fun = lambda x: jnp.sum(jnp.tanh(x @ large))

    def with_calls(x):
        # The carry keeps its dtype, as plain code in FP16 must have it.
        turn = lambda c, _: ((c + fun(x)).astype(c.dtype), None)
        total, _ = lax.scan(turn, jnp.sum(x), None, length=2)
        return total + jax.checkpoint(fun)(x) + cubed(fun(x))

    return with_calls


@pytest.mark.parametrize("scales", ["auto", "static"])
def test_what_a_program_closes_over_is_freed_with_it(scales):
    def call(turn):
        large = normal(turn, 16, 300)
        x = as_scaled_array(normal(0, 8, 16), dtype=HALF)
        jax.jit(scalify(program(large), scales=scales))(x)
        return weakref.ref(large)

    references = [call(i) for i in range(2)]
    # On a loaded machine the runtime may hold an argument a moment longer; a cache would
    # hold it for good.
    for _ in range(50):
        gc.collect()
        if not any(x() is not None for x in references):
            break
        time.sleep(0.1)
    assert [x() for x in references] == [None, None]
