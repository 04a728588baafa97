"""Arithmetic of scales, while tracing or in the compiled program.

A scale is *static* when it is a Python float: its arithmetic happens while tracing and
leaves no operation in the compiled program. Otherwise it is an FP32 array, a scalar or
broadcastable to the data. Every scale is a power of two in [2^-126, 2^126].

The smallest is the scale of zeros, and says nothing about other values. Its products
are the smallest scale again, and results of other scales are larger. So zeros, their
sums and their products are told from small numbers wherever they come from. Where a
product leaves the range of scales, the remainder goes into the data.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalify_core.numerics.compiler_hints import barrier, materialize_once
from scalify_core.numerics.formats import (
    MAX_SCALE,
    MIN_SCALE,
    as_float32,
    pow2_inverse,
    pow2_round,
)

Scale = Any  # float: static; FP32 jax.Array: dynamic
# `MIN_SCALE` is the scale of zeros alone: computed scales of other values are clipped
# to at least this number, so that none is taken for it.
LEAST_NONZERO_SCALE = 2.0**-125


@jax.jit
def checked_scale(scale: jax.Array) -> jax.Array:
    """Return FP32 run-time scales, with NaN where one is not a power of two.

    That shows arithmetic on the leaves of ScaledArrays outside scalify. Zero, from
    `jnp.zeros_like` of a state, counts as the scale of zeros.
    """
    exponent = lax.bitcast_convert_type(scale, jnp.int32) & np.int32(0x7F800000)
    power = lax.bitcast_convert_type(exponent, jnp.float32)
    power = lax.clamp(np.float32(MIN_SCALE), power, np.float32(MAX_SCALE))
    is_valid = (scale == power) | (scale == 0)
    # The scale itself, not `power`: its tangent tells that it is differentiated.
    checked = jnp.where(
        is_valid, lax.max(scale, np.float32(MIN_SCALE)), np.float32(np.nan)
    )
    # Otherwise XLA's CPU backend repeats the check in each kernel that reads the scale.
    (checked,) = materialize_once(checked)
    return checked


class Multiple(NamedTuple):
    """A run-time scale times a static power of two, not yet multiplied.

    Every product adds such a power; a chain of them is one number. Data is multiplied
    by both factors. So no operation on scalars is left in the program, which on a GPU
    would be a kernel each.
    """

    base: Any  # FP32 scalar
    by: float


def as_multiple(scale: Scale | Multiple) -> Multiple:
    """Return a scale as a multiple: of itself, if it is none."""
    if isinstance(scale, Multiple):
        return scale
    return Multiple(scale, 1.0)


def is_static(scale: Scale) -> bool:
    """Return whether the scale is known while tracing."""
    return isinstance(scale, float)


def same_scale(a: Scale, b: Scale) -> bool:
    """Return whether two scales are known to be equal."""
    if (both := of_one_base(a, b)) is not None:
        return both[0] == both[1]
    return a is b or (is_static(a) and is_static(b) and a == b)


def has_any_scale(number: float | None) -> bool:
    """Return whether a number is the same at every scale: zero, infinite or NaN."""
    return number is not None and (number == 0 or not math.isfinite(number))


def near(scales: Sequence[Scale]) -> bool:
    """Return whether scales are static, and at most four octaves apart."""
    # E4M3 of a Gaussian is as exact at an RMS of 2^-4 as at 1; at 2^-7 it has lost 9 of
    # 31 dB.
    return all(map(is_static, scales)) and max(scales) <= 16 * min(scales)


def as_number(scale: Scale | Multiple) -> Scale:
    """Return a scale multiplied out, within the range of scales."""
    if isinstance(scale, Multiple):
        return _multiplied(scale.base, np.float32(scale.by), scale.base)
    return scale


def _multiplied(a: Any, b: Any, smaller: Any) -> Any:
    """Return `a * b` within the range of scales.

    Where `smaller`, one of the two, is the scale of zeros, the result is, too.
    """
    # Zeros stay zeros: otherwise the product of zeros and a large scale would look like
    # a number of moderate size, and set the scale of a sum.
    zeros = lax.lt(smaller, np.float32(LEAST_NONZERO_SCALE))
    # Not at 2^-126: a small product must not be taken for one of zeros.
    clipped = lax.clamp(
        np.float32(LEAST_NONZERO_SCALE),
        lax.mul(a, b),
        np.float32(1 / LEAST_NONZERO_SCALE),
    )
    return lax.select(zeros, lax.full_like(smaller, MIN_SCALE), clipped)


def ratio(a: Any, b: Any) -> Any:
    """Return `a / b`, to multiply data by.

    It is static for multiples of one run-time scalar, and a `Multiple` where `b` is
    static and `a` a run-time scalar. Otherwise it is at most 2^126; where it underflows
    FP32, data near 1 would, too: 0.
    """
    if is_static(b):
        return product(a, 1 / b)
    if (both := of_one_base(a, b)) is not None:
        return both[0] / both[1]
    base, by = as_multiple(a)
    base, b = _arrays(base, b)
    quotient = lax.mul(base, pow2_inverse(b))
    if by != 1.0:
        quotient = lax.mul(quotient, np.float32(by))
    # Infinity, from scales at both ends, would make NaN of zeros in the data.
    quotient = lax.min(quotient, np.float32(MAX_SCALE))
    if is_static(a) and a >= LEAST_NONZERO_SCALE:
        return quotient
    # Data at the scale of zeros may be infinite: times 0 it would be NaN.
    zeros = lax.lt(base, np.float32(LEAST_NONZERO_SCALE))
    least = lax.select(zeros, lax.full_like(base, MIN_SCALE), lax.full_like(base, 0))
    return lax.max(quotient, least)


def product(a: Any, b: Any) -> Any:
    """Return `a * b`, within the range of scales where dynamic.

    It is a `Multiple` where one is static and one a run-time scalar.
    """
    if is_static(a) and is_static(b):
        return a * b
    if is_static(b):
        a, b = b, a
    if is_static(a):
        # The same object: `same_scale` knows run-time scales by identity.
        if a == 1.0:
            return b
        base, by = as_multiple(b)
        by *= a
        # Only powers of two are kept apart: their product with the base is exact.
        is_power = math.frexp(a)[0] == 0.5
        if is_power and base.ndim == 0 and MIN_SCALE <= by <= MAX_SCALE:
            if by == 1.0:
                return base
            return Multiple(base, by)
        b = as_number(b)
        return _multiplied(b, np.float32(a), b)
    a, b = _arrays(a, b)
    return _multiplied(a, b, lax.min(a, b))


def product_and_rest(a: Any, b: Any) -> tuple[Any, Scale]:
    """Return the `product` of `a` and `b`, and the missing power of two for the data.

    The power is 1 where both are static.
    """
    if is_static(a) and is_static(b):
        return a * b, 1.0
    (a, rest_a), (b, rest_b) = number_and_rest(a), number_and_rest(b)
    scale = as_number(product(a, b))
    if scale is a or scale is b:
        return scale, _without_ones(rest_a, rest_b)
    # Within FP32: the smaller over the product is at most the inverse of the larger, or
    # the scale is at its limit.
    rest = lax.mul(lax.div(*_arrays(smallest(a, b), scale)), largest(a, b))
    return scale, _without_ones(rest, rest_a, rest_b)


def number_and_rest(scale: Any) -> tuple[Scale, Scale]:
    """Return a scale as a number, and the missing power of two for the data."""
    if not isinstance(scale, Multiple):
        return scale, 1.0
    number = as_number(scale)
    small, large = (f(scale.base, np.float32(scale.by)) for f in (lax.min, lax.max))
    return number, lax.mul(lax.div(small, number), large)


def _without_ones(*factors: Any) -> Any:
    factors = tuple(x for x in factors if not is_static(x) or x != 1.0)
    if factors:
        return functools.reduce(lambda a, b: lax.mul(*_arrays(a, b)), factors)
    return 1.0


def largest(*scales: Scale) -> Scale:
    """Return the largest scale."""
    if all(map(is_static, scales)):
        return max(scales)
    if (multiples := of_one_base(*scales)) is not None:
        return scales[multiples.index(max(multiples))]
    return functools.reduce(lambda a, b: lax.max(*_arrays(a, b)), scales)


def between(scales: Sequence[Scale]) -> Scale:
    """Return the largest scale, or a smaller one where scales are far apart.

    Where the smallest scale, zeros aside, is 2^64 below the largest, it is the power of
    two halfway between them.
    """
    top = largest(*scales)
    if all(map(is_static, scales)):
        low = min(scales)
        # At the largest scale, FP32 data of a far smaller one would lose what plain
        # FP32 keeps.
        if top <= low * 2.0**64:
            return top
        return pow2_round(math.sqrt(top) * math.sqrt(low))
    if len(scales) == 1 or of_one_base(*scales) is not None:
        return top
    top = as_number(top)
    numbers = [jnp.asarray(as_number(s), jnp.float32) for s in scales]
    low = functools.reduce(
        jnp.minimum,
        (jnp.where(s < np.float32(LEAST_NONZERO_SCALE), top, s) for s in numbers),
    )
    # Root by root: the product of two scales may leave FP32.
    middle = pow2_round(jnp.sqrt(top) * jnp.sqrt(low))
    return jnp.where(top > low * np.float32(2.0**64), middle, top)


def smallest(a: Scale, b: Scale) -> Scale:
    """Return the smaller scale, a dynamic one."""
    return lax.min(*_arrays(a, b))


def unless_of_zeros(scale: Any, other: Any) -> Any:
    """Return a dynamic scale, or the number `other` where it is that of zeros."""
    return lax.select(
        lax.lt(scale, np.float32(LEAST_NONZERO_SCALE)),
        lax.full_like(scale, other),
        scale,
    )


def scale_and_rms(size: float) -> tuple[float, float]:
    """Return the scale of data of this expected size, and the expected RMS."""
    scale = pow2_round(size)
    return scale, size / scale


def times(x: Any, factor: Scale | Multiple) -> Any:
    """Return `x * factor`, rounded in FP32; a factor of 1 leaves no operation.

    16-bit data stays in its format at a power of two in [2^-14, 1]. Numbers that are
    then below the normal ones of FP16 lose digits, or are zero.
    """
    if isinstance(factor, Multiple):
        # The intermediate product could overflow FP32.
        if not 2.0**-60 <= factor.by <= 2.0**60:
            number, rest = number_and_rest(factor)
            return times(times(x, number), rest)
        return times(times(as_float32(x), factor.by), factor.base)
    if isinstance(factor, float):
        if factor == 1.0:
            return x
        if isinstance(x, np.float32):  # a literal: the product is one too
            return np.float32(float(x) * factor)
        if (
            factor
            and math.isfinite(factor)
            and not MIN_SCALE <= abs(factor) <= MAX_SCALE
        ):
            # The factor is too large or small for one FP32 number. So there are two,
            # which a compiler would multiply with each other.
            step = MAX_SCALE if abs(factor) > 1 else MIN_SCALE
            return times(barrier(times(as_float32(x), step)), factor / step)
        # Such factors are numbers of FP16 and BF16, and none makes a number of the data
        # infinite.
        in_format = (
            x.dtype.itemsize == 2
            and 2.0**-14 <= abs(factor) <= 1
            and math.frexp(factor)[0] in (0.5, -0.5)
        )
        if not in_format:
            x = as_float32(x)
        return lax.mul(x, x.dtype.type(factor))
    return jnp.multiply(as_float32(x), broadcast_scale(factor, x))


def broadcast_scale(scale: Any, x: Any) -> Any:
    """Return a dynamic scale for data `x`: a scalar, or of the rank of the data.

    A scale of lower rank belongs to the leading axes.
    """
    if scale.ndim in (0, x.ndim):
        return scale
    return lax.reshape(scale, scale.shape + (1,) * (x.ndim - scale.ndim))


def of_one_base(*scales: Any) -> tuple[float, ...] | None:
    """Return the static parts of scales that are multiples of one run-time scalar.

    None: they are not.
    """
    parts = [as_multiple(s) for s in scales if not is_static(s)]
    one = len(parts) == len(scales) and all(
        part.base is parts[0].base for part in parts
    )
    if one and parts[0].base.ndim == 0:
        return tuple(part.by for part in parts)
    return None


def _arrays(a: Any, b: Any) -> tuple[Any, Any]:
    """Return both scales as FP32 arrays of one rank."""
    a, b = (np.float32(s) if is_static(s) else as_number(s) for s in (a, b))
    if np.ndim(a) and np.ndim(b) and a.shape != b.shape:
        a, b = jnp.broadcast_arrays(a, b)
    return a, b


def rms_scale(x: Any) -> jax.Array:
    """Return the power of two nearest to the RMS of `x`, FP32.

    It is 2^-126 where the RMS is zero, and 1 where it is not finite.
    """
    rms = rms_of(x)
    scale = jnp.where(
        rms > 0,
        jnp.clip(pow2_round(rms), LEAST_NONZERO_SCALE, MAX_SCALE),
        jnp.float32(MIN_SCALE),
    )
    # A scale of NaN would hide which elements are not finite.
    return jnp.where(jnp.isfinite(rms), scale, jnp.float32(1))


def rms_of(x: Any) -> jax.Array:
    """Return the RMS of `x`, an FP32 scalar; not finite where an element is not.

    The squares of elements may overflow FP32.
    """
    x = jnp.abs(jnp.asarray(x, jnp.float32))
    peak = jnp.minimum(jnp.max(x, initial=0.0), jnp.float32(1 / LEAST_NONZERO_SCALE))
    # Relative to the peak: squares of 2^100 or 2^-100 leave FP32, as does the inverse
    # of 2^127.
    inverse = 1 / jnp.where(peak > 0, peak, 1)
    return peak * jnp.sqrt(jnp.mean(jnp.square(x * inverse)))
