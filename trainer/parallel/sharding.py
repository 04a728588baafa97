"""Sharding of the state: which axis of each array is split over which axis of the mesh.

`fsdp` splits every parameter, its gradient and its moments along the first axis that it
divides. Scales, small arrays, and all that is no parameter or moment stay whole.
`tensor` splits attention and MLP as Megatron does: by heads and hidden channels, the
columns of the first layer and the rows of the second. The parameter's role says which
axis that is. Columns that hold queries, keys and values of all heads one after another
have no contiguous part for a device: such a kernel is split in rows.

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

from scalify_core.array.tree import Packed, map_arrays
from trainer.models.roles import Role, role_of
from trainer.parallel.mesh import REPLICA
from trainer.step.state import REPLICA_FIELDS


def partition(
    role: Role | None, shape: Sequence[int], sizes: dict[str, int]
) -> PartitionSpec:
    """Return how an array of the state is split over a mesh.

    Of a kernel [D, F] that both axes split, `fsdp` splits the rows; where `tensor`
    splits those too, each of its shares.

    Args:
      role: of the parameter that it is, or is a moment of; None: it is neither.
      shape: of the array; a factored moment's is not the parameter's.
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
    """Return the axis that `fsdp` splits; None if there is none."""
    return next((i for i, entry in enumerate(spec) if entry and "fsdp" in entry), None)


def mesh_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Return all mesh axes that an array is split over."""
    axes: list[str] = []
    for entry in spec:
        if isinstance(entry, str):
            axes.append(entry)
        elif entry:
            axes += entry
    return tuple(axes)


def map_partitions(
    make: Callable[[Any, PartitionSpec], Any], tree: Any, mesh: Mesh, roles: Any
) -> Any:
    """Apply `make` to every array of a tree and its `partition`.

    The arrays of a packed tree stay in their places. Arrays of DiLoCo replicas have a
    leading axis, which is split over the mesh axis REPLICA. `roles`: of the parameters,
    see `roles.role_of`.
    """
    sizes = dict(mesh.shape)

    def make_array(path: Any, x: Any, stacked: bool) -> Any:
        role = role_of(roles, path)
        if stacked and x.shape:
            spec = PartitionSpec(REPLICA, *partition(role, x.shape[1:], sizes))
        else:
            spec = partition(role, x.shape, sizes)
        return make(x, spec)

    def make_leaf(path: Any, x: Any) -> Any:
        stacked = any(
            isinstance(entry, GetAttrKey) and entry.name in REPLICA_FIELDS
            for entry in path
        )
        if not isinstance(x, Packed):
            return make_array(path, x, stacked)
        paths = jax.tree_util.tree_leaves_with_path(
            jax.tree.unflatten(x.structure, x.names)
        )
        arrays = {
            name: jax.tree.map(
                functools.partial(make_array, path, stacked=stacked), x.arrays[name]
            )
            for path, name in paths
        }
        return dataclasses.replace(
            x, arrays=arrays, scales=make_array((), x.scales, stacked)
        )

    return jax.tree_util.tree_map_with_path(
        make_leaf, tree, is_leaf=lambda x: isinstance(x, Packed)
    )


def partitions(tree: Any, mesh: Mesh, roles: Any) -> Any:
    """Return the `partition` of every array of a tree, among them a ScaledArray's data
    and scale.
    """
    return map_partitions(lambda x, spec: spec, tree, mesh, roles)


def shardings(tree: Any, mesh: Mesh, roles: Any) -> Any:
    """Return `partitions` as shardings, for `jax.jit` and `jax.device_put`."""
    return map_partitions(lambda x, spec: NamedSharding(mesh, spec), tree, mesh, roles)


def parameter_partitions(params: Any, mesh: Mesh, roles: Any) -> Any:
    """Return the `partition` of every parameter; for a ScaledArray that of its data."""
    sizes = dict(mesh.shape)
    return map_arrays(lambda p, role: partition(role, p.shape, sizes), params, roles)


def abstract(tree: Any, mesh: Mesh, roles: Any) -> Any:
    """Return shapes, dtypes and shardings of a tree of arrays, or of their shapes."""
    return map_partitions(
        lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        ),
        tree,
        mesh,
        roles,
    )
