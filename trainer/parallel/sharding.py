"""Sharding of the state: which axis of each array is split over which axis of the mesh.

`fsdp` splits every parameter, its gradient and its moments along the first axis that it
divides. Arrays without such an axis stay whole; so do scales, and arrays that are
neither parameters nor moments. `tensor` splits attention and MLP as Megatron does: by
heads and hidden channels, the columns of the first layer and the rows of the second.
The parameter's role says which axis that is. A fused QKV kernel has all queries, then
all keys, then all values in its columns, so that the columns of a device's heads are
not contiguous. It is split by rows.

Legend: D model, F width of a layer's output.

Reference: Shoeybi et al. 2019, "Megatron-LM", https://arxiv.org/abs/1909.08053.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey

from scalify_core.array.tree import map_arrays
from trainer.models.roles import Role, role_of
from trainer.parallel.mesh import REPLICA
from trainer.step.packing import Packed
from trainer.step.state import REPLICA_FIELDS


def partition_spec(
    role: Role | None, shape: Sequence[int], sizes: dict[str, int]
) -> PartitionSpec:
    """Return how an array of the state is split over a mesh.

    Of a kernel [D, F], `fsdp` splits the rows if it divides them. If `tensor` splits
    the rows as well, `fsdp` splits each shard of `tensor` further.

    Args:
      role: role of the parameter, also for its moments; None for other arrays.
      shape: shape of the array; that of a factored moment is not the parameter's.
      sizes: sizes of the mesh's axes.
    """
    axes: list[Any] = [None] * len(shape)
    if role is None:
        return PartitionSpec(*axes)
    first_axis = int(role.stacked)  # not that of layers, which a scan slices
    local_shape = list(shape)
    # An axis of one device is not named, so that shardings of equal placement are
    # equal.
    if sizes["tensor"] > 1 and role.split is not None:
        # `role.split` counts from the end: -1 is the last axis. A factored moment may
        # lack that axis.
        split_axis = len(shape) + role.split
        # A factored moment may have another axis at this place, or one of length 1; one
        # that does not divide stays whole.
        if split_axis >= first_axis and local_shape[split_axis] % sizes["tensor"] == 0:
            axes[split_axis] = "tensor"
            local_shape[split_axis] //= sizes["tensor"]
    if sizes["fsdp"] > 1:
        # Rows of a kernel before its columns: shards of rows are contiguous in memory.
        for axis in range(first_axis, len(shape)):
            # XLA cannot reduce-scatter an empty axis.
            if local_shape[axis] > 0 and local_shape[axis] % sizes["fsdp"] == 0:
                axes[axis] = "fsdp" if axes[axis] is None else (axes[axis], "fsdp")
                break
    return PartitionSpec(*axes)


def axes_of_entry(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes in an entry of a spec: a name, a tuple of names, or None."""
    if isinstance(entry, str):
        return (entry,)
    return entry or ()


def fsdp_axis(spec: PartitionSpec) -> int | None:
    """Return the axis that `fsdp` splits; None if there is none."""
    return next(
        (i for i, entry in enumerate(spec) if "fsdp" in axes_of_entry(entry)), None
    )


def mesh_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Return all mesh axes that an array is split over."""
    return tuple(itertools.chain(*map(axes_of_entry, spec)))


def map_specs(
    fun: Callable[[Any, PartitionSpec], Any], tree: Any, mesh: Mesh, roles: Any
) -> Any:
    """Apply `fun` to every array of a tree and its `partition_spec`.

    A `Packed` tree stays packed: `fun` is given the array of all its scales as well.
    Arrays of DiLoCo replicas have a leading axis, which is split over the mesh axis
    REPLICA. Their scalars are scales of parameters, which all replicas share. `roles`
    are those of the parameters; see `roles.role_of`.
    """
    sizes = dict(mesh.shape)

    def map_array(path: Any, x: Any, by_replica: bool) -> Any:
        role = role_of(roles, path)
        if by_replica and x.shape:
            spec = PartitionSpec(REPLICA, *partition_spec(role, x.shape[1:], sizes))
        else:
            spec = partition_spec(role, x.shape, sizes)
        return fun(x, spec)

    def map_leaf(path: Any, x: Any) -> Any:
        by_replica = any(
            isinstance(entry, GetAttrKey) and entry.name in REPLICA_FIELDS
            for entry in path
        )
        if not isinstance(x, Packed):
            return map_array(path, x, by_replica)
        # The paths of the arrays in the tree that was packed: they lead to roles.
        array_paths = jax.tree_util.tree_leaves_with_path(
            jax.tree.unflatten(x.structure, x.names)
        )
        arrays = {
            name: jax.tree.map(
                functools.partial(map_array, array_path, by_replica=by_replica),
                x.arrays[name],
            )
            for array_path, name in array_paths
        }
        # The empty path leads to no role, so the array of scales stays whole on every
        # device.
        return dataclasses.replace(
            x, arrays=arrays, scales=map_array((), x.scales, by_replica)
        )

    return jax.tree_util.tree_map_with_path(
        map_leaf, tree, is_leaf=lambda x: isinstance(x, Packed)
    )


def array_specs(tree: Any, mesh: Mesh, roles: Any) -> Any:
    """Return the `partition_spec` of every array of a tree.

    A ScaledArray has one for its data and one for its scale.
    """
    return map_specs(lambda x, spec: spec, tree, mesh, roles)


def shardings(tree: Any, mesh: Mesh, roles: Any) -> Any:
    """Return `array_specs` as shardings, for `jax.jit` and `jax.device_put`."""
    return map_specs(lambda x, spec: NamedSharding(mesh, spec), tree, mesh, roles)


def param_specs(params: Any, mesh: Mesh, roles: Any) -> Any:
    """Return the `partition_spec` of every parameter; a ScaledArray has that of its
    data.
    """
    sizes = dict(mesh.shape)
    return map_arrays(
        lambda p, role: partition_spec(role, p.shape, sizes), params, roles
    )


def abstract_arrays(tree: Any, mesh: Mesh, roles: Any) -> Any:
    """Return a tree of arrays or shapes as ShapeDtypeStructs with shardings."""
    return map_specs(
        lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        ),
        tree,
        mesh,
        roles,
    )
