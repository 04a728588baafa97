"""Zeros have no size: the run-time scale that they come with must not set that of
anything beside them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import F32
from draws import draw_normal
from numpy.testing import assert_allclose, assert_array_equal
from propagated import scalify

from scalify_core import ScaledArray, as_scaled_array, asarray

FORMATS = (F32, jnp.float16)


def scaled(x, dtype):
    """With the run-time scale of its RMS."""
    return as_scaled_array(jnp.asarray(x, F32), dtype=dtype)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.where(x == 0, 1.0, x),
        lambda x: jnp.maximum(x, 3.0),
        lambda x: jnp.concatenate([x, jnp.full(2, 7.0)]),
        lambda x: jnp.pad(x * 3 - x, 1, constant_values=2.0),
        lambda x: jnp.where(x > 0, jnp.sqrt(x), 1.0),
    ],
)
def test_a_constant_beside_zeros_keeps_its_value(fun, dtype):
    for content in (np.zeros(4), np.asarray([0.0, 1.0, 0.0, 4.0])):
        actual = jax.jit(scalify(fun))(scaled(content, dtype))
        assert_array_equal(asarray(actual), fun(jnp.asarray(content, F32)))


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_quotient_of_norms_is_one_where_either_is_zero(dtype):
    """The trust ratio of LARS and LAMB."""

    def ratio(x, y):
        a, b = jnp.linalg.norm(x), jnp.linalg.norm(y)
        return y * jnp.where((a == 0) | (b == 0), 1.0, a / b)

    jitted = jax.jit(scalify(ratio))
    sizes = (0.0, 2.0**-20, 2.0**20)
    for size, other in itertools.product(sizes, sizes):
        x, y = size * draw_normal(0, (64,)), other * draw_normal(1, (64,))
        # Roundings of the data and of the result, and what a sum of 64 squares is off
        # by in FP32.
        rtol = 4 * float(jnp.finfo(dtype).eps) + 64 * 2.0**-23
        actual = asarray(jitted(scaled(x, dtype), scaled(y, dtype)))
        assert_allclose(actual, ratio(x, y), rtol=rtol)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    "fun",
    [
        lambda good, zero: jnp.where(zero != 0, good / zero, good),
        lambda good, zero: jnp.where(zero > 0, jax.lax.rsqrt(zero), good),
        lambda good, zero: jax.lax.cond(
            jnp.sum(zero) != 0, lambda: good / zero, lambda: good
        ),
    ],
)
def test_what_is_not_selected_does_not_flush_what_is(fun, dtype):
    good = scaled(draw_normal(0, (64,)), dtype)
    actual = jax.jit(scalify(fun))(good, scaled(np.zeros(64), dtype))
    assert_array_equal(asarray(actual), asarray(good))


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_scalar_predicate_selects_the_scale_with_the_data(dtype):
    big, small = (scaled(s * draw_normal(0, (8,)), dtype) for s in (2.0**60, 2.0**-60))
    select = jax.jit(scalify(lambda which, a, b: jnp.where(which, a, b)))
    for which, expected in ((True, big), (False, small)):
        actual = select(which, big, small)
        assert float(actual.scale) == float(expected.scale)
        assert_array_equal(actual.data, expected.data)


def test_a_sum_of_zeros_times_constants_has_a_scale():
    """Zeros have the smallest scale, times constants a smaller one, which is flushed:
    their ratio would be 0/0."""
    zeros = ScaledArray(jnp.zeros(4, jnp.float16), F32(2.0**-126))
    sums = lambda a, b: (0.125 * a + 0.125 * b, 0.9 * a + 0.1 * b)
    for out in jax.jit(scalify(sums))(zeros, zeros):
        assert np.isfinite(out.scale)
        assert_array_equal(asarray(out), np.zeros(4))


def test_a_sum_beyond_the_largest_scale_saturates():
    ones = ScaledArray(jnp.ones(4, jnp.float16), F32(2.0**125))
    out = jax.jit(scalify(lambda a, b: 8 * a + 8 * b))(ones, ones)
    assert np.isfinite(out.scale)
    assert (out.data > 0).all()
