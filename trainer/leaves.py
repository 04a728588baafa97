"""The leaves of a state: their names, what they look like, and a checksum of their bits."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalify_core.array import ScaledArray, is_scaled_array


def leaf_names(tree: Any) -> list[str]:
    """The path of every leaf, such as `params/h_0/attn/kernel`, in the order of `jax.tree.leaves`."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]


def parameter_names(tree: Any) -> list[str]:
    """The paths of the parameters: as `leaf_names`, a ScaledArray being one."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled_array)]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed PRNG key array."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def describe(tree: Any) -> dict[str, dict[str, Any]]:
    """`shape` and `dtype` of every leaf by name, as JSON values."""
    names = leaf_names(tree)
    if len(set(names)) < len(names):
        raise ValueError(f"two leaves share a name: {sorted({n for n in names if names.count(n) > 1})}")
    return {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        for name, leaf in zip(names, jax.tree.leaves(tree), strict=True)
    }


Description = Mapping[str, Mapping[str, Any]]


def mismatch(wanted: Description, found: Description, *, partial: bool) -> str | None:
    """The first difference between two `describe`d trees in words; None: none. `partial`: `found` may have more."""

    def text(leaf: Mapping[str, Any]) -> str:
        return f"{leaf['dtype']}{leaf['shape']}"

    for name, leaf in wanted.items():
        if name not in found:
            return f"it has no leaf {name}, expected {text(leaf)}"
        if text(found[name]) != text(leaf):
            return f"leaf {name} is {text(found[name])}, expected {text(leaf)}"
    extra = [name for name in found if name not in wanted]
    return f"it has a leaf {extra[0]}, {text(found[extra[0]])}, that is not expected" if extra and not partial else None


def as_saved(like: Any, saved: Description) -> Any:
    """A tree like `like`, its leaves in the form in which they were saved: other dtypes, or ScaledArrays.

    Leaves that were not saved stay as they are, for `mismatch` to name.
    """

    def dtype(name: str) -> np.dtype:
        return jnp.dtype(saved[name]["dtype"])

    def convert(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if f"{name}/data" in saved:
            data = jax.ShapeDtypeStruct(leaf.shape, dtype(f"{name}/data"), sharding=leaf.sharding)
            named = isinstance(leaf.sharding, NamedSharding)
            whole = NamedSharding(leaf.sharding.mesh, PartitionSpec()) if named else leaf.sharding
            return ScaledArray(data, jax.ShapeDtypeStruct((), jnp.float32, sharding=whole))
        if name in saved:
            return jax.ShapeDtypeStruct(leaf.shape, dtype(name), sharding=leaf.sharding)
        return leaf

    return jax.tree_util.tree_map_with_path(convert, like)


def checksum(leaf: jax.Array, start: Sequence[Any] = (), shape: Sequence[int] = ()) -> jax.Array:
    """Two sums (uint32 [2]) of the leaf's bits, each element's times an odd number that depends on its position.

    Odd factors are invertible modulo 2^32: a change of one element changes the sums for certain, any other change with
    probability 1 - 2^-64. Integer sums do not depend on their order, and those of an array are the sums of its parts'.

    Args:
      leaf: an array, or a part of one,
      start: whose first element has this index
      shape: in the whole, which is so large; empty: it is the whole.
    """
    leaf = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
    position, stride = jnp.zeros(leaf.shape, jnp.uint32), 1
    for axis in reversed(range(leaf.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        index = index + jnp.asarray(start[axis]).astype(jnp.uint32) if start else index
        position += index * np.uint32(stride % 2**32)
        stride *= (shape or leaf.shape)[axis]

    def odd(factor: int) -> jax.Array:
        x = (position + np.uint32(1)) * np.uint32(factor)
        x = (x ^ (x >> 15)) * np.uint32(0x2C1B3C6D)
        return (x ^ (x >> 13)) | np.uint32(1)

    return jnp.stack([jnp.sum(bits * odd(factor), dtype=jnp.uint32) for factor in (0x9E3779B1, 0x85EBCA77)])


@functools.partial(jax.jit, static_argnums=(1, 2))
def checksums_of_parts(leaf: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """The checksum of every device's part of a leaf that is split over a mesh, [devices, 2], on that device."""
    entries = (*spec, *(None,) * (leaf.ndim - len(spec)))

    def of_part(part: jax.Array) -> jax.Array:
        start = [0 if e is None else jax.lax.axis_index(e) * n for e, n in zip(entries, part.shape, strict=True)]
        return checksum(part, start, leaf.shape)[None]

    devices = PartitionSpec(mesh.axis_names)
    return jax.shard_map(of_part, mesh=mesh, in_specs=spec, out_specs=devices, check_vma=False)(leaf)


def checksums(leaves: list[jax.Array]) -> list[str]:
    """Sixteen hexadecimal digits a leaf; waits until the leaves are computed. Of split arrays all processes must ask.

    Devices do not talk to each other for it: many small programs that do, at once, can wait for each other forever.
    """
    parts, owners = [], []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf.sharding, NamedSharding):
            first = {shard.device for shard in leaf.addressable_shards if shard.replica_id == 0}
            found = checksums_of_parts(leaf, leaf.sharding.mesh, leaf.sharding.spec)
            mine = [shard.data[0] for shard in found.addressable_shards if shard.device in first]
        else:
            mine = [_checksum(leaf)]
        parts += mine
        owners += [i] * len(mine)
    sums = np.zeros((len(leaves), 2), np.uint32)
    for i, pair in zip(owners, jax.device_get(parts), strict=True):
        sums[i] += pair
    if any(not leaf.is_fully_addressable for leaf in leaves):
        local = [i for i, leaf in enumerate(leaves) if leaf.is_fully_addressable]
        sums[local] *= np.uint32(jax.process_index() == 0)  # every process has those whole
        sums = np.sum(multihost_utils.process_allgather(sums), axis=0, dtype=np.uint32)
    return [f"{int(high):08x}{int(low):08x}" for high, low in sums]


_checksum = jax.jit(checksum)
