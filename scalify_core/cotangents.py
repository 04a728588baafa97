"""What the run-time scale of a gradient is while it is outside of scalify, where JAX adds cotangents leaf by leaf.

A gradient has the structure of its argument, so its data is one leaf and its scale another, and where the argument is
used twice JAX adds data to data and scale to scale. What is right after that has to be seen from the sum. So the leaf
of such a scale is not the scale 2^k, but a *mark*: `-(2^40 + k')`, k' a number that says k, and

- a sum of marks is no mark: it is known that there was an addition;
- data that has the range of FP32 always has the mark of scale 1. Then data adds up right, and so does whatever else is
  linear; a multiple of that mark is read as scale 1;
- in a narrow format each gradient has a scale of its own, so that nothing is lost of it. What has been added to another
  one is no number any more, and is read as NaN.

Other arithmetic on leaves (a scale times a learning rate, a parameter's scale plus that of an update) makes what is
neither a mark nor a power of two, and is read as NaN as well. Zero is the scale of a cotangent that is missing, so of
data that is zero: equal marks cancel to it, too, and where a number is left beside it, all of it is read as NaN. A mark
that something has made vanish is a negative zero. That is NaN in narrow formats, of which the data may have vanished by
the same: `optax.clip_by_global_norm` divides by an infinite norm, the sum of the squares of FP16 data.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalify_core.scales import MIN_SCALE, OF_ZEROS

_MANTISSA, _SIGN, _NAN = 23, -(2**31), 0x7FC00000
_OF_MARKS = _SIGN | ((127 + 40) << _MANTISSA)  # sign and exponent
_CHECK = 15  # bits; above them stands the exponent of the scale
_ROUNDINGS = np.float32(2.0**-18)  # of a sum or mean of marks, relative


def _check(exponent: Any) -> Any:
    """Bits that tell marks from their sums and means, also after FP32 has rounded those: a hash, found by search.

    No sum of two marks is a mark, and no mean of two different ones. Of longer sums and means of marks some octaves
    apart one in thousands may be. (A smooth function would add less to a long mean than rounding takes.)
    """
    return ((exponent * exponent * np.int32(27873)) >> 3) & np.int32((1 << _CHECK) - 1)


def _mark(exponent: int) -> np.float32:
    return np.int32(_OF_MARKS | exponent << _CHECK | _check(exponent)).view(np.float32)


OF_ONE = _mark(127)


def has_range_of_float32(dtype: Any) -> bool:
    """Whether gradients in this format need no scale."""
    return float(jnp.finfo(dtype).max) >= 2.0**120


def marked(scale: jax.Array) -> jax.Array:
    """The marks of run-time scales; 0 for those of zeros, so that they do not count in a sum."""
    exponent = lax.shift_right_logical(lax.bitcast_convert_type(scale, jnp.int32), np.int32(_MANTISSA))
    bits = np.int32(_OF_MARKS) | exponent << np.int32(_CHECK) | _check(exponent)
    mark = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(scale < np.float32(OF_ZEROS), np.float32(0), mark)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def read(leaf: Any, dtype: np.dtype) -> jax.Array:
    """The scale that a leaf says, for data of this format: a power of two, or NaN.

    It is not differentiable: where a gradient arrives that is not zero, NaN goes on.
    """
    return number(leaf, dtype)


read.defvjp(
    lambda leaf, dtype: (read(leaf, dtype), None),
    lambda dtype, _, gradient: (jnp.where(gradient == 0, np.float32(0), np.float32(np.nan)),),
)


def number(leaf: Any, dtype: np.dtype) -> jax.Array:
    """As `read`, for who is not differentiated."""
    return _number(leaf, has_range_of_float32(dtype))


@jax.jit
def of_data(scale: jax.Array, leaf: jax.Array, data: jax.Array) -> jax.Array:
    """The scale that a leaf says, but NaN where it is zero and some number of the data is not."""
    shape = leaf.shape + (1,) * (data.ndim - leaf.ndim)
    common = tuple(axis for axis, n in enumerate(shape) if n == 1)
    # The data itself is left as it is: made anew, each weight would be held twice.
    left = jnp.any((data != 0) & jnp.isfinite(data), common, keepdims=True).reshape(leaf.shape)
    return jnp.where((leaf == 0) & left, np.float32(np.nan), scale)


def is_unreadable(leaf: Any, data: Any) -> jax.Array:
    """Whether a leaf is a number, but none that says a scale for this data: a boolean scalar, not differentiated."""
    leaf, data = map(lax.stop_gradient, (jnp.asarray(leaf), jnp.asarray(data)))
    return jnp.any(jnp.isnan(of_data(number(leaf, np.dtype(data.dtype)), leaf, data)) & ~jnp.isnan(leaf))


def seen_unreadable[K](pairs: Mapping[K, tuple[Any, Any]]) -> list[K]:
    """The keys of those pairs of leaf and data that `is_unreadable`, as far as they can be looked at; no tracers."""

    def is_at_hand(x: Any) -> bool:
        return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)

    at_hand = {key: pair for key, pair in pairs.items() if all(map(is_at_hand, pair))}
    leaves = jax.device_get([leaf for leaf, _ in at_hand.values()])
    # Nearly all are powers of two: nothing is computed of them.
    odd = [key for key, leaf in zip(at_hand, leaves, strict=True) if not np.all(np.frexp(leaf)[0] == 0.5)]
    return [key for key in odd if is_unreadable(*at_hand[key])]


@functools.partial(jax.jit, static_argnums=1)
def _number(leaf: jax.Array, wide: bool) -> jax.Array:
    leaf = jnp.asarray(leaf, jnp.float32)
    bits = lax.bitcast_convert_type(leaf, jnp.int32)
    fraction = bits & np.int32((1 << _MANTISSA) - 1)
    is_power = (leaf >= np.float32(MIN_SCALE)) & (leaf <= np.float32(1 / MIN_SCALE)) & (fraction == 0)
    exponent = lax.shift_right_logical(fraction, np.int32(_CHECK))
    is_mark = (bits == np.int32(_OF_MARKS) | exponent << np.int32(_CHECK) | _check(exponent)) & (exponent > 0)
    scale = jnp.where(is_power, bits, np.int32(_NAN))
    scale = jnp.where(is_mark, exponent << np.int32(_MANTISSA), scale)
    if wide:
        number = leaf / OF_ONE
        whole = jnp.round(number)
        is_sum = ~is_mark & (whole >= 1) & (lax.abs(number - whole) <= _ROUNDINGS * number) & jnp.isfinite(leaf)
        scale = jnp.where(is_sum, np.float32(1).view(np.int32), scale)
    is_zero = (leaf == 0) if wide else (bits == 0)
    scale = jnp.where(is_zero, np.float32(MIN_SCALE).view(np.int32), scale)
    return lax.bitcast_convert_type(scale, jnp.float32)
