"""Store a value in a narrow format at a measured scale, and read it back.

A value is stored if its data is narrow. Every other value is its logical numbers in
FP32, at scale 1.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalify_core.interpreter.measured.masks import NO_MASK
from scalify_core.interpreter.value import MEASURED, Value, logical, value
from scalify_core.numerics import amax, compiler_hints, formats, precision_warnings
from scalify_core.numerics.amax import Parts
from scalify_core.numerics.formats import FloatFormat, pow2_inverse
from scalify_core.numerics.scales import MIN_SCALE, broadcast_scale

_MASK = 2.0**10  # the magnitude of a saturated mask: far above that of logits
# The least magnitude of a mask beside logits near zero: `exp(-256)` is zero in FP32.
_LEAST_MASK = np.float32(2.0**8)


def stored_value(data: Any, scale: Any) -> Value:
    """Return a value that is stored as this data, at this scale."""
    return value(data, scale, MEASURED)


def quantized(
    x: Any, dtype: np.dtype, parts: Parts = (), *, limit: float = NO_MASK
) -> Value:
    """Return a value in a narrow format, at a measured scale.

    The largest finite magnitude is stored in [2^top, 2^(top + 1)), top being
    that of its format. BF16 has the range of FP32, so its scale is 1.

    Args:
        x: a value, returned as the same object if it is so stored and its parts
            suffice, or an array.
        dtype: the format.
        parts: the number of scales along each axis; (): one scale.
        limit: elements at or below are masks, see `masks`. They do not take part in
            the scale, and saturate, at a magnitude that still masks where the format
            allows.
    """
    if isinstance(x, Value) and x.data.dtype == dtype and scaled_in(x, parts):
        return x
    x = formats.as_float32(logical(x))
    # What FP32 holds, BF16 holds: a measured scale would be a reduction for nothing.
    if formats.has_range_of_float32(dtype):
        return stored_value(formats.saturating_cast(x, dtype), 1.0)
    if limit > NO_MASK:
        # Only here: to look for masks takes a comparison and two selections an element
        # more.
        x, data, scale = _measured_masked(x, np.dtype(dtype), limit, parts)
    else:
        data, scale = amax.measured(x, np.dtype(dtype), parts)
    return stored_value(_observed(data, x=x, scale=scale), scale)


def scaled_in(x: Value, parts: Parts = ()) -> bool:
    """Return whether all elements of each part have one scale.

    Only the shape of the scale is considered.
    """
    return x.static is not None or all(
        n == 1 or (bool(parts) and parts[axis] == n)
        for axis, n in enumerate(jnp.shape(x.scale))
    )


def _observed(data: Any, *, x: Any, scale: Any) -> Any:
    """Return `data`, the stored form of `x`, after showing both to a watcher."""
    # The unrounded data is an operation more, so it is computed for `explain` alone.
    if precision_warnings.is_watched():
        inverse = broadcast_scale(pow2_inverse(scale), x)
        precision_warnings.observe_rounding(
            lax.mul(x, amax.spread(inverse, x.shape)), data
        )
    return data


def result(
    x: Any,
    dtype: np.dtype,
    limit: float = NO_MASK,
    *,
    nonzero: bool = False,
) -> Value:
    """Return a value as `scalify` returns it: a run-time scale, and data below 2^7.

    That leaves room for readers that treat the data as if its RMS were near 1, and in
    FP16 31 octaves below the largest magnitude. Where a few elements are far above all
    others, as masks or one loud token are, the others would lose digits. The largest is
    then stored as that of an operand, which in FP16 gives the others 8 octaves more.

    Args:
        x: a value, or an array.
        dtype: the format.
        limit: elements at or below are masks, see `masks`. They are kept beside the
            rest as far as the format holds both, and saturate beyond that.
        nonzero: whether nonzero elements must not become zero. They become the format's
            smallest number instead.
    """
    if dtype.itemsize >= 4:
        x = lax.convert_element_type(logical(x), dtype)
        # A run-time number in every format: a step whose results are its next arguments
        # is compiled once.
        return stored_value(x, jnp.float32(1))
    exact = x = formats.as_float32(logical(x))
    if formats.has_range_of_float32(dtype):
        return stored_value(formats.saturating_cast(x, dtype), jnp.float32(1))
    if limit > NO_MASK:
        x, data, scale = _measured_masked(x, np.dtype(dtype), limit, None)
    else:
        data, scale = amax.measured_result(x, np.dtype(dtype))
    data = _observed(data, x=x, scale=scale)
    return stored_value(_nonzero(exact, data) if nonzero else data, scale)


@jax.jit
def _nonzero(x: jax.Array, data: jax.Array) -> jax.Array:
    """Return `data`, with the smallest number where it is zero and `x` is not."""
    least = lax.convert_element_type(
        lax.sign(x) * np.float32(FloatFormat.of(data.dtype).min_subnormal), data.dtype
    )
    # The sign of zero is zero, so zeros stay.
    return lax.select(lax.eq(data, lax.full_like(data, 0)), least, data)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _measured_masked(
    x: jax.Array, dtype: np.dtype, limit: float, parts: Parts | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return `x` with its masks saturated, its data and its scale.

    `of_rest` is the scale of the rest, without masks. `furthest` is the largest scale
    at which the largest element of the rest is at least 4 octaves above the format's
    smallest normal number.

    1. If a scale up to `furthest` holds the masks, it is taken: masks are kept.
    2. Otherwise masks saturate, at the smallest scale at which that is at -`_MASK` or
       below, but at most at `furthest`.
    3. Where a result's masks would then be above -`_LEAST_MASK`, they become -inf.

    Args:
        x: FP32 numbers.
        dtype: the format.
        limit: elements at or below are masks.
        parts: the number of scales along each axis; None: a result.
    """
    # On a CPU, XLA would compute `x` again in each kernel that reads it.
    (x,) = compiler_hints.materialize_once(x)
    fmt = FloatFormat.of(dtype)
    # -inf stays as it is: it has no part in a scale in any case (`unit_of`).
    is_mask = lax.bitwise_and(
        lax.le(x, np.float32(limit)), lax.gt(x, np.float32(-np.inf))
    )
    zeros = lax.full_like(x, 0)
    rest, masks = lax.select(is_mask, zeros, x), lax.select(is_mask, x, zeros)
    # An operand is read by products alone; a result by anything, so it has octaves to
    # spare above.
    rest_top = amax.RESULT_TOP if parts is None else fmt.top
    of_rest = amax.unit_of(rest, rest_top, parts or ())
    of_masks = amax.unit_of(masks, fmt.top, parts or ())
    furthest = of_rest * np.float32(2.0 ** (rest_top - 4) / fmt.min_normal)
    if parts is None:
        of_rest = amax.lower(rest, of_rest, dtype)
    # A mask of -1024 is enough for logits, and leaves the rest more digits than the
    # mask's own magnitude would.
    saturating = lax.clamp(
        of_rest, lax.full_like(of_rest, _MASK / 2.0**fmt.top), furthest
    )
    of_both = lax.select(of_masks > furthest, saturating, lax.max(of_masks, of_rest))
    of_zeros = lax.full_like(of_rest, MIN_SCALE)
    scale = lax.select(of_masks > of_zeros, of_both, of_rest)
    # An array of masks alone keeps them: nothing is beside them.
    scale = lax.select(of_rest > of_zeros, scale, of_masks)
    lowest = scale * np.float32(-fmt.max)
    # Beside numbers below 1e-6 the largest magnitude of FP16 is at most 64: no mask.
    # Not in 8 bits: E4M3 has no infinity.
    if parts is None and np.dtype(dtype).itemsize == 2:
        infinite = lax.full_like(lowest, -np.inf)
        lowest = lax.select(lowest > -_LEAST_MASK, infinite, lowest)
    x = lax.select(is_mask, lax.max(x, amax.spread(lowest, x.shape)), x)
    return x, amax.divided(x, scale, dtype), scale
