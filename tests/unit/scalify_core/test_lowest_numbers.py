"""The lowest number masks in an operand of a product, too: the rest keeps its digits,
and the mask stays one."""

import jax
import jax.numpy as jnp
import pytest
from families import quick
from jax import nn
from measured_and_plain import HALF, ROUNDINGS, error, normal

from scalify_core import as_scaled_array, asarray, scalify

NUMBERS = {
    "lowest": float(jnp.finfo(jnp.float32).min),
    "0.7 of it": 0.7 * float(jnp.finfo(jnp.float32).min),
    "-1e38": -1e38,
}
COLUMNS, ROWS = jnp.arange(8)[None] >= 6, jnp.arange(8)[:, None] == 1
USES = {
    "columns that are left out": lambda h, w, n: (
        jnp.where(COLUMNS, n, h) @ jnp.eye(8, dtype=h.dtype)[:, :5] @ w[:5]
    ),
    "times zero": lambda h, w, n: jnp.where(COLUMNS, n, h) @ jnp.where(COLUMNS.T, 0, w),
    "transposed": lambda h, w, n: jnp.where(COLUMNS, n, h).T[:6] @ w,
    "a maximum": lambda h, w, n: (
        jnp.maximum(jnp.where(COLUMNS, n, h).max(0), n)[None, :5] @ w[:5]
    ),
    "rows that are copied": lambda h, w, n: (
        nn.softmax(jnp.eye(8, dtype=h.dtype)[:3] @ jnp.where(COLUMNS, n, h)) @ w
    ),
    "a row that is added": lambda h, w, n: (
        nn.softmax(jnp.tril(jnp.ones((8, 8), h.dtype))[:1] @ jnp.where(COLUMNS, n, h))
        @ w
    ),
    "all of a row": lambda h, w, n: (
        nn.softmax(jnp.eye(8, dtype=h.dtype)[:3] @ jnp.where(ROWS, n, h)) @ w
    ),
}


@pytest.mark.parametrize("size", quick([2.0**-20, 1.0, 4.0], 1.0))
@pytest.mark.parametrize("number", quick(NUMBERS, "lowest"))
@pytest.mark.parametrize("use", USES)
def test_what_is_not_masked_keeps_its_digits(use, number, size):
    def masked(x, w):
        return USES[use](size * jnp.tanh(x), w, NUMBERS[number])

    args = as_scaled_array((normal(0, 8, 8), normal(1, 8, 8)), dtype=HALF)
    assert error(scalify(masked)(*args), masked(*asarray(args))) < ROUNDINGS[HALF]


def test_numbers_as_large_as_any_are_none():
    x = as_scaled_array(normal(0, 8, 8) * 2.0**120, dtype=HALF)
    actual = scalify(
        lambda x: jnp.where(COLUMNS, -1e38, x) @ (jnp.eye(8, dtype=x.dtype) * 2.0**-120)
    )(x)
    assert (
        error(asarray(actual)[:, :6], asarray(x)[:, :6] * 2.0**-120) < ROUNDINGS[HALF]
    )


def test_other_large_numbers_count_in_a_sum():
    x = as_scaled_array(normal(0, 8, 8), dtype=HALF)

    def product(number, x):
        return jnp.where(COLUMNS, number, jnp.tanh(x)) @ x

    actual, expected = scalify(product)(-1e9, x), product(-1e9, asarray(x))
    assert error(actual, expected) < ROUNDINGS[HALF]
    written = scalify(lambda x: product(-1e9, x))(x)
    assert error(written, expected) < ROUNDINGS[HALF]
    jaxpr = jax.make_jaxpr(scalify(lambda x: product(-1e4, x)))(x)
    assert "_masked" not in str(jaxpr)
