"""Parts of a product's operands that are many octaves apart, where the format holds
less: rows, groups, experts, entries of a batch, where the other operand makes up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import HALF, ROUNDINGS, check, error, normal, scaled
from jax import lax
from jax.extend.core import jaxprs_in_params
from numpy.testing import assert_allclose, assert_array_equal

import scalify_core as sc
from scalify_core import ScaledArray, asarray, scalify
from scalify_core.numerics import amax
from scalify_core.numerics.formats import E4M3, E5M2, FP16

F32, BF16 = jnp.float32, jnp.bfloat16


def far(n, octaves=80):
    return 2.0 ** jnp.round(jnp.linspace(-octaves / 2, octaves / 2, n))


def like(x, table):
    """A table in the dtype of `x`, which as FP32 would make FP32 of it."""
    return table.astype(x.dtype)


def conv(x, k, **params):
    return lax.conv_general_dilated(
        x, k, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), **params
    )


def conv_elsewhere(x, k, **params):
    """The same, its axes in another order."""
    numbers = ("CWN", "OWI", "CWN")
    out = lax.conv_general_dilated(
        x.T, k.transpose(2, 0, 1), (1,), "SAME", dimension_numbers=numbers, **params
    )
    return out.T


SHARED = {
    "rows": lambda x, w, s: ((x[0] * s[:, None]) @ w[0]) / s[:, None],
    "vmap of vectors": lambda x, w, s: jax.vmap(lambda x, s: ((x * s) @ w[0]) / s)(
        x[0], s
    ),
    "vmap of weights": lambda x, w, s: jax.vmap(lambda w, s: (x[0] @ (w * s)) / s)(
        w, s
    ),
    "scan of products": lambda x, w, s: (
        lax.scan(lambda h, w: (h @ w, None), x[0] * s[:, None], w)[0] / s[:, None]
    ),
}


def test_entries_of_one_operand_are_as_right_as_each_by_itself():
    def fun(x, w):
        return {kind: use(x, w, like(x, far(6))) for kind, use in SHARED.items()}

    check(fun, normal(0, 6, 6, 8), normal(1, 6, 8, 8), axis=0, roundings=8)


LAST, GROUPS = far(8)[None, None], jnp.repeat(far(4), 2)[None, None]
# The axis of the result along which the factors are, and the use.
CONVOLUTIONS = {
    "features": (-1, lambda conv, x, k: conv(x, k * like(x, LAST)) / like(x, LAST)),
    "vmap of both": (
        0,
        lambda conv, x, k: jax.vmap(lambda x, k, s: conv(x[None] * s, k / s)[0])(
            x, jnp.stack([k] * 8), like(x, far(8))
        ),
    ),
    "vmap of kernels": (
        0,
        lambda conv, x, k: jax.vmap(lambda k, s: conv(x, k * s) / s)(
            jnp.stack([k] * 8), like(x, far(8))
        ),
    ),
    "groups of both": (
        -1,
        lambda conv, x, k: conv(
            x * like(x, GROUPS), k[:, :2] / like(x, GROUPS), feature_group_count=4
        ),
    ),
    "groups of the batch": (
        -1,
        lambda conv, x, k: conv(
            x * like(x, GROUPS).T, k / like(x, GROUPS), batch_group_count=4
        ),
    ),
}
IMAGE, KERNEL = normal(0, 8, 7, 8), normal(1, 3, 8, 8)


def test_groups_and_batches_of_convolutions_are_as_right_as_each_by_itself():
    def fun(x, k):
        return {
            kind: jnp.moveaxis(use(conv_elsewhere, x, k), axis, 0)
            for kind, (axis, use) in CONVOLUTIONS.items()
        }

    check(fun, IMAGE, KERNEL, axis=0)


@pytest.mark.parametrize("kind", ["vmap of both", "groups of both"])
def test_gradients_of_grouped_convolutions_are_too(kind):
    axis, use = CONVOLUTIONS[kind]
    total = lambda x, k: jnp.sum(use(conv, x, k) * like(x, normal(2, 8, 7, 8)))
    check(jax.grad(total), IMAGE, KERNEL, axis=axis)


def test_experts_and_rows_of_a_ragged_product_are_as_right_as_each_by_itself():
    sizes, experts, rows = jnp.array([3, 0, 5, 2]), far(4), far(10)[:, None]
    of_rows = jnp.repeat(experts, sizes, total_repeat_length=10)[:, None]

    def fun(x, w):
        of_experts = lax.ragged_dot(x, w * like(x, experts)[:, None, None], sizes)
        of_far_rows = lax.ragged_dot(x * like(x, rows), w, sizes)
        return of_experts / like(x, of_rows), of_far_rows / like(x, rows)

    check(fun, normal(0, 10, 8), normal(1, 4, 8, 8), axis=0)


# Products with a batch.

FACTORS = 10.0 ** jnp.linspace(-10, 8, 8)[:, None, None]  # 60 octaves
MATRICES = (((1,), (0,)), ((), ()))
A, B, WEIGHTS = normal(0, 8, 16, 32), normal(1, 8, 32, 16), normal(2, 8, 16, 16)
BATCHED = {
    "dims elsewhere": lambda dot, a, b: dot(
        jnp.moveaxis(a, 0, 1), jnp.moveaxis(b, 0, 2), (((2,), (0,)), ((1,), (2,)))
    ),
    "vmap of a vmap": lambda dot, a, b: jax.vmap(
        jax.vmap(lambda a, b: dot(a, b, MATRICES), in_axes=(0, None)),
        in_axes=(1, 0),
        out_axes=1,
    )(jnp.stack([a, 3 * a]), b).sum(0),
}


@pytest.mark.parametrize("kind", BATCHED)
@pytest.mark.parametrize(
    "dot", [lax.dot_general, sc.fp8_dot_general], ids=["fp16", "fp8"]
)
def test_entries_far_apart_are_as_right_as_each_by_itself_forward_and_backward(
    kind, dot
):
    product = lambda dot, a, b: BATCHED[kind](dot, a * FACTORS, b / FACTORS)
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
    return jnp.matmul(
        lax.stop_gradient(-a.transpose(1, 0, 2)).transpose(1, 0, 2),
        b.transpose(2, 0, 1).transpose(1, 2, 0),
    )


def through_devices(a, b):
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,))
    spec = jax.P("d", None, None)
    return jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(spec, spec), out_specs=spec)(
        a, b
    )


def through_a_product_without_batch(a, b):
    other = jnp.einsum("bij,jk->bik", a, WEIGHTS[0].repeat(2, 0)) * 1e-20
    return jnp.matmul(a, b) + other


WAYS = (
    through_constants,
    through_a_stack,
    through_moves,
    through_devices,
    through_a_product_without_batch,
    jax.checkpoint(jnp.matmul),
)


def test_they_are_however_they_get_to_the_product():
    fun = lambda a, b: [way(a * FACTORS, b / FACTORS) for way in WAYS]
    check(fun, A, B, axis=0, roundings=2)
    # of the sine of 30
    total = lambda a, b: jnp.sum(jnp.sin(jnp.matmul(a * FACTORS, b / FACTORS)))
    check(jax.grad(total), A, B, axis=0, roundings=16)


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def test_an_argument_with_a_scale_for_each_entry_is_read_as_it_is():
    exponents = jnp.arange(-80.0, 80.0, 20.0, F32)
    a = ScaledArray(A.astype(HALF), 2.0 ** exponents[:, None, None])
    b = ScaledArray(B.astype(HALF), 2.0**-exponents)
    actual = jax.jit(scalify(jnp.matmul))(a, b)
    assert error(actual, jnp.matmul(*asarray((a, b))), 0) <= FP16.epsilon
    positive = scalify(lambda a, b: jnp.sum(jnp.matmul(a, b)) > 0)
    assert "reduce_max" not in str(jax.make_jaxpr(positive)(a, b))


def test_residuals_of_a_batch_are_stacked_in_the_format_of_the_product():
    def attention(h, w):
        q = (h @ w).reshape(4, 8, 2, 8)
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q))
        return h + jnp.einsum("bhqk,bkhd->bqhd", p, q).reshape(h.shape), None

    gradient = jax.grad(lambda ws, h: jnp.sum(lax.scan(attention, h, ws)[0] ** 2))
    args = normal(0, 3, 16, 16) / 8, normal(1, 4, 8, 16)
    jaxpr = jax.make_jaxpr(scalify(gradient))(*scaled(*args))
    scans = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]
    read = {(var.aval.shape, var.aval.dtype) for var in scans[-1].invars}
    # The projections, their probabilities, and the scales of both: for each entry, and
    # of what no product sums over.
    halves, scales = (
        ((3, 4, 8, 2, 8), (3, 4, 2, 8, 8)),
        ((3, 4, 1, 2, 1), (3, 4, 2, 1, 8)),
    )
    assert read >= {(s, np.dtype(HALF)) for s in halves}
    assert read >= {(s, np.dtype(F32)) for s in scales}
    check(gradient, *args, roundings=8)


def test_what_a_product_sums_over_has_one_scale_and_an_operand_is_stored_once_for_all_readers():
    def stores(fun):
        jaxpr = jax.make_jaxpr(scalify(fun))(*scaled(A[0], B[0]))
        found = [e for e in equations(jaxpr) if e.primitive.name == "reduce_max"]
        return [eqn.params["axes"] for eqn in found]

    product = lambda a, b: jnp.tanh(a) @ jnp.tanh(b)
    # each row, each column, and the result
    assert stores(product) == [(1,), (0,), (0, 1)]
    # A gradient sums over the other axis: one scale an operand, stored once, the two
    # cotangents' and results'.
    gradient = jax.grad(lambda a, b: jnp.sum(product(a, b) ** 2), (0, 1))
    assert stores(gradient) == [(0, 1)] * 5


# Plain FP32 beside narrow data.

TIMES = 19000 + jnp.arange(24.0) / 24
PLAIN = {
    "computed": lambda w, t: jnp.stack([jnp.sqrt(t * t), jnp.ones(24)], 1) @ w,
    "of integers": lambda w, t: (
        jnp.stack([jnp.round(t * 24).astype(jnp.int32), jnp.full(24, 24)], 1) @ w
    ),
    "in a loop": lambda w, t: lax.map(lambda t: jnp.stack([t, jnp.ones(())]) @ w, t),
}


@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_a_plain_operand_keeps_all_its_digits_in_a_product(dtype):
    (w,) = scaled(jnp.array([[1.0, -1.0], [-19000.0, 19000.0]]) / 8)
    w, fun = w.astype(dtype), lambda w, t: [use(w, t) for use in PLAIN.values()]
    expected, narrow = fun(asarray(w), TIMES), fun(asarray(w).astype(dtype), TIMES)
    of_all = zip(jax.jit(scalify(fun))(w, TIMES), expected, narrow, strict=True)
    for actual, right, in_format in of_all:
        # As JAX promotes it: an FP32 operand makes FP32, integers do not.
        assert actual.dtype == in_format.dtype
        epsilon = 2.0**-22 if actual.dtype == F32 else jnp.finfo(dtype).eps
        limit = epsilon * float(jnp.abs(right).max())
        assert_allclose(asarray(actual), right, atol=limit)


NARROW = {
    "mask": lambda w, i: (i[:, None] > jnp.arange(8)[None]).astype(w.dtype) @ w,
    "int8": lambda w, i: (
        jnp.broadcast_to(i.astype(jnp.int8), (8, 8)).astype(w.dtype) @ w
    ),
    "fp16": lambda w, i: (0.3 * jnp.ones((8, 8))).astype(HALF) @ w,
}


@pytest.mark.parametrize("kind", NARROW)
def test_a_plain_operand_that_the_format_holds_is_read_in_it(kind):
    fun, args = NARROW[kind], (*scaled(normal(0, 8, 8)), jnp.arange(8))
    text = str(jax.make_jaxpr(scalify(fun))(*args))
    assert "f16[8,8] = " in text
    assert text.count("dot_general") == 1
    product = text[text.index("dot_general") :][:400]
    assert "preferred_element_type=float32" in product
    actual, expected = scalify(fun)(*args), fun(*asarray(args))
    assert error(actual[1:], expected[1:]) <= ROUNDINGS[HALF]


# How it is measured.


@pytest.mark.parametrize("parts", [(4, 1, 1), (1, 3, 4), (4, 2, 1)])
def test_a_scale_for_each_part_is_that_of_its_largest_magnitude(parts):
    x = normal(0, 4, 6, 8) * far(4)[:, None, None] * far(6)[None, :, None]
    actual = np.broadcast_to(amax.unit_of(x, 14, parts), x.shape)
    cut = [n for p, size in zip(parts, x.shape, strict=True) for n in (p, size // p)]
    blocks = np.abs(np.asarray(x)).reshape(cut).max((1, 3, 5), keepdims=True)
    expected = 2.0 ** (np.floor(np.log2(blocks)) - 14)
    assert_array_equal(actual, np.broadcast_to(expected, cut).reshape(x.shape))
