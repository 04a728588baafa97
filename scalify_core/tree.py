"""Functions of pytrees in which a ScaledArray is one leaf, and not two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core import cotangents
from scalify_core.array import ScaledArray, is_scaled_array, with_scale


def map_arrays(fun: Callable, tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` in which `fun` is given whole ScaledArrays."""
    return jax.tree.map(fun, tree, *rest, is_leaf=is_scaled_array)


def leaves(tree: Any) -> list[Any]:
    """`jax.tree.leaves` in which a ScaledArray is a leaf."""
    return jax.tree.leaves(tree, is_leaf=is_scaled_array)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A tree whose dynamic scalar scales are one array: a buffer that a compiled step updates, instead of one for each.

    Attributes:
        arrays: the data of its ScaledArrays, and its other leaves, by path.
        scales: FP32, in the order of the leaves.
        structure: of the tree, a ScaledArray being a leaf.
        names: the paths of the leaves, in order.
        scaled: those of the ScaledArrays that `scales` has the scales of.
    """

    arrays: dict[str, Any]
    scales: jax.Array
    structure: Any = dataclasses.field(metadata={"static": True})
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    scaled: tuple[str, ...] = dataclasses.field(metadata={"static": True})


def pack(tree: Any) -> Any:
    """As `Packed`, which `unpack` undoes; a tree without dynamic scalar scales as it is."""
    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_scaled_array)
    named = {jax.tree_util.keystr(path): x for path, x in found}
    dynamic = {name: x for name, x in named.items() if is_scaled_array(x) and not x.is_static}
    scales = {name: scale_of_leaf(x) for name, x in dynamic.items() if x._leaf.ndim == 0}
    if not scales:
        return tree
    arrays = {name: x.data if name in scales else x for name, x in named.items()}
    return Packed(arrays, jnp.stack(list(scales.values())), structure, tuple(named), tuple(scales))


def scale_of_leaf(x: ScaledArray) -> Any:
    """`x.scale` as its leaf says it, whatever the data is: of arrays at hand, outside of `jit`, that is not looked at.

    To look at the data of a state that lies on several devices is a program with a collective for each array; so many
    at once wait for each other for ever on a CPU.
    """
    at_hand = not x._known and isinstance(x._leaf, jax.Array) and not isinstance(x._leaf, jax.core.Tracer)
    return cotangents.number(x._leaf, np.dtype(x.dtype)) if at_hand else x.scale


def unpack(tree: Any) -> Any:
    """The tree that was packed; one that was not as it is."""
    if not isinstance(tree, Packed):
        return tree
    scales = dict(zip(tree.scaled, tree.scales, strict=True))
    arrays = ((name, tree.arrays[name]) for name in tree.names)
    return jax.tree.unflatten(tree.structure, [with_scale(x, scales[n]) if n in scales else x for n, x in arrays])


def with_static_scales(tree: Any) -> Any:
    """Every dynamic scalar scale as a static one, a constant of the programs that are compiled next.

    Reads the scales from the device; a ScaledArray with one scale per layer stays as it is.
    """

    def convert(x: Any) -> Any:
        if is_scaled_array(x) and not x.is_static and x._leaf.ndim == 0:
            return ScaledArray(x.data, float(scale_of_leaf(x)))
        return x

    return map_arrays(convert, tree)


def with_dynamic_scales(tree: Any) -> Any:
    """Every static scale as an FP32 array, a buffer of its own: the form for checkpoints and donated state."""

    def convert(x: Any) -> Any:
        return ScaledArray(x.data, jnp.full((), x.scale, jnp.float32)) if is_scaled_array(x) and x.is_static else x

    return map_arrays(convert, tree)


def rescaled_like(tree: Any, like: Any) -> Any:
    """Every ScaledArray brought to the scale and dtype of the one at its place in `like`, saturating."""

    def convert(x: Any, y: Any) -> Any:
        return x.rescale(y.scale).astype(y.dtype) if is_scaled_array(x) and is_scaled_array(y) else x

    return map_arrays(convert, tree, like)
