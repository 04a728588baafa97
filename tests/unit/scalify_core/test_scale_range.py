"""Run-time scales from 2^-120 to 2^120: small numbers are not taken for zeros, nothing
that is cut off is lost, and zeros set the scale of nothing beside them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import F32, assert_near
from draws import draw_normal
from numpy.testing import assert_allclose, assert_array_equal
from propagated import scalify

from scalify_core import ScaledArray, as_scaled_array, asarray, fp8_dot_general
from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.static import rebalance

MATRICES = (((1,), (0,)), ((), ()))
A, B = (np.asarray(jax.random.normal(jax.random.key(k), (4, 8))) for k in range(2))


def standardised(x, a, b):
    centred = a - x.mean(a, -1, keepdims=True)
    return centred / x.sqrt(x.mean(centred**2, -1, keepdims=True))


def ratio_of_cubes(x, a, b):
    return (a * b * b) / (a * a * b)


def test_a_sum_of_multiples_of_one_scale_expects_what_each_has():
    x = ScaledArray(draw_normal(0, (2, 64)).astype(jnp.float16), jnp.float32(2.0**10))
    total = scalify(lambda x: x[0] + 8 * jnp.sum(x, 0))(x)
    assert total.scale == 2.0**14  # of sqrt(1 + 2 * 8^2) = 11.4


# With the exponents up to which they fit: scale and FP32 data reach from 2^-250 to
# 2^250, a cube fills that at 2^80.
@pytest.mark.parametrize(
    ("program", "largest"), [(standardised, 120), (ratio_of_cubes, 78)]
)
def test_results_that_do_not_depend_on_size_are_the_same_at_all_scales(
    program, largest
):
    fun = scalify(lambda a, b: program(jnp, a, b))
    jitted, expected = jax.jit(fun), program(np, np.float64(A), np.float64(B))
    for e in (-largest, -60, -15, 0, 60, largest):
        args = (ScaledArray(x, F32(2.0**e)) for x in (A, B))
        # Sums of 32 terms, which may cancel.
        assert_near(jitted(*args), expected, 2e-5)
    static = ScaledArray(A, 2.0**62), ScaledArray(B, 2.0**62)
    assert_near(fun(*static), expected, 2e-5)


@pytest.mark.parametrize(
    ("fun", "e"), [(jnp.add, 60), (lambda a, b: jnp.where(b == 0, a, b), 70)]
)
def test_of_far_sizes_the_smaller_is_exact_where_the_other_is_nothing(fun, e):
    jitted, a = jax.jit(scalify(fun)), np.float32([1, 2, 3, 4])
    for b in (np.float32([1, 0, -2, 0]), np.zeros(4, np.float32)):
        actual = jitted(ScaledArray(a, F32(2.0**-e)), ScaledArray(b, F32(2.0**e)))
        expected = np.where(b == 0, a * 2.0**-e, b * 2.0**e)
        assert_allclose(asarray(actual), expected, rtol=1e-6)


@pytest.mark.parametrize("e", [-120, 75])
def test_results_that_leave_fp32_in_plain_code_are_no_moderate_numbers(e):
    """A product that leaves the range of scales takes the rest into its data, which
    underflows or saturates."""
    fun = lambda a: (a * a, a @ a.T, a * a * a, jnp.square(a), a * 2.0**e)
    a = ScaledArray(np.abs(A) + 1, F32(2.0**e))
    for x in asarray(jax.jit(scalify(fun))(a)):
        assert ((x < 2.0**-120) if e < 0 else (x > 2.0**120)).all()


# Of an FP8 product its two gradients, too.
STATIC = {
    "rebalance": lambda a, b: rebalance(a, 4.0),
    "an FP8 product": lambda a, b: fp8_dot_general(a, b, MATRICES),
    "its gradients": jax.grad(
        lambda a, b: jnp.sum(fp8_dot_general(a, b, MATRICES) * a[:1, :1]), (0, 1)
    ),
}


@pytest.mark.parametrize("name", STATIC)
def test_static_scales_stay_in_the_range_that_run_time_scales_have(name):
    for scale in (2.0**126, 2.0**-126):
        a, b = (ScaledArray(jnp.ones((16, 16), jnp.float16), scale) for _ in "ab")
        for x in jax.tree.leaves(scalify(STATIC[name])(a, b), is_leaf=is_scaled_array):
            assert 2.0**-126 <= x.scale <= 2.0**126


@pytest.mark.parametrize("other", [2.0**-120, 2.0**120])
def test_zeros_are_zeros_whatever_they_meet(other):
    """They set no scale after products, sums, roots and powers, static or not."""
    zeros = ScaledArray(np.zeros((4, 8), np.float16), F32(2.0**-126))
    x = ScaledArray(np.float16(A), F32(other))

    def fun(z, x):
        made = z * 2.0**60, z * x * x, z * z, 0.9 * z + 0.1 * z, jnp.sqrt(z), z @ z.T
        return [x + y.sum() for y in made], [1.0 + y for y in made]

    beside, beside_one = jax.jit(scalify(fun))(zeros, x)
    for y in beside:
        assert_array_equal(asarray(y), asarray(x))
    for y in beside_one:
        assert_array_equal(asarray(y), 1.0)


@pytest.mark.parametrize("number", [1.72e38, 3.3e38])
def test_numbers_near_the_largest_of_float32_have_a_scale(number):
    x = as_scaled_array(jnp.full(4, number, F32), dtype=jnp.float16)
    assert_allclose(asarray(x), np.full(4, number, np.float32), rtol=2.0**-8)
    assert float(x.scale) <= 2.0**126


FORMATS = (F32, jnp.float16)


def scaled(x, dtype):
    """With the run-time scale of its RMS."""
    return as_scaled_array(jnp.asarray(x, F32), dtype=dtype)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.where(x == 0, 1.0, x),
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
@pytest.mark.parametrize(
    "fun",
    [
        lambda good, zero: jnp.where(zero != 0, good / zero, good),
        lambda good, zero: jax.lax.cond(
            jnp.sum(zero) != 0, lambda: good / zero, lambda: good
        ),
    ],
)
def test_a_quotient_that_is_not_selected_does_not_flush_the_result(fun, dtype):
    good = scaled(draw_normal(0, (64,)), dtype)
    actual = jax.jit(scalify(fun))(good, scaled(np.zeros(64), dtype))
    assert_array_equal(asarray(actual), asarray(good))


def test_a_scalar_predicate_selects_the_scale_with_the_data():
    big, small = (scaled(s * draw_normal(0, (8,)), F32) for s in (2.0**60, 2.0**-60))
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


@pytest.mark.parametrize("run", [lambda f: f, jax.jit])
def test_zeros_and_numbers_are_rescaled_over_more_than_the_range_of_scales(run):
    """XLA multiplied the two factors with each other, to infinity or zero."""
    to_small = run(lambda x: x.rescale(2.0**-80))
    assert_array_equal(to_small(ScaledArray(np.zeros(4, np.float16), 2.0**80)).data, 0)
    tiny = ScaledArray(np.full(4, 2.0**-120, np.float32), 2.0**100)
    assert_array_equal(run(lambda x: x.rescale(2.0**-30))(tiny).data, 2.0**10)


@pytest.mark.parametrize("run", [lambda f: f, jax.jit])
@pytest.mark.parametrize("exponent", [-30, 0, 30])
def test_an_infinite_constant_beside_a_run_time_scale_stays_infinite(run, exponent):
    x = ScaledArray(A.astype(np.float16), F32(2.0**exponent))
    for fun, expected in ((jnp.add, np.inf), (jnp.subtract, -np.inf)):
        out = run(
            scalify(lambda x, fun=fun: fun(x, np.full((4, 8), np.inf, np.float32)))
        )(x)
        assert_array_equal(asarray(out), expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("exponent", "factor"), [(125, 4.0), (-124, 2.0**-3)])
def test_a_result_beyond_the_range_of_scales_keeps_its_value(dtype, exponent, factor):
    x = ScaledArray(np.asarray([1.5], dtype), F32(2.0**exponent))
    out = scalify(lambda x: x * factor)(x)
    actual = np.float64(out.data) * np.float64(out.scale)
    assert_array_equal(actual, 1.5 * 2.0**exponent * factor)
