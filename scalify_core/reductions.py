"""Statistics of many arrays at once: one kernel for each large array, and a few for all of them together.

A large array is reduced in two kernels, of which the second is tiny. Here it is one for all arrays: each is brought to
at most `BLOCKS` partial results first, and those of all arrays are reduced together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

BLOCKS = 256


def largest_magnitudes(groups: Sequence[Sequence[jax.Array]]) -> list[list[jax.Array]]:
    """The largest magnitude of each array, FP32 scalars; 0 of an empty one.

    Args:
        groups: of arrays of one shape: what a group is computed from is read once for all of it.
    """
    partial = [
        part
        for group in groups
        for part in lax.reduce(
            [jnp.abs(_blocks(x)) for x in group],
            [jnp.float32(0)] * len(group),
            lambda a, b: tuple(map(lax.max, a, b)),
            (1,),
        )
    ]
    found = iter(_all(partial, jnp.max))
    return [[next(found) for _ in group] for group in groups]


def sums_of_squares(arrays: Sequence[jax.Array]) -> jax.Array:
    """FP32 `[number of arrays]`."""
    return jnp.stack(_all([jnp.sum(jnp.square(_blocks(x)), axis=1) for x in arrays], jnp.sum))


def _blocks(x: jax.Array) -> jax.Array:
    """The FP32 elements in at most `BLOCKS` rows."""
    rows = math.gcd(x.size, BLOCKS) if x.size else 1
    return x.astype(jnp.float32).reshape(rows, x.size // rows)


def _all(partial: Sequence[jax.Array], reduce: Callable) -> list[jax.Array]:
    """`reduce` of each of these vectors, of which zeros change no result."""
    if not partial:
        return []
    table = jnp.stack([jnp.pad(p, (0, BLOCKS - p.size)) for p in partial])
    return list(reduce(table, axis=1))
