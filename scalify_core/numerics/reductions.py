"""Statistics of many arrays at once, in few kernels.

A large array is reduced in two kernels, of which the second is tiny. Here many arrays
share the second. Each is brought to `BLOCKS` partial results first, or to so many that
XLA does not split that step. The partial results of many arrays are the rows of a table
that is reduced at once. Small arrays are rows of such tables directly, those of one
shape together.
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
# Elements of a block: up to this length XLA's row reductions for GPUs are one kernel.
LONGEST = 2**14
SMALL = 2**14  # elements
LARGE_ROWS = 64  # rows of a table: XLA gives a kernel some 96 operands
# Small rows are computed in that kernel: two new moments from four or five operands.
SMALL_ROWS = 32


def largest_magnitudes(groups: Sequence[Sequence[jax.Array]]) -> jax.Array:
    """Return the largest magnitude of each array, FP32 `[number of arrays]`.

    It is 0 for an empty array.

    Args:
        groups: groups of arrays of one shape; shared operands of a group are read once.
    """
    return _reduced(groups, jnp.abs, lax.max)


def largest_of_rows(stacks: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the largest magnitude of each row, FP32 `[n]` for each stack.

    The stacks have one shape [n, ...].
    """
    zeros, axes = (np.float32(0),) * len(stacks), tuple(range(1, stacks[0].ndim))
    magnitudes = tuple(jnp.abs(x.astype(jnp.float32)) for x in stacks)
    return list(
        lax.reduce(magnitudes, zeros, lambda a, b: tuple(map(lax.max, a, b)), axes)
    )


def squares_of_rows(stack: jax.Array) -> jax.Array:
    """Return the sum of squares of each row of a stack [n, ...], FP32 `[n]`."""
    return jnp.sum(jnp.square(stack.astype(jnp.float32)), tuple(range(1, stack.ndim)))


def sums_of_squares(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return the sum of squares of each array, FP32 `[number of arrays]`."""
    return _reduced([[x] for x in arrays], jnp.square, lax.add)


def sums_at_once(
    arrays: Sequence[jax.Array], axes: tuple[int, ...]
) -> Sequence[jax.Array]:
    """Return the sum over `axes` of each FP32 array, all of one shape, in one
    reduction.

    For GPUs; not differentiable. XLA compiles it to one kernel for each of its steps;
    separate sums are a kernel each at the second step.
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
    """Reduce `of_element` of each array's elements in FP32 with `combine`.

    Zeros must not change the result of `combine`.
    """
    # The rows of tables by length, each with the number of its array.
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
    tables = list[tuple]()
    for same in large.values():
        tables += itertools.batched(same, LARGE_ROWS)
    for same in small.values():
        tables += itertools.batched(same, SMALL_ROWS)
    if not tables:
        return jnp.zeros(0)
    results = [
        lax.reduce(jnp.stack([row for row, _ in table]), jnp.float32(0), combine, (1,))
        for table in tables
    ]
    numbers = [n for _, n in itertools.chain(*tables)]
    return jnp.concatenate(results)[np.argsort(numbers)]


def _blocks(x: jax.Array) -> jax.Array:
    """Return the elements in `BLOCKS` rows, or 2, 4, ... times as many.

    Each row has at most `LONGEST` elements; the last rows are filled with zeros.
    """
    blocks = BLOCKS * 2 ** max(math.ceil(math.log2(x.size / (BLOCKS * LONGEST))), 0)
    missing = -x.size % blocks
    return (jnp.pad(x.ravel(), (0, missing)) if missing else x).reshape(blocks, -1)
