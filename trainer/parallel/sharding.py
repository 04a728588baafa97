"""Where each array of the state lives: which of its axes is split over which axis of
the mesh.

`fsdp` splits every parameter, its gradient and its moments along the first axis that it
divides; scales and whatever is too small stay whole, and so does what is no parameter
and no moment of one. `tensor` splits attention and MLP as Megatron does: by heads and
hidden channels, the columns of the first layer and the rows of the second. Which axis
that is, the parameter's role says. Columns that are queries, keys and values of all
heads, one after the other, have no contiguous part that is a device's share: such a
kernel is stored in rows.

Legend: D model, F width of a layer's output, L layers.

Reference: Shoeybi et al. 2019, "Megatron-LM", https://arxiv.org/abs/1909.08053.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey

from scalify_core.tree import Packed, map_arrays
from trainer.models.roles import Role, role_of
from trainer.parallel.mesh import REPLICA
from trainer.step.state import REPLICA_FIELDS


def partition(
    role: Role | None, shape: Sequence[int], sizes: dict[str, int]
) -> PartitionSpec:
    """How an array of the state is split over a mesh whose axes have these sizes.

    Of a kernel [D, F] that both axes split, `fsdp` has the rows; where `tensor` has
    those too, each of its shares.

    Args:
      role: of the parameter that it is, or is a moment of; None: it is neither.
      shape: its own; that of a factored moment is not the parameter's.
      sizes: of the mesh's axes.
    """
    axes: list[Any] = [None] * len(shape)
    if role is None:
        return PartitionSpec(*axes)
    first = int(role.stacked)  # layers are not split
    rest = list(shape)
    if sizes["tensor"] > 1 and role.split is not None:
        tensor = len(shape) + role.split
        if tensor >= first and rest[tensor] % sizes["tensor"] == 0:
            axes[tensor] = "tensor"
            rest[tensor] //= sizes["tensor"]
    if sizes["fsdp"] > 1:
        for axis in range(first, len(shape)):
            if rest[axis] % sizes["fsdp"] == 0 and rest[axis]:
                axes[axis] = "fsdp" if axes[axis] is None else (axes[axis], "fsdp")
                break
    return PartitionSpec(*axes)


def fsdp_axis(spec: PartitionSpec) -> int | None:
    """The axis that `fsdp` splits; None: none."""
    return next((i for i, entry in enumerate(spec) if entry and "fsdp" in entry), None)


def mesh_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """All axes of the mesh that an array is split over."""
    return tuple(
        name
        for entry in spec
        if entry
        for name in ((entry,) if isinstance(entry, str) else entry)
    )


def mapped(
    make: Callable[[Any, PartitionSpec], Any], tree: Any, mesh: Mesh, roles: Any
) -> Any:
    """`make` of every array of a tree and its `partition`; the arrays of a packed tree
    are where they were.

    Arrays of replicas have an axis of these in front, which is split over the axis
    REPLICA of the mesh.

    `roles`: of the parameters, see `roles.role_of`.
    """
    sizes = dict(mesh.shape)

    def of_array(path: Any, x: Any, stacked: bool) -> Any:
        if stacked and x.shape:
            return make(
                x,
                PartitionSpec(
                    REPLICA, *partition(role_of(roles, path), x.shape[1:], sizes)
                ),
            )
        return make(x, partition(role_of(roles, path), x.shape, sizes))

    def of_leaf(path: Any, x: Any) -> Any:
        stacked = any(
            isinstance(entry, GetAttrKey) and entry.name in REPLICA_FIELDS
            for entry in path
        )
        if not isinstance(x, Packed):
            return of_array(path, x, stacked)
        paths = jax.tree_util.tree_leaves_with_path(
            jax.tree.unflatten(x.structure, x.names)
        )
        arrays = {
            name: jax.tree.map(
                functools.partial(of_array, path, stacked=stacked), x.arrays[name]
            )
            for path, name in paths
        }
        return dataclasses.replace(
            x, arrays=arrays, scales=of_array((), x.scales, stacked)
        )

    return jax.tree_util.tree_map_with_path(
        of_leaf, tree, is_leaf=lambda x: isinstance(x, Packed)
    )


def partitions(tree: Any, mesh: Mesh, roles: Any) -> Any:
    """`partition` of every array of a tree, a ScaledArray's data and scale among
    them.
    """
    return mapped(lambda x, spec: spec, tree, mesh, roles)


def shardings(tree: Any, mesh: Mesh, roles: Any) -> Any:
    """The same as shardings, for `jax.jit` and `jax.device_put`."""
    return mapped(lambda x, spec: NamedSharding(mesh, spec), tree, mesh, roles)


def of_parameters(params: Any, mesh: Mesh, roles: Any) -> Any:
    """`partition` of every parameter, as one: of a ScaledArray that of its data."""
    sizes = dict(mesh.shape)
    return map_arrays(lambda p, role: partition(role, p.shape, sizes), params, roles)


def abstract(tree: Any, mesh: Mesh, roles: Any) -> Any:
    """Shapes, dtypes and shardings of a tree of arrays or of their shapes."""
    return mapped(
        lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        ),
        tree,
        mesh,
        roles,
    )


def bytes_per_device(tree: Any) -> int:
    """Of the arrays of a tree, of the device that holds most of them."""
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        leaf = (
            jax.random.key_data(leaf)
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        )
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values())
