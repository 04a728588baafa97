"""Copies that a value keeps of what was stored of it, where it goes through loops,
devices and calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.draws import draw_normal

from scalify_core import as_scaled_array, asarray, explain, fp8_dot_general, scalify
from scalify_core.numerics.formats import E4M3, FP16


def scaled(*shapes, dtype=jnp.float16):
    arrays = [draw_normal(i, shape) for i, shape in enumerate(shapes)]
    return as_scaled_array(tuple(arrays), dtype=dtype)


def error(actual, reference):
    actual, reference = (
        np.asarray(asarray(x), np.float64) for x in (actual, reference)
    )
    return np.linalg.norm(actual - reference) / np.linalg.norm(reference)


def fp8(a, b):
    return fp8_dot_general(a, b, (((a.ndim - 1,), (0,)), ((), ())))


def test_a_stack_with_copies_in_two_formats_is_scanned():
    def both(x, w, g):
        h = jnp.tanh(x)
        outside = jnp.einsum("lnd,lne->de", h, g), fp8(h, w)
        _, stacks = lax.scan(lambda c, a: (c, (a @ w, fp8(a, w))), 0.0, h)
        return *stacks, *outside

    x, w, g = scaled((4, 16, 32), (32, 16), (4, 16, 16))
    halves, eighths, *_ = jax.jit(scalify(both))(x, w, g)
    exact = jnp.tanh(asarray(x)) @ asarray(w)
    assert error(halves, exact) < 2 * FP16.epsilon
    assert error(eighths, exact) < E4M3.epsilon


@pytest.mark.parametrize("name", ["two readers", "a result", "gradient"])
def test_copies_do_not_cross_into_shard_map(name):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def mapped(fun):
        specs = {"in_specs": (P("d"), P()), "out_specs": P("d")}
        return jax.shard_map(fun, mesh=mesh, **specs)

    layer = mapped(lambda x, w: jnp.tanh(x @ w))

    def two_readers(x, w):
        h = jnp.sin(x)
        return h.T @ h, layer(h, w)

    def also_a_result(x, w):
        h = jnp.sin(x)
        return h, h @ w

    funs = {
        "two readers": two_readers,
        "a result": mapped(also_a_result),
        "gradient": jax.grad(lambda x, w: jnp.sum(layer(x, w) ** 2), (0, 1)),
    }
    args = scaled((8, 16), (16, 16))
    actual = jax.jit(scalify(funs[name]))(*args)
    for x, exact in zip(actual, funs[name](*asarray(args)), strict=True):
        assert error(x, exact) < 4 * FP16.epsilon


def test_what_a_loop_stores_stays_in_it_when_it_is_run_eagerly():
    def loop(x, w):
        w = jnp.sin(w)
        turn = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w))
        return lax.while_loop(lambda c: c[0] < 3, turn, (0, x))[1]

    def scan(x, w):
        return lax.scan(lambda c, _: (jnp.tanh(fp8(c, w)), None), x, None, length=3)[0]

    args = scaled((16, 16), (16, 16))
    for fun in (loop, scan):
        jitted = jax.jit(scalify(fun))(*args)
        with jax.disable_jit():
            assert error(scalify(fun)(*args), asarray(jitted)) < 2 * FP16.epsilon
        assert explain(fun, *args).rows


HALF = jnp.float16
READ_AS_CAST = {
    "bits": lambda x: lax.bitcast_convert_type(x.astype(HALF), jnp.uint16),
    "signs": lambda x: jnp.signbit(x.astype(HALF)),
    "exponents": lambda x: jnp.frexp(x.astype(HALF))[1],
    "next": lambda x: jnp.nextafter(x.astype(HALF), HALF(30)) - x.astype(HALF),
    "bfloat16": lambda x: x.astype(jnp.bfloat16).view(jnp.uint16),
    "reduce": lambda x: lax.reduce(
        x.astype(HALF), HALF(0), lambda a, b: a + b * 1.0, (0,)
    ),
    "scatter": lambda x: x.astype(HALF).at[jnp.array([0, 2, 2])].add(HALF(1)),
    "gradient of gather": jax.grad(
        lambda x: (x.astype(HALF)[jnp.array([0, 2, 2])] ** 2).sum()
    ),
    "solve": lambda x: lax.custom_linear_solve(
        lambda v: v * HALF(2), x.astype(HALF), lambda _, b: b / HALF(2)
    ),
    "callback": lambda x: jax.pure_callback(
        lambda a: np.asarray(a) * 2, jax.typeof(x.astype(HALF)), x.astype(HALF)
    ),
}


@pytest.mark.parametrize("name", READ_AS_CAST)
def test_what_depends_on_a_dtype_reads_what_the_user_cast_to(name):
    fun = READ_AS_CAST[name]
    x = as_scaled_array(jnp.arange(1.0, 9.0), dtype=HALF)
    actual, exact = asarray(jax.jit(scalify(fun))(x)), fun(asarray(x))
    assert actual.shape == exact.shape
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(exact, actual.dtype))


@pytest.mark.parametrize("name", ["fori", "scan", "cond"])
def test_what_starts_in_eight_bits_has_sixteen_after_arithmetic(name):
    funs = {
        "fori": lambda x, w: lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ w), x),
        "scan": lambda x, w: lax.scan(
            lambda c, _: (jnp.tanh(c @ w), None), x, length=3
        )[0],
        "cond": lambda x, w: lax.cond(
            x[0, 0] > -100, lambda x: jnp.tanh(x @ w), lambda x: x, x
        ),
    }
    args = scaled((16, 16), (16, 16), dtype=jnp.float8_e4m3fn)
    actual = jax.jit(scalify(funs[name]))(*args)
    assert actual.dtype == HALF
    assert error(actual, funs[name](*asarray(args))) < 8 * FP16.epsilon
