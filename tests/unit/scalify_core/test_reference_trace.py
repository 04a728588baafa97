"""Products that plain code of the same format has in FP32, by a cast or by promotion,
are FP32 under `scalify`."""

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

F32, HALF = jnp.float32, jnp.float16


def wide(*xs):
    """The operands in FP32, as numbers that FP16 does not hold."""
    return [jnp.tanh(x.astype(F32)) for x in xs]


def conv(x, w):
    dims = ("NCH", "OIH", "NCH")
    y = lax.conv_general_dilated(
        x.reshape(2, 4, 16), w.reshape(8, 4, 8), (1,), "SAME", dimension_numbers=dims
    )
    return y.reshape(16, 16)


def preferred(x, w):
    product = jnp.matmul(x, w, preferred_element_type=F32)
    return jnp.sin(16 * product) @ w.astype(F32) / 4


PRODUCTS = {
    "matmul": lambda x, w: jnp.matmul(*wide(x, w)),
    "conv": lambda x, w: conv(*wide(x, w)),
    "preferred": preferred,
}


def program(product, x, w):
    """It makes much of small differences, and is as narrow as its operands in the
    end."""
    return jnp.sin(16 * product(x, w)).astype(x.dtype)


def scanned(fun):
    return lambda x, w: lax.scan(lambda c, _: (fun(c, w), None), x, None, length=2)[0]


CASES = {
    name: functools.partial(program, product) for name, product in PRODUCTS.items()
}
CASES["scan of remat"] = scanned(jax.checkpoint(CASES["matmul"]))


def operands():
    return as_scaled_array((normal(0, 8, 16), normal(1, 16, 16) / 4), dtype=HALF)


def gradients(name):
    def loss(x, w):
        out = CASES[name](x, w).astype(F32)
        return jnp.sum(out * normal(2, *out.shape))

    return jax.grad(loss, (0, 1))


def errors(actual, exact):
    return np.array([error([x], [y]) for x, y in pairs(actual, exact)])


# A gradient has the products of its forward pass.
@pytest.mark.parametrize("name", CASES)
def test_what_is_cast_to_float32_is_as_right_as_in_plain_code(name):
    gradient, scaled = gradients(name), operands()
    exact = asarray(scaled)
    expected = gradient(*exact)
    of_plain = errors(gradient(*(x.astype(HALF) for x in exact)), expected)
    assert np.all(errors(scalify(gradient)(*scaled), expected) <= 2 * of_plain)


def in_full(fun, *args):
    """Count the products of a program that ask for FP32."""
    return jax.jit(fun).lower(*args).as_text().count("HIGHEST") // 2


TABLE = np.linspace(0.5, 1, 16, dtype=np.float32)[None]
NARROW = {
    "a scalar of Python": lambda x, w: (x / math.sqrt(16.0)) @ w,
    "a mask": lambda x, w: jnp.where(TABLE > 0.6, x, 0) @ w,
    "a cast back": lambda x, w: (
        (x.astype(F32) * lax.rsqrt(jnp.mean(x.astype(F32) ** 2))).astype(x.dtype) @ w
    ),
}
PROMOTED = {
    "a scalar of NumPy": lambda x, w: (x / np.sqrt(16.0)) @ w,
    # as nnx.Embed is without a dtype
    "a layer in FP32": lambda x, w: jnp.matmul(*promote_dtype(x, w, dtype=F32)),
    "a table": lambda x, w: (x * TABLE) @ w,
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
    scaled = operands()
    fun = lambda x, w: jnp.sum(
        jnp.tanh(NARROW[name](jnp.tanh(NARROW[name](x, w)).astype(x.dtype), w))
    )
    assert in_full(scalify(fun), *scaled) == 0
    assert in_full(scalify(jax.grad(fun, (0, 1))), *scaled) == 0


def fp32_products(fun, *args):
    """Count the products of a program that have an FP32 operand."""
    actual = re.findall(
        r"dot_general .*: \((.*?)\) ->", jax.jit(fun).lower(*args).as_text()
    )
    return sum("xf32>" in operands for operands in actual)


@pytest.mark.parametrize("name", PROMOTED)
def test_products_that_plain_code_has_in_fp32_by_promotion_are_fp32(name):
    fun, scaled = PROMOTED[name], operands()
    loss = lambda x, w: jnp.sum(jnp.sin(fun(x, w)).astype(F32))
    plain = [x.astype(HALF) for x in asarray(scaled)]
    # a loop of unknown length has no gradient
    for program in (fun,) if "while" in name else (fun, jax.grad(loss, (0, 1))):
        expected = fp32_products(program, *plain)
        assert fp32_products(scalify(program), *scaled) == expected > 0


def test_logits_of_attention_that_are_float32_as_a_result_read_the_format():
    def attention(x, w):
        q, k, v = (y.reshape(1, 8, 2, 8) for y in (x @ w, jnp.tanh(x @ w), x))
        # Of a bare sum the gradient would be a plain FP32 matrix, whose product by a
        # computed value is FP32.
        return jnp.sum(jnp.sin(jax.nn.dot_product_attention(q, k, v).astype(F32)))

    gradient = scalify(jax.grad(attention, (0, 1)))
    # In plain code the algorithm says that of the gradients, too: F16_F16_F32.
    assert fp32_products(gradient, *operands()) == 0


def test_a_program_that_has_no_narrow_trace_is_evaluated_as_it_is_and_explain_says_so():
    x, w = operands()
    # which FP16 does not have
    fun = lambda x, w: x @ jnp.linalg.cholesky(w @ w.T + jnp.eye(16, dtype=w.dtype))
    with pytest.warns(
        PrecisionWarning,
        match=r"it cannot be traced .* at test_reference_trace.py:\d+ .TypeError: chol",
    ):
        actual = scalify(fun)(x, w)
    assert error(actual, fun(*asarray((x, w)))) < 2**-9
    assert "cannot be traced" in str(explain(fun, x, w))


def test_a_program_that_has_other_products_in_another_dtype_is_told_at_trace_time():
    def fun(x, w):
        if x.dtype != F32:
            x = x[:, :8] @ w[:8] + x[:, 8:] @ w[8:]
        return x.astype(F32) @ w.astype(F32)

    x, w = operands()
    with pytest.warns(
        PrecisionWarning,
        match="fun: .* has other products, .* precision=.highest. keeps FP32",
    ) as seen:
        assert in_full(scalify(fun), x, w) == 0
    assert len(seen) == 1
    assert "has other products" in str(explain(fun, x, w))
    with pytest.warns(PrecisionWarning, match="has other products"):
        jax.jit(scalify(jax.grad(lambda x, w: jnp.sum(fun(x, w)))))(x, w)
