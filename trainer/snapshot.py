"""Copies of arrays in the host's memory, which the steps that follow cannot overwrite: all that a save waits for."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainer.leaves import checksums, start_checksums


class Copies(NamedTuple):
    """Of some arrays, at one moment.

    Attributes:
      arrays: in the order of the originals; those that one process has whole, on one device.
      checksums: waits for those of the originals, sixteen hexadecimal digits each; all processes must ask.
    """

    arrays: list[jax.Array]
    checksums: Callable[[], list[str]]


def copied(originals: Sequence[jax.Array]) -> Copies:
    """Copies that are complete: the originals may be donated to the next step."""
    leaves = [x.addressable_data(0) if x.is_fully_addressable and x.is_fully_replicated else x for x in originals]
    return beside(leaves) if jax.default_backend() == "cpu" else pinned(leaves)


def beside(leaves: Sequence[jax.Array]) -> Copies:
    """Of arrays that are in the host's memory themselves; checksums take time of the cores that train.

    One device computes them later, in the save's own thread. Several do so now: their steps wait for each other on few
    threads, and with programs of another thread in between they can do that forever.
    """
    copies = jax.block_until_ready([_copier(x.sharding)(x) for x in leaves])
    if jax.device_count() == 1:
        return Copies(copies, lambda: checksums(copies))
    values = checksums(copies)
    return Copies(copies, lambda: values)


def pinned(leaves: Sequence[jax.Array]) -> Copies:
    """Of arrays in the memory of a GPU, which computes their checksums in next to no time."""
    found = start_checksums(leaves)
    copies = [jax.device_put(x, x.sharding.with_memory_kind("pinned_host")) for x in leaves]
    return Copies(jax.block_until_ready(copies), found)


@functools.cache
def _copier(sharding: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    """To the same places."""
    return jax.jit(jnp.copy, out_shardings=sharding)
