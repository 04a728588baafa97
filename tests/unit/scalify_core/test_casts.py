"""Casts of the user's, and dtypes that are asked for, under measured scales: FP16 or
BF16 data lose nothing to them, at any size, and what depends on a dtype has it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import F32, HALF, case, check, error, normal, scaled
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

from scalify_core import ScaledArray, asarray, explain, fp8_dot_general, scalify
from scalify_core.numerics.formats import E4M3, FP16

ROUNDING, ZERO = 2.0**-10, np.float16(0)
(ONES,) = scaled(jnp.ones(64))
BETWEEN = jnp.linspace(1.0, 2.0, 16)


def cast(x):
    return x.astype(HALF)


FORWARD = {
    "remat": jax.checkpoint(cast),
    "scan": lambda x: lax.scan(lambda carry, row: (carry, cast(row)), 0.0, x)[1],
    "vmap": jax.vmap(cast),
}


@pytest.mark.parametrize("scales", ["auto", "static"])
@pytest.mark.parametrize("forward", FORWARD.values(), ids=FORWARD)
def test_a_bare_sum_of_a_cast_has_its_gradient(forward, scales):
    for size in (1e-9, 1e7):
        loss = lambda x, size=size: jnp.sum(forward(x).astype(F32)) * size
        actual = scalify(jax.grad(loss), scales=scales)(ONES)
        assert_allclose(asarray(actual), size, rtol=ROUNDING)


def combined(a, b):
    return jnp.where(a > b, a + b, (b.astype(F32) + a).astype(HALF))


REDUCTIONS = {
    "combined": lambda x: lax.reduce(x, ZERO, combined, [0]),
    "pair": lambda x: lax.reduce(
        (x, x), (ZERO, ZERO), lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])), [0]
    )[0],
    "window": lambda x: lax.reduce_window(x, ZERO, combined, (16,), (1,), "VALID")[0],
}
GROUPS = jnp.arange(16) % 4
# Of numbers that are cast: so many times what they are of numbers near 1.
LOGICAL = REDUCTIONS | {
    "add": lambda x: jnp.zeros(4, x.dtype).at[GROUPS].add(x),
    "max": lambda x: jax.ops.segment_max(x, GROUPS, 4),
    "rows of a table": lambda x: jax.grad(lambda t: (t[GROUPS] * x).sum())(
        jnp.zeros(4, x.dtype)
    ),
    "update": lambda x: x.at[jnp.arange(4)].apply(lambda y: y * 2)[:4],
}


@pytest.mark.parametrize("name", LOGICAL)
def test_bodies_of_reductions_and_scatters_behind_a_cast_add_up_logical_numbers(name):
    fun, (x,) = LOGICAL[name], scaled(BETWEEN)
    for size in (1e-9, 1.0, 1e5):
        actual = scalify(lambda x, size=size: fun(cast(x * size)))(x)
        actual = np.asarray(actual.data, np.float64) * np.float64(actual.scale)
        expected = np.asarray(fun(cast(BETWEEN)), np.float64) * size
        assert_allclose(actual, expected, rtol=4 * ROUNDING)
    if name in REDUCTIONS:
        report = explain(lambda x: fun(cast(x * 1e-9)), x)
        assert report.first_loss is None
        assert max(report.errors) < 2 * ROUNDING


@pytest.mark.parametrize("size", [1e-9, 1e7])
def test_products_of_casts(size):
    x, w = scaled(jnp.ones(8), jnp.ones((8, 4)))
    loss = lambda x, w: jnp.sum((cast(x) @ cast(w)).astype(F32)) * size
    of_x, of_w = asarray(scalify(jax.grad(loss, (0, 1)))(x, w))
    assert_allclose(of_x, 4 * size, rtol=ROUNDING)
    assert_allclose(of_w, size, rtol=ROUNDING)
    batch = jnp.linspace(1.0, 2.0, 64) * size
    f = lambda x, batch: (jnp.dot(x, cast(batch)), cast(batch) * 3)
    total, tripled = scalify(f)(ONES, batch)
    assert_allclose(asarray(total), batch.sum(), rtol=ROUNDING)
    assert_allclose(asarray(tripled), 3 * batch, rtol=2 * ROUNDING)
    assert isinstance(tripled, ScaledArray)


def test_constants_that_float16_holds_stay_plain():
    out = scalify(lambda x: (x, cast(jnp.full(3, 0.5, F32))))(ONES)[1]
    assert not isinstance(out, ScaledArray)


# What scans leave for later scans is FP32, except for operands of narrow products.


def of_maps(w):
    t = lax.map(lambda k: w.astype(F32) + 1000 * k, jnp.arange(3.0))
    return lax.map(jnp.sin, t)


def of_a_carry(w):
    step = lambda c, _: (c + 100.0, jnp.sin(c).sum())
    return lax.scan(jax.checkpoint(step), w.astype(F32), None, length=20)[1].sum()


def of_far_apart_residuals(w):
    sizes = jnp.array([1, 1e-5, 1e-10, 1e-14])
    step = lambda k: jnp.log((2 + w.astype(F32)) * sizes * k).sum()
    return lax.map(step, jnp.arange(1.0, 4.0)).sum()


def distances(x, precision=None):
    """Squared distances by a product, which FP16 operands would make noise."""
    y = x.astype(F32) + 100.3
    squares = (y * y).sum(1)
    return squares[:, None] + squares[None] - 2 * jnp.dot(y, y.T, precision=precision)


def masked(x, lowest):
    scores = jnp.where(jnp.tri(8, dtype=bool), x @ x.T, lowest)
    return jax.nn.softmax(cast(scores))


def filled(x):
    ids = jnp.array([0, 3, 99])
    return jax.nn.softmax(jnp.take(x, ids, axis=1, mode="fill", fill_value=-jnp.inf))


def wide_product(x, z):
    return jnp.matmul(x, z.T, preferred_element_type=F32)


ROW, SMALL, SQUARE = jnp.linspace(-1.0, 1.0, 4), normal(0, 8, 16), normal(0, 8, 8)
PROGRAMS = {
    "maps": case(of_maps, ROW, roundings=2),
    "a carry": case(jax.grad(of_a_carry), ROW, roundings=2),
    "residuals": case(jax.grad(of_far_apart_residuals), ROW, roundings=2),
    "distances": case(distances, SMALL, roundings=0.5),
    "algorithm": case(lambda x: distances(x, "F32_F32_F32"), SMALL, roundings=0.5),
    "bfloat16": case(
        wide_product, SMALL, SMALL[::-1], dtype=jnp.bfloat16, roundings=2.0**-13
    ),
    "eight bits": case(filled, normal(0, 2, 8), dtype=E4M3.dtype, roundings=2.0**-6),
    "a mask": case(lambda x: masked(0.03 * x, -1e9), SQUARE),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_cast_or_asked_for_is_as_right_as_in_float32(name):
    PROGRAMS[name]()


@pytest.mark.parametrize("size", [1e4, 1e-8])
def test_an_algorithm_that_adds_up_in_float16_neither_overflows_nor_vanishes(size):
    x, z = SMALL, normal(1, 8, 16)
    algorithm = lax.DotAlgorithmPreset.F16_F16_F16
    product = lambda x, z: jnp.dot(x * size, z.T, precision=algorithm) / size
    assert error(scalify(product)(*scaled(x, z)), x @ z.T) < 2.0**-9


def test_float64_keeps_its_digits():
    with jax.enable_x64(True):
        check(lambda x: (x.astype(jnp.float64) + 1e8) - 1e8, normal(0, 8), roundings=1)


READ_AS_CAST = {
    "bits": lambda x: lax.bitcast_convert_type(cast(x), jnp.uint16),
    "next": lambda x: jnp.nextafter(cast(x), HALF(30)) - cast(x),
    "scatter": lambda x: cast(x).at[jnp.array([0, 2, 2])].add(HALF(1)),
    "gradient of gather": jax.grad(
        lambda x: (cast(x)[jnp.array([0, 2, 2])] ** 2).sum()
    ),
    "solve": lambda x: lax.custom_linear_solve(
        lambda v: v * HALF(2), cast(x), lambda _, b: b / HALF(2)
    ),
    "callback": lambda x: jax.pure_callback(
        lambda a: np.asarray(a) * 2, jax.typeof(cast(x)), cast(x)
    ),
}


@pytest.mark.parametrize("name", READ_AS_CAST)
def test_what_depends_on_a_dtype_reads_what_the_user_cast_to(name):
    fun, (x,) = READ_AS_CAST[name], scaled(jnp.arange(1.0, 9.0))
    actual, exact = asarray(jax.jit(scalify(fun))(x)), fun(asarray(x))
    assert actual.shape == exact.shape
    assert_array_equal(np.asarray(actual), np.asarray(exact, actual.dtype))


# Copies that a value keeps of what was stored of it.


def fp8(a, b):
    return fp8_dot_general(a, b, (((a.ndim - 1,), (0,)), ((), ())))


def test_a_stack_with_copies_in_two_formats_is_scanned():
    def both(x, w, g):
        h = jnp.tanh(x)
        outside = jnp.einsum("lnd,lne->de", h, g), fp8(h, w)
        _, stacks = lax.scan(lambda c, a: (c, (a @ w, fp8(a, w))), 0.0, h)
        return *stacks, *outside

    x, w, g = scaled(normal(0, 4, 16, 32), normal(1, 32, 16), normal(2, 4, 16, 16))
    halves, eighths, *_ = jax.jit(scalify(both))(x, w, g)
    exact = jnp.tanh(asarray(x)) @ asarray(w)
    assert error(halves, exact) < 2 * FP16.epsilon
    assert error(eighths, exact) < E4M3.epsilon


def mapped(fun):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P("d"), P()), "out_specs": P("d")}
    return lambda x, w: jax.shard_map(fun, mesh=mesh, **specs)(x, w)


layer = mapped(lambda x, w: jnp.tanh(x @ w))
MAPPED = {
    "two readers": lambda x, w: (lambda h: (h.T @ h, layer(h, w)))(jnp.sin(x)),
    "gradient": jax.grad(lambda x, w: jnp.sum(layer(x, w) ** 2), (0, 1)),
}


@pytest.mark.parametrize("name", MAPPED)
def test_copies_do_not_cross_into_shard_map(name):
    check(MAPPED[name], normal(0, 8, 16), normal(1, 16, 16))


def test_what_a_loop_stores_stays_in_it_when_it_is_run_eagerly():
    def loop(x, w):
        w = jnp.sin(w)
        turn = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w))
        return lax.while_loop(lambda c: c[0] < 3, turn, (0, x))[1]

    def scan(x, w):
        return lax.scan(lambda c, _: (jnp.tanh(fp8(c, w)), None), x, None, length=3)[0]

    args = scaled(normal(0, 16, 16), normal(1, 16, 16))
    for fun in (loop, scan):
        jitted = jax.jit(scalify(fun))(*args)
        with jax.disable_jit():
            assert error(scalify(fun)(*args), asarray(jitted)) < 2 * FP16.epsilon
        assert explain(fun, *args).rows


IN_EIGHT_BITS = {
    "scan": lambda x, w: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0],
    "cond": lambda x, w: lax.cond(
        x[0, 0] > -100, lambda x: jnp.tanh(x @ w), lambda x: x, x
    ),
}


@pytest.mark.parametrize("name", IN_EIGHT_BITS)
def test_what_starts_in_eight_bits_has_sixteen_after_arithmetic(name):
    fun = IN_EIGHT_BITS[name]
    args = scaled(normal(0, 16, 16), normal(1, 16, 16), dtype=E4M3.dtype)
    actual = jax.jit(scalify(fun))(*args)
    assert actual.dtype == HALF
    assert error(actual, fun(*asarray(args))) < 8 * FP16.epsilon
