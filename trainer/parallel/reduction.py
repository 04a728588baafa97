"""Means of gradients over devices, in FP32 or a narrow format, inside `shard_map` over
all mesh axes.

Narrow data is moved and never added. By an all-to-all each device receives its part of
the array from all devices, and adds the parts in FP32. If several devices need the
mean, it is rounded again and all-gathered. So a sum cannot overflow, and a ring moves
as many elements as an FP32 reduce-scatter or all-reduce would. Each tensor has one
scale: the power of two that puts the amax over all devices into the format's top
binade, from half its maximum to its maximum. FP8 is rounded stochastically, so that the
mean is unbiased.

The deterministic reduction moves FP32 data in the same way, without a scale. Parts are
added in the order of the devices in the mesh, on any number of processes. FP32 data is
reduced by XLA's own collectives otherwise.

Narrow data is sent as integers of its width: XLA widens FP8 and BF16 collectives where
a backend has none.

Legend: P parts of an array, Q pieces of a part, S elements of a piece.
"""

from collections.abc import Callable
from typing import Any

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
from trainer.parallel.mesh import BATCH_AXES, STEP_AXES

UINT_BY_BYTES = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
# Added to an array's index for the random bits of the second rounding; larger than any
# number of arrays.
SECOND_ROUNDING = 2**16


def as_bits(x: jax.Array) -> jax.Array:
    """Return narrow floats as unsigned integers of their width.

    Other arrays are returned unchanged.
    """
    # FP32 stays: XLA widens narrow collectives only.
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
        return lax.bitcast_convert_type(x, UINT_BY_BYTES[x.dtype.itemsize])
    return x


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """Invert `as_bits`."""
    if bits.dtype == dtype:
        return bits
    return lax.bitcast_convert_type(bits, dtype)


def all_gather_bits(
    x: jax.Array, axis_name: str | tuple[str, ...], axis: int
) -> jax.Array:
    """Return `lax.all_gather` of narrow or FP32 data, tiled; narrow data is moved as
    integers.
    """
    gathered = lax.all_gather(as_bits(x), axis_name, axis=axis, tiled=True)
    return from_bits(gathered, x.dtype)


def all_to_all_bits(
    x: jax.Array,
    axis_name: str | tuple[str, ...],
    split_axis: int,
    concat_axis: int,
) -> jax.Array:
    """Return `lax.all_to_all` of narrow or FP32 data, tiled; narrow data is moved as
    integers.
    """
    bits = lax.all_to_all(as_bits(x), axis_name, split_axis, concat_axis, tiled=True)
    return from_bits(bits, x.dtype)


def quantize(x: jax.Array, fmt: FloatFormat, seed: Any, leaf_index: Any) -> jax.Array:
    """Cast FP32 data to a format.

    FP8 is rounded stochastically. Arrays, and devices with different parts of the
    batch, have different random bits. Other formats are rounded to nearest.
    """
    if fmt is FP32:
        return x
    # E4M3 has 3 bits of mantissa, E5M2 has 2; BF16 and FP16 have more.
    if fmt.mantissa_bits > 3:
        return fmt.cast(x)
    # Not over `tensor`: its devices hold equal copies of the arrays that are not split,
    # and must round them alike.
    shard_index = lax.axis_index(BATCH_AXES)
    return fmt.stochastic_round(x, counter_bits(x.shape, seed, leaf_index, shard_index))


def top_binade_scale(amax: jax.Array, fmt: FloatFormat) -> jax.Array:
    """Return the power of two that puts an amax into the top binade of a format."""
    # BF16 has FP32's range: at its maximum the FP32 sum would overflow, and the scale
    # would be subnormal.
    top = min(fmt.max, FP16.max)
    return pow2_floor(amax * (2 / top))


def common_scale(x: jax.Array, fmt: FloatFormat) -> jax.Array | float:
    """Return the scale at which no device's data overflows the format.

    It is FP32, the same on all devices, and 1 for FP32 data. Nonfinite values are kept,
    so that the step finds them.
    """
    if fmt is FP32:
        return 1.0
    # Over all axes of a step, with `tensor`: `reshard` mixes data of its devices, which
    # must be at one scale. `initial` serves arrays without elements.
    amax = lax.pmax(jnp.max(jnp.abs(x), initial=0.0), STEP_AXES)
    return jnp.where(
        jnp.isfinite(amax) & (amax > 0), top_binade_scale(amax, fmt), jnp.float32(1)
    )


def mean_over_devices(
    x: jax.Array,
    scatter_axis: int | None,
    fmt: FloatFormat,
    *,
    deterministic: bool,
    seed: Any,
    leaf_index: Any,
    reshard: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    """Return the mean over the devices that the batch is split over, FP32.

    Args:
      x: this device's data, FP32.
      scatter_axis: the axis that is reduce-scattered over `fsdp`; None: all-reduce.
      fmt: format of the sent data.
      deterministic: whether FP32 data is summed in the order of the devices.
      seed: seed of stochastic rounding.
      leaf_index: index of the array; each has different random bits.
      reshard: moves data inside the tensor-parallel group. It is called after rounding,
        so that narrow data is moved.
    """
    devices = lax.axis_size(BATCH_AXES)
    if fmt is FP32 and not deterministic:
        x = reshard(x)
        if scatter_axis is None:
            return lax.psum(x, BATCH_AXES) / devices
        part = lax.psum_scatter(x, "fsdp", scatter_dimension=scatter_axis, tiled=True)
        # XLA runs a psum over one device as a collective, too.
        if lax.axis_size("data") > 1:
            part = lax.psum(part, "data")
        return part / devices
    # A power of two: its reciprocal is exact, and rescaling rounds nothing.
    scale = common_scale(x, fmt)
    data = reshard(quantize(x * (1 / scale), fmt, seed, leaf_index))
    mean = mean_by_all_to_all(data, scatter_axis, fmt, seed=seed, leaf_index=leaf_index)
    return mean * scale


def mean_by_all_to_all(
    x: jax.Array,
    scatter_axis: int | None,
    fmt: FloatFormat,
    *,
    seed: Any,
    leaf_index: Any,
) -> jax.Array:
    """Return `mean_over_devices` of data in a format, by all-to-all and all-gather.

    With a `scatter_axis` the array has a part for each device of `fsdp`. Device (data
    q, fsdp p) sums piece q of part p, then gathers part p over `data`. Otherwise the
    array is one part, and each device sums a piece of it.
    """
    num_devices = lax.axis_size(BATCH_AXES)
    gather_axes: tuple[str, ...] = BATCH_AXES
    num_parts, shape = 1, list(x.shape)
    if scatter_axis is not None:
        num_parts, gather_axes = lax.axis_size("fsdp"), ("data",)
        shape[scatter_axis] //= num_parts
        leading, trailing = x.shape[:scatter_axis], x.shape[scatter_axis + 1 :]
        x = x.reshape(*leading, num_parts, -1, *trailing)
        x = jnp.moveaxis(x, scatter_axis, 0)
    num_pieces = num_devices // num_parts
    parts = x.reshape(num_parts, -1)
    part_size = parts.shape[1]
    # All pieces of an all-to-all have one size, so zeros fill up the last one; they are
    # cut off again below.
    padded = jnp.pad(parts, ((0, 0), (0, -part_size % num_pieces)))
    pieces_PxQxS = padded.reshape(num_parts, num_pieces, -1)
    # all_to_all numbers the devices with `fsdp` fastest, so the axis of pieces (`data`)
    # must precede that of parts (`fsdp`).
    pieces_QPxS = jnp.swapaxes(pieces_PxQxS, 0, 1).reshape(num_devices, -1)
    received = all_to_all_bits(pieces_QPxS, BATCH_AXES, 0, 0)
    mean = jnp.sum(received.astype(jnp.float32), axis=0) / num_devices
    if num_pieces > 1:
        # The data keeps its scale: a mean is at most as large as the largest operand.
        piece = quantize(mean, fmt, seed, leaf_index + SECOND_ROUNDING)
        mean = all_gather_bits(piece, gather_axes, 0).astype(jnp.float32)[:part_size]
    return mean.reshape(shape)
