"""FP32 that a program asks for by a cast is FP32 under `scalify`, as in plain code of the same format."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen.dtypes import promote_dtype
from jax import lax

from scalify_core import PrecisionWarning, as_scaled_array, asarray, explain, scalify

F32, HALF, E4M3 = jnp.float32, jnp.float16, jnp.float8_e4m3fn


def wide(*xs):
    """In FP32, and nothing that FP16 holds."""
    return [jnp.tanh(x.astype(F32)) for x in xs]


def promote_to_float32(*xs):
    """A name that a helper of a user's may have."""
    return wide(*xs)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def factor(w):
    return jnp.linalg.cholesky(w @ w.T + jnp.eye(len(w)))


def conv(x, w):
    dims = ("NCH", "OIH", "NCH")
    y = lax.conv_general_dilated(x.reshape(2, 4, 16), w.reshape(8, 4, 8), (1,), "SAME", dimension_numbers=dims)
    return y.reshape(16, 16)


def logits(x, w):
    scores = x.astype(F32) * len(w) ** -0.5 @ w.astype(F32)
    return jax.nn.softmax(20 * scores) @ w.astype(F32)


def preferred(x, w):
    return jnp.sin(16 * jnp.matmul(x, w, preferred_element_type=F32)) @ w.astype(F32) / 4


PRODUCTS = {
    "matmul": lambda x, w: jnp.matmul(*wide(x, w)),
    "one of two": lambda x, w: jnp.tanh(x.astype(F32)) @ w,
    "a helper": lambda x, w: jnp.matmul(*promote_to_float32(x, w)),
    "sum": lambda x, w: jnp.tanh(jnp.sum(jnp.stack([x, x]), 0, dtype=F32) / 2) @ jnp.mean(w[None], 0, dtype=F32),
    "einsum": lambda x, w: jnp.einsum("ij,jk->ik", *wide(x, w)),
    "batched": lambda x, w: jnp.einsum("bij,bjk->bik", *wide(x.reshape(2, 8, 8), w.reshape(2, 8, 16))).reshape(8, 32),
    "conv": lambda x, w: conv(*wide(x, w)),
    "linalg": lambda x, w: x.astype(F32) @ factor(w.astype(F32)) / 2,
    "preferred": preferred,
    "logits": logits,
}


def program(product, x, w):
    """It makes much of small differences, and is as narrow as its operands in the end."""
    return jnp.sin(16 * product(x, w)).astype(x.dtype)


def scanned(fun):
    return lambda x, w: lax.scan(lambda c, _: (fun(c, w), None), x, None, length=2)[0]


def chosen(fun):
    return lambda x, w: lax.cond(jnp.sum(x) > -1e3, fun, lambda x, w: jnp.zeros_like(fun(x, w)), x, w)


def by_hand(fun):
    """A pullback that a user has written, in FP32."""

    def forward(x, w):
        return fun(x, w), (x, w)

    def backward(residuals, g):
        x, w = (x.astype(F32) for x in residuals)
        _, pullback = jax.vjp(lambda x, w: jnp.sin(16 * jnp.tanh(x) @ jnp.tanh(w)), x, w)
        gradients = pullback(g.astype(F32))
        return tuple(d.astype(like.dtype) for d, like in zip(gradients, residuals, strict=True))

    called = jax.custom_vjp(fun)
    called.defvjp(forward, backward)
    return called


CALLS = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": scanned,
    "scan of remat": lambda fun: scanned(jax.checkpoint(fun)),
    "cond": chosen,
    "vmap": lambda fun: lambda x, w: jax.vmap(fun, (0, None))(x.reshape(4, 2, 16), w).reshape(8, 16),
    "custom_vjp": by_hand,
}
CALLS |= {f"{name} of custom_vjp": lambda fun, call=call: call(by_hand(fun)) for name, call in CALLS.items()}
CASES = {name: functools.partial(program, product) for name, product in PRODUCTS.items()}
CASES |= {name: call(functools.partial(program, PRODUCTS["matmul"])) for name, call in CALLS.items()}


def operands(name, dtype):
    x, w = normal(0, 8, 16), normal(1, 16, 16) / 4
    return as_scaled_array((x if name != "batched" else normal(0, 16, 8), w), dtype=dtype)


def loss(name, x, w):
    out = CASES[name](x, w)
    return jnp.sum(out.astype(F32) * np.random.default_rng(2).normal(size=out.shape).astype(np.float32))


def gradients(name):
    return jax.grad(functools.partial(loss, name), (0, 1))


def outside(name):
    return jax.grad(lambda x, w: asarray(scalify(functools.partial(loss, name))(x, w)), (0, 1))


PLACES = {"forward": lambda name: scalify(CASES[name]), "inside": lambda name: scalify(gradients(name))}
PLACES |= {"outside": outside}


def error(found, exact):
    leaves = zip(jax.tree.leaves(asarray(found)), jax.tree.leaves(exact), strict=True)
    return np.array([jnp.linalg.norm(a.astype(F32) - b) / jnp.linalg.norm(b) for a, b in leaves])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_what_is_cast_to_float32_is_as_right_as_in_plain_code(name, place):
    scaled = operands(name, HALF)
    exact = asarray(scaled)
    plain = CASES[name] if place == "forward" else gradients(name)
    expected = plain(*exact)
    assert np.all(
        error(PLACES[place](name)(*scaled), expected) <= 2 * error(plain(*(x.astype(HALF) for x in exact)), expected)
    )


def in_full(fun, *args):
    """How many products of a program are in FP32 because that is asked for."""
    return jax.jit(fun).lower(*args).as_text().count("HIGHEST") // 2


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_of_fp8_data_the_same_products_are_in_float32(name, place):
    found, expected = (in_full(PLACES[place](name), *operands(name, dtype)) for dtype in (E4M3, HALF))
    assert found == expected > 0


def attention(x, w):
    q, k, v = (y.reshape(1, 8, 2, 8) for y in (x @ w, jnp.tanh(x @ w), x))
    return jax.nn.dot_product_attention(q, k, v).reshape(x.shape)


TABLE = np.linspace(0.5, 1, 16, dtype=np.float32)[None]
SILENT = {
    "nothing": lambda x, w: x @ w,
    "a scalar of NumPy": lambda x, w: (x / np.sqrt(16.0)) @ w,
    "a table": lambda x, w: (x * TABLE) @ w,
    "a plain mask": lambda x, w: jnp.where(TABLE > 0.6, x, np.float32(0)) @ w,
    "a cast back": lambda x, w: (x.astype(F32) * lax.rsqrt(jnp.mean(x.astype(F32) ** 2))).astype(x.dtype) @ w,
    "a layer in FP32": lambda x, w: jnp.matmul(*promote_dtype(x, w, dtype=F32)),  # as nnx.Embed is by itself
    "a layer that promotes": lambda x, w: jnp.matmul(*promote_dtype(x * TABLE, w)),
    "logits of attention": lambda x, w: attention(x, w),
    "a mean": lambda x, w: (x - jnp.mean(x, -1, keepdims=True)) @ w / jnp.var(w),
}


@pytest.mark.parametrize("name", SILENT)
def test_promotion_takes_no_product_out_of_its_format(name):
    """Neither does what is narrow again when a product reads it; also in a pullback, of which the casts are others."""
    scaled = operands(name, HALF)
    fun = lambda x, w: jnp.sum(jnp.tanh(SILENT[name](jnp.tanh(SILENT[name](x, w)).astype(x.dtype), w)))
    assert in_full(scalify(fun), *scaled) == 0
    assert in_full(scalify(jax.grad(fun, (0, 1))), *scaled) == 0
    assert in_full(jax.grad(lambda x, w: asarray(scalify(fun)(x, w)), (0, 1)), *scaled) == 0


def test_a_program_that_has_no_narrow_trace_is_evaluated_as_it_is_and_explain_says_so():
    x, w = operands("linalg", HALF)
    fun = lambda x, w: x @ jnp.linalg.cholesky(w @ w.T + jnp.eye(16, dtype=w.dtype))  # which FP16 does not have
    with pytest.raises(TypeError):
        fun(asarray(x).astype(HALF), asarray(w).astype(HALF))
    assert np.all(error(scalify(fun)(x, w), fun(*asarray((x, w)))) < 2**-9)
    assert "cannot be traced" in str(explain(fun, x, w))
    with pytest.warns(PrecisionWarning, match=r"test_asked.py:\d+ .*cannot be traced .TypeError: cholesky"):
        scalify(fun, check=True)(x, w)


def test_a_program_that_has_other_products_in_another_dtype_has_what_it_asks_for_in_both():
    def fun(x, w):
        if x.dtype != F32:
            x = x[:, :8] @ w[:8] + x[:, 8:] @ w[8:]
        return x.astype(F32) @ w.astype(F32)

    x, w = operands("matmul", HALF)
    assert in_full(scalify(fun), x, w) == 1
    assert "it is another one" in str(explain(fun, x, w))


def test_a_scope_of_any_name_is_no_backward_pass():
    fun = jax.named_scope("transpose(net)")(CASES["matmul"])
    assert in_full(scalify(fun), *operands("matmul", HALF)) == 1


def test_explain_computes_with_what_is_asked_for():
    found = explain(CASES["matmul"], *operands("matmul", HALF))
    assert found.errors[0] < 2**-11
    assert found.unknown is None


@pytest.mark.parametrize("place", ["forward", "inside", "outside"])
def test_a_program_that_closes_over_traced_values_has_what_it_asks_for(place):
    x, w = operands("matmul", HALF)

    def step(x, plain):
        fun = lambda x: jnp.sum(program(PRODUCTS["matmul"], x, plain.astype(HALF)).astype(F32) ** 3)
        if place == "outside":
            return jax.grad(lambda x: asarray(scalify(fun)(x)))(x)
        return scalify(fun if place == "forward" else jax.grad(fun))(x)

    assert in_full(step, x, asarray(w)) == (1 if place == "forward" else 2)


def test_data_in_float32_is_traced_once():
    traced = []

    def fun(x, w):
        traced.append(x.dtype)
        return x @ w

    scalify(fun)(*operands("matmul", F32))
    scalify(fun)(*operands("matmul", HALF))
    assert traced == [F32, F32, HALF]


@pytest.mark.parametrize("dtype", [HALF, jnp.bfloat16])
def test_gradients_outside_of_functions_with_integers_and_choices(dtype):
    """Their gradients are of a type of their own, in the backward pass of plain code, too."""
    x, w = as_scaled_array((normal(0, 8, 16), normal(1, 16, 16)), dtype=dtype)

    def loss(w, x):
        y = x @ w
        return jnp.mean(jax.nn.logsumexp(y, -1)), jnp.argmax(y, -1), y[0, 0] > 0

    def value(w, x):
        out, *others = scalify(loss)(w, x)
        return asarray(out), others

    found, (ids, _) = jax.grad(value, has_aux=True)(w, x)
    expected = jax.grad(lambda *args: loss(*args)[0])(*asarray((w, x)))
    assert np.all(error(found, expected) < 2**-5)
    assert ids.shape == (8,)
    kinked = lambda w: asarray(scalify(lambda w, x: jnp.mean(jax.nn.relu(x @ w) ** 3))(w, x))
    twice = jax.grad(lambda w: jnp.sum(asarray(jax.grad(kinked)(w)) ** 2))(w)
    assert np.all(np.isfinite(asarray(twice)))


PROMOTED = {
    "a scalar array": lambda x, w: (x + jnp.zeros((), F32)) @ w,
    "a table": SILENT["a table"],
    "in a scan": scanned(lambda x, w: ((x * TABLE) @ w).astype(x.dtype)),
    "in a branch": chosen(lambda x, w: (x * TABLE) @ w),
    "in a while loop": lambda x, w: lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, ((c[1] * TABLE) @ w).astype(x.dtype)), (0, x)
    )[1],
}
BY_A_LIBRARY = {
    "a layer in FP32": lambda x, w: SILENT["a layer in FP32"](jnp.tanh(x), w),
    "a layer that promotes": SILENT["a layer that promotes"],
}


@pytest.mark.parametrize("name", [*PROMOTED, "a layer in FP32"])
def test_explain_names_products_that_plain_code_has_in_float32_by_promotion(name):
    x, w = operands("matmul", HALF)
    found = explain((PROMOTED | BY_A_LIBRARY)[name], x, w)
    assert [(product.name, product.dtype) for product in found.promoted] == [("dot_general", "float16")]
    assert 'precision="highest" keeps FP32:\n  test_asked.py:' in str(found)


@pytest.mark.parametrize("name", [*CASES, "nothing", "a cast back", "a mean"])
def test_explain_names_no_product_that_is_what_it_is_in_plain_code(name):
    x, w = operands(name, HALF)
    assert explain(CASES.get(name) or SILENT[name], x, w).promoted == []


def checked(fun, place):
    """A function in check mode, or its gradient, inside or outside."""
    total = lambda x, w: jnp.sum(jnp.sin(fun(x, w)).astype(F32))
    if place == "outside":
        return jax.grad(lambda x, w: asarray(scalify(total, check=True)(x, w)))
    return scalify(fun if place == "forward" else jax.grad(total), check=True)


@pytest.mark.parametrize(
    ("name", "place"),
    [pair for pair in itertools.product(PROMOTED, PLACES) if "while" not in pair[0] or pair[1] == "forward"],
)
def test_check_mode_warns_of_them(name, place):
    with pytest.warns(PrecisionWarning, match=r"test_asked.py:\d+ .*dot_general.*: plain code has FP32 here"):
        checked(PROMOTED[name], place)(*operands("matmul", HALF))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["nothing", "a cast back", "a mean", "logits of attention", *BY_A_LIBRARY])
def test_check_mode_says_nothing_of_what_is_narrow_in_plain_code_or_promoted_by_a_library(name, place):
    checked((SILENT | BY_A_LIBRARY)[name], place)(*operands("matmul", HALF))


def test_check_mode_warns_of_requests_that_cannot_be_told():
    def fun(x, w):
        return x.astype(F32) @ w.astype(F32) if x.dtype == F32 else w.T.astype(F32) @ x.T.astype(F32)

    with pytest.warns(PrecisionWarning, match="fun: .* it is another program"):
        scalify(fun, check=True)(*operands("matmul", HALF))


HELD = {
    "a weight's mask": lambda x, w: x @ (w * jnp.tril(jnp.ones((16, 16)))),
    "rows of padding": lambda x, w: jnp.concatenate([x, jnp.zeros((1, 16))]) @ w,
    "a buffer": lambda x, w: jnp.zeros((12, 16)).at[:8].set(x) @ w,
    "a choice": lambda x, w: jnp.where(x > 0, x, jnp.zeros((8, 16))) @ w,
    "a power of two": lambda x, w: (x * jnp.float32(2)) @ w,
}


@pytest.mark.parametrize("name", HELD)
def test_what_is_promoted_and_held_by_the_format_as_it_is_is_not_named(name):
    x, w = operands("matmul", HALF)
    plain = HELD[name](*(y.astype(HALF) for y in asarray((x, w))))
    assert plain.dtype == F32
    found = asarray(scalify(HELD[name], check=True)(x, w))
    # The result is stored in the data's format, at a scale of its own; sums of 16 terms differ by order in FP32.
    np.testing.assert_allclose(found, plain, rtol=2.0**-11, atol=2.0**-24)
    with pytest.warns(PrecisionWarning, match="by promotion"):
        scalify(lambda x, w: HELD[name](jnp.tanh(x), jnp.tanh(w)), check=True)(x, w)


def test_what_a_plain_fp32_operand_has_made_fp32_is_promoted_too():
    x, w = operands("matmul", HALF)
    batch = jnp.asarray(asarray(x), F32)
    twice = lambda w, batch: jnp.tanh(batch @ w) @ w  # the first product is FP32 here, too
    for fun in (twice, jax.grad(lambda w, batch: jnp.sum(jnp.sin(twice(w, batch))))):
        with pytest.warns(PrecisionWarning, match=r"test_asked.py:\d+ .*dot_general.*: plain code has FP32 here"):
            scalify(fun, check=True)(w, batch)
    scalify(lambda w, batch: batch @ w, check=True)(w, batch)
