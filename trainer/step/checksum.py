"""A checksum of each leaf of a state.

It does not depend on the sharding, so that a run that was restored on another mesh can
compare.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalify_core.numerics import compiler_hints


def checksum(leaf: jax.Array, start: Sequence[Any] = ()) -> jax.Array:
    """Return two sums (uint32 [2]) of the leaf's scrambled bits times odd factors that
    depend on the position.

    Scrambling, by a different function in each sum, is one-to-one, and odd factors are
    invertible modulo 2^32: one changed element always changes the sums. Several changes
    cancel in both sums with a probability of 2^-50. Integer sums do not depend on their
    order, and the sums of an array are those of its parts, added.

    Args:
      leaf: an array, or a part of one.
      start: index of the part's first element in the whole array; empty: the leaf is
        the whole array.
    """
    # `bitcast_convert_type` refuses booleans.
    leaf = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
    # No 8 bytes: `libraries.prepare_jax` refuses JAX_ENABLE_X64.
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    # A scalar gets an axis: elements are scrambled in the loop over the axes.
    bits = jax.lax.bitcast_convert_type(leaf, unsigned).reshape(leaf.shape or (1,))

    def total(sum_index: int) -> jax.Array:
        x = bits
        for axis, size in enumerate(bits.shape):
            # The factor of an element is the product of one factor for each axis, and
            # odd too. So an array of n x m elements needs n + m factors.
            factors = _odd_numbers(size, start[axis] if start else 0, axis, sum_index)
            column = jnp.expand_dims(factors, [i for i in range(x.ndim) if i != axis])
            # `_sum` adds equal parts elementwise: on CPUs a reduction is slower.
            parts = _parts(x, axis)
            if axis == 0:  # later axes add sums, which are not scrambled again
                parts = [_scrambled(part, sum_index) for part in parts]
            x = _sum(
                [
                    part * factor
                    for part, factor in zip(parts, _parts(column, axis), strict=True)
                ],
                axis,
            )
        return x.reshape(())

    return jnp.stack([total(0), total(1)])


def _odd_numbers(size: int, start: Any, axis: int, sum_index: int) -> jax.Array:
    """Return pseudorandom odd factors for positions along an axis, uint32 [size].

    `start` is the first of the `size` positions.
    """
    x = (
        jnp.arange(size, dtype=jnp.uint32)
        + jnp.asarray(start).astype(jnp.uint32)
        + np.uint32(1)
    )
    # The constants of both hashes are part of the checkpoint format: with another one,
    # all saved checkpoints look damaged. These three are primes of xxHash, then comes
    # the `prospector32` of github.com/skeeto/hash-prospector.
    x = x * np.uint32((0x9E3779B1, 0x85EBCA77)[sum_index]) + np.uint32(
        (axis * 0x27D4EB2F) % 2**32
    )
    x = (x ^ (x >> 15)) * np.uint32(0x2C1B3C6D)
    x = (x ^ (x >> 12)) * np.uint32(0x297A2D39)
    # Without the barrier XLA computes the factors again for every element.
    return compiler_hints.barrier((x ^ (x >> 15)) | np.uint32(1))


def _scrambled(bits: jax.Array, sum_index: int) -> jax.Array:
    """Return the bits scrambled one-to-one.

    Without it two flipped sign bits would cancel: together they change the sum by 2^31
    times an even number, which is 0 modulo 2^32.
    """
    # One half of the hash `lowbias32` for each sum. With one function for both, two
    # words whose scrambled bits differ in the highest one alone could be swapped
    # unnoticed: the factors differ by an even number.
    x = bits.astype(jnp.uint32)
    x = (x ^ (x >> (16, 15)[sum_index])) * np.uint32(
        (0x7FEB352D, 0x846CA68B)[sum_index]
    )
    return x ^ (x >> (15, 16)[sum_index])


def _parts(x: jax.Array, axis: int) -> list[jax.Array]:
    """Split an array into four, three or two equal parts along an axis, or one part if
    none of these divide it.
    """
    size = x.shape[axis]
    return jnp.split(x, next((n for n in (4, 3, 2) if size and size % n == 0), 1), axis)


def _sum(parts: list[jax.Array], axis: int) -> jax.Array:
    """Return the sum of equal parts of an array along an axis, which keeps length 1.

    It adds elementwise as far as possible.
    """
    total = functools.reduce(jnp.add, parts)
    if len(parts) > 1:
        return _sum(_parts(total, axis), axis)
    return jnp.sum(total, axis, keepdims=True, dtype=jnp.uint32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def checksums_of_parts(leaf: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Return the checksum of each device's part of a sharded leaf, [devices, 2]."""
    # A PartitionSpec may be shorter than the array has axes; the rest are not split.
    entries = (*spec, *(None,) * (leaf.ndim - len(spec)))

    def part_checksum(part: jax.Array) -> jax.Array:
        start = [
            # Factors depend on the position in the whole array. So the sums of the
            # parts add up to the same total on any mesh.
            0 if axes is None else jax.lax.axis_index(axes) * size
            for axes, size in zip(entries, part.shape, strict=True)
        ]
        return checksum(part, start)[None]

    # Each device returns its own sum and the host adds them. With an all-reduce in each
    # program, forty programs in flight waited for each other forever on CPU devices.
    devices = PartitionSpec(mesh.axis_names)
    return jax.shard_map(
        part_checksum, mesh=mesh, in_specs=spec, out_specs=devices, check_vma=False
    )(leaf)


def checksums(leaves: list[jax.Array]) -> list[str]:
    """Return the checksum of each leaf, sixteen hexadecimal digits.

    Waits until the leaves are computed. For sharded leaves all processes must call
    this. Devices do not communicate: many small collective programs at once can
    deadlock.
    """
    parts, leaf_indices = [], []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf.sharding, NamedSharding):
            # A part that several devices hold must count once.
            first_copies = {
                shard.device
                for shard in leaf.addressable_shards
                if shard.replica_id == 0
            }
            part_sums = checksums_of_parts(leaf, leaf.sharding.mesh, leaf.sharding.spec)
            leaf_parts = [
                shard.data
                for shard in part_sums.addressable_shards
                if shard.device in first_copies
            ]
        else:
            leaf_parts = [_checksum(leaf)]
        parts += leaf_parts
        leaf_indices += [i] * len(leaf_parts)
    sums = np.zeros((len(leaves), 2), np.uint32)
    # Read here, not in the loop above, which would wait for each program in turn.
    for i, pair in zip(leaf_indices, jax.device_get(parts), strict=True):
        sums[i] += pair.reshape(2)
    if any(not leaf.is_fully_addressable for leaf in leaves):
        local = [i for i, leaf in enumerate(leaves) if leaf.is_fully_addressable]
        # Every process has these leaves: only process 0 counts them.
        sums[local] *= np.uint32(jax.process_index() == 0)
        sums = np.sum(multihost_utils.process_allgather(sums), axis=0, dtype=np.uint32)
    return [f"{int(high):08x}{int(low):08x}" for high, low in sums]


_checksum = jax.jit(checksum)
