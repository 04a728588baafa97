"""The FP8 product on CPU: values, gradients, residuals, scales, fallback, Flax
layers."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import F32, HALF
from jax import lax
from numpy.testing import assert_allclose, assert_array_equal

from scalify_core.numerics.formats import E4M3, E5M2, FP16
from scalify_core.ops.matmul import Fp8DotGeneral, Scaling, fp8_dot_general

MATRIX = (((1,), (0,)), ((), ()))
CASES = {  # lhs shape, rhs shape, dimension numbers
    "dense layer on B, T, D": ((2, 16, 32), (32, 16), (((2,), (0,)), ((), ()))),
    "attention logits": (
        (3, 16, 2, 32),
        (3, 48, 2, 32),
        (((3,), (3,)), ((0, 2), (0, 2))),
    ),
    "batch not in front": ((16, 5, 32), (32, 16, 5), (((2,), (0,)), ((1,), (2,)))),
}
EPS32 = 2.0**-23


def normal(seed, shape, dtype=F32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def on_grid(fmt, x):
    """The FP8 values, in FP32."""
    return fmt.cast(x).astype(F32)


@pytest.mark.parametrize(("case", "fmt"), zip(CASES, (E5M2, E4M3, E5M2), strict=True))
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
    rounded = on_grid(E4M3, lhs), on_grid(E4M3, rhs), on_grid(fmt, gradient)
    expected = jax.jit(with_gradients, static_argnums=0)(exact, *rounded)
    # Sums of at most 768 products in FP32, of any order: gamma_n |a||b|, with |a||b| at
    # most 3.5^2 a product here.
    tolerance = {"rtol": 0, "atol": 768 * EPS32 * 16}
    dot = Fp8DotGeneral(gradient=fmt)
    all_found = jax.jit(with_gradients, static_argnums=0)(dot, lhs, rhs, gradient)
    for actual, right in zip(all_found, expected, strict=True):
        assert_allclose(actual, right, **tolerance)


@pytest.mark.parametrize("dtype", [HALF, F32])
def test_result_is_rounded_once_to_the_compute_dtype_and_gradients_have_their_operands_dtype(
    dtype,
):
    # Small integers are exact in E4M3 and in the FP32 sum, so the only rounding is the
    # last one.
    lhs = jax.random.randint(jax.random.key(0), (16, 512), -7, 8).astype(HALF)
    rhs = jax.random.randint(jax.random.key(1), (512, 16), -7, 8).astype(dtype)
    # what the operands promote to
    out, vjp = jax.vjp(lambda a, b: fp8_dot_general(a, b, MATRIX), lhs, rhs)
    exact = np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32)
    assert out.dtype == dtype
    assert_array_equal(out, jnp.asarray(exact).astype(dtype))
    assert [g.dtype for g in vjp(out)] == [HALF, dtype]
    wanted = {"preferred_element_type": jnp.bfloat16}
    out = fp8_dot_general(lhs, rhs, MATRIX, **wanted)
    assert_array_equal(out, jnp.asarray(exact).astype(jnp.bfloat16))


@pytest.mark.parametrize("scaling", [Scaling(), Scaling("rms", "amax", "rms")])
def test_residuals_are_the_fp8_operands_and_nothing_wider(scaling):
    dot = Fp8DotGeneral(scaling=scaling)
    _, vjp = jax.vjp(
        lambda a, b: dot(a, b, MATRIX), normal(0, (32, 16)), normal(1, (16, 48))
    )
    arrays = [leaf for leaf in jax.tree.leaves(vjp) if leaf.ndim]
    assert sorted(leaf.shape for leaf in arrays) == [(16, 48), (32, 16)]
    assert all(leaf.dtype == jnp.float8_e4m3fn for leaf in arrays)


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


@pytest.mark.parametrize("statistic", ["rms", "amax"])
def test_scales_from_the_tensors_make_the_product_homogeneous(statistic):
    """Powers of two in front of operands and gradient come out exactly, over a range
    that FP8 alone has not."""
    dot = Fp8DotGeneral(scaling=Scaling(statistic, statistic, statistic))
    lhs, rhs, gradient = normal(0, (16, 32)), normal(1, (32, 16)), normal(2, (16, 16))

    def both(a, b, g):
        out, vjp = jax.vjp(lambda a, b: dot(a, b, MATRIX), a, b)
        return out, *vjp(g)

    base = both(lhs, rhs, gradient)
    zeros = both(0 * lhs, 0 * rhs, 0 * gradient)
    assert not any(np.any(x) for x in zeros)
    scaled = both(lhs * 2.0**-40, rhs * 2.0**50, gradient * 2.0**-30)
    for actual, expected, power in zip(scaled, base, (10, 20, -70), strict=True):
        assert_array_equal(actual, expected * 2.0**power)
    # The rounding of both operands to nearest: 2^-4 each, of the typical size of a
    # product.
    error = np.abs(base[0] - lax.dot(lhs, rhs, precision="highest"))
    assert np.sqrt(np.mean(error**2)) < 2 * E4M3.epsilon / 2 * np.sqrt(32)


def test_amax_scales_never_saturate_and_rms_scales_center_the_data():
    heavy = normal(0, (32, 32)) ** 5
    for statistic in ("amax", "rms"):
        dot = Fp8DotGeneral(scaling=Scaling(statistic, 1.0, 1.0))
        _, vjp = jax.vjp(lambda a, dot=dot: dot(a, jnp.eye(32), MATRIX), heavy * 3000)
        operands = [
            np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(vjp) if leaf.ndim
        ]
        (data,) = [x for x in operands if not np.array_equal(x, np.eye(32))]
        if statistic == "amax":
            assert 128 <= np.abs(data).max() <= 256
        else:
            assert 0.7 < np.sqrt(np.mean(data**2)) < 1.42


def test_constant_scales_divide_operands_and_multiply_the_product():
    dot = Fp8DotGeneral(scaling=Scaling(lhs=2.0**-12, rhs=4, gradient=2.0**-20))
    lhs, rhs = (
        normal(0, (16, 16), HALF) * 2.0**-12,
        normal(1, (16, 16), HALF) * 4,
    )
    unit = fp8_dot_general(lhs * 2.0**12, rhs / 4, MATRIX, preferred_element_type=F32)
    out, vjp = jax.vjp(lambda a, b: dot(a, b, MATRIX), lhs, rhs)
    assert_array_equal(out, (unit * 2.0**-10).astype(HALF))
    # E5M2 alone ends at 2^-16; the gradient's scale keeps what lies below.
    assert float(jnp.abs(vjp(jnp.full((16, 16), 2.0**-19, HALF))[0]).max()) > 0


def test_fp16_products_with_scales_do_not_overflow_before_they_are_scaled():
    dot = Fp8DotGeneral(scaling=Scaling("amax", "amax", 1.0))
    # unscaled: 64 * 128 * 128
    out = dot(jnp.ones((16, 64), HALF), jnp.ones((64, 16), HALF), MATRIX)
    assert_array_equal(out, np.full((16, 16), 64, np.float16))


def test_sizes_that_are_not_multiples_of_16_fall_back_once_a_shape_and_are_named():
    dot = Fp8DotGeneral("h.0.mlp.c_fc")
    lhs, rhs = normal(0, (16, 20), HALF), normal(1, (20, 32), HALF)
    with pytest.warns(
        UserWarning, match=re.escape("h.0.mlp.c_fc: not FP8 but float16")
    ) as caught:
        out = dot(lhs, rhs, MATRIX)
    assert "(16, 32, 20)" in str(caught[0].message)
    dot(lhs, rhs, MATRIX)  # a second warning would be an error
    assert_array_equal(out, lax.dot_general(lhs, rhs, MATRIX))
    dot(normal(0, (16, 32)), rhs.T.reshape(32, 20)[:, :16], MATRIX)
    assert (dot.skipped, dot.converted) == ({(16, 32, 20)}, {(16, 16, 32)})


def test_what_cannot_be_honoured_is_an_error():
    ones = jnp.ones((16, 16))
    for kwargs in (
        {"precision": "highest"},
        {"out_sharding": jax.P()},
        {"preferred_element_type": jnp.float8_e5m2},
        {"preferred_element_type": jnp.int32},
    ):
        with pytest.raises((ValueError, TypeError), match="fp8_dot_general"):
            fp8_dot_general(ones, ones, MATRIX, **kwargs)
    with pytest.raises(TypeError, match="int32"):
        fp8_dot_general(jnp.ones((16, 16), jnp.int32), ones, MATRIX)
    for wrong in ("max", 0.0, -1.0, float("inf")):
        with pytest.raises(ValueError, match="amax"):
            Fp8DotGeneral(scaling=Scaling(wrong))
    with pytest.raises(ValueError, match=r"mine: .*e5m2 or e4m3, not e5m10"):
        Fp8DotGeneral("mine", gradient=FP16)


def test_vmap_gives_each_example_its_own_scales():
    dot = Fp8DotGeneral(scaling=Scaling("rms", "rms", "rms"))
    lhs = normal(0, (3, 16, 16)) * jnp.array([1, 2.0**20, 2.0**-20])[:, None, None]
    rhs = normal(1, (16, 16))

    def f(a, b):
        out, vjp = jax.vjp(lambda a, b: dot(a, b, MATRIX), a, b)
        return out, *vjp(out)

    mapped = jax.vmap(f, in_axes=(0, None))(lhs, rhs)
    looped = [f(a, rhs) for a in lhs]
    for i, expected in enumerate(looped):
        jax.tree.map(
            lambda m, e, i=i: assert_allclose(m[i], e, rtol=16 * EPS32),
            mapped,
            expected,
        )


def test_it_is_the_dot_general_of_linen_layers():
    dot = Fp8DotGeneral("dense")
    layer = nn.Dense(32, dot_general=dot, dtype=jnp.bfloat16)
    x = normal(0, (4, 4, 16))
    variables = layer.init(jax.random.key(1), x)
    kernel = variables["params"]["kernel"].astype(jnp.bfloat16)
    expected = fp8_dot_general(x.astype(jnp.bfloat16), kernel, (((2,), (0,)), ((), ())))
    assert_array_equal(layer.apply(variables, x), expected)
    grads = jax.grad(lambda v: layer.apply(v, x).astype(F32).sum())(variables)
    assert np.isfinite(grads["params"]["kernel"]).all()
    assert dot.converted == {(16, 32, 16)}
