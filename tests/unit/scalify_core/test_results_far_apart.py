"""Results some of whose elements are far larger than all others: masks that are
arguments, loud rows."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import draw_normal

from scalify_core import PrecisionWarning, as_scaled_array, asarray, explain, scalify
from scalify_core.numerics.formats import FP16

HALF = jnp.float16
LOWEST = float(jnp.finfo(jnp.float32).min)
X = draw_normal(0, (16, 16))
SOME = jax.random.bernoulli(jax.random.key(1), 0.5, (16, 16))
ONE = jnp.arange(16)[:, None] == 3


def error(actual, expected, where):
    actual, expected = (
        np.asarray(x, np.float64)[np.asarray(where)] for x in (actual, expected)
    )
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def many(x, factor):
    """More numbers than are followed one by one."""
    return (
        sum((jnp.where(SOME, x, -factor * k) for k in range(1, 7)), jnp.zeros_like(x))
        / 6
    )


def in_its_dtype(fun):
    """A result that an FP32 factor does not make FP32."""
    return lambda x, m: fun(x, m).astype(x.dtype)


# Of data, and of a factor: what is not `SOME` is as large as that.
KINDS = {
    "an argument": lambda x, m: x + jnp.where(SOME, 0.0, 1.0) * m,
    "an array": lambda x, m: (lambda mask: x + mask * m)(
        jnp.asarray(np.where(SOME, 0.0, 1.0), jnp.float32)
    ),
    "selected": lambda x, m: jnp.where(SOME, x, m),
    "over a temperature": lambda x, m: jnp.where(SOME, x, -1e9) / (-1e9 / m),
    "many constants": many,
    "a product": lambda x, m: jnp.where(SOME, x, x * 0.5 * m + m),
    "a gradient": lambda x, m: jax.grad(
        lambda x: jnp.sum(jnp.where(SOME, 0.5 * x * x, x * m))
    )(x),
}
KINDS = {kind: in_its_dtype(fun) for kind, fun in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [-1e5, 3e7, -1e9, 1e9])
def test_what_is_near_1_keeps_its_digits_beside_numbers_of_up_to_1e9(kind, size):
    x = as_scaled_array(X, dtype=HALF)
    actual, expected = (
        jax.jit(scalify(KINDS[kind]))(x, jnp.float32(size)),
        KINDS[kind](asarray(x), jnp.float32(size)),
    )
    assert error(asarray(actual), expected, SOME) <= 4 * FP16.epsilon
    assert error(asarray(actual), expected, ~SOME) <= 4 * FP16.epsilon


@pytest.mark.parametrize("name", ["add", "scaled", "closed over", "twice"])
@pytest.mark.parametrize("lowest", [LOWEST, LOWEST / 4, -1e38])
def test_the_lowest_numbers_mask_wherever_they_come_from(name, lowest):
    mask = jnp.where(SOME, 0.0, lowest)
    masked = {
        "add": lambda x, m, t: x + m,
        "scaled": lambda x, m, t: (x + m / 8) / t,
        "closed over": lambda x, m, t: x + mask / 2,
        "twice": lambda x, m, t: (x + m / 4) + m / 4,
    }[name]
    fun = lambda x, m, t: masked(x, m, t).astype(x.dtype)
    x, t = as_scaled_array(X, dtype=HALF), jnp.float32(0.7)
    actual, expected = (
        asarray(jax.jit(scalify(fun))(x, mask, t)),
        fun(asarray(x), mask, t),
    )
    assert error(actual, expected, SOME) <= 4 * FP16.epsilon
    assert (np.asarray(actual)[~np.asarray(SOME)] < -1000).all()


@pytest.mark.parametrize("dtype", [HALF, jnp.float8_e5m2])
def test_results_of_all_sizes_leave_room_above(dtype):
    """For who goes on with data as if its RMS were near 1."""
    sizes = 2.0 ** jnp.linspace(-22, 0, 256).reshape(16, 16)
    for fun in (
        lambda x: 3 * x,
        lambda x: x * sizes.astype(x.dtype),
        lambda x: x * 2.0**-100,
        lambda x: jnp.exp(3 * x),
    ):
        actual = scalify(fun)(as_scaled_array(X, dtype=dtype))
        assert (
            2.0**6 <= float(jnp.max(jnp.abs(actual.data.astype(jnp.float32)))) < 2.0**7
        )
    assert (
        float(scalify(lambda x: 0 * x)(as_scaled_array(X, dtype=dtype)).scale)
        == 2.0**-126
    )


def said(fun, *args):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        jax.block_until_ready(jax.jit(scalify(fun, check=True))(*args))
        jax.effects_barrier()
    return [str(w.message) for w in seen if issubclass(w.category, PrecisionWarning)]


def attention(q, k, v):
    logits = jnp.where(jnp.tril(jnp.ones((16, 16), bool)), q @ k.T / 4, -1e9)
    return (
        jax.nn.softmax(logits),
        jax.nn.softmax(logits) @ v,
        jax.nn.softmax(logits * 9),
    )


def test_what_is_lost_beside_larger_numbers_is_named_and_nothing_else():
    x = as_scaled_array(X, dtype=HALF)
    for kind, fun in KINDS.items():
        if kind != "over a temperature":
            (text,) = said(fun, x, jnp.float32(1e14))
            assert (
                "of its elements are off by more than 1%, because they are small beside"
                " the others" in text
            )
            assert explain(fun, x, jnp.float32(1e14)).first_loss is not None
        assert said(fun, x, jnp.float32(-1e9)) == []
        assert explain(fun, x, jnp.float32(-1e9)).first_loss is None
    for fun in (
        attention,
        jax.grad(lambda *args: jnp.sum(attention(*args)[1] ** 2), (0, 1, 2)),
    ):
        assert said(fun, x, x, x) == []
    assert (
        said(
            lambda x: (
                x**9,
                jnp.exp(9 * x),
                x * (2.0 ** jnp.linspace(-40, 0, 16))[None].astype(x.dtype),
            ),
            x,
        )
        == []
    )


def test_one_loud_token_leaves_the_others_their_digits():
    x = as_scaled_array(X, dtype=HALF)
    fun = lambda x, s: (x * jnp.where(ONE, s, 1.0)).astype(x.dtype)
    actual = jax.jit(scalify(fun))(x, jnp.float32(2e8))
    assert (
        error(asarray(actual), asarray(x), jnp.broadcast_to(~ONE, X.shape))
        <= 4 * FP16.epsilon
    )
