"""A value that is moved or passed on to a product is FP32 for all others who read it,
as that which is not moved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import quick
from jax import lax
from measured_and_plain import HALF, ROUNDINGS, error, normal

from scalify_core import as_scaled_array, asarray, scalify

X, V = as_scaled_array((normal(0, 8, 8), normal(1, 8, 4)), dtype=HALF)

# There, and back again.
MOVES = {
    "transpose": (lambda p: p.T, lambda m: m.T),
    "swapaxes": (lambda p: jnp.swapaxes(p[None], 1, 2), lambda m: m[0].T),
    "reshape": (lambda p: p.reshape(4, 2, 8), lambda m: m.reshape(8, 8)),
    "new axis": (lambda p: p[None], lambda m: m[0]),
    "neg": (lambda p: -p, lambda m: -m),
    "rev": (lambda p: p[::-1], lambda m: m[::-1]),
    "rev of columns": (lambda p: jnp.flip(p, 1), lambda m: jnp.flip(m, 1)),
    "broadcast": (lambda p: jnp.broadcast_to(p, (2, 8, 8)), lambda m: m[1]),
    "two": (lambda p: -p.T[::-1], lambda m: -m[::-1].T),
}
# Of a value, of it moved, and of that moved back.
READERS = {
    "log": lambda p, m, back: -jnp.mean(jnp.log(jnp.abs(m))),
    "reciprocal": lambda p, m, back: jnp.log(jnp.sum(1 / jnp.abs(m))),
    "comparison": lambda p, m, back: jnp.mean(
        jnp.where(jnp.abs(back - p) <= 1e-5 * jnp.abs(p), p, 1e3)
    ),
}
# Who reads a value for a product and otherwise, in a function of its own.
PASSED_ON = {
    "jit": lambda fun, p, v: jax.jit(fun)(p, v),
    "checkpoint": lambda fun, p, v: jax.checkpoint(fun)(p, v),
    "constant of a scan": lambda fun, p, v: lax.scan(
        lambda c, _: (c + fun(p, v), None), 0.0, length=2
    )[0],
    "stack of a scan": lambda fun, p, v: lax.scan(
        lambda c, p: (c + fun(p, v), None), 0.0, p[None]
    )[0],
}


def weights_of(x):
    """Of attention, so sharp that no narrow format holds the small ones beside the
    large."""
    return jax.nn.softmax(7 * x, -1)


def moved(move, reader):
    there, back = MOVES[move]

    def loss(x, v):
        p = weights_of(x)
        m = there(p)
        return jnp.mean((m @ v) ** 2) + READERS[reader](p, m, back(m))

    return loss


def passed_on(how, reader):
    def inner(p, v):
        return jnp.mean((p @ v) ** 2) + READERS[reader](p, p, p)

    def loss(x, v):
        p = weights_of(x)
        return jnp.mean(jnp.tanh(p @ v)) + PASSED_ON[how](inner, p, v)

    return loss


def check(loss):
    inside = jax.value_and_grad(loss, (0, 1))
    expected = inside(*asarray((X, V)))
    actual = jax.jit(scalify(inside))(X, V)
    assert error(actual, expected) < ROUNDINGS[HALF]
    checked = scalify(inside, check=True)(X, V)
    for a, b in zip(
        jax.tree.leaves(asarray(actual)), jax.tree.leaves(asarray(checked)), strict=True
    ):
        # both FP16, of sums in another order
        np.testing.assert_allclose(a, b, rtol=2**-9, atol=2**-18)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("move", quick(MOVES, "two"))
def test_who_reads_a_moved_value_beside_a_product_reads_all_of_it(move, reader):
    check(moved(move, reader))


@pytest.mark.parametrize("reader", quick(["log", "reciprocal"], "log"))
@pytest.mark.parametrize("how", quick(PASSED_ON, "checkpoint", "stack of a scan"))
def test_who_reads_what_is_passed_on_beside_a_product_reads_all_of_it(how, reader):
    check(passed_on(how, reader))


def test_what_a_product_reads_moved_is_stored_once():
    """The peak of the value is measured where it is made, and not again where it is
    read transposed."""

    def stores(fun):
        text = str(jax.make_jaxpr(scalify(fun))(X, V))
        return text.count("name=measured ")

    direct = stores(lambda x, v: jnp.sum(jnp.tanh(x) @ v))
    assert direct > 0
    assert (
        stores(
            lambda x, v: (
                jnp.sum(jnp.tanh(x)[None] @ v) + jnp.sum(jnp.log(jnp.tanh(x).T))
            )
        )
        == direct
    )
    assert (
        stores(
            lambda x, v: (lambda h: jnp.sum(h.T @ v) + jnp.sum(jnp.abs(h.T)))(
                jnp.tanh(x)
            )
        )
        == direct
    )
