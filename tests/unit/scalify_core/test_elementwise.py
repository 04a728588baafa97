"""Elementwise rules where a narrow format, a constant or an extreme scale would change
the result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import F32
from draws import draw_normal
from numpy.testing import assert_allclose, assert_array_equal
from propagated import scalify

from scalify_core import ScaledArray, as_scaled_array, asarray

HALF, BRAIN = jnp.float16, jnp.bfloat16
# One rounding to the format of the result.
RTOL = 2.0**-10


# Constants that only keep a divisor or an argument of a logarithm from zero.


GUARDS = {
    "maximum": lambda x: x / jnp.maximum(jnp.abs(x), 1e-12),
    "where": lambda x: 1e-6 / jnp.where(x == 0, 1e-12, x),
    "clip": lambda x: jnp.log(1 - jnp.clip(x, 1e-7, 1 - 1e-7)),
}


@pytest.mark.parametrize("name", GUARDS)
def test_guards_below_the_format_act_as_in_fp32(name):
    x = jnp.asarray([0.0, 1.0, -2.0])
    actual = scalify(GUARDS[name])(as_scaled_array(x, 1.0, dtype=HALF))
    limit = float(jnp.finfo(HALF).max) * float(actual.scale)
    expected = np.clip(GUARDS[name](x), -limit, limit)
    # The clip's complement, 1 - (1 - 1e-7), has few bits in FP32 already: an ulp of its
    # logarithm's argument.
    assert_allclose(asarray(actual), expected, rtol=RTOL, atol=1e-6)


def test_a_constant_that_the_format_holds_costs_no_conversion():
    x = as_scaled_array(jnp.ones(8), 1.0, dtype=HALF)
    for fun in (
        lambda x: jnp.maximum(x, 0.25),
        lambda x: jnp.where(x > 0, x, -jnp.inf),
    ):
        jaxpr = jax.make_jaxpr(scalify(fun))(x)
        assert "convert_element_type" not in str(jaxpr)


@pytest.mark.parametrize(
    ("dynamic", "mask"), [(False, -1e9), (True, float(jnp.finfo(F32).min))]
)
def test_a_mask_hides_small_logits_too(dynamic, mask):
    def probabilities(x):
        return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((4, 4), bool)), x, mask))

    scale = 2.0**-30
    x = ScaledArray(
        jax.random.normal(jax.random.key(0), (4, 4), HALF),
        F32(scale) if dynamic else scale,
    )
    actual = asarray(scalify(probabilities)(x))
    assert_allclose(actual, probabilities(asarray(x)), rtol=2 * RTOL)


# Scales that the operation, not the operand, decides.


def small(dtype=HALF, dynamic=False, exponent=-26):
    scale = F32(2.0**exponent) if dynamic else 2.0**exponent
    return ScaledArray(jnp.asarray([1.0, -2.0, 0.5, 0.0], dtype), scale)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "fun",
    [jnp.tanh, jnp.expm1, jax.nn.elu],
)
def test_functions_that_are_their_argument_near_zero_keep_small_ones(fun, dynamic):
    x = small(dynamic=dynamic)
    assert_allclose(asarray(scalify(fun)(x)), fun(asarray(x)), rtol=RTOL)
    large = small(dynamic=dynamic, exponent=3)
    actual = scalify(fun)(large)
    assert_allclose(asarray(actual), fun(asarray(large)), rtol=RTOL, atol=0)


def test_run_time_zeros_do_not_get_a_scale_that_others_saturate_at():
    x = as_scaled_array(jnp.zeros(4), dtype=HALF)
    assert_array_equal(asarray(scalify(lambda x: jnp.tanh(x) + 1)(x)), 1)


@pytest.mark.parametrize(("fun", "dynamic"), [(jnp.floor, False), (jnp.round, True)])
def test_integers_are_not_out_of_proportion_to_a_small_scale(fun, dynamic):
    x = small(dynamic=dynamic, exponent=-20)
    assert_array_equal(asarray(scalify(fun)(x)), fun(asarray(x)))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("n", "exponent"), [(4, -30), (600, 2), (-7, -2)])
def test_integer_powers_stay_in_range_whatever_the_scale(n, exponent, dynamic):
    scale = 2.0**exponent
    x = ScaledArray(
        jnp.asarray([0.9, 0.99, 1.0]) / scale, F32(scale) if dynamic else scale
    )
    # Repeated squaring doubles a relative error.
    assert_allclose(
        asarray(scalify(lambda x: x**n)(x)), asarray(x) ** n, rtol=2 * abs(n) * 2.0**-23
    )


def test_a_logarithm_of_what_the_user_cast_to_fp16_is_of_the_logical_value():
    x = as_scaled_array(jnp.asarray([2.0**-30, 2.0**-22]), 2.0**-26)
    actual = scalify(lambda x: jnp.log(x.astype(HALF)))(x)
    assert actual.dtype == HALF
    assert_allclose(asarray(actual), jnp.log(asarray(x)), rtol=RTOL)


# Constants.


def test_a_scalar_compared_with_a_constant_array_is_broadcast():
    x = as_scaled_array(F32(0.5), 0.5)
    assert_array_equal(scalify(lambda x: x > jnp.zeros(3))(x), [True] * 3)
    assert_array_equal(scalify(lambda x: jnp.full(3, jnp.inf) > x)(x), [True] * 3)


@pytest.mark.parametrize("dtype", [F32, HALF])
def test_a_quotient_by_zero_or_infinity_does_not_drag_the_scale(dtype):
    x = as_scaled_array(jnp.asarray([1.5, -2.0, 0.25]), 1.0, dtype=dtype)
    for fun in (lambda x: x / jnp.inf + x, lambda x: jnp.where(x > 10, x / 0.0, x)):
        assert_array_equal(asarray(scalify(fun)(x)), asarray(x))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, BRAIN])
def test_a_product_with_a_constant_is_rounded_once_and_to_an_arithmetic_format(dtype):
    x = as_scaled_array(draw_normal(0, (4096,)), 1.0, dtype=dtype)
    for fun in (lambda x: x * 0.1, lambda x: x * 0.3, lambda x: -x / 3):
        actual = scalify(fun)(x)
        assert actual.dtype == (HALF if dtype == jnp.float8_e4m3fn else BRAIN)
        expected = fun(asarray(x))
        assert_allclose(
            asarray(actual),
            expected,
            rtol=float(jnp.finfo(actual.dtype).eps),
            atol=2.0**-24,
        )
        if dtype == BRAIN:  # FP8's few significands do not average
            error = (asarray(actual) - expected) / jnp.where(expected == 0, 1, expected)
            # Of 4096 errors that are uniform within half an ulp, five times the mean's
            # own deviation.
            assert abs(float(jnp.mean(error))) < 5 * float(
                jnp.finfo(dtype).eps
            ) / 64 / np.sqrt(12)


# Scales at run time that leave their range: what they cannot hold goes into the data,
# as where they are static.

RANGE = {
    "product": (lambda x: x * x * 2.0**100, -65),
    "constants": (lambda x: (x * 2.0**-40) * 2.0**40, -100),
    "quotient": (lambda x: x * x / x, 70),
    "inverse": (lambda x: (1 / x) / x * 2.0**50 * x, 70),
}


@pytest.mark.parametrize("name", RANGE)
def test_run_time_scales_keep_what_leaves_their_range_as_static_ones_do(name):
    fun, exponent = RANGE[name]
    x = jnp.asarray([1.0, 2.0, 1.0 if name in ("inverse", "quotient") else 0.0])
    actual = scalify(fun)(ScaledArray(x, F32(2.0**exponent)))
    expected = scalify(fun)(ScaledArray(x, 2.0**exponent))
    assert_array_equal(asarray(actual), asarray(expected))
    assert np.all(np.isfinite(asarray(expected)))
    assert asarray(expected)[0] != 0
