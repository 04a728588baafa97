"""Run-time scales from 2^-120 to 2^120: small numbers are not taken for zeros, and
nothing that is cut off is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import F32, assert_near
from jax import lax
from numpy.testing import assert_allclose, assert_array_equal
from propagated import scalify

from scalify_core import ScaledArray, as_scaled_array, asarray
from scalify_core.numerics import scales

EXPONENTS = range(-120, 121, 15)
A, B = (np.asarray(jax.random.normal(jax.random.key(k), (4, 8))) for k in range(2))


def standardised(x, a, b):
    centred = a - x.mean(a, -1, keepdims=True)
    return centred / x.sqrt(x.mean(centred**2, -1, keepdims=True))


def ratio_of_cubes(x, a, b):
    return (a * b * b) / (a * a * b)


def adam(x, a, b):
    m, v = 0.9 * (0.1 * a) + 0.1 * b, 0.99 * (0.01 * a * a) + 0.01 * b * b
    return m / x.sqrt(v)


def product_of_products(x, a, b):
    return (a @ b.T) / x.sqrt(x.sum(a * a, -1, keepdims=True) * x.sum(b * b, -1)[None])


def beyond_and_back(x, a, b):
    return ((a * 2.0**-20 * 2.0**-20) * b) / ((a * 2.0**-20) * (b * 2.0**-20))


def largest_of_them(x, a, b):
    return x.maximum(a, b) / x.max(x.abs(a)), x.where(a > b, a, b * 0.5) / x.max(
        x.abs(b)
    )


# With the exponents up to which they fit: scale and FP32 data reach from 2^-250 to
# 2^250, a cube fills that at 2^80.
PROGRAMS = {
    standardised: 120,
    ratio_of_cubes: 78,
    adam: 115,
    product_of_products: 60,
    beyond_and_back: 100,
    largest_of_them: 120,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_does_not_depend_on_size_is_the_same_at_all_scales(program):
    largest, fun = PROGRAMS[program], scalify(lambda a, b: program(jnp, a, b))
    jitted, expected = jax.jit(fun), program(np, np.float64(A), np.float64(B))
    for e in (e for e in EXPONENTS if abs(e) <= largest):
        args = (ScaledArray(x, F32(2.0**e)) for x in (A, B))
        # Sums of 32 terms, which may cancel.
        assert_near(jitted(*args), expected, 2e-5)
    static = 2.0 ** min(62, largest)
    assert_near(fun(ScaledArray(A, static), ScaledArray(B, static)), expected, 2e-5)


def test_of_a_sum_of_far_sizes_the_smaller_is_exact_where_the_other_is_nothing():
    """2^-60 beside zeros at 2^60, and the other way round."""
    add = jax.jit(scalify(lambda a, b: (a + b, jnp.where(b == 0, a, b))))
    large, small = F32(2.0**60), F32(2.0**-60)
    for data in ([1.0, 0.0, -2.0, 0.0], [0.0, 0.0, 0.0, 0.0]):
        b = np.float32(data)
        actual = asarray(
            add(ScaledArray(np.float32([1, 2, 3, 4]), small), ScaledArray(b, large))
        )
        a = np.float32([1, 2, 3, 4]) * 2.0**-60
        assert_allclose(actual[0], a + b * 2.0**60, rtol=1e-6)
        assert_allclose(actual[1], np.where(b == 0, a, b * 2.0**60), rtol=1e-6)


@pytest.mark.parametrize("e", [-120, 75])
def test_what_plain_numbers_underflow_or_overflow_to_is_no_moderate_number(e):
    """A product that leaves the range of scales takes the rest into its data, which
    underflows or saturates."""
    scale = F32(2.0**e)

    def fun(a, b):
        return (
            a * b,
            a @ b.T,
            a * b * b,
            jnp.square(a),
            a * 2.0**e,
            (a * 2.0**30) * 2.0**30 * 2.0**30,
        )

    a = np.abs(A) + 1
    for x in asarray(
        jax.jit(scalify(fun))(ScaledArray(a, scale), ScaledArray(a, scale))
    )[:5]:
        assert ((x < 2.0**-120) if e < 0 else (x > 2.0**120)).all()


@pytest.mark.parametrize("other", [2.0**-120, 2.0**120])
def test_zeros_are_zeros_whatever_they_meet(other):
    """They set no scale after products, sums, roots and powers, static or not."""
    zeros, x = (
        ScaledArray(np.zeros((4, 8), np.float16), F32(2.0**-126)),
        ScaledArray(np.float16(A), F32(other)),
    )

    def fun(z, x):
        made = (
            z * 2.0**60,
            z * x,
            z * x * x,
            z * z,
            z + z,
            0.9 * z + 0.1 * z,
            jnp.sqrt(z),
            z @ z.T,
            jnp.sum(z, 0),
        )
        return [x + y.sum() for y in made], [1.0 + y for y in made]

    beside, beside_one = jax.jit(scalify(fun))(zeros, x)
    for y in beside:
        assert_array_equal(asarray(y), asarray(x))
    for y in beside_one:
        assert_array_equal(asarray(y), 1.0)


def test_scales_of_numbers_and_of_zeros_are_told_apart():
    zeros, smallest = F32(scales.MIN_SCALE), F32(scales.LEAST_NONZERO_SCALE)
    big = F32(2.0**100)
    for a, b in ((zeros, big), (big, zeros), (zeros, zeros), (zeros, smallest)):
        assert float(scales.product(a, b)) == scales.MIN_SCALE
    for a in (smallest, F32(2.0**-70)):
        assert float(scales.product(a, F32(2.0**-70))) == scales.LEAST_NONZERO_SCALE
    for a, b in ((-100, -100), (-60, -70), (100, 100), (-3, 5), (90, -20)):
        scale, rest = scales.product_and_rest(F32(2.0**a), F32(2.0**b))
        assert np.log2(float(scale)) + np.log2(float(rest)) == a + b
    assert float(scales.as_number(scales.Multiple(zeros, 2.0**90))) == scales.MIN_SCALE
    assert lax.lt(
        scales.ratio(F32(2.0**-100), F32(2.0**100)),
        np.float32(2.0**-125),
    )


@pytest.mark.parametrize("number", [1.72e38, 3.3e38])
def test_numbers_near_the_largest_of_float32_have_a_scale(number):
    x = as_scaled_array(jnp.full(4, number, F32), dtype=jnp.float16)
    assert_allclose(asarray(x), np.full(4, number, np.float32), rtol=2.0**-8)
    assert float(x.scale) <= 2.0**126
