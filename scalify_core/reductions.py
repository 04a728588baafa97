"""Statistics of many arrays at once: a kernel for each large array, and a few for all the rest.

A large array is reduced in two kernels, of which the second is tiny. Here it is one for many arrays: each is brought to
`BLOCKS` partial results first, and those of `ROWS` arrays are reduced together. Small arrays, which a model has
many of, are reduced as rows of a table, those of one shape together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCKS = 256
SMALL = 2**14  # elements
# XLA gives a kernel some 96 operands. The new moments of a parameter are computed from four or five.
ROWS = 64
GROUPS = 16


def largest_magnitudes(groups: Sequence[Sequence[jax.Array]]) -> jax.Array:
    """The largest magnitude of each array, FP32 `[number of arrays]`; 0 of an empty one.

    Args:
        groups: of arrays of one shape: what a group is computed from is read once for all of it.
    """
    return _reduced(groups, jnp.abs, lax.max)


def sums_of_squares(arrays: Sequence[jax.Array]) -> jax.Array:
    """FP32 `[number of arrays]`."""
    return _reduced([[x] for x in arrays], jnp.square, lax.add)


def _reduced(
    groups: Sequence[Sequence[jax.Array]],
    of_element: Callable[[jax.Array], jax.Array],
    combine: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """What `combine`, which zeros do not change, makes of `of_element` of each array's elements in FP32."""
    tables = list[list[jax.Array]]()
    places = list[int]()  # of the rows of all tables
    first = np.cumsum([0, *map(len, groups)])
    small: dict[tuple[int, ...], list[int]] = {}
    rows = list[jax.Array]()
    for i, group in enumerate(groups):
        if group[0].size <= SMALL:
            small.setdefault(group[0].shape, []).append(i)
            continue
        zeros = [jnp.float32(0)] * len(group)
        rows += lax.reduce([of_element(_blocks(x)) for x in group], zeros, lambda a, b: tuple(map(combine, a, b)), (1,))
        places += range(first[i], first[i + 1])
    tables += _parts(rows, ROWS)
    for same in small.values():
        for part in _parts(same, GROUPS):
            tables.append([of_element(x.astype(jnp.float32).ravel()) for i in part for x in groups[i]])
            places += [place for i in part for place in range(first[i], first[i + 1])]
    if not tables:
        return jnp.zeros(0)
    found = [lax.reduce(jnp.stack(table), jnp.float32(0), combine, (1,)) for table in tables]
    return jnp.concatenate(found)[np.argsort(places)]


def _blocks(x: jax.Array) -> jax.Array:
    """The FP32 elements in `BLOCKS` rows, the last ones filled up with zeros."""
    x = x.astype(jnp.float32)
    missing = -x.size % BLOCKS
    return (jnp.pad(x.ravel(), (0, missing)) if missing else x).reshape(BLOCKS, -1)


def _parts[T](whole: Sequence[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(whole), size):
        yield list(whole[start : start + size])
