"""What scans leave for later scans is FP32, except for operands of narrow products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from measured_and_plain import HALF

from scalify_core import as_scaled_array, asarray, scalify

W = jnp.linspace(-1.0, 1.0, 4)


def of_maps(w):
    t = lax.map(lambda k: w.astype(jnp.float32) + 1000 * k, jnp.arange(3.0))
    return lax.map(jnp.sin, t)


def of_a_carry(w):
    def step(c, _):
        return c + 100.0, jnp.sin(c).sum()

    sums = lax.scan(jax.checkpoint(step), w.astype(jnp.float32), None, length=20)[1]
    return sums.sum()


def of_far_apart_residuals(w):
    sizes = jnp.array([1, 1e-5, 1e-10, 1e-14])

    def step(k):
        return jnp.log((2 + w.astype(jnp.float32)) * sizes * k).sum()

    return lax.map(step, jnp.arange(1.0, 4.0)).sum()


@pytest.mark.parametrize(
    "fun", [of_maps, jax.grad(of_a_carry), jax.grad(of_far_apart_residuals)]
)
def test_small_differences_are_those_of_plain_code(fun):
    w = as_scaled_array(W, dtype=HALF)
    expected = np.asarray(fun(asarray(w).astype(jnp.float32)))
    actual = np.asarray(asarray(scalify(fun)(w)).astype(jnp.float32))
    # One rounding of the result to FP16, at one scale.
    np.testing.assert_allclose(actual, expected, atol=2.0**-10 * np.abs(expected).max())
