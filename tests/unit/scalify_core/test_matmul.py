"""The FP8 product on CPU: values, gradients, residuals, scales, fallback, Flax
layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import F32, HALF
from jax import lax
from numpy.testing import assert_allclose, assert_array_equal

from scalify_core.numerics.formats import E4M3, E5M2, FP16
from scalify_core.ops.matmul import Fp8DotGeneral, fp8_dot_general

MATRIX = (((1,), (0,)), ((), ()))
CASES = {  # lhs shape, rhs shape, dimension numbers
    "attention logits": (
        (3, 16, 2, 32),
        (3, 48, 2, 32),
        (((3,), (3,)), ((0, 2), (0, 2))),
    ),
    "batch not in front, contracted axes in another order": (
        (16, 5, 4, 8),
        (8, 16, 5, 4),
        (((2, 3), (3, 0)), ((1,), (2,))),
    ),
}
EPS32 = 2.0**-23
ONES = jnp.ones((16, 16))


def normal(seed, shape, dtype=F32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.parametrize(("case", "fmt"), zip(CASES, (E5M2, E4M3), strict=True))
def test_product_and_gradients_are_those_of_the_fp8_operands(case, fmt):
    lhs_shape, rhs_shape, dims = CASES[case]
    lhs, rhs = normal(0, lhs_shape), normal(1, rhs_shape)
    gradient = normal(
        2, jax.eval_shape(lambda a, b: lax.dot_general(a, b, dims), lhs, rhs).shape
    )

    def with_gradients(dot, lhs, rhs, gradient):
        out, vjp = jax.vjp(lambda a, b: dot(a, b, dims), lhs, rhs)
        return out, *vjp(gradient)

    exact = functools.partial(lax.dot_general, precision="highest")

    @jax.jit
    def of_rounded(*operands):
        formats = E4M3, E4M3, fmt
        pairs = zip(formats, operands, strict=True)
        return with_gradients(exact, *(f.cast(x).astype(F32) for f, x in pairs))

    expected = of_rounded(lhs, rhs, gradient)
    # Sums of at most 768 products in FP32, of any order: gamma_n |a||b|, with |a||b| at
    # most 3.5^2 a product here.
    dot = Fp8DotGeneral(gradient=fmt)
    actual = jax.jit(with_gradients, static_argnums=0)(dot, lhs, rhs, gradient)
    for x, y in zip(actual, expected, strict=True):
        assert_allclose(x, y, rtol=0, atol=768 * EPS32 * 16)


@pytest.mark.parametrize("dtype", [HALF, F32])
def test_result_is_rounded_once_to_the_promoted_dtype(dtype):
    """Gradients have the dtypes of their operands."""
    # Small integers are exact in E4M3 and in the FP32 sum, so the only rounding is the
    # last one.
    lhs = jax.random.randint(jax.random.key(0), (16, 512), -7, 8).astype(HALF)
    rhs = jax.random.randint(jax.random.key(1), (512, 16), -7, 8).astype(dtype)
    out, vjp = jax.vjp(lambda a, b: fp8_dot_general(a, b, MATRIX), lhs, rhs)
    exact = jnp.asarray(np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32))
    assert out.dtype == dtype
    assert_array_equal(out, exact.astype(dtype))
    assert [g.dtype for g in vjp(out)] == [HALF, dtype]
    out = fp8_dot_general(lhs, rhs, MATRIX, preferred_element_type=jnp.bfloat16)
    assert_array_equal(out, exact.astype(jnp.bfloat16))


def test_large_operands_saturate_and_what_is_not_finite_stays_visible():
    huge = jnp.full((16, 16), 1e6)
    out, vjp = jax.vjp(lambda a: fp8_dot_general(a, jnp.eye(16), MATRIX), huge)
    assert_array_equal(out, np.full((16, 16), 448.0))
    assert_array_equal(vjp(huge)[0], np.full((16, 16), 57344.0))
    for bad in (np.nan, np.inf):
        assert np.isnan(
            fp8_dot_general(huge.at[0, 0].set(bad), jnp.eye(16), MATRIX)[0, 0]
        )
        assert not np.isfinite(vjp(huge.at[0, 0].set(bad))[0][0, 0])


def test_current_scales_make_the_product_homogeneous():
    """Powers of two in front of operands and gradient come out exactly, over a range
    that FP8 alone has not."""
    dot = Fp8DotGeneral(current_scaling=True)
    lhs, rhs, gradient = normal(0, (16, 32)), normal(1, (32, 16)), normal(2, (16, 16))

    def both(a, b, g):
        out, vjp = jax.vjp(lambda a, b: dot(a, b, MATRIX), a, b)
        return out, *vjp(g)

    base = both(lhs, rhs, gradient)
    scaled = both(lhs * 2.0**-40, rhs * 2.0**50, gradient * 2.0**-30)
    for actual, expected, power in zip(scaled, base, (10, 20, -70), strict=True):
        assert_array_equal(actual, expected * 2.0**power)


def test_current_scales_never_saturate():
    heavy = 3000 * normal(0, (48, 32)) ** 5
    dot = Fp8DotGeneral(current_scaling=True)
    out, vjp = jax.vjp(lambda a: dot(a, jnp.eye(32), MATRIX), heavy)
    assert_allclose(out, heavy, rtol=2.0**-4, atol=2.0**-16 * heavy.max())
    (data,) = [x for x in jax.tree.leaves(vjp) if x.shape == heavy.shape]
    assert 128 <= np.abs(np.asarray(data, np.float32)).max() <= 256
    assert_array_equal(dot(0 * heavy, jnp.eye(32), MATRIX), 0 * heavy)


def test_sizes_that_are_not_multiples_of_16_fall_back_once_a_shape_and_are_named():
    dot = Fp8DotGeneral("h.0.mlp.c_fc")
    lhs, rhs = normal(0, (16, 20), HALF), normal(1, (20, 32), HALF)
    with pytest.warns(
        UserWarning, match=r"h.0.mlp.c_fc: not FP8 but float16.*\(16, 32, 20\)"
    ):
        out = dot(lhs, rhs, MATRIX)
    dot(lhs, rhs, MATRIX)  # a second warning would be an error
    assert_array_equal(out, lax.dot_general(lhs, rhs, MATRIX))
    dot(ONES, ONES, MATRIX)
    assert dot.skipped == {(16, 32, 20)}


REFUSED = {
    r"no precision \(highest\)": lambda: fp8_dot_general(
        ONES, ONES, MATRIX, precision="highest"
    ),
    "float8_e5m2 of float32": lambda: fp8_dot_general(
        ONES, ONES, MATRIX, preferred_element_type=jnp.float8_e5m2
    ),
    "int32": lambda: fp8_dot_general(ONES.astype(jnp.int32), ONES, MATRIX),
    r"mine: .*e5m2 or e4m3, not e5m10": lambda: Fp8DotGeneral("mine", gradient=FP16),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_wrong_argument_is_refused(message):
    with pytest.raises((ValueError, TypeError), match=message):
        REFUSED[message]()


def test_quantized_zeros_have_the_scale_1():
    # Times that of a ScaledArray, the scale of zeros would be zero in a checkpoint.
    product = Fp8DotGeneral(current_scaling=True)
    for dtype in (jnp.float16, jnp.float32):
        data, scale = product.quantize(jnp.zeros((16, 16), dtype))
        assert not data.any()
        assert scale == 1
