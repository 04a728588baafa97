"""Storing a value in a narrow format, at a scale that is measured, and reading it back.

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
from scalify_core.interpreter.measured import mask_constants
from scalify_core.interpreter.measured.products import Parts
from scalify_core.numerics import amax, compiler_hints, precision_warnings, storage
from scalify_core.numerics.formats import FloatFormat, pow2_inverse
from scalify_core.numerics.scales import MIN_SCALE, broadcast_scale, times

_MASK = 2.0**10  # what no logit comes near
# beside logits of nearly zero; `exp` of its negative is zero in FP32
_LEAST_MASK = 2.0**8
# and below: a mask wherever it comes from, such as the lowest number of FP32
_LOWEST = np.float32(-(2.0**120))
# and below: what stands for nothing in logits, and is no number that anybody computes
# with
_MASKS = -1e7


def wide(x: Any) -> Any:
    """The logical value of a stored array, in FP32; any other operand as it is."""
    if type(x) is not ScaledArray:
        return x
    data = storage.as_float32(x.data)
    return times(
        data,
        (
            x.scale
            if x.is_static
            else broadcast_scale(jnp.asarray(x.scale, jnp.float32), data)
        ),
    )


def has_own_range(dtype: np.dtype) -> bool:
    """Whether a format has less range than FP32, so that what is stored in it needs a
    scale.
    """
    return np.dtype(dtype).itemsize < 4 and FloatFormat.of(dtype).max < 2.0**120


def stored(
    x: Any, dtype: np.dtype, parts: Parts = (), *, masked: bool = False
) -> ScaledArray:
    """A value in a narrow format, its largest finite magnitude in [2^top, 2^(top + 1)),
    top being `top_of`.

    Each of `parts` has its own scale. What is there already stays, if it has no more of
    them. BF16 has the range of FP32, and no scale. `masked`: elements at or below
    `masks.LOWEST` have no part in the scale; they saturate, far enough out to be a mask
    still if the rest is below that.
    """
    if type(x) is ScaledArray:
        if x.dtype == dtype and scaled_in(x, parts):
            return x
        x = wide(x)
    x = storage.as_float32(x)
    if not has_own_range(dtype):
        return ScaledArray(storage.saturating_cast(x, dtype), 1.0)
    if masked:
        x, data, scale = _measured_masked(x, np.dtype(dtype), parts)
    else:
        data, scale = amax.measured(x, np.dtype(dtype), amax.top_of(dtype), parts)
    return with_scale(rounded(data, x=x, scale=scale), scale)


def scaled_in(x: ScaledArray, parts: Parts = ()) -> bool:
    """Whether all elements of each part have one scale, as far as the shape of the
    scales says it.
    """
    return x.is_static or all(
        n == 1 or (bool(parts) and parts[axis] == n)
        for axis, n in enumerate(jnp.shape(x.scale))
    )


def rounded(data: Any, *, x: Any, scale: Any) -> Any:
    """`data`, that `x` is stored as; who watches is shown both."""
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
    """A value as `scalify` returns it: with a run-time scale, and data of which the
    largest is below 2^7.

    That leaves room for those who go on with the data as if its RMS were near 1, and 31
    octaves below the largest. Where some elements are far above all others, as masks
    are or one loud token, and the others would lose digits, the largest is stored as
    that of an operand: 8 octaves more for the others. Elements that are one of
    `constants` (see `masks`) stay what they are beside the rest as far as the format
    holds both. Where it does not, those of a mask, such as -1e9, saturate, far enough
    out to be a mask still: see `_beside`. `nonzero`: elements that are not zero stay
    so, as the format's smallest number if nothing else holds them.
    """
    if nonzero and has_own_range(dtype):
        found = result(x, dtype, constants)
        return with_scale(
            _nonzero(storage.as_float32(wide(x)), found.data), found.scale
        )
    if dtype.itemsize >= 4:
        return with_scale(lax.convert_element_type(wide(x), dtype), jnp.float32(1))
    x = storage.as_float32(wide(x))
    if constants and has_own_range(dtype):
        x, data, scale = _beside(x, dtype, tuple(sorted(constants)))
        return with_scale(rounded(data, x=x, scale=scale), scale)
    if has_own_range(dtype):
        data, scale = amax.measured_result(x, np.dtype(dtype))
        return with_scale(rounded(data, x=x, scale=scale), scale)
    x = stored(x, dtype)
    return with_scale(x.data, jnp.float32(x.scale)) if x.is_static else x


@jax.jit
def _nonzero(x: jax.Array, data: jax.Array) -> jax.Array:
    """`data`, in which no `x` other than zero is zero."""
    least = lax.convert_element_type(
        lax.sign(x) * np.float32(FloatFormat.of(data.dtype).min_subnormal), data.dtype
    )
    return lax.select(lax.eq(data, lax.full_like(data, 0)), least, data)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _beside(
    x: jax.Array, dtype: np.dtype, constants: tuple[float, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`x`, its data and its scale, where some elements are constants that may be far
    from all else.

    They are kept while the largest of the rest stays 4 octaves above the format's
    smallest normal number, so that it has all of its precision. Of constants further
    off, those up to `_MASKS` mean no number: they saturate, at the scale of the rest,
    or at one so much larger that they are `_MASK` still, of which `exp` is zero, as
    long as the rest has that precision; where that would leave less than `_LEAST_MASK`
    of them (beside 1e-8), they are -inf. All others are numbers as the rest is, and the
    scale is that of the largest.
    """
    (x,) = compiler_hints.once(x)
    fmt, top, known = (
        FloatFormat.of(dtype),
        amax.top_of(dtype),
        tuple(c for c in constants if c != mask_constants.UNKNOWN),
    )
    constant, masked = (
        _is_one_of(x, some) for some in (known, tuple(c for c in known if c <= _MASKS))
    )
    if known != constants:
        constant, masked = (
            lax.bitwise_or(some, lax.le(x, _LOWEST)) for some in (constant, masked)
        )
    rest = lax.select(constant, lax.full_like(x, 0), x)
    of_rest = amax.unit_of(rest, amax.RESULT_TOP)
    of_numbers = amax.unit_of(lax.select(masked, lax.full_like(x, 0), x), top)
    of_all = amax.unit_of(x, top)
    furthest = of_rest * np.float32(2.0 ** (amax.RESULT_TOP - 4) / fmt.min_normal)
    as_mask = lax.clamp(of_rest, np.float32(_MASK / 2.0**top), furthest)
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


def _is_one_of(x: jax.Array, constants: tuple[float, ...]) -> jax.Array:
    """Where `x` is one of these numbers, up to roundings of the arithmetic that it came
    from.
    """
    near = [
        lax.le(lax.abs(x - np.float32(c)), np.float32(abs(c) * 2.0**-20))
        for c in constants
    ]
    return functools.reduce(lax.bitwise_or, near, lax.full(x.shape, False, np.bool_))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _measured_masked(
    x: jax.Array, dtype: np.dtype, parts: Parts
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`x`, of which masks are what they saturate to, its data and its scale, which is
    that of the rest.

    It is larger where masks would be less than `_MASK` so, as long as the rest is 4
    octaves above the smallest normal number.
    """
    (x,) = compiler_hints.once(x)
    top, fmt = amax.top_of(dtype), FloatFormat.of(dtype)
    is_mask = lax.bitwise_and(
        lax.le(x, np.float32(mask_constants.LOWEST)), lax.gt(x, np.float32(-np.inf))
    )
    of_rest = amax.unit_of(lax.select(is_mask, lax.full_like(x, 0), x), top, parts)
    of_masks = amax.unit_of(lax.select(is_mask, x, lax.full_like(x, 0)), top, parts)
    furthest = of_rest * np.float32(2.0 ** (top - 4) / fmt.min_normal)
    as_mask = lax.min(furthest, lax.full_like(furthest, _MASK / 2.0**top))
    least = lax.full_like(of_rest, MIN_SCALE)
    among_numbers = lax.select(of_masks > least, lax.max(of_rest, as_mask), of_rest)
    scale = lax.select(of_rest > least, among_numbers, of_masks)
    x = lax.select(
        is_mask, lax.max(x, amax.spread(scale * np.float32(-fmt.max), x.shape)), x
    )
    return x, amax.divided(x, scale, dtype), scale


def scaled_by(x: jax.Array, a: Any, b: Any) -> jax.Array:
    """The FP32 product of two operands' data as a logical value: times both scales,
    which broadcast to it.

    One after the other, the smaller first: operands are stored 14 octaves above 1, so
    the product of two scales leaves FP32 where that of the logical operands is 28
    octaves away from it, and an infinite scale makes NaN of zeros.
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
