"""The largest magnitude of an array, the power of two that follows from it, and the
array in units of that.

This is the arithmetic of a measured scale; `measured.quantize` says where it is used.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalify_core.numerics import compiler_hints
from scalify_core.numerics.formats import FloatFormat, pow2_inverse
from scalify_core.numerics.scales import OF_ZEROS

# into how many parts with a scale each an axis is cut; (): the whole is one
Parts = tuple[int, ...]
_EXPONENT = np.int32(0x7F800000)  # of an FP32 number's bits
_MANTISSA = 23
# the exponent at which the largest magnitude of a result is stored, if it needs no more
RESULT_TOP = 6


def top_of(dtype: np.dtype) -> int:
    """The exponent at which the largest magnitude of an operand is stored: one octave
    below the format's largest.

    An operand is multiplied and added up in FP32 and never in its own format, so all of
    the range is there for what is smaller than the largest.
    """
    return int(np.log2(FloatFormat.of(dtype).max)) - 1


def unit_of(x: jax.Array, top: int, parts: Parts = ()) -> jax.Array:
    """The power of two, FP32, that a value is divided by to have its largest finite
    magnitude in [2^top, 2^(top + 1)).

    At least 2^-125, and 2^-126 of zeros. What is not finite has no part in it. A
    scalar; with `parts` one for each of these, of size 1 along the axes that are one
    part, and of the size of `x` along all others.
    """
    magnitude = lax.abs(x)
    finite = lax.select(
        lax.lt(magnitude, np.float32(np.inf)), magnitude, lax.full_like(magnitude, 0)
    )
    peak = (
        _peaks(finite, parts)
        if x.size
        else lax.full((1,) * (x.ndim if max(parts, default=1) > 1 else 0), 0.0)
    )
    exponent = lax.bitwise_and(lax.bitcast_convert_type(peak, jnp.int32), _EXPONENT)
    least = lax.select(
        lax.gt(exponent, np.int32(0)),
        *(lax.full_like(exponent, n << _MANTISSA) for n in (2, 1)),
    )
    power = lax.max(exponent - np.int32(top << _MANTISSA), least)
    return lax.bitcast_convert_type(power, jnp.float32)


def _peaks(x: jax.Array, parts: Parts) -> jax.Array:
    """The largest element of each part; of as many dimensions as `x`, or a scalar if
    there is one part.
    """
    if max(parts, default=1) == 1:
        return lax.reduce_max(x, range(x.ndim))
    blocks = [axis for axis, n in enumerate(parts) if 1 < n < x.shape[axis]]
    common = [axis for axis, n in enumerate(parts) if n == 1]
    shape = tuple(1 if n == 1 else size for n, size in zip(parts, x.shape, strict=True))
    if not blocks:
        return lax.reshape(lax.reduce_max(x, common), shape)
    cut = [
        n
        for part, size in zip(parts, x.shape, strict=True)
        for n in (part, size // part)
    ]
    whole = [axis for axis, n in enumerate(parts) if n == x.shape[axis]]
    inner = [
        2 * axis + 1
        for axis in range(x.ndim)
        if axis not in whole or x.shape[axis] == 1
    ]
    peaks = lax.reduce_max(lax.reshape(x, cut), inner)
    # One for each element of a block.
    left = [i for i in range(len(cut)) if i not in inner]
    spread = [n if i % 2 == 0 or i // 2 in blocks else 1 for i, n in enumerate(cut)]
    return lax.reshape(lax.broadcast_in_dim(peaks, spread, left), shape)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def measured(
    x: jax.Array, dtype: np.dtype, top: int, parts: Parts
) -> tuple[jax.Array, jax.Array]:
    """Data in `dtype`, and the FP32 scale. Infinities and NaN stay, and have no part in
    the scale.
    """
    # XLA's CPU backend would compile all that makes it twice, for its peak and for its
    # cast, and the scale in each kernel that reads it: a fifth of all instructions.
    (x,) = compiler_hints.once(x)
    (scale,) = compiler_hints.once(unit_of(x, top, parts))
    return divided(x, scale, dtype), scale


@functools.partial(jax.jit, static_argnums=(1, 2))
def measured_result(
    x: jax.Array, dtype: np.dtype, parts: Parts = ()
) -> tuple[jax.Array, jax.Array]:
    """As `measured`, of a result, see `measured.quantize.result`."""
    (x,) = compiler_hints.once(x)
    (unit,) = compiler_hints.once(unit_of(x, RESULT_TOP, parts))
    (scale,) = compiler_hints.once(lower(x, unit, dtype))
    return divided(x, scale, dtype), scale


def lower(x: jax.Array, unit: jax.Array, dtype: np.dtype) -> jax.Array:
    """The unit of a result, or one so much smaller that all of the format is used, if
    that is what its elements need.

    It is where more of them would be stored below the smallest normal number than there
    are within 8 octaves below those within 6 of the largest: so these stand apart, or
    most are small. (Numbers of any order of summation.)
    """
    magnitude, fmt = lax.abs(x), FloatFormat.of(dtype)

    def within(low: jax.Array, high: jax.Array) -> jax.Array:
        return lax.bitwise_and(
            lax.ge(magnitude, spread(low, x.shape)),
            lax.lt(magnitude, spread(high, x.shape)),
        )

    loses = lax.bitwise_and(
        lax.gt(magnitude, np.float32(0)),
        lax.lt(magnitude, spread(unit * fmt.min_normal, x.shape)),
    )
    between = within(
        unit * np.float32(2.0 ** (RESULT_TOP - 14)),
        unit * np.float32(2.0 ** (RESULT_TOP - 6)),
    )
    more = lax.reduce_sum(
        loses.astype(jnp.int32) - between.astype(jnp.int32), range(x.ndim)
    )
    full = lax.max(
        unit * np.float32(2.0 ** (RESULT_TOP - top_of(dtype))),
        lax.min(unit, np.float32(OF_ZEROS)),
    )
    return lax.select(lax.gt(more, np.int32(0)), full, unit)


def divided(x: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """`x` in units of `scale`, in `dtype`."""
    return lax.convert_element_type(
        lax.mul(x, spread(pow2_inverse(scale), x.shape)), dtype
    )


def spread(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A scale for each element: of a scalar, or of one with size 1 along the axes that
    it is common to.
    """
    return (
        lax.broadcast(scale, shape)
        if scale.ndim == 0
        else lax.broadcast_in_dim(scale, shape, range(len(shape)))
    )
