"""A mask's constant stays out of the scale of what is moved, whatever moves it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from measured_and_plain import HALF, ROUNDINGS, error, normal

from scalify_core import as_scaled_array, asarray, scalify

MOVES = {
    "sort": lambda x: lax.sort(x),
    "top_k": lambda x: lax.top_k(x, 6)[0],
    "approx_max_k": lambda x: lax.approx_max_k(x, 6)[0],
    "optimization_barrier": lambda x: lax.optimization_barrier(x),
    "device_put": lambda x: jax.device_put(x),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 23),
    "scatter-max": lambda x: jnp.full_like(x, -1e9).at[:].max(x),
    "stack": lambda x: jnp.stack([x, x]),
    "reduce_window_max": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID"
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_is_not_masked_keeps_its_digits_where_it_is_moved(name):
    def moved(x):
        masked = jnp.where(jnp.arange(8) < 4, 1e-3 * (2 + jnp.tanh(x)), -1e9)
        return MOVES[name](masked.astype(x.dtype))

    x = as_scaled_array(normal(0, 16, 8), dtype=HALF)
    out, expected = asarray(scalify(moved)(x)), moved(asarray(x).astype(jnp.float32))
    rest = expected > 0
    assert bool(jnp.all(out[~rest] < -1e3))
    assert error(out[rest], expected[rest]) < ROUNDINGS[HALF]
