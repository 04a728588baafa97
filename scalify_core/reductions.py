"""Statistics of many arrays at once: one kernel for each large array, and a few for all of them together.

A large array is reduced in two kernels, of which the second is tiny. Here it is one for all arrays: each is brought to
at most `BLOCKS` partial results first, and those of all arrays are reduced together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

BLOCKS = 256


def largest_magnitudes(groups: Sequence[Sequence[jax.Array]]) -> jax.Array:
    """The largest magnitude of each array, FP32 `[number of arrays]`; 0 of an empty one.

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
    return jnp.max(_table(partial), axis=1)


def sums_of_squares(arrays: Sequence[jax.Array]) -> jax.Array:
    """FP32 `[number of arrays]`."""
    return jnp.sum(_table([jnp.sum(jnp.square(_blocks(x)), axis=1) for x in arrays]), axis=1)


def _blocks(x: jax.Array) -> jax.Array:
    """The FP32 elements in at most `BLOCKS` rows."""
    rows = math.gcd(x.size, BLOCKS) if x.size else 1
    return x.astype(jnp.float32).reshape(rows, x.size // rows)


def _table(partial: Sequence[jax.Array]) -> jax.Array:
    """These vectors as rows, filled up with zeros, which change no result."""
    return jnp.stack([jnp.pad(p, (0, BLOCKS - p.size)) for p in partial])
