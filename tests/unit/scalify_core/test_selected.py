"""What a product with a mask, one-hot vectors or a one-hot matrix selects is the number
that it is selected from."""

import jax
import jax.numpy as jnp
import pytest
from families import quick
from jax import nn
from measured_and_plain import HALF, ROUNDINGS, error, normal

from scalify_core import as_scaled_array, asarray, scalify

LABELS = jnp.arange(32) % 10


def picked(mask, s):
    return jnp.einsum("bc,bc->b", mask, s)


def hardest_wrong(w, x):
    s = x @ w
    right = picked(nn.one_hot(LABELS, 10, dtype=s.dtype), s)
    wrong = jnp.max(jnp.where(s < right[:, None], s, -1e4), -1)
    return jnp.mean(jnp.where(wrong > -1e4, nn.relu(1 + wrong - right), 0))


def accuracy(w, x):
    s = x @ w
    return jnp.mean(
        (
            picked(nn.one_hot(jnp.argmax(s, -1), 10, dtype=s.dtype), s) == s.max(-1)
        ).astype(jnp.float32)
    )


def of_the_diagonal(w, x):
    s = jnp.tanh(x @ w) @ jnp.tanh(x @ w).T
    selected = picked(jnp.eye(32, dtype=bool).astype(s.dtype), s)
    return jnp.mean(jnp.max(jnp.where(s == selected[:, None], -10.0, s), -1))


def margin(w, x):
    z = jnp.tanh(x @ w)
    mask = jnp.where(jnp.argmax(z, -1)[:, None] == jnp.arange(10)[None], 1.0, 0.0)
    top = picked(mask, z)
    return jnp.mean(
        nn.relu(0.5 - top + jnp.max(jnp.where(z >= top[:, None], -1e4, z), -1))
    )


@pytest.mark.parametrize(
    "loss",
    quick([hardest_wrong, accuracy, of_the_diagonal, margin], hardest_wrong, margin),
)
@pytest.mark.parametrize("seed", quick([0, 1], 0))
def test_it_compares_as_it_does_in_the_plain_program(loss, seed):
    w, x = as_scaled_array((normal(seed + 9, 16, 10), normal(seed, 32, 16)), dtype=HALF)
    both = jax.value_and_grad(loss)
    expected = both(*asarray((w, x)))
    for actual in (jax.jit(scalify(both))(w, x), scalify(both, check=True)(w, x)):
        assert error(actual, expected) < ROUNDINGS[HALF]


ROWS, IDS = jnp.arange(8), jnp.array([3, 1, 1, 6])


def dispatched(h):
    """By two one-hot vectors each, to four places of two experts, and back again in
    order."""
    expert, place = jnp.arange(8) % 2, jnp.arange(8) // 2
    to = nn.one_hot(expert, 2)[:, :, None] * nn.one_hot(place, 4)[:, None, :]
    return jnp.einsum("tec,td->ecd", to, h).transpose(1, 0, 2).reshape(8, 8)


# What copies rows or columns by a product, and how to take them.
COPIES = {
    "eye": (lambda h: jnp.eye(8)[:4] @ h, lambda h: h[:4]),
    "shifted": (
        lambda h: jnp.eye(8, k=-1) @ h,
        lambda h: jnp.pad(h, ((1, 0), (0, 0)))[:8],
    ),
    "booleans": (
        lambda h: jnp.eye(8, dtype=bool)[:4].astype(h.dtype) @ h,
        lambda h: h[:4],
    ),
    "one-hot": (lambda h: nn.one_hot(IDS, 8) @ h, lambda h: h[IDS]),
    "where": (
        lambda h: jnp.where(IDS[:, None] == jnp.arange(8)[None], 1.0, 0.0) @ h,
        lambda h: h[IDS],
    ),
    "columns": (lambda h: h @ nn.one_hot(IDS, 8).T, lambda h: h[:, IDS]),
    "of a part": (lambda h: jnp.eye(8)[:4] @ h[:, :3], lambda h: h[:4, :3]),
    "of the transpose": (lambda h: jnp.eye(8)[:4] @ h.T, lambda h: h.T[:4]),
    "dispatch": (dispatched, lambda h: h),
    "inside a call": (jax.jit(lambda h: jnp.eye(8)[:4] @ h), lambda h: h[:4]),
    "in a scan": (
        lambda h: jax.lax.scan(lambda c, _: (c, jnp.eye(8)[:4] @ c), h, length=2)[1][1],
        lambda h: h[:4],
    ),
    "a mask that is given": (
        lambda h: jax.lax.scan(
            lambda c, m: (c, m.astype(c.dtype) @ c), h, jnp.eye(8, dtype=bool)[None, :4]
        )[1][0],
        lambda h: h[:4],
    ),
    "by another comparison": (
        lambda h: (
            (jnp.abs(jnp.arange(8)[:, None] - jnp.arange(8)[None]) < 1).astype(h.dtype)
            @ h
        ),
        lambda h: h,
    ),
    "signs": (
        lambda h: (
            jnp.where(
                ROWS[:, None] == (ROWS[None] ^ 1),
                jnp.where(ROWS[:, None] % 2 == 0, 1.0, -1.0),
                0.0,
            )
            @ h
        ),
        lambda h: jnp.where(ROWS[:, None] % 2 == 0, h[ROWS ^ 1], -h[ROWS ^ 1]),
    ),
    "a power of two": (
        lambda h: jnp.where(jnp.eye(8, dtype=bool)[:4], 0.25, 0.0) @ h,
        lambda h: h[:4] / 4,
    ),
    "patches": (
        lambda h: jax.lax.conv_general_dilated_patches(h[:, None], (3,), (1,), "SAME")[
            :, 1
        ],
        lambda h: h,
    ),
    "a convolution": (
        lambda h: jax.lax.conv_general_dilated(
            h[:, None], jnp.eye(3)[None, :1], (1,), "VALID"
        )[:, 0],
        lambda h: h[:, :6],
    ),
    "under vmap": (
        lambda h: jax.vmap(lambda i: nn.one_hot(i, 8) @ h)(IDS),
        lambda h: h[IDS],
    ),
}


# by `sizes`: true, and not the subject
@pytest.mark.filterwarnings("ignore:.*plain code has FP32 here, by promotion")
@pytest.mark.parametrize("dtype", quick([HALF, jnp.bfloat16], HALF))
@pytest.mark.parametrize(
    "how", quick(COPIES, "eye", "one-hot", "in a scan", "a convolution")
)
def test_a_copy_by_a_one_hot_matrix_is_equal_to_the_rows_that_it_copies(how, dtype):
    copied, taken = COPIES[how]
    # of elements that are summed over: the last are FP16's subnormal numbers
    sizes = jnp.exp2(-jnp.arange(8.0) * 2)

    def made(x):
        return jnp.tanh(x) * sizes[:, None]  # FP32 digits

    def loss(x, w):
        h = made(x)
        return jnp.mean(jnp.tanh(copied(h) @ w[: copied(h).shape[-1]]) ** 2)

    x, w = as_scaled_array((normal(0, 8, 8), normal(1, 8, 4)), dtype=dtype)
    differ = scalify(lambda x: jnp.abs(copied(made(x)) - taken(made(x))).max())
    assert asarray(differ(x)) == asarray(jax.jit(differ)(x)) == 0
    both = jax.value_and_grad(loss, (0, 1))
    for actual in (scalify(both)(x, w), scalify(both, check=True)(x, w)):
        assert error(actual, both(*asarray((x, w)))) < ROUNDINGS[dtype]


def test_what_is_not_finite_stays_so_in_a_copy():
    x = as_scaled_array(jnp.array([[1.0, 2], [jnp.inf, 3], [4, 5]]), dtype=HALF)
    copied = scalify(lambda x: jnp.eye(3)[:1] @ (x * 1.1))(x)
    assert jnp.isnan(asarray(copied)[0, 0])  # 0 * inf, as in the plain program
    assert abs(asarray(copied)[0, 1] - 2.2) < 2e-3


def test_a_copy_loses_nothing():
    x = as_scaled_array(normal(0, 8, 8), dtype=HALF)
    copied = lambda x: jnp.eye(8, dtype=x.dtype)[:4] @ (1e-30 * jnp.tanh(x))
    same = lambda x: jnp.all(copied(x) == (1e-30 * jnp.tanh(x))[:4])
    assert scalify(same)(x)


def test_how_often_a_product_is_multiplied():
    """Once: by zeros and powers of two in FP32, but for what is stored as it is."""
    s = as_scaled_array(normal(0, 8, 8), dtype=HALF)

    def products(fun):
        text = jax.jit(scalify(fun)).lower(s).as_text()
        return sum("dot_general" in line for line in text.splitlines())

    eye = lambda s: jnp.eye(8, dtype=s.dtype)
    assert (
        products(
            lambda s: (2 * jnp.eye(8, dtype=jnp.int8)).astype(s.dtype) @ jnp.tanh(s)
        )
        == 1
    )
    assert (
        products(lambda s: eye(s)[:4] @ s)
        == products(lambda s: eye(s)[:4] @ s[::-1].T)
        == 1
    )
    assert products(lambda s: eye(s)[:4] @ jnp.tanh(s)) == 1
    assert (
        products(lambda s: jnp.where(jnp.eye(8, dtype=bool), -0.5, 0.0) @ jnp.tanh(s))
        == 1
    )
    assert (
        products(lambda s: jnp.where(jnp.eye(8, dtype=bool), 3.0, 0.0) @ jnp.tanh(s))
        == 1
    )


def test_what_copies_a_computed_value_is_in_float32():
    s, mask = as_scaled_array(normal(0, 8, 8), dtype=HALF), jnp.eye(8, dtype=bool)

    def product(fun):
        text = jax.jit(scalify(fun)).lower(s).as_text()
        lines = [line for line in text.splitlines() if "dot_general" in line]
        return "".join(lines)

    matrix = product(lambda s: mask.astype(s.dtype) @ s)
    assert "f16>, tensor" in matrix
    assert "HIGHEST" not in matrix
    chosen = product(lambda s: picked(mask.astype(s.dtype), jnp.tanh(s)))
    assert "f32>, tensor" in chosen
    assert "HIGHEST" in chosen
    in_fp32 = product(
        lambda s: jnp.einsum(
            "bc,bc->b", mask.astype(s.dtype), jnp.tanh(s), precision="high"
        )
    )
    assert "HIGHEST" not in in_fp32


def test_a_product_of_the_highest_precision_is_in_float32_and_so_is_its_gradient():
    s = as_scaled_array(normal(0, 8, 8), dtype=HALF)

    def products(fun):
        text = jax.jit(scalify(jax.grad(fun))).lower(s).as_text()
        return [line for line in text.splitlines() if "dot_general" in line]

    in_fp32 = products(
        lambda s: jnp.sum(jnp.tanh(jnp.dot(jnp.tanh(s), s, precision="highest")))
    )
    assert len(in_fp32) == 3
    assert not any("f16>" in line for line in in_fp32)
    assert all(
        "f16>" in line
        for line in products(lambda s: jnp.sum(jnp.tanh(jnp.tanh(s) @ s)))
    )


def test_derivatives_of_linear_algebra_are_what_plain_float32_gives():
    """Their products ask for the highest precision; plain code of FP16 casts to FP32
    before."""
    fun = lambda a, b: jnp.sum(
        jnp.linalg.lstsq(a.astype(jnp.float32), b.astype(jnp.float32))[0] ** 2
    )
    a, b = as_scaled_array((normal(0, 12, 6), normal(1, 12)), dtype=HALF)
    actual, expected = (
        asarray(scalify(jax.grad(fun))(a, b)),
        jax.grad(fun)(asarray(a), asarray(b)),
    )
    assert jnp.linalg.norm(actual - expected) < 2.0**-11 * jnp.linalg.norm(expected)
