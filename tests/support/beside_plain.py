"""Programs under scalify beside the same in plain FP32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from draws import draw_normal
from numpy.testing import assert_allclose

from scalify_core import ScaledArray, as_scaled_array, asarray, scalify
from scalify_core.numerics.formats import FloatFormat

HALF, F32 = jnp.float16, jnp.float32
SIZES = (2.0**-60, 2.0**-20, 1.0, 2.0**20, 2.0**60)
ROUNDINGS = {HALF: 2.0**-8, jnp.bfloat16: 2.0**-5, F32: 1e-5}  # four epsilon


def normal(seed, *shape):
    return draw_normal(seed, shape)


def scaled(*arrays, dtype=HALF, scale=None):
    return as_scaled_array(arrays, scale, dtype=dtype)


def pairs(actual, expected):
    """The leaves of both trees, the numbers that scaled ones are, as float64."""
    trees = jax.tree.leaves(asarray(actual)), jax.tree.leaves(expected)
    for x, y in zip(*trees, strict=True):
        yield np.asarray(x, np.float64), np.asarray(y, np.float64)


def error(actual, expected, axis=None):
    """Relative to the norm, of each leaf; of each index along an axis, if one is given;
    the largest."""
    errors = []
    for x, y in pairs(actual, expected):
        assert np.isfinite(y).all()
        rows = 1 if axis is None else y.shape[axis]
        x, y = (
            np.moveaxis(np.atleast_1d(a), axis or 0, 0).reshape(rows, -1)
            for a in (x, y)
        )
        off = np.linalg.norm(x - y, axis=1)
        errors.append(np.max(off / np.maximum(np.linalg.norm(y, axis=1), 1e-300)))
    return max(errors)


def assert_near(actual, expected, rtol):
    """Within `rtol` of the largest element, each leaf."""
    for x, y in pairs(actual, expected):
        limit = rtol * np.abs(y).max(initial=0) + 1e-30
        assert_allclose(x, y, rtol=0, atol=limit)


def both(fun, *args, dtype=HALF, static=False):
    """The function under scalify, jitted, of arguments in a format, and plain of the
    same values."""
    args = as_scaled_array(args, dtype=dtype)
    if static:
        args = [ScaledArray(x.data, float(x.scale)) for x in args]
    return jax.jit(scalify(fun))(*args), jax.jit(fun)(*asarray(args))


def check(fun, *args, roundings=4, axis=None, **how):
    """Assert that the function is off by so many roundings of the format at most."""
    epsilon = FloatFormat.of(how.get("dtype", HALF)).epsilon
    assert error(*both(fun, *args, **how), axis) <= roundings * epsilon


def case(fun, *args, **how):
    """A check as a row of a table."""
    return functools.partial(check, fun, *args, **how)


def products(fun, *args):
    """The lines of a scalified program's products, as it is lowered."""
    text = jax.jit(scalify(fun)).lower(*args).as_text()
    return [line for line in text.splitlines() if "dot_general" in line]
