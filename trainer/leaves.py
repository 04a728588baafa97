"""The leaves of a state: their names, what they look like, and a checksum of their bits."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

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


@jax.jit
def checksum(leaf: jax.Array) -> jax.Array:
    """Two sums (uint32 [2]) of the leaf's bits, each element's times an odd number that depends on its position.

    Odd factors are invertible modulo 2^32: a change of one element changes the sums for certain, any other change with
    probability 1 - 2^-64. Integer sums do not depend on their order, hence neither on the sharding nor on the device.
    """
    leaf = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
    position, stride = jnp.zeros(leaf.shape, jnp.uint32), 1
    for axis in reversed(range(leaf.ndim)):
        position += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * np.uint32(stride % 2**32)
        stride *= leaf.shape[axis]

    def odd(factor: int) -> jax.Array:
        x = (position + np.uint32(1)) * np.uint32(factor)
        x = (x ^ (x >> 15)) * np.uint32(0x2C1B3C6D)
        return (x ^ (x >> 13)) | np.uint32(1)

    return jnp.stack([jnp.sum(bits * odd(factor), dtype=jnp.uint32) for factor in (0x9E3779B1, 0x85EBCA77)])


def checksums(leaves: list[jax.Array]) -> list[str]:
    """Sixteen hexadecimal digits a leaf; waits until the leaves are computed."""
    pairs = jax.device_get([checksum(leaf) for leaf in leaves])
    return [f"{int(high):08x}{int(low):08x}" for high, low in pairs]
