"""What a product with a mask, one-hot vectors or a one-hot matrix selects is the number
that it is selected from; and who reads a value beside a product, moved or passed on,
reads all of it."""

import jax
import jax.numpy as jnp
import pytest
from beside_plain import HALF, ROUNDINGS, error, normal, products, scaled
from jax import lax, nn
from numpy.testing import assert_allclose

from scalify_core import asarray, scalify

IDS = jnp.array([3, 1, 1, 6])


# What copies rows or columns by a product, and how to take them.
COPIES = {
    "eye": (lambda h: jnp.eye(8)[:4] @ h, lambda h: h[:4]),
    "one-hot": (lambda h: nn.one_hot(IDS, 8) @ h, lambda h: h[IDS]),
    "a mask that is given": (
        lambda h: lax.scan(
            lambda c, m: (c, m.astype(c.dtype) @ c), h, jnp.eye(8, dtype=bool)[None, :4]
        )[1][0],
        lambda h: h[:4],
    ),
}


# by `sizes`: true, and not the subject
@pytest.mark.filterwarnings("ignore:.*plain code has FP32 here, by promotion")
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_by_a_one_hot_matrix_is_equal_to_the_rows_that_it_copies(how):
    copied, taken = COPIES[how]
    # of elements that are summed over: the last are FP16's subnormal numbers
    sizes = jnp.exp2(-jnp.arange(8.0) * 2)

    def made(x):
        return jnp.tanh(x) * sizes[:, None]  # FP32 digits

    def loss(x, w):
        h = made(x)
        return jnp.mean(jnp.tanh(copied(h) @ w[: copied(h).shape[-1]]) ** 2)

    x, w = scaled(normal(0, 8, 8), normal(1, 8, 4))
    differ = scalify(lambda x: jnp.abs(copied(made(x)) - taken(made(x))).max())
    assert asarray(differ(x)) == asarray(jax.jit(differ)(x)) == 0
    both = jax.value_and_grad(loss, (0, 1))
    assert error(scalify(both)(x, w), both(*asarray((x, w)))) < ROUNDINGS[HALF]


def test_in_which_format_a_product_is_multiplied():
    """Once: in FP32 where it may select computed elements, else as it is stored."""
    (s,), mask = scaled(normal(0, 8, 8)), jnp.eye(8, dtype=bool)
    (matrix,) = products(lambda s: mask.astype(s.dtype) @ s, s)
    assert "f16>, tensor" in matrix
    assert "HIGHEST" not in matrix
    (computed,) = products(lambda s: jnp.where(mask, 3.0, 0.0) @ jnp.tanh(s), s)
    assert "f32>, tensor" in computed
    assert "HIGHEST" in computed


# Readers of a value beside a product.

X, V = scaled(normal(0, 8, 8), normal(1, 8, 4))


def weights_of(x):
    """Of attention, so sharp that no narrow format holds the small ones beside the
    large."""
    return nn.softmax(7 * x, -1)


def product_and_log(p, v):
    return jnp.mean((p @ v) ** 2) - jnp.mean(jnp.log(jnp.abs(p)))


def moved_and_compared(x, v):
    p = weights_of(x)
    moved = -p.T[::-1]
    back = -moved[::-1].T
    is_same = jnp.abs(back - p) <= 1e-5 * jnp.abs(p)
    return product_and_log(moved, v) + jnp.mean(jnp.where(is_same, p, 1e3))


def in_a_checkpoint(x, v):
    p = weights_of(x)
    return jnp.mean(jnp.tanh(p @ v)) + jax.checkpoint(product_and_log)(p, v)


@pytest.mark.parametrize("loss", [moved_and_compared, in_a_checkpoint])
def test_a_reader_of_a_value_beside_a_product_reads_all_its_digits(loss):
    inside = jax.value_and_grad(loss, (0, 1))
    actual = asarray(jax.jit(scalify(inside))(X, V))
    assert error(actual, inside(*asarray((X, V)))) < ROUNDINGS[HALF]
    eager = asarray(scalify(inside)(X, V))
    # both FP16, of sums in another order
    close = lambda a, b: assert_allclose(a, b, rtol=2**-9, atol=2**-18)
    jax.tree.map(close, actual, eager)
