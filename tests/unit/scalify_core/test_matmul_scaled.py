"""The FP8 product under scalify: a cast of the data, a scale by rule, no matter where
the values lie."""

import contextlib
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
from scalify_core.ops.matmul import Fp8DotGeneral, Scaling, fp8_dot_general

MATRIX = (((1,), (0,)), ((), ()))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, HALF)


def product_and_gradients(x, w, g):
    out, vjp = jax.vjp(lambda x, w: fp8_dot_general(x, w, MATRIX), x, w)
    return out, *vjp(g)


X, W, G = normal(0, 32, 64), normal(1, 64, 48), normal(2, 32, 48)


@pytest.mark.parametrize(
    ("dynamic", "ex", "ew", "eg"), [(False, -60, 40, -60), (True, 60, -7, 33)]
)
def test_product_and_gradients_are_those_of_the_cast_data(dynamic, ex, ew, eg):
    scales = [F32(2.0**e) if dynamic else 2.0**e for e in (ex, ew, eg)]
    args = [
        ScaledArray(data, scale) for data, scale in zip((X, W, G), scales, strict=True)
    ]
    actual = jax.jit(scalify(product_and_gradients))(*args)
    x8, w8, g8 = (
        f.cast(a).astype(F32)
        for f, a in zip((E4M3, E4M3, E5M2), (X, W, G), strict=True)
    )
    dot = lambda a, b: np.asarray(lax.dot(a, b, precision="highest"), np.float64)
    expected = (
        dot(x8, w8) * 2.0 ** (ex + ew),
        dot(g8, w8.T) * 2.0 ** (eg + ew),
        dot(x8.T, g8) * 2.0 ** (ex + eg),
    )
    for y, right in zip(actual, expected, strict=True):
        assert y.dtype == HALF
        # below what FP32 holds, at some of these scales
        value = np.asarray(y.data, np.float64) * float(y.scale)
        # One rounding of the product to FP16 before it is rescaled, one after.
        assert_allclose(
            value, right, rtol=2.0**-10, atol=2.0**-20 * np.abs(right).max()
        )
        assert 0.5 < np.sqrt(np.mean(np.square(np.asarray(y.data, np.float64)))) < 2


def test_a_weight_that_is_kept_is_the_weight_that_is_cast_again():
    """The same bits; kept for the backward pass is an E4M3 array in place of the FP16
    one. Under vmap, too."""
    dims = (((2,), (1,)), ((), ()))
    args = [
        ScaledArray(data, 2.0**e)
        for data, e in ((jnp.stack([X, -X]), -3), (W.T, 2), (jnp.stack([G, G]), -9))
    ]
    entries = []
    for kept in (False, True):
        dot = Fp8DotGeneral(keep_rhs=kept)
        pull = lambda x, w, dot=dot: jax.vjp(lambda x, w: dot(x, w, dims), x, w)
        run = lambda x, w, g, pull=pull: (pull(x, w)[0], pull(x, w)[1](g))
        entries.append(jax.jit(scalify(run))(*args))
        residuals = jax.tree.leaves(scalify(pull)(*args[:2])[1])
        assert [r.dtype for r in residuals if r.shape == W.T.shape] == [
            jnp.float8_e4m3fn if kept else HALF
        ]
        rows = [ScaledArray(jnp.stack([a.data, -a.data]), a.scale) for a in args]
        of_rows = jax.jit(scalify(jax.vmap(run)))(*rows)
        entries.append(jax.tree.map(lambda y: y[0], of_rows))
    for other in entries[1:]:
        jax.tree.map(assert_array_equal, entries[0], other)


def test_the_gradient_of_weights_can_be_stored_where_it_is_computed():
    """The bits of a cast after it; a loop over layers then stacks one byte an
    element."""
    layers = ScaledArray(jnp.stack([W[:, :32] * 2.0**-3, W[:, 16:48]]), 0.5)

    def gradient(dot, layers, x):
        body = lambda x, w: (
            jnp.concatenate([dot(x, w, MATRIX), x[:, 32:]], axis=1),
            None,
        )
        return jax.grad(lambda w: jnp.sum(lax.scan(body, x, w)[0] ** 2))(layers)

    late, early = (
        jax.jit(scalify(lambda w, x, dot=dot: gradient(dot, w, x)))(
            layers, ScaledArray(X, 4.0)
        )
        for dot in (fp8_dot_general, Fp8DotGeneral(rhs_gradient=E5M2.dtype))
    )
    assert (late.dtype, early.dtype) == (HALF, E5M2.dtype)
    jax.tree.map(assert_array_equal, late.astype(E5M2.dtype), early)


def test_the_scaling_of_plain_programs_is_not_used():
    dot = Fp8DotGeneral(scaling=Scaling("rms", "amax", "amax"))
    fun = lambda dot: (
        lambda x, w, g: jax.vjp(lambda x, w: dot(x, w, MATRIX), x, w)[1](g)
    )
    args = [
        ScaledArray(a, s)
        for a, s in zip((X * 8, W, G), (2.0**20, 2.0**-9, 1.0), strict=True)
    ]
    for a, b in zip(
        scalify(fun(dot))(*args), scalify(fun(fp8_dot_general))(*args), strict=True
    ):
        assert_array_equal(a.data, b.data)
        assert a.scale == b.scale


def test_one_operand_may_be_plain():
    actual = scalify(lambda w: fp8_dot_general(jnp.asarray(X, F32), w, MATRIX))(
        ScaledArray(W, 2.0**30)
    )
    both = scalify(lambda x, w: fp8_dot_general(x, w, MATRIX))(
        ScaledArray(X, 1.0), ScaledArray(W, 2.0**30)
    )
    assert_array_equal(np.asarray(actual), np.asarray(both))


def test_a_product_that_falls_back_has_the_rule_of_dot_general():
    with pytest.warns(UserWarning, match="multiples of 16"):
        out = scalify(lambda x, w: Fp8DotGeneral("odd")(x, w, MATRIX))(
            ScaledArray(X[:, :20], 2.0**40), ScaledArray(W[:20], 1.0)
        )
    exact = asarray(ScaledArray(X, 2.0**40))[:, :20] @ W[:20].astype(F32)
    assert_allclose(
        np.asarray(out), exact, rtol=2.0**-10, atol=2.0**-10 * np.abs(exact).max()
    )


@pytest.mark.parametrize("dot", [fp8_dot_general, lax.dot_general], ids=["fp8", "fp16"])
def test_products_beyond_the_range_of_fp16_saturate_forward_and_backward(dot):
    # All terms are equal, so the sums are 64 times what independent ones give: data of
    # 300 * 300 * 4096 / 64 > 65504.
    x = ScaledArray(jnp.full((16, 4096), 300.0, HALF), 1.0)
    w = ScaledArray(jnp.full((4096, 16), 300.0, HALF), 1.0)
    g = ScaledArray(jnp.full((16, 16), 6e4, HALF), 2.0**30)

    def both_passes(x, w, g):
        y, pullback = jax.vjp(lambda x, w: dot(x, w, MATRIX), x, w)
        return y, pullback(g)

    y, gradients = scalify(both_passes)(x, w, g)
    for array in (y, *gradients):
        assert np.isfinite(np.asarray(array.data, np.float32)).all()
    assert (np.asarray(y) >= 65504).all()


def test_an_infinity_that_enters_an_fp8_product_comes_out_as_nan():
    ones = jnp.ones((16, 16), HALF)
    for infinite in range(3):
        args = [ScaledArray(ones, 1.0)] * 3
        args[infinite] = ScaledArray(ones.at[0, 0].set(jnp.inf), 1.0)
        out = scalify(product_and_gradients)(*args)
        assert sum(np.isnan(asarray(y)).any() for y in out) == 2


@pytest.mark.parametrize(
    ("wrap", "given"), [(jax.checkpoint, True), (lambda f: f, False)]
)
def test_no_product_is_rounded_to_fp16_before_its_constant(wrap, given):
    """Lowered for CUDA: an operand has been multiplied by it, or the result is FP32."""
    block = wrap(lambda w, x: jnp.tanh(fp8_dot_general(x, w, MATRIX)))
    loss = lambda w, x: jnp.sum(
        jnp.sin(fp8_dot_general(block(w, block(w, x)), w, MATRIX))
    )
    fun = scalify(jax.grad(loss, argnums=(0, 1)))
    args = ScaledArray(normal(3, 64, 64), 1.0), ScaledArray(normal(4, 32, 64), 1.0)
    with compiler_hints.scales_in_products() if given else contextlib.nullcontext():
        text = (
            jax.jit(lambda *args: fun(*args))
            .trace(*args)
            .lower(lowering_platforms=("cuda",))
            .as_text()
        )
    products = re.findall(
        r"stablehlo\.dot_general.* : \(tensor<\S+x(\w+)>, tensor<\S+x(\w+)>\) ->"
        r" tensor<\S+x(\w+)>",
        text,
    )
    assert len(products) >= 5
    if given:
        assert set(products) == {("f16", "f16", "f16")}
        constants = {
            float(c)
            for c in re.findall(r"stablehlo\.constant dense<(\S+)> : tensor<f16>", text)
        }
        assert {2.0**-3} <= constants
    else:
        assert {out for _, _, out in products} == {"f32"}
        assert {operand[:2] for *operands, _ in products for operand in operands} == {
            "f8"
        }
