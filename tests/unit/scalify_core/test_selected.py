"""What a product with a mask, one-hot vectors or a one-hot matrix selects is the number
that it is selected from; and who reads a value beside a product, moved or passed on,
reads all of it."""

import jax
import jax.numpy as jnp
import pytest
from beside_plain import F32, HALF, ROUNDINGS, error, normal, products, scaled
from jax import lax, nn
from numpy.testing import assert_allclose

from scalify_core import asarray, scalify

LABELS = jnp.arange(32) % 10


def eye(h, **how):
    return jnp.eye(8, dtype=h.dtype, **how)


def picked(mask, s):
    return jnp.einsum("bc,bc->b", mask, s)


def hardest_wrong(w, x):
    s = x @ w
    right = picked(nn.one_hot(LABELS, 10, dtype=s.dtype), s)
    wrong = jnp.max(jnp.where(s < right[:, None], s, -1e4), -1)
    return jnp.mean(jnp.where(wrong > -1e4, nn.relu(1 + wrong - right), 0))


def margin(w, x):
    z = jnp.tanh(x @ w)
    mask = jnp.where(jnp.argmax(z, -1)[:, None] == jnp.arange(10)[None], 1.0, 0.0)
    top = picked(mask, z)
    other = jnp.max(jnp.where(z >= top[:, None], -1e4, z), -1)
    return jnp.mean(nn.relu(0.5 - top + other))


@pytest.mark.parametrize("loss", [hardest_wrong, margin])
def test_it_compares_as_it_does_in_the_plain_program(loss):
    args = scaled(normal(9, 16, 10), normal(0, 32, 16))
    both = jax.value_and_grad(loss)
    actual = jax.jit(scalify(both))(*args)
    assert error(actual, both(*asarray(args))) < ROUNDINGS[HALF]


ROWS, IDS = jnp.arange(8), jnp.array([3, 1, 1, 6])


def dispatched(h):
    """By two one-hot vectors each, to four places of two experts, and back again in
    order."""
    to = nn.one_hot(ROWS % 2, 2)[:, :, None] * nn.one_hot(ROWS // 2, 4)[:, None, :]
    return jnp.einsum("tec,td->ecd", to, h).transpose(1, 0, 2).reshape(8, 8)


def signed(h):
    signs = jnp.where(ROWS[:, None] % 2 == 0, 1.0, -1.0)
    return jnp.where(ROWS[:, None] == (ROWS[None] ^ 1), signs, 0.0) @ h


# What copies rows or columns by a product, and how to take them.
COPIES = {
    "eye": (lambda h: jnp.eye(8)[:4] @ h, lambda h: h[:4]),
    "one-hot": (lambda h: nn.one_hot(IDS, 8) @ h, lambda h: h[IDS]),
    "a convolution": (
        lambda h: lax.conv_general_dilated(
            h[:, None], jnp.eye(3)[None, :1], (1,), "VALID"
        )[:, 0],
        lambda h: h[:, :6],
    ),
    "a mask that is given": (
        lambda h: lax.scan(
            lambda c, m: (c, m.astype(c.dtype) @ c), h, jnp.eye(8, dtype=bool)[None, :4]
        )[1][0],
        lambda h: h[:4],
    ),
    "dispatch": (dispatched, lambda h: h),
    "signs": (
        signed,
        lambda h: jnp.where(ROWS[:, None] % 2 == 0, h[ROWS ^ 1], -h[ROWS ^ 1]),
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


# Rows of a matrix, chosen by a product with one-hot vectors.
PICKS = {
    "jit": lambda hot, h: jax.jit(jnp.matmul)(hot, h),
    "scan, constant": lambda hot, h: (
        lax.scan(lambda c, a: (c, hot @ a), 0, h.T[..., None])[1][..., 0].T
    ),
    "scan, stack": lambda hot, h: lax.scan(lambda c, a: (c, a @ h), 0, hot)[1],
    "scatter": lambda hot, h: (
        jnp.zeros_like(hot).at[jnp.arange(IDS.size), IDS].set(1) @ h
    ),
}


@pytest.mark.parametrize("kind", PICKS)
def test_copies_by_one_hot_vectors_are_equal_in_bodies_too(kind):
    def same(x):
        h = jnp.tanh(x)
        hot = nn.one_hot(IDS, h.shape[0], dtype=h.dtype)
        return jnp.mean((PICKS[kind](hot, h) == h[IDS]).astype(F32))

    assert float(asarray(jax.jit(scalify(same))(*scaled(normal(0, 8, 4))))) == 1


def test_what_is_not_finite_stays_so_in_a_copy():
    (x,) = scaled(jnp.array([[1.0, 2], [jnp.inf, 3], [4, 5]]))
    copied = asarray(scalify(lambda x: jnp.eye(3)[:1] @ (x * 1.1))(x))
    assert jnp.isnan(copied[0, 0])  # 0 * inf, as in the plain program
    assert abs(copied[0, 1] - 2.2) < 2e-3


def test_how_often_and_in_which_format_a_product_is_multiplied():
    """Once: by zeros and powers of two in FP32, but for what is stored as it is."""
    (s,), mask = scaled(normal(0, 8, 8)), jnp.eye(8, dtype=bool)
    for fun in (
        lambda s: (2 * jnp.eye(8, dtype=jnp.int8)).astype(s.dtype) @ jnp.tanh(s),
        lambda s: eye(s)[:4] @ s,
        lambda s: eye(s)[:4] @ s[::-1].T,
        lambda s: eye(s)[:4] @ jnp.tanh(s),
        lambda s: jnp.where(mask, -0.5, 0.0) @ jnp.tanh(s),
        lambda s: jnp.where(mask, 3.0, 0.0) @ jnp.tanh(s),
    ):
        assert len(products(fun, s)) == 1
    (matrix,) = products(lambda s: mask.astype(s.dtype) @ s, s)
    assert "f16>, tensor" in matrix
    assert "HIGHEST" not in matrix
    chosen = lambda s, **how: jnp.einsum(
        "bc,bc->b", mask.astype(s.dtype), jnp.tanh(s), **how
    )
    (computed,) = products(chosen, s)
    assert "f32>, tensor" in computed
    assert "HIGHEST" in computed
    (in_fp32,) = products(lambda s: chosen(s, precision="high"), s)
    assert "HIGHEST" not in in_fp32


def test_a_product_of_the_highest_precision_is_in_float32_and_so_is_its_gradient():
    (s,) = scaled(normal(0, 8, 8))
    gradient = lambda how: jax.grad(
        lambda s: jnp.sum(jnp.tanh(jnp.dot(jnp.tanh(s), s, precision=how)))
    )
    in_fp32 = products(gradient("highest"), s)
    assert len(in_fp32) == 3
    assert not any("f16>" in line for line in in_fp32)
    assert all("f16>" in line for line in products(gradient(None), s))


def test_derivatives_of_linear_algebra_are_what_plain_float32_gives():
    """Their products ask for the highest precision; plain code of FP16 casts to FP32
    before."""
    solve = lambda a, b: jnp.linalg.lstsq(a.astype(F32), b.astype(F32))[0]
    gradient = jax.grad(lambda a, b: jnp.sum(solve(a, b) ** 2))
    args = scaled(normal(0, 12, 6), normal(1, 12))
    assert error(scalify(gradient)(*args), gradient(*asarray(args))) < 2.0**-11


# Who reads a value beside a product.

X, V = scaled(normal(0, 8, 8), normal(1, 8, 4))
# Of a value, of it moved, and of that moved back.
READERS = {
    "log": lambda p, m, back: -jnp.mean(jnp.log(jnp.abs(m))),
    "comparison": lambda p, m, back: jnp.mean(
        jnp.where(jnp.abs(back - p) <= 1e-5 * jnp.abs(p), p, 1e3)
    ),
}
# Who reads a value for a product and otherwise, in a function of its own.
PASSED_ON = {
    "checkpoint": lambda fun, p, v: jax.checkpoint(fun)(p, v),
    "stack of a scan": lambda fun, p, v: lax.scan(
        lambda c, p: (c + fun(p, v), None), 0.0, p[None]
    )[0],
}


def weights_of(x):
    """Of attention, so sharp that no narrow format holds the small ones beside the
    large."""
    return nn.softmax(7 * x, -1)


def moved(reader):
    def loss(x, v):
        p = weights_of(x)
        m = -p.T[::-1]
        return jnp.mean((m @ v) ** 2) + READERS[reader](p, m, -m[::-1].T)

    return loss


def passed_on(how):
    inner = lambda p, v: jnp.mean((p @ v) ** 2) + READERS["log"](p, p, p)

    def loss(x, v):
        p = weights_of(x)
        return jnp.mean(jnp.tanh(p @ v)) + PASSED_ON[how](inner, p, v)

    return loss


@pytest.mark.parametrize("loss", [*map(moved, READERS), *map(passed_on, PASSED_ON)])
def test_who_reads_a_value_beside_a_product_reads_all_of_it(loss):
    inside = jax.value_and_grad(loss, (0, 1))
    actual = asarray(jax.jit(scalify(inside))(X, V))
    assert error(actual, inside(*asarray((X, V)))) < ROUNDINGS[HALF]
    eager = asarray(scalify(inside)(X, V))
    # both FP16, of sums in another order
    close = lambda a, b: assert_allclose(a, b, rtol=2**-9, atol=2**-18)
    jax.tree.map(close, actual, eager)


def test_what_a_product_reads_moved_is_stored_once():
    """The peak of the value is measured where it is made, and not again where it is
    read transposed."""

    def stores(fun):
        text = str(jax.make_jaxpr(scalify(lambda x, v: fun(jnp.tanh(x), v)))(X, V))
        return text.count("name=measured ")

    direct = stores(lambda h, v: jnp.sum(h @ v))
    assert direct > 0
    logs = lambda h, v: jnp.sum(h[None] @ v) + jnp.sum(jnp.log(h.T))
    assert stores(logs) == direct
    assert stores(lambda h, v: jnp.sum(h.T @ v) + jnp.sum(jnp.abs(h.T))) == direct
