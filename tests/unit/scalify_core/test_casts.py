"""Casts of the program, and dtypes that it asks for, under measured scales: FP16 and
BF16 data lose nothing to them, at any size."""

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


def cast(x):
    return x.astype(HALF)


@jax.checkpoint
def cast_rows(x):
    return lax.scan(lambda _, row: (None, jax.vmap(cast)(row)), None, x)[1]


@pytest.mark.parametrize("scales", ["auto", "static"])
def test_a_sum_of_a_cast_has_its_gradient(scales):
    for size in (1e-9, 1e7):
        loss = lambda x, size=size: jnp.sum(cast_rows(x).astype(F32)) * size
        actual = scalify(jax.grad(loss), scales=scales)(*scaled(jnp.ones((8, 8))))
        assert_allclose(asarray(actual), size, rtol=ROUNDING)


def combined(a, b):
    return jnp.where(a > b, a + b, (b.astype(F32) + a).astype(HALF))


def sum_and_maximum(a, b):
    return a[0] + b[0], jnp.maximum(a[1], b[1])


# Reductions and scatters, whose bodies are evaluated in the dtype of the cast.
LOGICAL = {
    "combined": lambda x: lax.reduce(x, ZERO, combined, [0]),
    "pair": lambda x: lax.reduce((x, x), (ZERO, ZERO), sum_and_maximum, [0])[0],
    "add": lambda x: jnp.zeros(4, x.dtype).at[jnp.arange(16) % 4].add(x),
    "update": lambda x: x.at[jnp.arange(4)].apply(lambda y: y * 2)[:4],
}


@pytest.mark.parametrize("name", LOGICAL)
def test_reductions_and_scatters_behind_a_cast_add_up_logical_numbers(name):
    fun, between = LOGICAL[name], jnp.linspace(1.0, 2.0, 16)
    expected = np.asarray(fun(cast(between)), np.float32)
    for size in (1e-9, 1e5):
        resized = lambda x, size=size: fun(cast(x * size))
        actual = asarray(scalify(resized)(*scaled(between)))
        assert_allclose(actual, expected * size, rtol=4 * ROUNDING)
    if name == "combined":
        report = explain(lambda x: fun(cast(x * 1e-9)), *scaled(between))
        assert report.first_loss is None
        assert max(report.errors) < 2 * ROUNDING


@pytest.mark.parametrize("size", [1e-9, 1e7])
def test_products_of_casts(size):
    x, w = scaled(jnp.ones(8), jnp.ones((8, 4)))
    loss = lambda x, w: jnp.sum((cast(x) @ cast(w)).astype(F32)) * size
    of_x, of_w = asarray(scalify(jax.grad(loss, (0, 1)))(x, w))
    assert_allclose(of_x, 4 * size, rtol=ROUNDING)
    assert_allclose(of_w, size, rtol=ROUNDING)
    batch = jnp.linspace(1.0, 2.0, 8) * size
    total = scalify(lambda x, y: x @ cast(y))(x, batch)
    assert_allclose(asarray(total), batch.sum(), rtol=ROUNDING)


def test_constants_that_float16_holds_stay_plain():
    out = scalify(lambda x: (x, cast(jnp.full(3, 0.5, F32))))(*scaled(jnp.ones(3)))[1]
    assert not isinstance(out, ScaledArray)


# Stacks of scans for later scans are FP32, except for operands of narrow products.


def of_a_carry(w):
    step = lambda c, _: (c + 100.0, jnp.sin(c).sum())
    return lax.scan(jax.checkpoint(step), w.astype(F32), None, length=20)[1].sum()


def distances(x):
    """Squared distances by a product, which FP16 operands would make noise."""
    y = x.astype(F32) + 100.3
    squares, product = (y * y).sum(1), jnp.dot(y, y.T, precision="F32_F32_F32")
    return squares[:, None] + squares[None] - 2 * product


def filled(x):
    ids = jnp.array([0, 3, 99])
    return jax.nn.softmax(jnp.take(x, ids, axis=1, mode="fill", fill_value=-jnp.inf))


ROW, SMALL = jnp.linspace(-1.0, 1.0, 4), normal(0, 8, 16)
PROGRAMS = {
    "a carry": case(jax.grad(of_a_carry), ROW, roundings=2),
    "an algorithm": case(distances, SMALL, roundings=0.5),
    "eight bits": case(filled, normal(0, 2, 8), dtype=E4M3.dtype, roundings=2.0**-6),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_casts_and_requested_dtypes_are_as_right_as_in_float32(name):
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


def solved(x):
    solve = lambda _, b: b / HALF(2)
    return lax.custom_linear_solve(lambda v: v * HALF(2), cast(x), solve)


def called_back(x):
    double = lambda a: np.asarray(a) * 2
    return jax.pure_callback(double, jax.typeof(cast(x)), cast(x))


READ_AS_CAST = {
    "bits": lambda x: lax.bitcast_convert_type(cast(x), jnp.uint16),
    "next": lambda x: jnp.nextafter(cast(x), HALF(30)) - cast(x),
    "gradient of gather": jax.grad(
        lambda x: (cast(x)[jnp.array([0, 2, 2])] ** 2).sum()
    ),
    "solve": solved,
    "callback": called_back,
}


@pytest.mark.parametrize("name", READ_AS_CAST)
def test_readers_of_a_dtype_read_the_cast(name):
    fun, (x,) = READ_AS_CAST[name], scaled(jnp.arange(1.0, 9.0))
    actual, exact = asarray(jax.jit(scalify(fun))(x)), fun(asarray(x))
    assert_array_equal(np.asarray(actual), np.asarray(exact, actual.dtype), strict=True)


# Copies that a value keeps of what was stored of it.


def fp8(a, b):
    return fp8_dot_general(a, b, (((a.ndim - 1,), (0,)), ((), ())))


def test_a_stack_with_copies_in_two_formats_is_scanned():
    def both(x, w):
        h = jnp.tanh(x)
        outside = jnp.einsum("lnd,lne->de", h, x), fp8(h, w)
        _, stacks = lax.scan(lambda c, a: (c, (a @ w, fp8(a, w))), 0.0, h)
        return *stacks, *outside

    x, w = scaled(normal(0, 4, 16, 32), normal(1, 32, 16))
    halves, eighths, *_ = jax.jit(scalify(both))(x, w)
    exact = jnp.tanh(asarray(x)) @ asarray(w)
    assert error(halves, exact) < 2 * FP16.epsilon
    assert error(eighths, exact) < E4M3.epsilon


def test_copies_do_not_cross_into_shard_map():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    how = {"mesh": mesh, "in_specs": (P("d"), P()), "out_specs": P("d")}
    layer = jax.shard_map(lambda x, w: jnp.tanh(x @ w), **how)
    two_readers = lambda x, w: (lambda h: (h.T @ h, layer(h, w)))(jnp.sin(x))
    check(two_readers, normal(0, 8, 16), normal(1, 16, 16))


def test_what_a_loop_stores_stays_in_it_when_it_is_run_eagerly():
    def loops(x, w):
        v = jnp.sin(w)
        turn = lambda c: (c[0] + 1, jnp.tanh(c[1] @ v))
        _, x = lax.while_loop(lambda c: c[0] < 3, turn, (0, x))
        return lax.scan(lambda c, _: (jnp.tanh(fp8(c, w)), None), x, None, length=3)[0]

    args = scaled(normal(0, 16, 16), normal(1, 16, 16))
    jitted = asarray(jax.jit(scalify(loops))(*args))
    with jax.disable_jit():
        assert error(scalify(loops)(*args), jitted) < 2 * FP16.epsilon


def test_data_in_eight_bits_has_sixteen_after_arithmetic():
    def fun(x, w):
        x, _ = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)
        return lax.cond(x[0, 0] > -100, lambda x: x @ w, lambda x: x, x)

    args = scaled(normal(0, 16, 16), normal(1, 16, 16), dtype=E4M3.dtype)
    actual = jax.jit(scalify(fun))(*args)
    assert actual.dtype == HALF
    assert error(actual, fun(*asarray(args))) < 8 * FP16.epsilon
