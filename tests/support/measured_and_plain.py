"""Programs under measured scales beside the same in plain FP32."""

import jax
import jax.numpy as jnp
import numpy as np
from draws import draw_normal

import scalify_core as sc
from scalify_core import ScaledArray, as_scaled_array, asarray, scalify
from scalify_core.numerics.formats import BF16, FP16

HALF = jnp.float16
SIZES = (2.0**-60, 2.0**-20, 1.0, 2.0**20, 2.0**60)


def normal(seed, *shape):
    return draw_normal(seed, shape)


def error(actual, expected):
    """Relative to the norm, each leaf; the largest."""
    pairs = zip(
        jax.tree.leaves(asarray(actual)), jax.tree.leaves(expected), strict=True
    )
    errors = []
    for x, y in pairs:
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        assert np.isfinite(y).all()
        errors.append(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-300))
    return max(errors)


def both(fun, *args, dtype=HALF, static=False):
    """The function under scalify, jitted, of arguments in a format, and plain of the
    same values."""
    scaled = as_scaled_array(args, dtype=dtype)
    if static:
        scaled = jax.tree.map(
            lambda x: ScaledArray(x.data, float(x.scale)),
            scaled,
            is_leaf=sc.array.scaled_array.is_scaled_array,
        )
    return jax.jit(scalify(fun))(*scaled), jax.jit(fun)(*asarray(scaled))


ROUNDINGS = {HALF: 4 * FP16.epsilon, jnp.bfloat16: 4 * BF16.epsilon, jnp.float32: 1e-5}
