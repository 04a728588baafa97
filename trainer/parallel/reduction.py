"""Means of gradients over devices, in FP32 or in a narrow format, inside `shard_map`
over all axes of the mesh.

Narrow data is moved and never added: every device gets its part of the array from all
others (an all-to-all), adds up in FP32, and where more than one device needs the part
hands the mean on, narrow again (an all-gather). A sum cannot overflow, and a ring moves
as many elements as it does for an FP32 reduce-scatter or all-reduce. The scale is the
power of two that puts the largest magnitude on any device into the upper octave of the
format; it is one number a tensor. FP8 is rounded stochastically: the mean of what is
moved is the mean in expectation.

The same with FP32 data, without a scale, is the deterministic reduction: the parts are
added in the order of the devices in the mesh, whatever processes these belong to.
Otherwise FP32 is left to XLA's own collectives.

Narrow data travels as integers of its width: XLA does FP8 and BF16 collectives in wider
types where a backend has none.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from scalify_core.formats import FP16, FP32, FloatFormat, counter_bits, pow2_floor
from trainer.parallel.mesh import BATCH_AXES, Sizes

UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class Reduction(NamedTuple):
    """How gradients are reduced.

    Attributes:
      format: of the data on the wire.
      deterministic: in FP32, a sum in fixed order.
    """

    format: FloatFormat
    deterministic: bool

    @property
    def is_native(self) -> bool:
        """Return whether it is XLA's reduce-scatter or all-reduce."""
        return self.format is FP32 and not self.deterministic


def as_bits(x: jax.Array) -> jax.Array:
    """Narrow floats as unsigned integers of their width; others as they are."""
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
        return lax.bitcast_convert_type(x, UNSIGNED[x.dtype.itemsize])
    return x


def of_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `as_bits`."""
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)


def gathered(x: jax.Array, axis: int, name: str | tuple[str, ...]) -> jax.Array:
    """The parts of all devices along a mesh axis, along an axis of the array."""
    return of_bits(lax.all_gather(as_bits(x), name, axis=axis, tiled=True), x.dtype)


def exchanged(
    x: jax.Array, name: str | tuple[str, ...], split: int, concat: int
) -> jax.Array:
    """An all-to-all over mesh axes: the parts along `split` go to their devices, what
    comes stands along `concat`.
    """
    return of_bits(
        lax.all_to_all(
            as_bits(x), name, split_axis=split, concat_axis=concat, tiled=True
        ),
        x.dtype,
    )


def device_index() -> jax.Array:
    """The number of this device among those that the batch is split over."""
    return lax.axis_index(BATCH_AXES)


def narrowed(x: jax.Array, fmt: FloatFormat, *counters: Any) -> jax.Array:
    """FP32 in the format: FP8 rounded stochastically, with random bits of these three
    counters, others to nearest.
    """
    if fmt is FP32:
        return x
    if fmt.mantissa_bits > 3:
        return fmt.cast(x)
    return fmt.stochastic_round(x, counter_bits(x.shape, *counters))


def common_scale(x: jax.Array, fmt: FloatFormat) -> jax.Array | float:
    """The scale at which no device's data leaves the format: FP32, the same on all; 1
    for FP32 data, which needs none.

    What is not finite stays so, and is seen by the step.
    """
    if fmt is FP32:
        return 1.0
    peak = lax.pmax(jnp.max(jnp.abs(x), initial=0.0), Sizes._fields)
    top = min(fmt.max, FP16.max)  # BF16 data gets the place of FP16 data, not 2^127
    return jnp.where(
        jnp.isfinite(peak) & (peak > 0), pow2_floor(peak * (2 / top)), jnp.float32(1)
    )


def mean(
    x: jax.Array,
    split: int | None,
    how: Reduction,
    *,
    seed: Any,
    leaf: int,
    arrange: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    """The mean over the devices that the batch is split over, FP32.

    Args:
      x: FP32, of this device.
      split: the axis of which every device of a row of `fsdp` gets its part; None: all
          get the whole.
      how: format and order.
      seed, leaf: of the stochastic rounding; `leaf` tells arrays apart.
      arrange: moves what is on the wire anyway, among the devices of a row of `tensor`,
          before it is reduced.
    """
    devices = math.prod(lax.axis_size(axis) for axis in BATCH_AXES)
    if how.is_native:
        x = arrange(x)
        if split is None:
            return lax.psum(x, BATCH_AXES) / devices
        part = lax.psum_scatter(x, "fsdp", scatter_dimension=split, tiled=True)
        # Over one device it would be a collective nevertheless.
        return (lax.psum(part, "data") if lax.axis_size("data") > 1 else part) / devices
    scale = common_scale(x, how.format)
    narrow = narrowed(x * (1 / scale), how.format, seed, leaf, device_index())
    return moved_mean(arrange(narrow), split, how.format, seed=seed, leaf=leaf) * scale


def moved_mean(
    x: jax.Array, split: int | None, fmt: FloatFormat, *, seed: Any, leaf: int
) -> jax.Array:
    """`mean` of data in the format `fmt`, by moving it."""
    devices = math.prod(lax.axis_size(axis) for axis in BATCH_AXES)
    parts = 1 if split is None else lax.axis_size("fsdp")
    copies, copied = devices // parts, BATCH_AXES if split is None else "data"
    # [parts, copies, m]: a part goes to as many devices as will have it, each of which
    # adds up a piece of it.
    shape = list(x.shape)
    if split is not None:
        shape[split] //= parts
        x = jnp.moveaxis(
            x.reshape(*x.shape[:split], parts, -1, *x.shape[split + 1 :]), split, 0
        )
    pieces = x.reshape(parts, -1)
    size = pieces.shape[1]
    pieces = jnp.pad(pieces, ((0, 0), (0, -size % copies))).reshape(parts, copies, -1)
    received = exchanged(
        jnp.swapaxes(pieces, 0, 1).reshape(devices, -1), BATCH_AXES, 0, 0
    )
    average = jnp.sum(received.astype(jnp.float32), axis=0) / devices
    if copies > 1:
        # At the same scale: a mean is not larger than the largest.
        piece = narrowed(average, fmt, seed, leaf + SECOND_ROUNDING, device_index())
        average = gathered(piece, 0, copied).astype(jnp.float32)[:size]
    return average.reshape(shape)


# more than there are arrays: their random bits are others than those of the first
SECOND_ROUNDING = 2**16
