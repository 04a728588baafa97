"""Small arrays of a tree that a step computes with as one: those of one shape, as the
rows of a stack.

A model has hundreds of vectors. What an optimiser and a rounding do to each is compiled
for each: of a step of 12 layers of GPT-2 that was most of what a compiler for GPUs had
to do. Between steps every vector is an array of its own; inside, `gather` puts those of
a shape together, and `scatter` takes them apart.

In a gathered tree the first of them has the stack in its place, `[n, ...]` with a scale
for each row, and the others have None. What is computed of a tree element by element is
the same, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core.array.scaled_array import ScaledArray, is_scaled_array
from scalify_core.array.tree import leaves
from scalify_core.numerics import compiler_hints
from scalify_core.optim.weights import LARGE, wide


class Stacks(NamedTuple):
    """Which leaves of trees of a structure are put together.

    Attributes:
        structure: of the trees, a ScaledArray being a leaf; None: no tree is changed.
        groups: of leaves by their numbers, in ascending order; each is a stack.
    """

    structure: Any = None
    groups: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, tree: Any, kinds: Any) -> Stacks:
        """Of the vectors below `LARGE` elements: those of one shape and dtype, and of
        one kind.

        Args:
            tree: of arrays, ScaledArrays or their shapes; the scales all static or all
                scalars.
            kinds: a tree of hashable values of the same structure, such as whether
                weights decay.
        """
        groups: dict[Any, list[int]] = {}
        for i, (x, kind) in enumerate(
            zip(leaves(tree), jax.tree.leaves(kinds), strict=True)
        ):
            if x.ndim == 1 and x.size < LARGE and jnp.issubdtype(x.dtype, jnp.floating):
                groups.setdefault(
                    (x.shape, x.dtype, is_scaled_array(x), kind), []
                ).append(i)
        structure = jax.tree.structure(tree, is_leaf=is_scaled_array)
        blocks = (tuple(block) for group in groups.values() for block in _even(group))
        return cls(structure, tuple(block for block in blocks if len(block) > 1))

    def gather(self, tree: Any) -> Any:
        """`tree` with stacks, as are all its subtrees that have the structure.

        Leaves may be arrays, ScaledArrays with scalar scales, integers or anything
        else: of what is no number the first stands for all. What differs in kind or
        dtype becomes a plain stack in FP32.
        """

        def gathered(tree: Any) -> Any:
            found = leaves(tree)
            for first, *others in self.groups:
                found[first] = _stacked([found[i] for i in (first, *others)])
                for i in others:
                    found[i] = None
            return self.structure.unflatten(found)

        return jax.tree.map(
            lambda x: gathered(x) if self._is_tree(x) else x,
            tree,
            is_leaf=self._is_whole,
        )

    def numbers(self, tree: Any) -> Any:
        """The numbers of the leaves of a tree, gathered as the tree is; None where
        there are no stacks.
        """
        structure: Any = jax.tree.structure(tree, is_leaf=is_scaled_array)
        return (
            self.gather(structure.unflatten(range(structure.num_leaves)))
            if self.groups
            else None
        )

    def scatter(self, tree: Any, like: Any) -> Any:
        """What `gather` made of a tree like `like`, whose static scales the new
        ScaledArrays have.
        """
        subtrees, outer = _flatten(like, self._is_whole)
        return outer.unflatten(
            self._scattered(part, whole) if self._is_tree(whole) else part
            for part, whole in zip(outer.flatten_up_to(tree), subtrees, strict=True)
        )

    def each(
        self,
        tree: Any,
        of_arrays: Callable[[Any], jax.Array],
        of_rows: Callable[[Any], jax.Array],
    ) -> jax.Array:
        """A number of each leaf, in order: `of_arrays` of a gathered tree's lone
        leaves, `of_rows` of each stack.

        Without stacks `of_arrays` of the tree.
        """
        if not self.groups:
            return of_arrays(tree)
        found = self.structure.flatten_up_to(tree)
        rows = [i for group in self.groups for i in group]
        alone = sorted(set(range(len(found))) - set(rows))
        numbers = [
            of_arrays([found[i] for i in alone]),
            *(of_rows(found[group[0]]) for group in self.groups),
        ]
        return jnp.concatenate(numbers)[np.argsort([*alone, *rows])]

    def _is_tree(self, x: Any) -> bool:
        return (
            bool(self.groups)
            and jax.tree.structure(x, is_leaf=is_scaled_array) == self.structure
        )

    def _is_whole(self, x: Any) -> bool:
        """Whether it is not taken apart: a ScaledArray that is built anew has a scale
        that nobody knows any more.
        """
        return is_scaled_array(x) or self._is_tree(x)

    def _scattered(self, tree: Any, like: Any) -> Any:
        found, whole = self.structure.flatten_up_to(tree), leaves(like)
        for group in self.groups:
            rows = _rows(found[group[0]], [whole[i] for i in group])
            for i, row in zip(group, rows, strict=True):
                found[i] = row
        return self.structure.unflatten(found)


NONE = Stacks()
OPERANDS = 90  # of a kernel: XLA gives it some 96


def _even(group: Sequence[int]) -> Iterable[Sequence[int]]:
    """Parts of at most `OPERANDS`, nearly equal: XLA takes the rows of a larger stack
    one by one, a kernel each.
    """
    return itertools.batched(group, -(-len(group) // -(-len(group) // OPERANDS)))


def _flatten(tree: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree, is_leaf=is_leaf)


def _stacked(parts: Sequence[Any]) -> Any:
    if all(type(x) is int for x in parts):
        return np.array(parts)
    if not hasattr(parts[0], "ndim"):
        return parts[0]
    if len({(is_scaled_array(x), x.dtype) for x in parts}) > 1:
        parts = [wide(x) for x in parts]
    if not is_scaled_array(parts[0]):
        return _one_array(parts)
    data, scales = _one_array([x.data for x in parts]), [x.scale for x in parts]
    is_static = all(x.is_static for x in parts)
    scale: Any = (
        np.array(scales, np.float32)
        if is_static
        else jnp.stack([jnp.float32(scale) for scale in scales])
    )
    return ScaledArray(data, scale.reshape(-1, *[1] * (data.ndim - 1)))


def _one_array(parts: Sequence[jax.Array]) -> jax.Array:
    # Held: a kernel that read the parts would write where it reads them, and they would
    # be copied first.
    return compiler_hints.held("rows", jnp.stack(parts))


def _rows(stack: Any, like: Sequence[Any]) -> list[Any]:
    if not is_scaled_array(stack):
        return list(stack)
    scales = [
        x.scale if x.is_static else scale.reshape(())
        for x, scale in zip(like, stack.scale, strict=True)
    ]
    return [
        ScaledArray(row, scale) for row, scale in zip(stack.data, scales, strict=True)
    ]
