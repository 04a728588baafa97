"""The FP8 product under scalify: a cast of the data, a scale by rule, no matter where
the values lie."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import F32, HALF
from jax import lax
from numpy.testing import assert_allclose, assert_array_equal
from propagated import scalify

from scalify_core.array.scaled_array import ScaledArray, asarray
from scalify_core.numerics import compiler_hints
from scalify_core.numerics.formats import E4M3, E5M2
from scalify_core.ops.matmul import Fp8DotGeneral, fp8_dot_general

MATRIX = (((1,), (0,)), ((), ()))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, HALF)


def product_and_gradients(x, w, g):
    out, vjp = jax.vjp(lambda x, w: fp8_dot_general(x, w, MATRIX), x, w)
    return out, *vjp(g)


X, W, G = normal(0, 32, 64), normal(1, 64, 48), normal(2, 32, 48)


@pytest.mark.parametrize(
    ("as_scale", "exponents"), [(float, (-60, 40, -60)), (F32, (60, -7, 33))]
)
def test_product_and_gradients_are_those_of_the_cast_data(as_scale, exponents):
    args = [
        ScaledArray(data, as_scale(2.0**e))
        for data, e in zip((X, W, G), exponents, strict=True)
    ]
    # in FP64: beyond what FP32 holds, at some of these scales
    x, w, g = (
        np.asarray(jax.jit(fmt.cast)(data), np.float64) * 2.0**e
        for fmt, data, e in zip((E4M3, E4M3, E5M2), (X, W, G), exponents, strict=True)
    )
    actual = jax.jit(scalify(product_and_gradients))(*args)
    for y, expected in zip(actual, (x @ w, g @ w.T, x.T @ g), strict=True):
        assert y.dtype == HALF
        data = np.asarray(y.data, np.float64)
        # One rounding of the product to FP16 before it is rescaled, one after.
        atol = 2.0**-20 * np.abs(expected).max()
        assert_allclose(data * float(y.scale), expected, rtol=2.0**-10, atol=atol)
        assert 0.5 < np.sqrt(np.mean(np.square(data))) < 2


def test_a_weight_that_is_kept_gives_the_bits_of_one_that_is_cast_again():
    x, w, g = (
        ScaledArray(jnp.stack([data, -data]), 2.0**e)
        for data, e in ((X, -3), (W.T, 2), (G, -9))
    )
    results = []
    for keep, dtype in ((False, HALF), (True, jnp.float8_e4m3fn)):
        dot = Fp8DotGeneral(keep_rhs=keep)
        product = lambda x, w, dot=dot: dot(x, w, (((1,), (1,)), ((), ())))
        pull = lambda x, w, product=product: jax.vjp(product, x, w)
        run = lambda x, w, g, pull=pull: (pull(x, w)[0], pull(x, w)[1](g))
        results.append(jax.jit(scalify(jax.vmap(run)))(x, w, g))
        residuals = jax.tree.leaves(scalify(pull)(x[0], w[0])[1])
        assert [r.dtype for r in residuals if r.shape == W.T.shape] == [dtype]
    jax.tree.map(assert_array_equal, *results)


@pytest.mark.parametrize("dot", [fp8_dot_general, lax.dot_general], ids=["fp8", "fp16"])
def test_products_beyond_the_range_of_fp16_saturate_forward_and_backward(dot):
    def both_passes(x, w, g):
        y, pullback = jax.vjp(lambda x, w: dot(x, w, MATRIX), x, w)
        return y, *pullback(g)

    # All terms are equal, so the sums are 64 times what independent ones give: data of
    # 300 * 300 * 4096 / 64 > 65504.
    x, w, g = (
        ScaledArray(jnp.full(shape, number, HALF), scale)
        for shape, number, scale in (
            ((16, 4096), 300, 1.0),
            ((4096, 16), 300, 1.0),
            ((16, 16), 6e4, 2.0**30),
        )
    )
    arrays = jax.jit(scalify(both_passes))(x, w, g)
    assert all(np.isfinite(np.asarray(array.data)).all() for array in arrays)
    assert (np.asarray(arrays[0]) >= 65504).all()


def test_an_infinity_that_enters_an_fp8_product_comes_out_as_nan():
    ones = jnp.ones((16, 16), HALF)
    for infinite in range(3):
        args = [ScaledArray(ones, 1.0)] * 3
        args[infinite] = ScaledArray(ones.at[0, 0].set(jnp.inf), 1.0)
        out = scalify(product_and_gradients)(*args)
        assert sum(np.isnan(asarray(y)).any() for y in out) == 2


@pytest.mark.parametrize("given", [True, False])
def test_no_product_is_rounded_to_fp16_before_its_constant(given):
    """Lowered for CUDA: an operand has been multiplied by it, or the result is FP32."""
    block = jax.checkpoint(lambda w, x: jnp.tanh(fp8_dot_general(x, w, MATRIX)))
    loss = lambda w, x: jnp.sum(fp8_dot_general(block(w, x), w, MATRIX) ** 2)
    gradient = scalify(jax.grad(loss, argnums=(0, 1)))
    args = ScaledArray(normal(3, 64, 64), 1.0), ScaledArray(normal(4, 32, 64), 1.0)
    with compiler_hints.scales_in_products(given):
        trace = jax.jit(lambda *args: gradient(*args)).trace(*args)
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
    products = re.findall(
        r"stablehlo\.dot_general.* : \(tensor<\S+x(\w+)>, tensor<\S+x(\w+)>\) ->"
        r" tensor<\S+x(\w+)>",
        text,
    )
    assert len(products) >= 5
    if given:
        assert set(products) == {("f16", "f16", "f16")}
        assert "stablehlo.constant dense<1.250000e-01> : tensor<f16>" in text
    else:
        assert {(a[:2], b[:2], out) for a, b, out in products} == {("f8", "f8", "f32")}
