"""Measured scales beside numbers that are far larger than all others: masks and other
constants. They set no scale, and the rest keeps its digits. Products with masks or
one-hot vectors select numbers exactly, and readers of a value beside a product read all
of its digits."""

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
    products,
    scaled,
)
from jax import lax, nn
from numpy.testing import assert_allclose

from scalify_core import asarray, scalify

LOWEST = float(jnp.finfo(F32).min)
X = normal(0, 16, 16)
SOME = np.asarray(normal(1, 16, 16)) > 0
LIMIT = ROUNDINGS[HALF]


def in_its_dtype(fun):
    """A result that an FP32 factor or table does not make FP32."""
    return lambda x, *args: fun(x, *args).astype(x.dtype)


def check_parts(actual, expected):
    """Both parts at their own size."""
    for part in (SOME, ~SOME):
        assert error(asarray(actual)[part], expected[part]) <= LIMIT


# Of data, and of a factor: what is not `SOME` is as large as that.
KINDS = {
    "an array": lambda x, m: x + jnp.asarray(np.where(SOME, 0.0, 1.0), F32) * m,
    "selected": lambda x, m: jnp.where(SOME, x, m),
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
    assert np.isinf(actual[masked]).all() == (size < 1e-6)


def test_a_result_of_masks_alone_keeps_them():
    actual, _ = both(lambda x: jnp.where(x > 100, x, -1e9), X)
    assert_allclose(asarray(actual), -1e9, rtol=2**-10)


# Of data, masks (zero for `SOME`) and a temperature.
MASKED = {
    "a temperature": lambda x, m, t: (x + m) / t,
    "twice": lambda x, m, t: (x + m / 4) + m / 4,
    "another mask": lambda x, m, t: x + m / 2 + jnp.where(m > -1, 0.0, -1e9),
}


@pytest.mark.parametrize("is_constant", [False, True], ids=["argument", "constant"])
@pytest.mark.parametrize("name", MASKED)
def test_a_mask_is_one_after_arithmetic_with_numbers_of_the_program(name, is_constant):
    (x,), t = scaled(X), F32(0.7)
    for lowest in (LOWEST / 2, -1e9):
        mask = jnp.where(SOME, 0.0, lowest)
        fun = in_its_dtype(
            lambda x, m, t, c=mask: MASKED[name](x, c if is_constant else m, t)
        )
        actual = np.asarray(asarray(jax.jit(scalify(fun))(x, mask, t)))
        assert error(actual[SOME], fun(asarray(x), mask, t)[SOME]) <= LIMIT
        assert (actual[~SOME] < -1000).all()


def masked(x):
    return jnp.where(x > 0, 1e-3 * (2 + jnp.tanh(x)), -1e9).astype(x.dtype)


INSIDE = {
    "a call": jax.jit(masked),
    "a checkpoint": jax.checkpoint(masked),
    "a loop": lambda x: lax.map(masked, x),
    "a branch": lambda x: lax.cond(x[0, 0] > -100, masked, jnp.zeros_like, x),
}


@pytest.mark.parametrize("place", INSIDE)
def test_a_mask_is_one_inside_of_another_program(place):
    """The program around it has no number as large."""
    actual, expected = both(INSIDE[place], X)
    rest = np.asarray(expected) > 0
    assert error(asarray(actual)[rest], expected[rest]) <= LIMIT
    assert bool(jnp.all(asarray(actual)[~rest] < -1000))


MOVES = {
    "top_k": lambda x: lax.top_k(x, 6)[0],
    "scatter-max": lambda x: jnp.full_like(x, -1e9).at[:].max(x),
}


@pytest.mark.parametrize("name", MOVES)
def test_elements_beside_masks_keep_their_digits_where_they_are_moved(name):
    def moved(x):
        masked = jnp.where(jnp.arange(8) < 4, 1e-3 * (2 + jnp.tanh(x)), -1e9)
        return MOVES[name](masked.astype(x.dtype))

    (x,) = scaled(normal(0, 16, 8))
    actual, expected = asarray(scalify(moved)(x)), moved(asarray(x))
    rest = expected > 0
    assert bool(jnp.all(actual[~rest] < -1e3))
    assert error(actual[rest], expected[rest]) < LIMIT


# The lowest number masks in an operand of a product, too.
COLUMNS = jnp.arange(8)[None] >= 6
EYE = lambda h: jnp.eye(8, dtype=h.dtype)
USES = {
    "columns that are left out": lambda h, w: (
        jnp.where(COLUMNS, LOWEST, h) @ EYE(h)[:, :5] @ w[:5]
    ),
    "a maximum": lambda h, w: (
        jnp.maximum(jnp.where(COLUMNS, LOWEST, h).max(0), LOWEST)[None, :5] @ w[:5]
    ),
    "rows that are copied": lambda h, w: (
        nn.softmax(EYE(h)[:3] @ jnp.where(COLUMNS, LOWEST, h)) @ w
    ),
}
OPERANDS = normal(0, 8, 8), normal(1, 8, 8)


@pytest.mark.parametrize("use", USES)
def test_elements_beside_masks_keep_their_digits_in_a_product(use):
    check(lambda x, w: USES[use](jnp.tanh(x), w), *OPERANDS)


def test_other_large_numbers_count_in_a_sum():
    product = lambda x, number=-1e9: jnp.where(COLUMNS, number, jnp.tanh(x)) @ x
    check(product, OPERANDS[0])
    (x,) = scaled(OPERANDS[0])
    assert "_masked" not in str(jax.make_jaxpr(scalify(product))(x, -1e4))


@pytest.mark.parametrize("dtype", [HALF, jnp.float8_e5m2])
def test_results_of_all_sizes_leave_room_above(dtype):
    """For who goes on with data as if its RMS were near 1."""
    sizes = 2.0 ** jnp.linspace(-22, 0, 256).reshape(16, 16)
    (x,) = scaled(X, dtype=dtype)
    for fun in (lambda x: x * 2.0**-100, lambda x: x * sizes.astype(x.dtype)):
        data = scalify(fun)(x).data.astype(F32)
        assert 2.0**6 <= float(jnp.max(jnp.abs(data))) < 2.0**7
    assert float(scalify(lambda x: 0 * x)(x).scale) == 2.0**-126


IDS = jnp.array([3, 1, 1, 6])


# What copies rows or columns by a product, and how to take them.
COPIES = {
    "eye": (lambda h: jnp.eye(8)[:4] @ h, lambda h: h[:4]),
    "one-hot": (lambda h: nn.one_hot(IDS, 8) @ h, lambda h: h[IDS]),
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
        return jnp.mean(jnp.tanh(copied(h) @ w) ** 2)

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


def test_a_product_of_the_highest_precision_is_in_float32_and_so_is_its_gradient():
    (s,) = scaled(normal(0, 8, 8))
    gradient = lambda precision: jax.grad(
        lambda s: jnp.sum(jnp.tanh(jnp.dot(jnp.tanh(s), s, precision=precision)))
    )
    in_fp32 = products(gradient("highest"), s)
    assert len(in_fp32) == 3
    assert not any("f16>" in line for line in in_fp32)
    assert all("f16>" in line for line in products(gradient(None), s))


# Readers of a value beside a product.


def weights_of(x):
    """Attention so sharp that no narrow format holds its small weights beside the
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
    args = scaled(normal(0, 8, 8), normal(1, 8, 4))
    inside = jax.value_and_grad(loss, (0, 1))
    actual = asarray(jax.jit(scalify(inside))(*args))
    assert error(actual, inside(*asarray(args))) < ROUNDINGS[HALF]
    # both FP16, of sums in another order
    close = lambda a, b: assert_allclose(a, b, rtol=2**-9, atol=2**-18)
    jax.tree.map(close, actual, asarray(scalify(inside)(*args)))
