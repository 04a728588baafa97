"""Means of gradients over devices, in FP32 or a narrow format, inside `shard_map` over
all mesh axes.

Narrow data is moved and never added. An all-to-all brings each device its part of the
array from all others; it adds them up in FP32. If several devices need the part, an
all-gather hands on the mean, narrow again. So a sum cannot overflow, and a ring moves
as many elements as an FP32 reduce-scatter or all-reduce would. Each tensor has one
scale: the power of two that puts the largest magnitude on any device into the upper
octave of the format. FP8 is rounded stochastically: the mean of what is moved is the
mean in expectation.

The same with FP32 data, without a scale, is the deterministic reduction: parts are
added in the order of the devices in the mesh, whatever processes these belong to.
Otherwise FP32 is left to XLA's own collectives.

Narrow data is sent as integers of its width: XLA widens FP8 and BF16 collectives where
a backend has none.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from scalify_core.numerics.formats import (
    FP16,
    FP32,
    FloatFormat,
    counter_bits,
    pow2_floor,
)
from trainer.parallel.mesh import BATCH_AXES, Sizes

UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class WireFormat(NamedTuple):
    """The format and the order in which a gradient is reduced.

    Attributes:
      format: of the data that is sent.
      deterministic: FP32, summed in fixed order.
    """

    format: FloatFormat
    deterministic: bool

    @property
    def is_native(self) -> bool:
        """Return whether it is XLA's reduce-scatter or all-reduce."""
        return self.format is FP32 and not self.deterministic


def as_bits(x: jax.Array) -> jax.Array:
    """Return narrow floats as unsigned integers of their width, and other arrays
    unchanged.
    """
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
        return lax.bitcast_convert_type(x, UNSIGNED[x.dtype.itemsize])
    return x


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """Invert `as_bits`."""
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)


def all_gather(x: jax.Array, axis: int, name: str | tuple[str, ...]) -> jax.Array:
    """Concatenate the parts of all devices along a mesh axis, along an axis of the
    array.
    """
    return from_bits(lax.all_gather(as_bits(x), name, axis=axis, tiled=True), x.dtype)


def all_to_all(
    x: jax.Array, name: str | tuple[str, ...], split: int, concat: int
) -> jax.Array:
    """Send the parts along `split` to the devices of mesh axes; what arrives is
    concatenated along `concat`.
    """
    return from_bits(
        lax.all_to_all(
            as_bits(x), name, split_axis=split, concat_axis=concat, tiled=True
        ),
        x.dtype,
    )


def device_index() -> jax.Array:
    """Return the number of this device among those that the batch is split over."""
    return lax.axis_index(BATCH_AXES)


def narrowed(x: jax.Array, fmt: FloatFormat, *counters: Any) -> jax.Array:
    """Cast FP32 to the format.

    FP8 is rounded stochastically, with random bits of the three counters; other formats
    to nearest.
    """
    if fmt is FP32:
        return x
    if fmt.mantissa_bits > 3:
        return fmt.cast(x)
    return fmt.stochastic_round(x, counter_bits(x.shape, *counters))


def common_scale(x: jax.Array, fmt: FloatFormat) -> jax.Array | float:
    """Return the scale at which no device's data overflows the format, FP32, the same
    on all devices.

    It is 1 for FP32 data, which needs none. Values that are not finite stay so, and the
    step sees them.
    """
    if fmt is FP32:
        return 1.0
    amax = lax.pmax(jnp.max(jnp.abs(x), initial=0.0), Sizes._fields)
    top = min(fmt.max, FP16.max)  # BF16 data gets the place of FP16 data, not 2^127
    return jnp.where(
        jnp.isfinite(amax) & (amax > 0), pow2_floor(amax * (2 / top)), jnp.float32(1)
    )


def mean_over_devices(
    x: jax.Array,
    split: int | None,
    wire: WireFormat,
    *,
    seed: Any,
    leaf: int,
    arrange: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    """Return the mean over the devices that the batch is split over, FP32.

    Args:
      x: FP32, of this device.
      split: the axis that is reduce-scattered over `fsdp`; None: all-reduce.
      wire: format and order.
      seed: of stochastic rounding.
      leaf: the number of the array, which has random bits of its own.
      arrange: moves data inside the tensor-parallel group, before it is reduced.
    """
    devices = math.prod(lax.axis_size(axis) for axis in BATCH_AXES)
    if wire.is_native:
        x = arrange(x)
        if split is None:
            return lax.psum(x, BATCH_AXES) / devices
        part = lax.psum_scatter(x, "fsdp", scatter_dimension=split, tiled=True)
        # Even over one device a psum is a collective.
        if lax.axis_size("data") > 1:
            part = lax.psum(part, "data")
        return part / devices
    scale = common_scale(x, wire.format)
    narrow = narrowed(x * (1 / scale), wire.format, seed, leaf, device_index())
    return moved_mean(arrange(narrow), split, wire.format, seed=seed, leaf=leaf) * scale


def moved_mean(
    x: jax.Array, split: int | None, fmt: FloatFormat, *, seed: Any, leaf: int
) -> jax.Array:
    """Return `mean_over_devices` of data in the format `fmt`, by moving it."""
    devices = math.prod(lax.axis_size(axis) for axis in BATCH_AXES)
    parts = 1 if split is None else lax.axis_size("fsdp")
    copies = devices // parts
    copied_over = BATCH_AXES if split is None else "data"
    # Device (data d, fsdp f) sums piece d of part f, then gathers part f over `data`.
    # Without `split` there is one part, and every device sums a piece of it.
    shape = list(x.shape)
    if split is not None:
        shape[split] //= parts
        x = jnp.moveaxis(
            x.reshape(*x.shape[:split], parts, -1, *x.shape[split + 1 :]), split, 0
        )
    pieces = x.reshape(parts, -1)
    size = pieces.shape[1]
    pieces = jnp.pad(pieces, ((0, 0), (0, -size % copies))).reshape(parts, copies, -1)
    # BATCH_AXES number devices by `data` first, so copies come before parts.
    received = all_to_all(
        jnp.swapaxes(pieces, 0, 1).reshape(devices, -1), BATCH_AXES, 0, 0
    )
    average = jnp.sum(received.astype(jnp.float32), axis=0) / devices
    if copies > 1:
        # At the same scale: a mean is at most as large as the largest operand.
        piece = narrowed(average, fmt, seed, leaf + SECOND_ROUNDING, device_index())
        average = all_gather(piece, 0, copied_over).astype(jnp.float32)[:size]
    return average.reshape(shape)


# Larger than any number of arrays, so that both roundings have their own random bits.
SECOND_ROUNDING = 2**16
