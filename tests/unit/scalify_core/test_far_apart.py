"""Parts of a product's operands that are many octaves apart, where the format holds
less: rows, groups, experts, entries of a batch, where the other operand makes up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import F32, HALF, ROUNDINGS, check, error, normal, scaled
from jax import lax
from jax.extend.core import jaxprs_in_params
from numpy.testing import assert_allclose, assert_array_equal

import scalify_core as sc
from scalify_core import ScaledArray, asarray, scalify
from scalify_core.numerics import amax
from scalify_core.numerics.formats import E4M3, E5M2, FP16


def far(n, octaves=80):
    return 2.0 ** jnp.round(jnp.linspace(-octaves / 2, octaves / 2, n))


def like(x, table):
    """Return a table in the dtype of `x`: as FP32 it would make FP32 of `x`."""
    return table.astype(x.dtype)


def scanned_rows(x, w):
    s, turn = like(x, far(6))[:, None], lambda h, w: (h @ w, None)
    return lax.scan(turn, x * s, w)[0] / s


def mapped_weights(x, w):
    return jax.vmap(lambda w, s: (x @ (w * s)) / s)(w, like(x, far(6)))


def test_entries_of_one_operand_are_as_right_as_each_by_itself():
    fun = lambda x, w: (scanned_rows(x, w), mapped_weights(x, w))
    check(fun, normal(0, 6, 8), normal(1, 6, 8, 8), axis=0, roundings=8)


def conv(x, k, **params):
    """A convolution of images NWC and kernels WIO, its axes in an unusual order."""
    numbers = ("CWN", "OWI", "CWN")
    k = k.transpose(2, 0, 1)
    how = {"window_strides": (1,), "padding": "SAME", "dimension_numbers": numbers}
    return lax.conv_general_dilated(x.T, k, **how, **params).T


def features(x, k):
    s = like(x, far(8))[None, None]
    return conv(x, k * s) / s


def vmap_of_both(x, k):
    fun = lambda x, k, s: conv(x[None] * s, k / s)[0]
    out = jax.vmap(fun)(x, jnp.stack([k] * 8), like(x, far(8)))
    return jnp.moveaxis(out, 0, -1)


def groups_of_both(x, k):
    s = like(x, jnp.repeat(far(4), 2))[None, None]
    return conv(x * s, k[:, :2] / s, feature_group_count=4)


def groups_of_the_batch(x, k):
    s = like(x, jnp.repeat(far(4), 2))[None, None]
    return conv(x * s.T, k / s, batch_group_count=4)


CONVOLUTIONS = features, vmap_of_both, groups_of_both, groups_of_the_batch
IMAGE, KERNEL = normal(0, 8, 7, 8), normal(1, 3, 8, 8)


def test_groups_and_batches_of_convolutions_are_as_right_as_each_by_itself():
    fun = lambda x, k: [use(x, k) for use in CONVOLUTIONS]
    check(fun, IMAGE, KERNEL, axis=-1)
    total = lambda x, k: jnp.sum(groups_of_both(x, k) * like(x, normal(2, 8, 7, 8)))
    check(jax.grad(total), IMAGE, KERNEL, axis=-1)


def test_experts_and_rows_of_a_ragged_product_are_as_right_as_each_by_itself():
    sizes, experts, rows = jnp.array([3, 0, 5, 2]), far(4), far(10)[:, None]
    of_rows = jnp.repeat(experts, sizes, total_repeat_length=10)[:, None]

    def fun(x, w):
        far_experts = lax.ragged_dot(x, w * like(x, experts)[:, None, None], sizes)
        far_rows = lax.ragged_dot(x * like(x, rows), w, sizes)
        return far_experts / like(x, of_rows), far_rows / like(x, rows)

    check(fun, normal(0, 10, 8), normal(1, 4, 8, 8), axis=0)


# Products with a batch.

FACTORS = 10.0 ** jnp.linspace(-10, 8, 8)[:, None, None]  # 60 octaves
A, B, WEIGHTS = normal(0, 8, 16, 32), normal(1, 8, 32, 16), normal(2, 8, 16, 16)


def dims_elsewhere(dot, a, b):
    dims = ((2,), (0,)), ((1,), (2,))
    return dot(jnp.moveaxis(a, 0, 1), jnp.moveaxis(b, 0, 2), dims)


def vmap_of_a_vmap(dot, a, b):
    product = lambda a, b: dot(a, b, (((1,), (0,)), ((), ())))
    inner = jax.vmap(product, in_axes=(0, None))
    return jax.vmap(inner, (1, 0), out_axes=1)(jnp.stack([a, 3 * a]), b).sum(0)


@pytest.mark.parametrize(
    ("use", "dot"),
    [
        (dims_elsewhere, lax.dot_general),
        (dims_elsewhere, sc.fp8_dot_general),
        (vmap_of_a_vmap, sc.fp8_dot_general),
    ],
)
def test_entries_of_a_batch_are_as_right_as_each_by_itself(use, dot):
    product = lambda dot, a, b: use(dot, a * FACTORS, b / FACTORS)
    total = lambda dot, a, b: jnp.sum(product(dot, a, b) * WEIGHTS)
    args, half = scaled(A, B), dot is lax.dot_general
    for fun, fmt in ((product, E4M3), (jax.grad(total, (1, 2)), E5M2)):
        actual = jax.jit(scalify(functools.partial(fun, dot)))(*args)
        expected = fun(lax.dot_general, *asarray(args))
        assert error(actual, expected, 0) <= 2 * (FP16 if half else fmt).epsilon


def through_constants(a, b):
    turn = lambda h, _: (h + jnp.matmul(a, b), None)
    return lax.scan(turn, jnp.zeros((8, 16, 16)), None, length=3)[0]


def through_a_stack(a, b):
    turn = lambda h, x: (2.0**-40 * h + jnp.matmul(x, b), None)
    stack = jnp.stack([a, 2 * a, 2.0**40 * a])
    return lax.scan(turn, jnp.zeros((8, 16, 16)), stack)[0]


def through_moves(a, b):
    a = lax.stop_gradient(-a.transpose(1, 0, 2)).transpose(1, 0, 2)
    return jnp.matmul(a, b.transpose(2, 0, 1).transpose(1, 2, 0))


def through_a_product_without_batch(a, b):
    other = jnp.einsum("bij,jk->bik", a, WEIGHTS[0].repeat(2, 0)) * 1e-20
    return jnp.matmul(a, b) + other


WAYS = (
    through_constants,
    through_a_stack,
    through_moves,
    through_a_product_without_batch,
    jax.checkpoint(jnp.matmul),
)


def test_they_are_however_they_get_to_the_product():
    fun = lambda a, b: [way(a * FACTORS, b / FACTORS) for way in WAYS]
    check(fun, A, B, axis=0, roundings=2)


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def test_an_argument_with_a_scale_for_each_entry_is_read_as_it_is():
    exponents = jnp.arange(-80.0, 80.0, 20.0, F32)
    a = ScaledArray(A.astype(HALF), 2.0 ** exponents[:, None, None])
    b = ScaledArray(B.astype(HALF), 2.0**-exponents)
    actual = scalify(jnp.matmul)(a, b)
    assert error(actual, jnp.matmul(*asarray((a, b))), 0) <= FP16.epsilon
    positive = scalify(lambda a, b: jnp.sum(jnp.matmul(a, b)) > 0)
    assert " reduce[" not in str(jax.make_jaxpr(positive)(a, b))  # no amax


def test_residuals_of_a_batch_are_stacked_in_the_format_of_the_product():
    def attention(h, w):
        q = (h @ w).reshape(4, 8, 2, 8)
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q))
        return h + jnp.einsum("bhqk,bkhd->bqhd", p, q).reshape(h.shape), None

    gradient = jax.grad(lambda ws, h: jnp.sum(lax.scan(attention, h, ws)[0] ** 2))
    args = scaled(normal(0, 3, 16, 16) / 8, normal(1, 4, 8, 16))
    jaxpr = jax.make_jaxpr(scalify(gradient))(*args)
    *_, backward = [e for e in equations(jaxpr) if e.primitive.name == "scan"]
    read = {(x.aval.shape, x.aval.dtype) for x in backward.invars}
    # The projections and the probabilities, with a scale for each entry.
    halves, scales = (
        {(3, 4, 8, 2, 8), (3, 4, 2, 8, 8)},
        {(3, 4, 1, 2, 1), (3, 4, 2, 1, 8)},
    )
    assert read >= {(shape, np.dtype(HALF)) for shape in halves}
    assert read >= {(shape, np.dtype(F32)) for shape in scales}


def test_an_operand_is_stored_once_for_all_readers():
    def stores(fun):
        jaxpr = jax.make_jaxpr(scalify(fun))(*scaled(A[0], B[0]))
        peaks = [e for e in equations(jaxpr) if e.primitive.name == "reduce"]
        return [eqn.params["dimensions"] for eqn in peaks]

    product = lambda a, b: jnp.tanh(a) @ jnp.tanh(b)
    # each row, each column, and the result
    assert stores(product) == [(1,), (0,), (0, 1)]
    # A gradient sums over the other axis: one scale an operand, stored once, the two
    # cotangents' and results'.
    gradient = jax.grad(lambda a, b: jnp.sum(product(a, b) ** 2), (0, 1))
    assert stores(gradient) == [(0, 1)] * 5


# A product whose result is not read: it sums over the rows of another's operand.


def unread(h, w):
    h.T @ w
    return h @ w


def unread_of_a_call(h, w):
    return jax.jit(lambda h, w: (h @ w, h.T @ w))(h, w)[0]


def unread_stack(h, w):
    turn = lambda total, _: (total + h @ w, h.T @ w)
    return lax.scan(turn, jnp.zeros_like(w), length=1)[0]


def unread_in_a_while_loop(h, w):
    turn = lambda carry: (False, carry[1] + unread(jnp.cos(h) * h, w))
    return lax.while_loop(lambda carry: carry[0], turn, (True, jnp.zeros_like(w)))[1]


def unread_of_a_branch(h, w):
    branch = lambda h, w: (h @ w, h.T @ w)
    return lax.cond(w[0, 0] < 2, branch, lambda h, w: branch(2 * h, w), h, w)[0]


def unread_of_a_checkpoint(h, w):
    return jax.checkpoint(lambda h: (h @ w, h.T @ w))(h)[0]


UNREAD = (
    unread, unread_of_a_call, unread_stack, unread_in_a_while_loop, unread_of_a_branch,
    unread_of_a_checkpoint,
)  # fmt: skip


@pytest.mark.parametrize("fun", UNREAD)
def test_a_product_that_is_not_read_makes_no_scale_coarser(fun):
    rows = jnp.ones((16, 1)).at[0].set(2.0**-45)
    x, w = ScaledArray(normal(0, 16, 16).astype(HALF), rows), scaled(normal(1, 16, 16))
    first_row = lambda x, w: fun(jnp.sin(x), w)[0]
    assert error(scalify(first_row)(x, *w), first_row(*asarray((x, *w)))) < 2**-9


def test_a_product_that_is_not_read_does_not_round_what_others_read():
    """Propagated scales round what several equations read, if one of them is narrow."""

    def fun(x):
        squares = x * x
        squares @ jnp.ones((2, 4))
        return jnp.sqrt(squares)

    x = ScaledArray(jnp.asarray([[1, 2.0**-14]], HALF), 1.0)
    assert_array_equal(asarray(scalify(fun, scales="static")(x)), asarray(x))


# Plain FP32 beside narrow data.

TIMES = 19000 + jnp.arange(24.0) / 24
PLAIN = {
    "computed": lambda w, t: jnp.stack([jnp.sqrt(t * t), jnp.ones(24)], 1) @ w,
    "of integers": lambda w, t: (
        jnp.stack([jnp.round(t * 24).astype(jnp.int32), jnp.full(24, 24)], 1) @ w
    ),
    "in a loop": lambda w, t: lax.map(lambda t: jnp.stack([t, jnp.ones(())]) @ w, t),
}


@pytest.mark.parametrize("dtype", [HALF, jnp.bfloat16])
@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_operand_keeps_all_its_digits_in_a_product(kind, dtype):
    fun, w = PLAIN[kind], jnp.array([[1.0, -1.0], [-19000.0, 19000.0]]) / 8
    (w,) = scaled(w, dtype=dtype)
    actual, expected = jax.jit(scalify(fun))(w, TIMES), fun(asarray(w), TIMES)
    # As JAX promotes it: an FP32 operand makes FP32, integers do not.
    assert actual.dtype == fun(w.data, TIMES).dtype
    epsilon = 2.0**-22 if actual.dtype == F32 else jnp.finfo(dtype).eps
    atol = epsilon * float(jnp.abs(expected).max())
    assert_allclose(asarray(actual), expected, atol=atol)


NARROW = {
    "mask": lambda w, i: (i[:, None] > jnp.arange(8)[None]).astype(w.dtype) @ w,
    "int8": lambda w, i: (
        jnp.broadcast_to(i.astype(jnp.int8), (8, 8)).astype(w.dtype) @ w
    ),
}


@pytest.mark.parametrize("kind", NARROW)
def test_a_plain_operand_that_the_format_holds_is_read_in_it(kind):
    fun, args = NARROW[kind], (*scaled(normal(0, 8, 8)), jnp.arange(8))
    jaxpr = jax.make_jaxpr(scalify(fun))(*args)
    (product,) = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert [x.aval.dtype for x in product.invars] == [HALF, HALF]
    assert product.params["preferred_element_type"] == F32
    actual, expected = scalify(fun)(*args), fun(*asarray(args))
    assert error(actual[1:], expected[1:]) <= ROUNDINGS[HALF]


def test_a_scale_for_each_part_is_that_of_its_largest_magnitude():
    x = normal(0, 4, 6) * far(4)[:, None]
    peaks = np.abs(np.asarray(x)).max(1, keepdims=True)
    expected = 2.0 ** (np.floor(np.log2(peaks)) - 14)
    assert_array_equal(amax.unit_of(x, 14, (4, 1)), expected)
