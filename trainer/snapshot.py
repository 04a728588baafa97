"""Copies of arrays in the host's memory, which the steps that follow cannot overwrite: all that a save waits for."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.leaves import checksums_of_host, start_checksums


class Copies(NamedTuple):
    """Of some arrays, at one moment.

    Attributes:
      arrays: in the order of the originals; those that every device has whole, on one device of each process.
      checksums: waits for those of the originals, sixteen hexadecimal digits each; all processes must ask.
    """

    arrays: list[jax.Array]
    checksums: Callable[[], list[str]]


def copied(originals: Sequence[jax.Array]) -> Copies:
    """Copies that are complete: the originals may be donated to the next step."""
    leaves = [once(x) if x.is_fully_replicated else x for x in originals]
    return beside(leaves) if jax.default_backend() == "cpu" else pinned(leaves)


def once(x: jax.Array) -> jax.Array:
    """An array that every device holds whole, without the copies of a process's other devices."""
    if x.is_fully_addressable:
        return x.addressable_data(0)
    devices: list[Any] = sorted(x.sharding.device_set, key=lambda device: device.id, reverse=True)
    first = {device.process_index: device for device in devices}
    sharding = NamedSharding(Mesh([first[i] for i in sorted(first)], "process"), PartitionSpec())
    mine = [shard.data for shard in x.addressable_shards if shard.device in first.values()]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, mine)


def beside(leaves: Sequence[jax.Array]) -> Copies:
    """Of arrays that are in the host's memory themselves; checksums take time of the cores that train, but later."""
    copies = jax.block_until_ready([_copier(x.sharding)(x) for x in leaves])
    return Copies(copies, lambda: start_checksums(copies, checksums_of_host)())


def pinned(leaves: Sequence[jax.Array]) -> Copies:
    """Of arrays in the memory of a GPU, which computes their checksums in next to no time."""
    found = start_checksums(leaves)
    copies = [jax.device_put(x, x.sharding.with_memory_kind("pinned_host")) for x in leaves]
    return Copies(jax.block_until_ready(copies), found)


@functools.cache
def _copier(sharding: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    """To the same places."""
    return jax.jit(jnp.copy, out_shardings=sharding)
