"""Products with a batch: its entries may differ by more octaves than a format has,
where the other operand makes up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import draw_normal
from families import quick
from jax import lax
from jax.extend.core import jaxprs_in_params

import scalify_core as sc
from scalify_core import ScaledArray, as_scaled_array, asarray, scalify
from scalify_core.numerics.formats import E4M3, E5M2, FP16

HALF = jnp.float16
FACTORS = 10.0 ** jnp.linspace(-10, 8, 8)[:, None, None]  # 60 octaves
MATRICES = (((1,), (0,)), ((), ()))


def normal(seed, *shape):
    return draw_normal(seed, shape)


A, B, WEIGHTS = normal(0, 8, 16, 32), normal(1, 8, 32, 16), normal(2, 8, 16, 16)


def error(actual, expected):
    """Of the worst entry of the worst result, relative to its norm."""
    pairs = zip(
        jax.tree.leaves(asarray(actual)), jax.tree.leaves(expected), strict=True
    )
    pairs = [
        [np.asarray(x, np.float64).reshape(len(x), -1) for x in pair] for pair in pairs
    ]
    return max(
        float(np.max(np.linalg.norm(x - y, axis=1) / np.linalg.norm(y, axis=1)))
        for x, y in pairs
    )


PRODUCTS = {
    "dims": lambda dot, a, b: dot(a, b, (((2,), (1,)), ((0,), (0,)))),
    "dims elsewhere": lambda dot, a, b: dot(
        jnp.moveaxis(a, 0, 1), jnp.moveaxis(b, 0, 2), (((2,), (0,)), ((1,), (2,)))
    ),
    "vmap": lambda dot, a, b: jax.vmap(lambda a, b: dot(a, b, MATRICES))(a, b),
    "vmap of other axes": lambda dot, a, b: jax.vmap(
        lambda a, b: dot(a, b, MATRICES), in_axes=(1, 2)
    )(jnp.moveaxis(a, 0, 1), jnp.moveaxis(b, 0, 2)),
    "vmap of a vmap": (
        lambda dot, a, b: jax.vmap(jax.vmap(lambda a, b: dot(a, b, MATRICES)))(
            jnp.stack([a, 3 * a], 1), jnp.stack([b, b], 1)
        ).sum(1)
    ),
    "vmap of a vmap of one": (
        lambda dot, a, b: jax.vmap(
            jax.vmap(lambda a, b: dot(a, b, MATRICES), in_axes=(0, None)),
            in_axes=(1, 0),
            out_axes=1,
        )(jnp.stack([a, 3 * a]), b).sum(0)
    ),
    "vmap of dims": (
        lambda dot, a, b: jax.vmap(
            lambda a, b: dot(a, b, (((2,), (1,)), ((0,), (0,)))), in_axes=(2, 0)
        )(jnp.stack([a, a], 2), jnp.stack([b, 3 * b])).sum(0)
    ),
}


@pytest.mark.parametrize("kind", quick(PRODUCTS, "dims elsewhere", "vmap of a vmap"))
@pytest.mark.parametrize(
    "dot", [lax.dot_general, sc.fp8_dot_general], ids=["fp16", "fp8"]
)
def test_entries_far_apart_are_as_right_as_each_by_itself_forward_and_backward(
    kind, dot
):
    def product(dot, a, b):
        return PRODUCTS[kind](dot, a * FACTORS, b / FACTORS)

    def gradient(dot, a, b):
        return jax.grad(lambda a, b: jnp.sum(product(dot, a, b) * WEIGHTS), (0, 1))(
            a, b
        )

    args = as_scaled_array((A, B), dtype=HALF)
    coarsest, of_gradient = (FP16, FP16) if dot is lax.dot_general else (E4M3, E5M2)
    for fun, fmt in ((product, coarsest), (gradient, of_gradient)):
        actual = jax.jit(scalify(functools.partial(fun, dot)))(*args)
        assert error(actual, fun(lax.dot_general, *asarray(args))) <= 2 * fmt.epsilon


def through_constants(a, b):
    return lax.scan(
        lambda h, _: (h + jnp.matmul(a, b), None),
        jnp.zeros((8, 16, 16)),
        None,
        length=3,
    )[0]


def through_a_stack(a, b):
    stack = jnp.stack([a, 2 * a, 2.0**40 * a])
    return lax.scan(
        lambda h, x: (2.0**-40 * h + jnp.matmul(x, b), None),
        jnp.zeros((8, 16, 16)),
        stack,
    )[0]


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
    return (
        jnp.matmul(a, b) + jnp.einsum("bij,jk->bik", a, WEIGHTS[0].repeat(2, 0)) * 1e-20
    )


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


WAYS = {
    **{
        "constants": through_constants,
        "stack": through_a_stack,
        "moves": through_moves,
        "devices": through_devices,
    },
    **{
        "two readers": through_a_product_without_batch,
        "remat": jax.checkpoint(jnp.matmul),
        "jit": jax.jit(jnp.matmul),
    },
    "einsum": lambda a, b: jnp.einsum("bij,bjk->bik", a, b),
}


@pytest.mark.parametrize("way", WAYS)
def test_they_are_however_they_get_to_the_product(way):
    def fun(a, b):
        return WAYS[way](a * FACTORS, b / FACTORS)

    args = as_scaled_array((A, B), dtype=HALF)
    assert (
        error(jax.jit(scalify(fun))(*args), jax.jit(fun)(*asarray(args)))
        <= 2 * FP16.epsilon
    )


@pytest.mark.parametrize("way", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_they_are_in_gradients(way):
    def loss(a, b):
        return jnp.sum(jnp.sin(jnp.matmul(a * FACTORS, b / FACTORS)))

    a, b = as_scaled_array((A, B), dtype=HALF)
    actual = way(scalify(jax.grad(loss)))(a, b)
    assert actual.scale.shape == ()
    # of the sine of 30
    assert error(actual, jax.grad(loss)(*asarray((a, b)))) <= 16 * FP16.epsilon


def test_an_argument_with_a_scale_for_each_entry_is_read_as_it_is():
    a = ScaledArray(
        A.astype(HALF), 2.0 ** jnp.arange(-80.0, 80.0, 20.0, jnp.float32)[:, None, None]
    )
    b = ScaledArray(B.astype(HALF), 2.0 ** -jnp.arange(-80.0, 80.0, 20.0, jnp.float32))
    fun = jax.jit(scalify(jnp.matmul))
    assert error(fun(a, b), jnp.matmul(*asarray((a, b)))) <= FP16.epsilon
    assert "reduce_max" not in str(
        jax.make_jaxpr(scalify(lambda a, b: jnp.sum(jnp.matmul(a, b)) > 0))(a, b)
    )


def test_residuals_of_a_batch_are_stacked_in_the_format_of_the_product():
    def attention(h, w):
        q = (h @ w).reshape(4, 8, 2, 8)
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q))
        return h + jnp.einsum("bhqk,bkhd->bqhd", p, q).reshape(h.shape), None

    def loss(ws, h):
        return jnp.sum(lax.scan(attention, h, ws)[0] ** 2)

    args = as_scaled_array((normal(0, 3, 16, 16) / 8, normal(1, 4, 8, 16)), dtype=HALF)
    scans = [
        eqn
        for eqn in equations(jax.make_jaxpr(scalify(jax.grad(loss)))(*args))
        if eqn.primitive.name == "scan"
    ]
    read = [(var.aval.shape, var.aval.dtype) for var in scans[-1].invars]
    # The projections, their probabilities, and the scales of both: for each entry, and
    # of what no product sums over.
    assert ((3, 4, 8, 2, 8), HALF) in read
    assert ((3, 4, 1, 2, 1), jnp.float32) in read
    assert ((3, 4, 2, 8, 8), HALF) in read
    assert ((3, 4, 2, 1, 8), jnp.float32) in read
    assert (
        error(jax.jit(scalify(jax.grad(loss)))(*args), jax.grad(loss)(*asarray(args)))
        <= 8 * FP16.epsilon
    )


def test_what_a_product_sums_over_has_one_scale_and_an_operand_is_stored_once_for_all_readers():
    args = as_scaled_array((A[0], B[0]), dtype=HALF)

    def product(a, b):
        return jnp.tanh(a) @ jnp.tanh(b)

    def stores(fun):
        jaxpr = jax.make_jaxpr(scalify(fun))(*args)
        return [
            eqn.params["axes"]
            for eqn in equations(jaxpr)
            if eqn.primitive.name == "reduce_max"
        ]

    # each row, each column, and the result
    assert stores(product) == [(1,), (0,), (0, 1)]
    # A gradient sums over the other axis: one scale an operand, stored once, the two
    # cotangents' and results'.
    assert (
        stores(jax.grad(lambda a, b: jnp.sum(product(a, b) ** 2), (0, 1)))
        == [(0, 1)] * 5
    )
