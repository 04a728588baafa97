"""The largest magnitude (amax) of an array, and the array in units of a power of two.

This is the arithmetic of a measured scale; `interpreter.measured.quantize` stores
values with it.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalify_core.numerics import compiler_hints
from scalify_core.numerics.formats import FloatFormat, as_float32, pow2_inverse
from scalify_core.numerics.scales import LEAST_NONZERO_SCALE

# For each axis, the number of parts that have their own scale: 1, or the axis's size.
# (): one scale for all.
Parts = tuple[int, ...]
_EXPONENT = np.int32(0x7F800000)  # the exponent bits of an FP32 number
_MANTISSA = 23
_ZEROS = np.int32(1 << _MANTISSA)  # the bits of 2^-126, the scale of zeros
# The exponent of a result's largest stored magnitude, unless it needs more range. Who
# reads the data may take its RMS for 1: in FP16 that leaves 9 octaves above, and 31
# below.
RESULT_TOP = 6


def unit_of(x: jax.Array, top: int, parts: Parts = ()) -> jax.Array:
    """Return the power of two that brings the largest finite magnitude to [2^top,
    2^(top+1)).

    It is FP32, at least 2^-125, and 2^-126 for zeros and numbers below 2^-126.
    Infinities and NaN do not count. It is a scalar. With `parts` it has one element for
    each part: its size is 1 along the axes of one part, and that of `x` along all
    others.
    """
    # The exponent by its bits: log2 may miss a power of two by one. One is added to it,
    # by which that of infinities and NaN overflows to the smallest integer.
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = lax.add(lax.bitwise_and(bits, _EXPONENT), _ZEROS)
    if x.size:
        peak = _peaks(exponent, parts)
    else:
        rank = x.ndim if max(parts, default=1) > 1 else 0
        peak = lax.full((1,) * rank, _ZEROS)
    power = lax.max(
        lax.sub(peak, np.int32(top + 1 << _MANTISSA)),
        lax.min(peak, np.int32(2 << _MANTISSA)),
    )
    return lax.bitcast_convert_type(power, jnp.float32)


def _peaks(x: jax.Array, parts: Parts) -> jax.Array:
    """Return the largest exponent of each part, at least that of zeros.

    It has the rank of `x`, or is a scalar if there is one part.
    """
    if max(parts, default=1) == 1:
        return lax.reduce(x, _ZEROS, lax.max, range(x.ndim))
    common = [axis for axis, n in enumerate(parts) if n == 1]
    return lax.reshape(lax.reduce(x, _ZEROS, lax.max, common), parts)


@functools.partial(jax.jit, static_argnums=(1, 2))
def measured(
    x: jax.Array, dtype: np.dtype, parts: Parts = ()
) -> tuple[jax.Array, jax.Array]:
    """Return data in `dtype`, and the FP32 scale that brings the largest to its top.

    Infinities and NaN stay not finite, and do not count in the scale.
    """
    x = as_float32(x)
    # XLA's CPU backend would compile its producers twice, for the peak and for the
    # cast, and the scale in each kernel that reads it: a fifth of all instructions.
    (x,) = compiler_hints.materialize_once(x)
    (scale,) = compiler_hints.materialize_once(
        unit_of(x, FloatFormat.of(dtype).top, parts)
    )
    return divided(x, scale, dtype), scale


@functools.partial(jax.jit, static_argnums=1)
def measured_result(x: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    """Return data in `dtype` and the FP32 scale of a result.

    See `interpreter.measured.quantize.result`.
    """
    (x,) = compiler_hints.materialize_once(x)
    (unit,) = compiler_hints.materialize_once(unit_of(x, RESULT_TOP))
    (scale,) = compiler_hints.materialize_once(lower(x, unit, dtype))
    return divided(x, scale, dtype), scale


def lower(x: jax.Array, unit: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the unit of a result, smaller where its elements need the format's full
    range.

    They need it where more elements would be stored below the smallest normal number
    than lie 6 to 14 octaves below the largest. The largest are then a few outliers, or
    most elements are small. Counts do not depend on the order of summation.
    """
    magnitude, fmt = lax.abs(x), FloatFormat.of(dtype)

    def below(limit: float) -> jax.Array:
        """Return which elements are below a multiple of the unit."""
        return lax.lt(magnitude, spread(lax.mul(unit, np.float32(limit)), x.shape))

    loses = lax.bitwise_and(lax.gt(magnitude, np.float32(0)), below(fmt.min_normal))
    # A gap without any element is no criterion: large numbers of a product cross zero,
    # and fill it.
    between = lax.gt(below(2.0 ** (RESULT_TOP - 6)), below(2.0 ** (RESULT_TOP - 14)))
    counts = (lax.convert_element_type(each, jnp.int32) for each in (loses, between))
    more = lax.reduce_sum(lax.sub(*counts), range(x.ndim))
    full = lax.max(
        lax.mul(unit, np.float32(2.0 ** (RESULT_TOP - fmt.top))),
        lax.min(unit, np.float32(LEAST_NONZERO_SCALE)),
    )
    return lax.select(lax.gt(more, np.int32(0)), full, unit)


def divided(x: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return `x` in units of `scale`, in `dtype`."""
    return lax.convert_element_type(
        lax.mul(x, spread(pow2_inverse(scale), x.shape)), dtype
    )


def spread(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a scale broadcast to each element.

    The scale is a scalar, or has size 1 along the axes that share it.
    """
    return lax.broadcast_in_dim(scale, shape, range(scale.ndim))


# Statistics of many arrays at once, in few kernels.
# A large array is reduced in two kernels, of which the second is tiny. Here many arrays
# share the second. Each is brought to `BLOCKS` partial results first, or to so many
# that XLA does not split that step. The partial results of many arrays are the rows of
# a table that is reduced at once. Small arrays are rows of such tables directly, those
# of one shape together.

BLOCKS = 256
# Elements of a block: up to this length XLA's row reductions for GPUs are one kernel.
LONGEST = 2**14
SMALL = 2**14  # elements: as long as a row that one kernel reduces
LARGE_ROWS = 64  # rows of a table: XLA gives a kernel some 96 operands
# Small rows are computed in that kernel: two new moments from four or five operands.
SMALL_ROWS = 32


def largest_magnitudes(groups: Sequence[Sequence[jax.Array]]) -> jax.Array:
    """Return the largest magnitude of each array, FP32 `[number of arrays]`.

    It is 0 for an empty array.

    Args:
        groups: groups of arrays of one shape; shared operands of a group are read once.
    """
    return _reduced(groups, jnp.abs, lax.max)


def largest_of_rows(stacks: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the largest magnitude of each row, FP32 `[n]` for each stack.

    The stacks have one shape [n, ...].
    """
    magnitudes = [jnp.abs(x.astype(jnp.float32)) for x in stacks]
    return _at_once(magnitudes, lax.max, tuple(range(1, stacks[0].ndim)))


def squares_of_rows(stack: jax.Array) -> jax.Array:
    """Return the sum of squares of each row of a stack [n, ...], FP32 `[n]`."""
    return jnp.sum(jnp.square(stack.astype(jnp.float32)), tuple(range(1, stack.ndim)))


def sums_of_squares(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return the sum of squares of each array, FP32 `[number of arrays]`."""
    return _reduced([[x] for x in arrays], jnp.square, lax.add)


def sums_at_once(
    arrays: Sequence[jax.Array], axes: tuple[int, ...]
) -> Sequence[jax.Array]:
    """Return the sum over `axes` of each FP32 array, all of one shape, in one
    reduction.

    For GPUs; not differentiable. XLA compiles it to one kernel for each of its steps;
    separate sums are a kernel each at the second step.
    """
    return _at_once(arrays, lax.add, axes)


def _at_once(
    arrays: Sequence[jax.Array], combine: Callable, axes: tuple[int, ...]
) -> list[jax.Array]:
    """Reduce FP32 arrays of one shape in one reduction, whose results start at zero."""
    zeros = (np.float32(0),) * len(arrays)
    return lax.reduce(
        tuple(arrays), zeros, lambda a, b: tuple(map(combine, a, b)), axes
    )


def _reduced(
    groups: Sequence[Sequence[jax.Array]],
    of_element: Callable[[jax.Array], jax.Array],
    combine: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Reduce `of_element` of each array's elements in FP32 with `combine`.

    Zeros must not change the result of `combine`.
    """
    # By length: rows of one length make a table, and a table is a kernel.
    large = dict[int, list[tuple[jax.Array, int]]]()
    small = dict[tuple[int, ...], list[tuple[jax.Array, int]]]()
    number = itertools.count()
    for group in groups:
        wide = [x.astype(jnp.float32) for x in group]
        if group[0].size <= SMALL:
            rows = [of_element(x.ravel()) for x in wide]
            small.setdefault(group[0].shape, []).extend(zip(rows, number, strict=False))
        else:
            # Both moments of a parameter at once: the gradient that they are computed
            # from is read once.
            rows = _at_once([of_element(_blocks(x)) for x in wide], combine, (1,))
            large.setdefault(rows[0].size, []).extend(zip(rows, number, strict=False))
    tables = list[tuple]()
    for same in large.values():
        tables += itertools.batched(same, LARGE_ROWS)
    for same in small.values():
        tables += itertools.batched(same, SMALL_ROWS)
    if not tables:
        return jnp.zeros(0)
    results = [
        lax.reduce(jnp.stack([row for row, _ in table]), jnp.float32(0), combine, (1,))
        for table in tables
    ]
    numbers = [n for _, n in itertools.chain(*tables)]
    # Tables have the arrays by length; the caller's order is that of their numbers.
    return jnp.concatenate(results)[np.argsort(numbers)]


def _blocks(x: jax.Array) -> jax.Array:
    """Return the elements in `BLOCKS` rows, or 2, 4, ... times as many.

    Each row has at most `LONGEST` elements; the last rows are filled with zeros.
    """
    blocks = BLOCKS * 2 ** max(math.ceil(math.log2(x.size / (BLOCKS * LONGEST))), 0)
    missing = -x.size % blocks
    if missing:
        x = jnp.pad(x.ravel(), (0, missing))
    return x.reshape(blocks, -1)
