"""Where each array of the state lives: which of its axes is split over which axis of the mesh.

`fsdp` splits every parameter, its gradient and its moments along the first axis that it divides; scales and whatever
is too small stay whole. `tensor` splits attention and MLP as Megatron does: by heads and hidden channels, the columns
of the first layer and the rows of the second. The columns of `attn.c_attn` are queries, keys and values of all heads
one after the other, of which no contiguous part is a device's share: its kernel is stored in rows.

Legend: D model, F width of a layer's output, L layers.

Reference: Shoeybi et al. 2019, "Megatron-LM", https://arxiv.org/abs/1909.08053.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalify_core.array import is_scaled_array
from scalify_core.tree import Packed

COLUMNS = ("c_fc", "c_gate")  # layers of which a device computes some of the outputs
ROWS = ("c_proj",)  # and those that take these as inputs
HEADS = ("c_attn",)  # queries, keys, values


def names_of(path: Sequence[Any]) -> list[Any]:
    """The keys of the dictionaries on a path, such as [h, 0, attn, c_attn, kernel], of a parameter or of its moment."""
    return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]


def partition(path: Sequence[Any], shape: Sequence[int], sizes: dict[str, int]) -> PartitionSpec:
    """How the array at a path of the state is split over a mesh whose axes have these sizes.

    Of a kernel [D, F] that both axes split, `fsdp` has the rows; where `tensor` has those too, each of its shares.
    """
    names = names_of(path)
    first = 1 if "h" in names and not isinstance(names[names.index("h") + 1], int) else 0  # layers are not split
    axes: list[Any] = [None] * len(shape)
    rest = list(shape)
    layer = names[-2] if len(names) > 1 else None
    if sizes["tensor"] > 1 and len(shape) > first:
        tensor = None
        if layer in COLUMNS:
            tensor = len(shape) - 1
        elif layer in (*ROWS, *HEADS) and names[-1] == "kernel" and len(shape) == first + 2:
            tensor = first
        if tensor is not None and rest[tensor] % sizes["tensor"] == 0:
            axes[tensor] = "tensor"
            rest[tensor] //= sizes["tensor"]
    if sizes["fsdp"] > 1:
        for axis in range(first, len(shape)):
            if rest[axis] % sizes["fsdp"] == 0 and rest[axis]:
                axes[axis] = "fsdp" if axes[axis] is None else (axes[axis], "fsdp")
                break
    return PartitionSpec(*axes)


def is_of_heads(path: Sequence[Any]) -> bool:
    """Whether a parameter is stored otherwise than `tensor` uses it: see above."""
    names = names_of(path)
    return len(names) > 1 and names[-2] in HEADS


def fsdp_axis(spec: PartitionSpec) -> int | None:
    """The axis that `fsdp` splits; None: none."""
    return next((i for i, entry in enumerate(spec) if entry and "fsdp" in entry), None)


def mesh_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """All axes of the mesh that an array is split over."""
    return tuple(name for entry in spec if entry for name in ((entry,) if isinstance(entry, str) else entry))


def mapped(make: Callable[[Any, PartitionSpec], Any], tree: Any, mesh: Mesh) -> Any:
    """`make` of every array of a tree and its `partition`; the arrays of a packed tree are where they were."""
    sizes = dict(mesh.shape)

    def of_leaf(path: Any, x: Any) -> Any:
        if not isinstance(x, Packed):
            return make(x, partition(path, x.shape, sizes))
        paths = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(x.structure, x.names))
        arrays = {name: jax.tree.map(functools.partial(of_leaf, path), x.arrays[name]) for path, name in paths}
        return dataclasses.replace(x, arrays=arrays, scales=make(x.scales, PartitionSpec()))

    return jax.tree_util.tree_map_with_path(of_leaf, tree, is_leaf=lambda x: isinstance(x, Packed))


def partitions(tree: Any, mesh: Mesh) -> Any:
    """`partition` of every array of a tree, a ScaledArray's data and scale among them."""
    return mapped(lambda x, spec: spec, tree, mesh)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """The same as shardings, for `jax.jit` and `jax.device_put`."""
    return mapped(lambda x, spec: NamedSharding(mesh, spec), tree, mesh)


def of_parameters(params: Any, mesh: Mesh) -> Any:
    """`partition` of every parameter, as one: of a ScaledArray that of its data."""
    sizes = dict(mesh.shape)

    def spec(path: Any, p: Any) -> PartitionSpec:
        return partition(path, p.shape, sizes)

    return jax.tree_util.tree_map_with_path(spec, params, is_leaf=is_scaled_array)


def abstract(tree: Any, mesh: Mesh) -> Any:
    """Shapes, dtypes and shardings of a tree of arrays or of their shapes."""
    return mapped(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), tree, mesh
    )


def bytes_per_device(tree: Any) -> int:
    """Of the arrays of a tree, of the device that holds most of them."""
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        leaf = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values())
