"""Stack the small arrays of a tree that have one shape, for a step's arithmetic.

A model has hundreds of vectors. The optimizer's arithmetic and rounding are compiled
for each: in a step of 12 layers of GPT-2, most of the compiler's work on GPUs. Between
steps every vector is an array of its own; inside, `stack` puts those of a shape
together, and `unstack` takes them apart.

In a stacked tree the first vector is replaced by the stack, `[n, ...]` with a scale for
each row, and the others by None. Elementwise results are the same, bit for bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core import weights
from scalify_core.array.scaled_array import ScaledArray, is_scaled_array
from scalify_core.array.tree import leaves, structure_of
from scalify_core.numerics import compiler_hints
from scalify_core.numerics.formats import is_float


class Stacks(NamedTuple):
    """The leaves of trees that are stacked.

    Attributes:
        structure: the structure of the trees, a ScaledArray being a leaf; None: trees
            are not changed.
        groups: the numbers of the leaves of each stack, in ascending order.
    """

    structure: Any = None
    groups: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, tree: Any, kinds: Any) -> Stacks:
        """Return the stacks of the vectors below `weights.LARGE` elements.

        Those of one shape, dtype and kind form a stack.

        Args:
            tree: a tree of arrays, ScaledArrays or their shapes; the scales are all
                static or all scalars.
            kinds: a tree of hashable values of the same structure, such as whether
                weights decay.
        """
        groups: dict[Any, list[int]] = {}
        # A stack has one dtype and one treatment, so both are part of its key.
        for i, (x, kind) in enumerate(
            zip(leaves(tree), jax.tree.leaves(kinds), strict=True)
        ):
            # Vectors alone: they are most of a GPT-2's arrays, and a stack copies its
            # rows.
            if x.ndim == 1 and x.size < weights.LARGE and is_float(x):
                groups.setdefault(
                    (x.shape, x.dtype, is_scaled_array(x), kind), []
                ).append(i)
        structure = structure_of(tree)
        parts = itertools.chain(*map(_split_evenly, groups.values()))
        # A stack of one row costs kernels and saves none.
        return cls(structure, tuple(part for part in parts if len(part) > 1))

    def stack(self, tree: Any) -> Any:
        """Return `tree` with stacks, in all its subtrees that have the structure.

        Leaves may be arrays, ScaledArrays with scalar scales, integers or other
        objects. For objects that are not numbers, the first stands for all. Leaves of
        different kind or dtype become a plain stack in FP32.
        """

        def stack_subtree(subtree: Any) -> Any:
            subtree_leaves = leaves(subtree)
            for group in self.groups:
                subtree_leaves[group[0]] = _stack_leaves(
                    [subtree_leaves[i] for i in group]
                )
                for i in group[1:]:
                    subtree_leaves[i] = None
            return self.structure.unflatten(subtree_leaves)

        return jax.tree.map(
            lambda x: stack_subtree(x) if self._has_structure(x) else x,
            tree,
            is_leaf=self._stop_at,
        )

    def leaf_indices(self, tree: Any) -> Any:
        """Return the index of each of a tree's leaves, stacked like the tree.

        None: there are no stacks.
        """
        structure = structure_of(tree)
        if self.groups:
            return self.stack(structure.unflatten(range(structure.num_leaves)))
        return None

    def unstack(self, tree: Any, like: Any) -> Any:
        """Return the tree whose stacked form is `tree`.

        `like` is the tree before stacking; new ScaledArrays take its static scales.
        """
        outer: Any
        subtrees, outer = jax.tree.flatten(like, is_leaf=self._stop_at)
        return outer.unflatten(
            self._unstack_subtree(part, subtree)
            if self._has_structure(subtree)
            else part
            for part, subtree in zip(outer.flatten_up_to(tree), subtrees, strict=True)
        )

    def each(
        self,
        tree: Any,
        of_arrays: Callable[[Any], jax.Array],
        of_rows: Callable[[Any], jax.Array],
    ) -> jax.Array:
        """Return a number for each leaf, in order.

        It is `of_arrays` of a stacked tree's lone leaves, and `of_rows` of each stack.
        Without stacks it is `of_arrays` of the tree.
        """
        if not self.groups:
            return of_arrays(tree)
        parts = self.structure.flatten_up_to(tree)
        rows = list(itertools.chain(*self.groups))
        alone = sorted(set(range(len(parts))) - set(rows))
        numbers = [
            of_arrays([parts[i] for i in alone]),
            *(of_rows(parts[group[0]]) for group in self.groups),
        ]
        # In the order of the leaves: the norm adds them so, with or without stacks.
        return jnp.concatenate(numbers)[np.argsort([*alone, *rows])]

    def _has_structure(self, x: Any) -> bool:
        return bool(self.groups) and structure_of(x) == self.structure

    def _stop_at(self, x: Any) -> bool:
        """Return whether not to take a node apart.

        Building a ScaledArray anew would lose the knowledge of its scale.
        """
        return is_scaled_array(x) or self._has_structure(x)

    def _unstack_subtree(self, subtree: Any, like: Any) -> Any:
        parts, originals = self.structure.flatten_up_to(subtree), leaves(like)
        for group in self.groups:
            rows = _rows(parts[group[0]], [originals[i] for i in group])
            for i, row in zip(group, rows, strict=True):
                parts[i] = row
        return self.structure.unflatten(parts)


NO_STACKS = Stacks()
MAX_ROWS = 90  # of a stack: XLA gives a kernel some 96 operands


def _split_evenly(group: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """Split into nearly equal parts of at most `MAX_ROWS`.

    XLA takes the rows of a larger stack one by one, a kernel each.
    """
    parts = math.ceil(len(group) / MAX_ROWS)
    return itertools.batched(group, math.ceil(len(group) / parts))


def _stack_leaves(parts: Sequence[Any]) -> Any:
    # Indices of leaves: a NumPy array is a constant of the compiled step. A bool is an
    # `int` too, but the mask of the decay is one value for the whole stack.
    if all(type(x) is int for x in parts):
        return np.array(parts)
    if not hasattr(parts[0], "ndim"):
        return parts[0]
    # Gradients of one shape may be stored in several formats, which FP32 holds.
    if len({(is_scaled_array(x), x.dtype) for x in parts}) > 1:
        parts = [weights.wide(x) for x in parts]
    if not is_scaled_array(parts[0]):
        return _stack_arrays(parts)
    data, scales = _stack_arrays([x.data for x in parts]), [x.scale for x in parts]
    is_static = all(x.is_static for x in parts)
    scale: Any = (
        np.array(scales, np.float32)
        if is_static
        else jnp.stack([jnp.float32(scale) for scale in scales])
    )
    return ScaledArray(data, scale.reshape(-1, *[1] * (data.ndim - 1)))


def _stack_arrays(parts: Sequence[jax.Array]) -> jax.Array:
    # Without the barrier XLA fuses the stack with the in-place update, and must first
    # copy the parts. On CUDA each row would be a kernel, too.
    return compiler_hints.barrier(jnp.stack(parts))


def _rows(stack: Any, like: Sequence[Any]) -> list[Any]:
    if not is_scaled_array(stack):
        return list(stack)
    # A static scale is a constant of the compiled step, so it is taken from the weight,
    # not from the stack.
    scales = [
        x.scale if x.is_static else scale.reshape(())
        for x, scale in zip(like, stack.scale, strict=True)
    ]
    return [
        ScaledArray(row, scale) for row, scale in zip(stack.data, scales, strict=True)
    ]
