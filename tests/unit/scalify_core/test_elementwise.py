"""Elementwise rules where a narrow format, a constant or an extreme scale would change
the result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import F32, HALF
from draws import draw_normal
from jax import lax
from numpy.testing import assert_allclose, assert_array_equal
from propagated import scalify

from scalify_core import ScaledArray, as_scaled_array, asarray
from scalify_core.ops.rescale import dynamic_rescale_max

# One rounding to the format of the result.
RTOL = 2.0**-10
KINDS = {"static": lambda scale: scale, "dynamic": F32}
ROW = jnp.asarray([1.0, -2.0, 0.5, 0.0], HALF)

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


# A guard's value, moved or at another scale, in front of a division and a product.
MOVES_OF_A_GUARD = {
    "transpose": lambda d: d.T.reshape(4, 8),
    "sort": lambda d: jnp.sort(d, axis=0),
    "concatenate": lambda d: jnp.concatenate([d, d])[2:6],
    "scan": lambda d: lax.scan(lambda _, row: (0, row[::-1]), 0, d)[1],
    "scatter": lambda d: d.at[0, 0].set(1.0),
    "gather": lambda d: d.at[:, jnp.arange(8)].get(mode="fill", fill_value=1.0),
    "select": lambda d: lax.select(d[0, 0] < 1, d, 2 * d),
    "reduce_precision": lambda d: lax.reduce_precision(d, 8, 10),
    "shard_map": lambda d: on_a_mesh(lambda d: 2 * d)(d),
    "dynamic_rescale_max": lambda d: dynamic_rescale_max(d.at[0].set(1.0)),
}


def on_a_mesh(fun):
    spec = jax.P("a")
    mesh = jax.sharding.Mesh(jax.devices()[:1], "a")
    return jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


@pytest.mark.parametrize("name", MOVES_OF_A_GUARD)
def test_a_guard_that_moves_still_guards(name):
    def fun(x):
        divisor = MOVES_OF_A_GUARD[name](jnp.maximum(x, 1e-12))
        return x / divisor, divisor @ jnp.ones((8, 3))

    quotient, _ = scalify(fun)(ScaledArray(jnp.zeros((4, 8), HALF), jnp.ones((4, 1))))
    assert_array_equal(asarray(quotient), 0)


@pytest.mark.parametrize("rows", [[1, 0, 3], [3, 2, 1, 0]])
def test_rows_that_a_gather_with_a_fill_value_moves_keep_their_numbers(rows):
    """A moved row does not get the scale of the row that was in its place."""
    x = ScaledArray(
        draw_normal(0, (4, 8)).astype(HALF), 2.0 ** F32([[-12, 12, 0, 5]]).T
    )
    fun = lambda x: x.at[jnp.asarray([*rows, 9])].get(mode="fill", fill_value=7.0)
    expected = fun(asarray(x))
    # The rows are 24 octaves apart, beside one scale.
    atol = RTOL * np.abs(expected).max()
    assert_allclose(asarray(scalify(fun)(x)), expected, rtol=RTOL, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_is_applied_to_the_logical_values_of_chosen_elements(kind):
    x = ScaledArray(ROW, KINDS[kind](2.0))
    fun = lambda x: x.at[jnp.asarray([0, 2])].apply(jnp.sin)
    assert_allclose(asarray(scalify(fun)(x)), fun(asarray(x)), rtol=RTOL)


def test_a_constant_that_the_format_holds_costs_no_conversion():
    x = as_scaled_array(jnp.ones(8), 1.0, dtype=HALF)
    fun = lambda x: jnp.where(jnp.arange(8) > 3, jnp.maximum(x, 0.25), -jnp.inf)
    assert "convert_element_type" not in str(jax.make_jaxpr(scalify(fun))(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [HALF, jnp.float8_e5m2, jnp.float8_e4m3fn])
def test_numbers_compare_with_infinity_also_in_a_format_that_has_none(dtype, kind):
    x = ScaledArray(ROW.astype(dtype), KINDS[kind](2.0**100))
    for compare in (jnp.less, jnp.greater, jnp.not_equal):
        for infinity in (jnp.inf, -jnp.inf):
            expected = compare(asarray(x), infinity)
            actual = scalify(lambda x, compare=compare, c=infinity: compare(x, c))(x)
            assert_array_equal(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_hides_small_logits_too(kind):
    x = ScaledArray(draw_normal(0, (4, 4)).astype(HALF), KINDS[kind](2.0**-30))
    for mask in (-1e9, float(jnp.finfo(F32).min)):
        fun = lambda x, mask=mask: jax.nn.softmax(jnp.where(jnp.tri(4) > 0, x, mask))
        actual = asarray(scalify(fun)(x))
        assert_allclose(actual, fun(asarray(x)), rtol=2 * RTOL)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fun", [jnp.tanh, jnp.expm1, jnp.floor, jnp.round])
def test_the_operation_decides_the_scale(fun, kind):
    """Near zero some functions are their argument; integers are at least 1."""
    for exponent in (-26, 3):
        x = ScaledArray(ROW, KINDS[kind](2.0**exponent))
        assert_allclose(asarray(scalify(fun)(x)), fun(asarray(x)), rtol=RTOL)


def test_run_time_zeros_do_not_get_a_scale_that_others_saturate_at():
    x = as_scaled_array(jnp.zeros(4), dtype=HALF)
    assert_array_equal(asarray(scalify(lambda x: jnp.tanh(x) + 1)(x)), 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "exponent"), [(4, -30), (600, 2), (-7, -2)])
def test_integer_powers_stay_in_range_whatever_the_scale(n, exponent, kind):
    scale = 2.0**exponent
    x = ScaledArray(jnp.asarray([0.9, 0.99, 1.0]) / scale, KINDS[kind](scale))
    actual = asarray(scalify(lambda x: x**n)(x))
    # Repeated squaring doubles a relative error.
    assert_allclose(actual, asarray(x) ** n, rtol=2 * abs(n) * 2.0**-23)


def test_scalar_bounds_clamp_rows_that_have_scales_of_their_own():
    x = ScaledArray(jnp.broadcast_to(ROW, (3, 4)), F32([[0.25], [1.0], [8.0]]))
    for fun in (
        lambda x: lax.clamp(-0.5, x, 1.0),
        lambda x: lax.clamp(jnp.min(x) / 2, x, jnp.max(x) / 2),
    ):
        assert_array_equal(asarray(scalify(fun)(x)), fun(asarray(x)))


def test_a_scalar_compared_with_a_constant_array_is_broadcast():
    x = as_scaled_array(F32(0.5), 0.5)
    assert_array_equal(scalify(lambda x: x > jnp.zeros(3))(x), [True] * 3)
    assert_array_equal(scalify(lambda x: jnp.full(3, jnp.inf) > x)(x), [True] * 3)


def test_a_quotient_by_zero_or_infinity_does_not_drag_the_scale():
    x = as_scaled_array(jnp.asarray([1.5, -2.0, 0.25]), 1.0, dtype=HALF)
    for fun in (lambda x: x / jnp.inf + x, lambda x: jnp.where(x > 10, x / 0.0, x)):
        assert_array_equal(asarray(scalify(fun)(x)), asarray(x))


@pytest.mark.parametrize(
    ("dtype", "result"), [(jnp.float8_e4m3fn, HALF), (jnp.bfloat16, jnp.bfloat16)]
)
def test_a_product_with_a_constant_is_rounded_once(dtype, result):
    x = as_scaled_array(draw_normal(0, (4096,)), 1.0, dtype=dtype)
    # Half an ulp, besides FP32's rounding.
    rtol = float(jnp.finfo(result).eps) / 2 + 2.0**-22
    for fun in (lambda x: x * 0.1, lambda x: x * 0.3, lambda x: -x / 3):
        actual = scalify(fun)(x)
        assert actual.dtype == result
        assert_allclose(asarray(actual), fun(asarray(x)), rtol=rtol, atol=2.0**-24)
