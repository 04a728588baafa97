"""Statistics of many arrays at once: a kernel for each large array, and a few for all
the rest.

A large array is reduced in two kernels, of which the second is tiny. Here it is one for
many arrays: each is brought to `BLOCKS` partial results first, or so many that XLA does
not cut that in two steps itself, and those of many are the rows of a table that is
reduced at once. Small arrays, which a model has many of, are rows of such tables as
they are, those of one shape together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCKS = 256
# elements of a block: XLA's row reductions for GPUs are one kernel up to that
LONGEST = 2**14
SMALL = 2**14  # elements
LARGE_ROWS = 64  # rows of a table: XLA gives a kernel some 96 operands
# these are computed in that kernel: two new moments from four or five operands
SMALL_ROWS = 32


def largest_magnitudes(groups: Sequence[Sequence[jax.Array]]) -> jax.Array:
    """The largest magnitude of each array, FP32 `[number of arrays]`; 0 of an empty
    one.

    Args:
        groups: of arrays of one shape: what a group is computed from is read once for
            all of it.
    """
    return _reduced(groups, jnp.abs, lax.max)


def largest_of_rows(stacks: Sequence[jax.Array]) -> list[jax.Array]:
    """The largest magnitude of each row of stacks of one shape [n, ...], FP32 `[n]` of
    each stack.
    """
    zeros, axes = (np.float32(0),) * len(stacks), tuple(range(1, stacks[0].ndim))
    magnitudes = tuple(jnp.abs(x.astype(jnp.float32)) for x in stacks)
    return list(
        lax.reduce(magnitudes, zeros, lambda a, b: tuple(map(lax.max, a, b)), axes)
    )


def squares_of_rows(stack: jax.Array) -> jax.Array:
    """The sum of squares of each row of a stack [n, ...], FP32 `[n]`."""
    return jnp.sum(jnp.square(stack.astype(jnp.float32)), tuple(range(1, stack.ndim)))


def sums_of_squares(arrays: Sequence[jax.Array]) -> jax.Array:
    """FP32 `[number of arrays]`."""
    return _reduced([[x] for x in arrays], jnp.square, lax.add)


def sums_at_once(
    arrays: Sequence[jax.Array], axes: tuple[int, ...]
) -> Sequence[jax.Array]:
    """The sum of each of some FP32 arrays of one shape over `axes`, in one reduction.
    For GPUs; not differentiable.

    XLA makes one kernel of it, and one where it cuts it in two steps; sums one by one
    are a kernel each at the second.
    """
    zeros = (np.float32(0),) * len(arrays)
    return lax.reduce(
        tuple(arrays), zeros, lambda a, b: tuple(map(lax.add, a, b)), axes
    )


def _reduced(
    groups: Sequence[Sequence[jax.Array]],
    of_element: Callable[[jax.Array], jax.Array],
    combine: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """What `combine`, which zeros do not change, makes of `of_element` of each array's
    elements in FP32.
    """
    # rows of tables by length, each with the number of its array
    large = dict[int, list[tuple[jax.Array, int]]]()
    small = dict[tuple[int, ...], list[tuple[jax.Array, int]]]()
    number = itertools.count()
    for group in groups:
        wide = [x.astype(jnp.float32) for x in group]
        if group[0].size <= SMALL:
            rows = [of_element(x.ravel()) for x in wide]
            small.setdefault(group[0].shape, []).extend(zip(rows, number, strict=False))
        else:
            zeros = [jnp.float32(0)] * len(wide)
            rows = lax.reduce(
                [of_element(_blocks(x)) for x in wide],
                zeros,
                lambda a, b: tuple(map(combine, a, b)),
                (1,),
            )
            large.setdefault(rows[0].size, []).extend(zip(rows, number, strict=False))
    tables = [
        table
        for same in large.values()
        for table in itertools.batched(same, LARGE_ROWS)
    ]
    tables += [
        table
        for same in small.values()
        for table in itertools.batched(same, SMALL_ROWS)
    ]
    if not tables:
        return jnp.zeros(0)
    found = [
        lax.reduce(jnp.stack([row for row, _ in table]), jnp.float32(0), combine, (1,))
        for table in tables
    ]
    return jnp.concatenate(found)[np.argsort([n for table in tables for _, n in table])]


def _blocks(x: jax.Array) -> jax.Array:
    """The elements in `BLOCKS` rows or as many times 2, 4, ... that each is at most
    `LONGEST`, the last ones filled up with zeros.
    """
    blocks = BLOCKS * 2 ** max(math.ceil(math.log2(x.size / (BLOCKS * LONGEST))), 0)
    missing = -x.size % blocks
    return (jnp.pad(x.ravel(), (0, missing)) if missing else x).reshape(blocks, -1)
