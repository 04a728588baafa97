"""Store a value in a narrow format at a measured scale, and read it back.

A stored value is a `ScaledArray`; every other value is an FP32 array of its logical
numbers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalify_core.array.scaled_array import ScaledArray, with_scale
from scalify_core.interpreter.measured import known_numbers
from scalify_core.numerics import amax, compiler_hints, formats, precision_warnings
from scalify_core.numerics.amax import Parts
from scalify_core.numerics.formats import FloatFormat, pow2_inverse
from scalify_core.numerics.scales import MIN_SCALE, broadcast_scale, times

_MASK = 2.0**10  # the magnitude of a saturated mask: far above that of logits
# The least magnitude of a mask beside logits near zero: `exp(-256)` is zero in FP32.
_LEAST_MASK = 2.0**8
# Numbers at or below are masks wherever they come from, as the lowest number of FP32.
_LOWEST_GIVEN = np.float32(-(2.0**120))
# Constants at or below are masks of logits: programs do not compute with them.
_MASKS = -1e7


def wide(x: Any) -> Any:
    """Return the logical value of a stored array, in FP32; other operands unchanged."""
    if not isinstance(x, ScaledArray):
        return x
    data = formats.as_float32(x.data)
    return times(
        data,
        (
            x.scale
            if x.is_static
            else broadcast_scale(jnp.asarray(x.scale, jnp.float32), data)
        ),
    )


def has_own_range(dtype: np.dtype) -> bool:
    """Return whether a format has less range than FP32, and so needs a scale."""
    return np.dtype(dtype).itemsize < 4 and FloatFormat.of(dtype).max < 2.0**120


def stored(
    x: Any, dtype: np.dtype, parts: Parts = (), *, masked: bool = False
) -> ScaledArray:
    """Return a value in a narrow format, at a measured scale.

    The largest finite magnitude is stored in [2^top, 2^(top + 1)), top being
    `amax.top_of(dtype)`. BF16 has the range of FP32, so its scale is 1.

    Args:
        x: a stored value, returned as the same object if its parts suffice, or an
            array.
        dtype: the format.
        parts: the number of scales along each axis; (): one scale.
        masked: whether elements at or below `known_numbers.LOWEST` do not take part in
            the scale. They saturate, at a magnitude that still masks where the format
            allows.
    """
    if isinstance(x, ScaledArray):
        if x.dtype == dtype and scaled_in(x, parts):
            return x
        x = wide(x)
    x = formats.as_float32(x)
    if not has_own_range(dtype):
        return ScaledArray(formats.saturating_cast(x, dtype), 1.0)
    if masked:
        x, data, scale = _measured_masked(x, np.dtype(dtype), parts)
    else:
        data, scale = amax.measured(x, np.dtype(dtype), amax.top_of(dtype), parts)
    return with_scale(rounded(data, x=x, scale=scale), scale)


def scaled_in(x: ScaledArray, parts: Parts = ()) -> bool:
    """Return whether all elements of each part have one scale.

    Only the shape of the scale is considered.
    """
    return x.is_static or all(
        n == 1 or (bool(parts) and parts[axis] == n)
        for axis, n in enumerate(jnp.shape(x.scale))
    )


def rounded(data: Any, *, x: Any, scale: Any) -> Any:
    """Return `data`, the stored form of `x`, after showing both to a watcher."""
    if precision_warnings.is_watched():
        inverse = broadcast_scale(pow2_inverse(scale), x)
        precision_warnings.rounded(
            lax.mul(x, lax.broadcast_in_dim(inverse, x.shape, range(inverse.ndim))),
            data,
        )
    return data


def result(
    x: Any,
    dtype: np.dtype,
    constants: frozenset[float] = frozenset(),
    *,
    nonzero: bool = False,
) -> ScaledArray:
    """Return a value as `scalify` returns it: a run-time scale, and data below 2^7.

    That leaves room for readers that treat the data as if its RMS were near 1, and 31
    octaves below the largest magnitude. Where a few elements are far above all others,
    as masks or one loud token are, the others would lose digits. The largest is then
    stored as that of an operand, which gives the others 8 octaves more.

    Args:
        x: a stored value, or an array.
        dtype: the format.
        constants: see `known_numbers`. Elements equal to one of them are kept beside
            the rest as far as the format holds both. Beyond that, constants of masks,
            such as -1e9, saturate at a magnitude that still masks: see `_beside`.
        nonzero: whether nonzero elements must not become zero. They become the format's
            smallest number instead.
    """
    if nonzero and has_own_range(dtype):
        array = result(x, dtype, constants)
        return with_scale(
            _nonzero(formats.as_float32(wide(x)), array.data), array.scale
        )
    if dtype.itemsize >= 4:
        return with_scale(lax.convert_element_type(wide(x), dtype), jnp.float32(1))
    x = formats.as_float32(wide(x))
    if constants and has_own_range(dtype):
        x, data, scale = _beside(x, dtype, tuple(sorted(constants)))
        return with_scale(rounded(data, x=x, scale=scale), scale)
    if has_own_range(dtype):
        data, scale = amax.measured_result(x, np.dtype(dtype))
        return with_scale(rounded(data, x=x, scale=scale), scale)
    x = stored(x, dtype)
    if x.is_static:
        return with_scale(x.data, jnp.float32(x.scale))
    return x


@jax.jit
def _nonzero(x: jax.Array, data: jax.Array) -> jax.Array:
    """Return `data`, with the smallest number where it is zero and `x` is not."""
    least = lax.convert_element_type(
        lax.sign(x) * np.float32(FloatFormat.of(data.dtype).min_subnormal), data.dtype
    )
    return lax.select(lax.eq(data, lax.full_like(data, 0)), least, data)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _beside(
    x: jax.Array, dtype: np.dtype, constants: tuple[float, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return `x`, its data and its scale, where elements may be far-off constants.

    Constants are kept while the largest of the rest stays 4 octaves above the format's
    smallest normal number, so that the rest has full precision.

    Constants further off that are at or below `_MASKS` are masks. They saturate at the
    scale of the rest, or at a larger scale where they reach `_MASK`, as long as the
    rest keeps its precision. Where saturation would leave less than `_LEAST_MASK`
    (beside 1e-8), they become -inf. All other constants count as numbers: the scale is
    that of the largest.
    """
    (x,) = compiler_hints.materialize_once(x)
    fmt, top, known = (
        FloatFormat.of(dtype),
        amax.top_of(dtype),
        tuple(c for c in constants if c != known_numbers.ANY_LARGE),
    )
    constant, masked = (
        _is_one_of(x, some) for some in (known, tuple(c for c in known if c <= _MASKS))
    )
    if known != constants:
        constant, masked = (
            lax.bitwise_or(some, lax.le(x, _LOWEST_GIVEN))
            for some in (constant, masked)
        )
    rest = lax.select(constant, lax.full_like(x, 0), x)
    of_rest = amax.unit_of(rest, amax.RESULT_TOP)
    of_numbers = amax.unit_of(lax.select(masked, lax.full_like(x, 0), x), top)
    of_all = amax.unit_of(x, top)
    furthest, as_mask = _beside_masks(of_rest, amax.RESULT_TOP, dtype)
    of_result = lax.max(of_all, amax.lower(rest, of_rest, dtype))
    scale = lax.select(of_all > furthest, lax.max(as_mask, of_numbers), of_result)
    scale = lax.select(
        of_rest > np.float32(MIN_SCALE), scale, amax.unit_of(x, amax.RESULT_TOP)
    )
    limit = lax.broadcast(scale * np.float32(fmt.max), x.shape)
    beyond, saturated = (
        lax.bitwise_and(masked, lax.gt(lax.abs(x), limit)),
        lax.mul(lax.sign(x), limit),
    )
    if np.dtype(dtype).itemsize == 2:  # a format that has infinities
        saturated = lax.select(
            lax.lt(limit, lax.full_like(limit, _LEAST_MASK)),
            lax.full_like(x, -np.inf),
            saturated,
        )
    x = lax.select(beyond, saturated, x)
    return x, amax.divided(x, scale, dtype), scale


def _beside_masks(
    of_rest: jax.Array, top: int, dtype: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """Return the largest scale that the rest allows, and the scale beside masks.

    At the first, the rest is 4 octaves above the smallest normal number. At the second,
    masks saturate at `_MASK` or above, as far as the first allows.
    """
    furthest = of_rest * np.float32(2.0 ** (top - 4) / FloatFormat.of(dtype).min_normal)
    as_mask = lax.full_like(of_rest, _MASK / 2.0 ** amax.top_of(dtype))
    return furthest, lax.clamp(of_rest, as_mask, furthest)


def _is_one_of(x: jax.Array, constants: tuple[float, ...]) -> jax.Array:
    """Return where `x` equals one of these constants, up to rounding errors."""
    near = [
        lax.le(lax.abs(x - np.float32(c)), np.float32(abs(c) * 2.0**-20))
        for c in constants
    ]
    return functools.reduce(lax.bitwise_or, near, lax.full(x.shape, False, np.bool_))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _measured_masked(
    x: jax.Array, dtype: np.dtype, parts: Parts
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return `x` with its masks saturated, its data, and the scale of the rest.

    The scale is larger where masks would saturate below `_MASK`, as long as the rest
    stays 4 octaves above the smallest normal number.
    """
    (x,) = compiler_hints.materialize_once(x)
    top, fmt = amax.top_of(dtype), FloatFormat.of(dtype)
    is_mask = lax.bitwise_and(
        lax.le(x, np.float32(known_numbers.LOWEST)), lax.gt(x, np.float32(-np.inf))
    )
    of_rest = amax.unit_of(lax.select(is_mask, lax.full_like(x, 0), x), top, parts)
    of_masks = amax.unit_of(lax.select(is_mask, x, lax.full_like(x, 0)), top, parts)
    _, as_mask = _beside_masks(of_rest, top, dtype)
    least = lax.full_like(of_rest, MIN_SCALE)
    among_numbers = lax.select(of_masks > least, as_mask, of_rest)
    scale = lax.select(of_rest > least, among_numbers, of_masks)
    x = lax.select(
        is_mask, lax.max(x, amax.spread(scale * np.float32(-fmt.max), x.shape)), x
    )
    return x, amax.divided(x, scale, dtype), scale


def scaled_by(x: jax.Array, a: Any, b: Any) -> jax.Array:
    """Return the FP32 product of two operands' data times both scales.

    Both scales broadcast to the product. The smaller scale is multiplied in first:
    operands are stored 14 octaves above 1. So the product of two scales leaves FP32
    where that of the logical operands is 28 octaves from its limit. An infinite scale
    would make NaN of zeros.
    """
    if isinstance(a, float) and isinstance(b, float):
        return times(x, a * b)
    if isinstance(a, float) and a == 1.0:
        return times(x, b)
    if isinstance(b, float) and b == 1.0:
        return times(x, a)
    a, b = jnp.broadcast_arrays(
        *(np.float32(s) if isinstance(s, float) else s for s in (a, b))
    )
    for scale in (lax.min(a, b), lax.max(a, b)):
        x = lax.mul(x, amax.spread(scale, x.shape))
    return x
