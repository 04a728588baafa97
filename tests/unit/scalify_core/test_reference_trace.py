"""What plain code of the same format has in FP32, by a cast or by promotion, is FP32
under `scalify`."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import error, normal, pairs
from flax.linen.dtypes import promote_dtype
from jax import lax

from scalify_core import PrecisionWarning, as_scaled_array, asarray, explain, scalify

F32, HALF, E4M3 = jnp.float32, jnp.float16, jnp.float8_e4m3fn


def wide(*xs):
    """In FP32, and nothing that FP16 holds."""
    return [jnp.tanh(x.astype(F32)) for x in xs]


def factor(w):
    return jnp.linalg.cholesky(w @ w.T + jnp.eye(len(w)))


def conv(x, w):
    dims = ("NCH", "OIH", "NCH")
    y = lax.conv_general_dilated(
        x.reshape(2, 4, 16), w.reshape(8, 4, 8), (1,), "SAME", dimension_numbers=dims
    )
    return y.reshape(16, 16)


def logits(x, w):
    scores = x.astype(F32) * len(w) ** -0.5 @ w.astype(F32)
    return jax.nn.softmax(20 * scores) @ w.astype(F32)


def preferred(x, w):
    return (
        jnp.sin(16 * jnp.matmul(x, w, preferred_element_type=F32)) @ w.astype(F32) / 4
    )


PRODUCTS = {
    "matmul": lambda x, w: jnp.matmul(*wide(x, w)),
    "sum": lambda x, w: (
        jnp.tanh(jnp.sum(jnp.stack([x, x]), 0, dtype=F32) / 2)
        @ jnp.mean(w[None], 0, dtype=F32)
    ),
    "batched": (
        lambda x, w: jnp.einsum(
            "bij,bjk->bik", *wide(x.reshape(2, 8, 8), w.reshape(2, 8, 16))
        ).reshape(8, 32)
    ),
    "conv": lambda x, w: conv(*wide(x, w)),
    "linalg": lambda x, w: x.astype(F32) @ factor(w.astype(F32)) / 2,
    "preferred": preferred,
    "logits": logits,
}


def program(product, x, w):
    """It makes much of small differences, and is as narrow as its operands in the
    end."""
    return jnp.sin(16 * product(x, w)).astype(x.dtype)


def scanned(fun):
    return lambda x, w: lax.scan(lambda c, _: (fun(c, w), None), x, None, length=2)[0]


def chosen(fun):
    return lambda x, w: lax.cond(
        jnp.sum(x) > -1e3, fun, lambda x, w: jnp.zeros_like(fun(x, w)), x, w
    )


def by_hand(fun):
    """A pullback that a user has written, in FP32."""

    def forward(x, w):
        return fun(x, w), (x, w)

    def backward(residuals, g):
        x, w = (x.astype(F32) for x in residuals)
        _, pullback = jax.vjp(
            lambda x, w: jnp.sin(16 * jnp.tanh(x) @ jnp.tanh(w)), x, w
        )
        gradients = pullback(g.astype(F32))
        return tuple(
            d.astype(like.dtype) for d, like in zip(gradients, residuals, strict=True)
        )

    called = jax.custom_vjp(fun)
    called.defvjp(forward, backward)
    return called


CALLS = {
    "remat": jax.checkpoint,
    "scan of remat": lambda fun: scanned(jax.checkpoint(fun)),
    "cond": chosen,
    "vmap": lambda fun: (
        lambda x, w: jax.vmap(fun, (0, None))(x.reshape(4, 2, 16), w).reshape(8, 16)
    ),
    "custom_vjp": by_hand,
}
CALLS["scan of custom_vjp"] = lambda fun: scanned(by_hand(fun))
CASES = {
    name: functools.partial(program, product) for name, product in PRODUCTS.items()
}
CASES |= {
    name: call(functools.partial(program, PRODUCTS["matmul"]))
    for name, call in CALLS.items()
}


def operands(name, dtype):
    x, w = normal(0, 8, 16), normal(1, 16, 16) / 4
    return as_scaled_array(
        (x if name != "batched" else normal(0, 16, 8), w), dtype=dtype
    )


def loss(name, x, w):
    out = CASES[name](x, w)
    return jnp.sum(
        out.astype(F32)
        * np.random.default_rng(2).normal(size=out.shape).astype(np.float32)
    )


def gradients(name):
    return jax.grad(functools.partial(loss, name), (0, 1))


def errors(actual, exact):
    return np.array([error([x], [y]) for x, y in pairs(actual, exact)])


# A gradient has the products of its forward pass.
@pytest.mark.parametrize("name", CASES)
def test_what_is_cast_to_float32_is_as_right_as_in_plain_code(name):
    gradient, scaled = gradients(name), operands(name, HALF)
    exact = asarray(scaled)
    expected = gradient(*exact)
    of_plain = errors(gradient(*(x.astype(HALF) for x in exact)), expected)
    assert np.all(errors(scalify(gradient)(*scaled), expected) <= 2 * of_plain)


def in_full(fun, *args):
    """How many products of a program are in FP32 because that is asked for."""
    return jax.jit(fun).lower(*args).as_text().count("HIGHEST") // 2


@pytest.mark.parametrize("name", ["conv", "scan of remat", "custom_vjp"])
def test_of_fp8_data_the_same_products_are_in_float32(name):
    fun = scalify(gradients(name))
    actual, expected = (in_full(fun, *operands(name, dtype)) for dtype in (E4M3, HALF))
    assert actual == expected > 0


TABLE = np.linspace(0.5, 1, 16, dtype=np.float32)[None]
NARROW = {
    "a scalar of Python": lambda x, w: (x / math.sqrt(16.0)) @ w,
    "a mask": lambda x, w: jnp.where(TABLE > 0.6, x, 0) @ w,
    "a cast back": lambda x, w: (
        (x.astype(F32) * lax.rsqrt(jnp.mean(x.astype(F32) ** 2))).astype(x.dtype) @ w
    ),
    "a layer in the format": lambda x, w: jnp.matmul(
        *promote_dtype(x, w, dtype=x.dtype)
    ),
}
PROMOTED = {
    "a scalar of NumPy": lambda x, w: (x / np.sqrt(16.0)) @ w,
    "a table": lambda x, w: (x * TABLE) @ w,
    "a one-hot matrix": lambda x, w: jax.nn.one_hot(jnp.arange(4), 8) @ x,
    # as nnx.Embed is by itself
    "a layer in FP32": lambda x, w: jnp.matmul(*promote_dtype(x, w, dtype=F32)),
    "in a scan": scanned(lambda x, w: ((x * TABLE) @ w).astype(x.dtype)),
    "in a while loop": lambda x, w: lax.while_loop(
        lambda c: c[0] < 2,
        lambda c: (c[0] + 1, ((c[1] * TABLE) @ w).astype(x.dtype)),
        (0, x),
    )[1],
}


@pytest.mark.parametrize("name", NARROW)
def test_what_plain_code_has_in_its_format_is_narrow(name):
    """Also in a pullback, of which the casts are others."""
    scaled = operands(name, HALF)
    fun = lambda x, w: jnp.sum(
        jnp.tanh(NARROW[name](jnp.tanh(NARROW[name](x, w)).astype(x.dtype), w))
    )
    assert in_full(scalify(fun), *scaled) == 0
    assert in_full(scalify(jax.grad(fun, (0, 1))), *scaled) == 0


def fp32_products(fun, *args):
    """How many products of a program have an FP32 operand."""
    actual = re.findall(
        r"dot_general .*: \((.*?)\) ->", jax.jit(fun).lower(*args).as_text()
    )
    return sum("xf32>" in operands for operands in actual)


@pytest.mark.parametrize("name", PROMOTED)
def test_what_plain_code_has_in_fp32_by_promotion_is_fp32(name):
    scaled = operands(name, HALF)
    plain = [x.astype(HALF) for x in asarray(scaled)]
    assert (
        fp32_products(scalify(PROMOTED[name]), *scaled)
        == fp32_products(PROMOTED[name], *plain)
        > 0
    )
    if "while" in name:
        return
    loss = lambda x, w: jnp.sum(jnp.sin(PROMOTED[name](x, w)).astype(F32))
    gradient = jax.grad(loss, (0, 1))
    assert (
        fp32_products(scalify(gradient), *scaled) == fp32_products(gradient, *plain) > 0
    )


def test_logits_of_attention_that_are_float32_as_a_result_read_the_format():
    def attention(x, w):
        q, k, v = (y.reshape(1, 8, 2, 8) for y in (x @ w, jnp.tanh(x @ w), x))
        # Of a bare sum the gradient would be a plain FP32 matrix, whose product by a
        # computed value is FP32.
        return jnp.sum(jnp.sin(jax.nn.dot_product_attention(q, k, v).astype(F32)))

    gradient = scalify(jax.grad(attention, (0, 1)))
    # In plain code the algorithm says that of the gradients, too: F16_F16_F32.
    assert fp32_products(gradient, *operands("matmul", HALF)) == 0


def test_a_program_that_has_no_narrow_trace_is_evaluated_as_it_is_and_explain_says_so():
    x, w = operands("linalg", HALF)
    # which FP16 does not have
    fun = lambda x, w: x @ jnp.linalg.cholesky(w @ w.T + jnp.eye(16, dtype=w.dtype))
    with pytest.raises(TypeError):
        fun(asarray(x).astype(HALF), asarray(w).astype(HALF))
    with pytest.warns(
        PrecisionWarning,
        match=r"it cannot be traced .* at test_reference_trace.py:\d+ .TypeError: chol",
    ):
        actual = scalify(fun)(x, w)
    assert error(actual, fun(*asarray((x, w)))) < 2**-9
    assert "cannot be traced" in str(explain(fun, x, w))
    without_products = lambda x: jnp.sum(
        x + jnp.linalg.cholesky(jnp.eye(16, dtype=x.dtype))
    )
    scalify(without_products)(w)  # there is nothing to tell


def test_a_program_that_has_other_products_in_another_dtype_is_told_at_trace_time():
    def fun(x, w):
        if x.dtype != F32:
            x = x[:, :8] @ w[:8] + x[:, 8:] @ w[8:]
        return x.astype(F32) @ w.astype(F32)

    x, w = operands("matmul", HALF)
    with pytest.warns(
        PrecisionWarning,
        match="fun: .* has other products, .* precision=.highest. keeps FP32",
    ) as seen:
        assert in_full(scalify(fun), x, w) == 0
    assert len(seen) == 1
    assert "has other products" in str(explain(fun, x, w))
    with pytest.warns(PrecisionWarning, match="has other products"):
        jax.jit(scalify(jax.grad(lambda x, w: jnp.sum(fun(x, w)))))(x, w)


def test_explain_computes_with_what_is_asked_for():
    explanation = explain(CASES["matmul"], *operands("matmul", HALF))
    assert explanation.errors[0] < 2**-11
    assert explanation.unknown is None


def test_a_program_that_closes_over_traced_values_has_what_it_asks_for():
    x, w = operands("matmul", HALF)

    def step(x, plain):
        product = lambda x: program(PRODUCTS["matmul"], x, plain.astype(HALF))
        return scalify(jax.grad(lambda x: jnp.sum(product(x).astype(F32) ** 3)))(x)

    assert in_full(step, x, asarray(w)) == 2


def test_data_in_float32_is_traced_once():
    traced = []

    def fun(x, w):
        traced.append(x.dtype)
        return x @ w

    scalify(fun)(*operands("matmul", F32))
    scalify(fun)(*operands("matmul", HALF))
    assert traced == [F32, F32, HALF]
