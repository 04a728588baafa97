"""Measured scales beside numbers that are far larger than all others: masks and other
constants, loud rows. They set no scale, and what is not masked keeps its digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import (
    F32,
    HALF,
    ROUNDINGS,
    both,
    check,
    error,
    normal,
    scaled,
)
from jax import lax, nn
from numpy.testing import assert_allclose

import scalify_core as sc
from scalify_core import asarray, scalify

LOWEST = float(jnp.finfo(F32).min)
X = normal(0, 16, 16)
SOME = jax.random.bernoulli(jax.random.key(1), 0.5, (16, 16))
LIMIT = ROUNDINGS[HALF]


def in_its_dtype(fun):
    """A result that an FP32 factor or table does not make FP32."""
    return lambda x, *args: fun(x, *args).astype(x.dtype)


def check_parts(actual, expected, where=SOME):
    """Both parts at their own size."""
    for part in (np.asarray(where), ~np.asarray(where)):
        assert error(asarray(actual)[part], expected[part]) <= LIMIT


def many(x, factor):
    """More numbers than are followed one by one."""
    return sum(jnp.where(SOME, x, -factor * k) for k in range(1, 7)) / 6


# Of data, and of a factor: what is not `SOME` is as large as that.
KINDS = {
    "an array": lambda x, m: x + jnp.asarray(np.where(SOME, 0.0, 1.0), F32) * m,
    "selected": lambda x, m: jnp.where(SOME, x, m),
    "many constants": many,
    "a gradient": lambda x, m: jax.grad(
        lambda x: jnp.sum(jnp.where(SOME, 0.5 * x * x, x * m))
    )(x),
}
KINDS = {kind: in_its_dtype(fun) for kind, fun in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_near_1_keeps_its_digits_beside_numbers_of_up_to_1e9(kind):
    (x,) = scaled(X)
    fun = jax.jit(scalify(KINDS[kind]))
    for size in (-1e5, 3e7, -1e9, 1e9):
        check_parts(fun(x, F32(size)), KINDS[kind](asarray(x), F32(size)))


CONSTANTS = {
    "clipped": lambda x: jnp.clip(1e7 * x**3, -1e6, 1e6),
    "filled": lambda x: jnp.where(x > 0, x, 1e6),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_large_constants_among_results_are_kept_where_the_format_holds_both(name):
    actual, expected = both(CONSTANTS[name], X)
    check_parts(actual, expected, np.abs(np.asarray(expected)) < 100)


NUMBERS = {
    "a gradient": (
        jax.grad(lambda x: jnp.where(x > 0.1, 1e6 * x, x * x / 2).sum()),
        [1e-6, 2e-6, 3e-6, 0.5],
    ),
    "a smallest of two": (
        lambda x: jnp.minimum(jnp.exp(x**3), 1e10),
        [0.1, 1, 10, 100],
    ),
    "a fill": (lambda x: jnp.where(x < 0.5, 1e9, 1 / x), [0.1, 1, 10, 100]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_large_constant_that_is_no_mask_is_a_number_as_all_others_are(name):
    fun, numbers = NUMBERS[name]
    actual, expected = both(fun, jnp.asarray(numbers))
    largest = np.argmax(np.abs(expected))
    assert_allclose(asarray(actual)[largest], expected[largest], rtol=2**-9)


def test_a_result_that_can_hold_no_large_constant_is_stored_as_all_others_are():
    logits = lambda x, w: jnp.where(x > 0, x @ w, -1e30)
    loss = lambda x, w: jnp.sum((nn.softmax(logits(x, w), axis=-1) @ w) ** 2)
    text = lambda fun: str(jax.make_jaxpr(scalify(fun))(*scaled(X, normal(1, 16, 16))))
    assert "_masked" not in text(jax.grad(loss, argnums=1))
    assert "_masked" in text(logits)


@pytest.mark.parametrize(("size", "mask"), [(1e-30, -1e9), (1.0, -1e9), (1e4, LOWEST)])
def test_large_constants_that_the_format_cannot_hold_beside_the_rest_saturate_as_masks(
    mask, size
):
    fun = lambda x: jnp.where(x > 0, size * x, mask)
    actual, expected = both(fun, X)
    actual, masked = asarray(actual), np.asarray(expected) < 0
    assert error(actual[~masked], expected[~masked]) <= LIMIT
    # Logits of up to 4 sizes move by half a rounding of them, or less. Beside the
    # smallest, FP16 has no mask but -inf.
    assert_allclose(nn.softmax(actual), nn.softmax(expected), atol=4e-3 * min(size, 10))
    masks = np.asarray(actual)[masked]
    assert np.isinf(masks).all() == (size < 1e-6)
    loss = sc.explain(fun, *scaled(X)).first_loss
    saturates = bool((np.isinf(masks) | (masks > mask * 0.99)).any())
    assert saturates == ("saturate in float16" in str(loss))
    assert saturates or loss is None


# Of data, masks (zero for `SOME`) and a temperature.
MASKED = {
    "a temperature": lambda x, m, t: (x + m) / t,
    "twice": lambda x, m, t: (x + m / 4) + m / 4,
    "another mask": lambda x, m, t: x + m / 2 + jnp.where(m > -1, 0.0, -1e9),
    "a penalty": lambda x, m, t: (lambda y: jnp.where(y > 0, y / 1.2, y * 1.2))(
        x + m / 2
    ),
}


@pytest.mark.parametrize("written", [False, True], ids=["argument", "constant"])
@pytest.mark.parametrize("name", MASKED)
def test_a_mask_is_one_after_arithmetic_with_numbers_of_the_program(name, written):
    (x,), t = scaled(X), F32(0.7)
    for lowest in (LOWEST / 2, -1e9):
        mask = jnp.where(SOME, 0.0, lowest)
        fun = in_its_dtype(
            (lambda x, _, t, m=mask: MASKED[name](x, m, t)) if written else MASKED[name]
        )
        actual = np.asarray(asarray(jax.jit(scalify(fun))(x, mask, t)))
        expected = fun(asarray(x), mask, t)
        assert error(actual[SOME], expected[SOME]) <= LIMIT
        assert (actual[~SOME] < -1000).all()


MOVES = {
    "sort": lax.sort,
    "top_k": lambda x: lax.top_k(x, 6)[0],
    "scatter-max": lambda x: jnp.full_like(x, -1e9).at[:].max(x),
    "reduce_window_max": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID"
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_is_not_masked_keeps_its_digits_where_it_is_moved(name):
    def moved(x):
        masked = jnp.where(jnp.arange(8) < 4, 1e-3 * (2 + jnp.tanh(x)), -1e9)
        return MOVES[name](masked.astype(x.dtype))

    (x,) = scaled(normal(0, 16, 8))
    actual, expected = asarray(scalify(moved)(x)), moved(asarray(x))
    rest = expected > 0
    assert bool(jnp.all(actual[~rest] < -1e3))
    assert error(actual[rest], expected[rest]) < LIMIT


# The lowest number masks in an operand of a product, too.
COLUMNS, ROWS = jnp.arange(8)[None] >= 6, jnp.arange(8)[:, None] == 1
EYE = lambda h: jnp.eye(8, dtype=h.dtype)
USES = {
    "columns that are left out": lambda h, w, n: (
        jnp.where(COLUMNS, n, h) @ EYE(h)[:, :5] @ w[:5]
    ),
    "times zero": lambda h, w, n: jnp.where(COLUMNS, n, h) @ jnp.where(COLUMNS.T, 0, w),
    "a maximum": lambda h, w, n: (
        jnp.maximum(jnp.where(COLUMNS, n, h).max(0), n)[None, :5] @ w[:5]
    ),
    "rows that are copied": lambda h, w, n: (
        nn.softmax(EYE(h)[:3] @ jnp.where(COLUMNS, n, h)) @ w
    ),
    "a row that is added": lambda h, w, n: (
        nn.softmax(jnp.tril(jnp.ones((8, 8), h.dtype))[:1] @ jnp.where(COLUMNS, n, h))
        @ w
    ),
}
OPERANDS = normal(0, 8, 8), normal(1, 8, 8)


@pytest.mark.parametrize("use", USES)
def test_what_is_not_masked_keeps_its_digits_in_a_product(use):
    check(lambda x, w: USES[use](jnp.tanh(x), w, LOWEST), *OPERANDS)


def test_numbers_as_large_as_any_are_none():
    (x,) = scaled(normal(0, 8, 8) * 2.0**120)
    fun = lambda x: jnp.where(COLUMNS, -1e38, x) @ (EYE(x) * 2.0**-120)
    actual, expected = asarray(scalify(fun)(x)), asarray(x) * 2.0**-120
    assert error(actual[:, :6], expected[:, :6]) < LIMIT


def test_other_large_numbers_count_in_a_sum():
    product = lambda x, number=-1e9: jnp.where(COLUMNS, number, jnp.tanh(x)) @ x
    check(product, OPERANDS[0])
    (x,) = scaled(OPERANDS[0])
    assert error(scalify(product)(x, -1e9), product(asarray(x))) < LIMIT
    assert "_masked" not in str(jax.make_jaxpr(scalify(product))(x, -1e4))


# Results of all sizes, and what is said of them.


@pytest.mark.parametrize("dtype", [HALF, jnp.float8_e5m2])
def test_results_of_all_sizes_leave_room_above(dtype):
    """For who goes on with data as if its RMS were near 1."""
    sizes = 2.0 ** jnp.linspace(-22, 0, 256).reshape(16, 16)
    (x,) = scaled(X, dtype=dtype)
    for fun in (
        lambda x: 3 * x,
        lambda x: x * sizes.astype(x.dtype),
        lambda x: x * 2.0**-100,
        lambda x: jnp.exp(3 * x),
    ):
        data = scalify(fun)(x).data.astype(F32)
        assert 2.0**6 <= float(jnp.max(jnp.abs(data))) < 2.0**7
    assert float(scalify(lambda x: 0 * x)(x).scale) == 2.0**-126


def test_what_is_lost_beside_larger_numbers_is_explained_and_nothing_else():
    (x,) = scaled(X)
    for fun in KINDS.values():
        assert sc.explain(fun, x, F32(1e14)).first_loss is not None
        assert sc.explain(fun, x, F32(-1e9)).first_loss is None


def test_one_loud_token_leaves_the_others_their_digits():
    (x,), loud = scaled(X), jnp.arange(16)[:, None] == 3
    fun = in_its_dtype(lambda x, s: x * jnp.where(loud, s, 1.0))
    actual = asarray(jax.jit(scalify(fun))(x, F32(2e8)))
    rest = np.asarray(~loud[:, 0])
    assert error(actual[rest], asarray(x)[rest]) <= LIMIT


def test_masks_in_results_are_explained_as_scalify_returns_them():
    scores, (x,) = lambda x: jnp.where(x > 0, 100 * x, -1e6), scaled(X)
    actual = sc.explain(scores, x).errors[0]
    assert actual == pytest.approx(error(scalify(scores)(x), scores(asarray(x))))
