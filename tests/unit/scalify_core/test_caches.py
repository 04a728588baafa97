"""What is remembered of programs is forgotten with them: they hold the arrays that they
close over."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from beside_plain import normal
from jax import lax

from scalify_core import as_scaled_array, scalify
from scalify_core.static import composite

HALF = jnp.float16


@composite
def cubed(x):
    return x**3


CALLS = {
    "remat": jax.checkpoint,
    # The carry keeps its dtype, as plain code in FP16 must have it.
    "scan": lambda fun: (
        lambda x: lax.scan(
            lambda c, _: ((c + jnp.sum(fun(x))).astype(c.dtype), None),
            jnp.sum(x),
            None,
            length=2,
        )[0]
    ),
    "composite": lambda fun: lambda x: cubed(fun(x)),
}


@pytest.mark.parametrize(
    ("name", "scales"), [("scan", "auto"), ("composite", "static"), ("remat", "auto")]
)
def test_what_a_program_closes_over_is_freed_with_it(name, scales):
    def call(turn):
        large = normal(turn, 16, 300)
        inner = CALLS[name](lambda x: jnp.tanh(x @ large))
        jax.jit(scalify(inner, scales=scales))(
            as_scaled_array(normal(0, 8, 16), dtype=HALF)
        )
        return weakref.ref(large)

    results = [call(i) for i in range(3)]
    gc.collect()
    assert [x() for x in results] == [None] * 3
