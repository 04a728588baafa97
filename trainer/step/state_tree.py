"""The leaves of a state: their names, shapes and dtypes."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from scalify_core.array.scaled_array import (
    ScaledArray,
    check_powers,
    is_scaled_array,
)
from trainer.errors import UserError


def leaf_name(path: Any) -> str:
    """Return a path of `jax.tree_util` as a name, such as `params/h_0/attn/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaf_names(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """Return the name of every leaf, in the order of `jax.tree.leaves`."""
    with_paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    return [leaf_name(path) for path, _ in with_paths]


def subtree_like(tree: Any, like: Any) -> Any:
    """Return the part of `tree`, nested dictionaries, whose keys are in `like`."""
    if not isinstance(like, dict):
        return tree
    # Dictionaries alone: a ScaledArray is one leaf here.
    return {key: subtree_like(x, like[key]) for key, x in tree.items() if key in like}


def with_subtree(tree: Any, subtree: Any) -> Any:
    """Return `tree` with the leaves of `subtree`, which `subtree_like` selected."""
    if not isinstance(subtree, dict):
        return subtree
    return {
        key: with_subtree(x, subtree[key]) if key in subtree else x
        for key, x in tree.items()
    }


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is a typed PRNG key array."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def describe(tree: Any) -> dict[str, dict[str, Any]]:
    """Return `shape` and `dtype` of every leaf by name, as JSON values."""
    names = leaf_names(tree)
    # A key `a/b` beside a key `a` with a key `b`: in a checkpoint one would replace the
    # other.
    if len(set(names)) < len(names):
        raise ValueError(
            "two leaves share a name:"
            f" {sorted({n for n in names if names.count(n) > 1})}"
        )
    return {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        for name, leaf in zip(names, jax.tree.leaves(tree), strict=True)
    }


Description = Mapping[str, Mapping[str, Any]]


def mismatch(wanted: Description, saved: Description, *, partial: bool) -> str | None:
    """Return the first difference between two `describe`d trees; None if there is none.

    The text is a clause about `saved`, such as "it has no leaf params/wte, expected
    ...". `partial`: `saved` may have more leaves.
    """

    def dtype_and_shape(leaf: Mapping[str, Any]) -> str:
        return f"{leaf['dtype']}{leaf['shape']}"

    # What is missing first: a renamed leaf would otherwise be reported as one too many.
    for name, leaf in wanted.items():
        expected = dtype_and_shape(leaf)
        if name not in saved:
            return f"it has no leaf {name}, expected {expected}"
        actual = dtype_and_shape(saved[name])
        if actual != expected:
            return f"leaf {name} is {actual}, expected {expected}"
    for name, leaf in saved.items():
        if name not in wanted and not partial:
            actual = dtype_and_shape(leaf)
            return f"it has a leaf {name}, {actual}, that is not expected"
    return None


def replicated_like(sharding: Any) -> Any:
    """Return the sharding that replicates an array over the devices of another
    sharding.
    """
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


def as_saved(like: Any, saved: Description) -> Any:
    """Return a tree like `like` with the dtypes and ScaledArrays of the saved leaves.

    Leaves that were not saved stay unchanged: `mismatch` reports them.
    """

    def dtype(name: str) -> np.dtype:
        return jnp.dtype(saved[name]["dtype"])

    def convert(path: Any, leaf: Any) -> Any:
        name = leaf_name(path)
        if f"{name}/data" in saved:
            data = jax.ShapeDtypeStruct(
                leaf.shape, dtype(f"{name}/data"), sharding=leaf.sharding
            )
            # Every device multiplies by the scale, so it is not split as the data is.
            scale = jax.ShapeDtypeStruct(
                (), jnp.float32, sharding=replicated_like(leaf.sharding)
            )
            return ScaledArray(data, scale)
        if name in saved:
            return jax.ShapeDtypeStruct(leaf.shape, dtype(name), sharding=leaf.sharding)
        return leaf

    return jax.tree_util.tree_map_with_path(convert, like)


def first_nonfinite_leaf(tree: Any) -> str | None:
    """Return the name of the first floating-point leaf that is not finite, or None.

    A ScaledArray is finite if its data times its scale is. Waits until the leaves are
    computed. If a leaf is sharded over processes, all of them must call this. Devices
    do not communicate, as in `checksum.checksums`.
    """
    leaves = jax.tree.leaves(tree, is_leaf=is_scaled_array)
    flags = [_finite_flags(leaf) for leaf in leaves]
    # One transfer for all leaves: a transfer for each would wait for the device each
    # time.
    is_finite = np.array(
        [all(flags_of_leaf) for flags_of_leaf in jax.device_get(flags)], bool
    )
    if any(
        isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        for leaf in jax.tree.leaves(tree)
    ):
        is_finite = np.all(multihost_utils.process_allgather(is_finite), axis=0)
    if is_finite.all():
        return None
    return leaf_names(tree, is_scaled_array)[int(np.argmin(is_finite))]


def _finite_flags(leaf: Any) -> list[jax.Array]:
    """Return whether each part of a leaf in this process is finite."""
    data, scale = leaf, 1.0
    if is_scaled_array(leaf):
        data, scale = leaf.data, leaf.scale
    if not isinstance(data, jax.Array) or not jnp.issubdtype(data.dtype, jnp.floating):
        return []
    shards = [shard for shard in data.addressable_shards if shard.replica_id == 0]
    scales: dict[jax.Device, jax.Array] = {}
    if isinstance(scale, jax.Array):
        scales = {shard.device: shard.data for shard in scale.addressable_shards}
        # Only then: the transfer waits for the device, for each leaf anew.
        if any(shard.device not in scales for shard in shards):
            scale = np.asarray(scale.addressable_data(0))
    return [
        _all_finite(shard.data, scales.get(shard.device, scale)) for shard in shards
    ]


def check_scales(tree: Any, where: str, advice: str) -> None:
    """Raise UserError for a ScaledArray whose scale is not a power of two.

    The message begins with `where`, the origin of the tree, and ends with `advice`.
    """
    with_paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled_array)
    for path, x in with_paths:
        if is_scaled_array(x):
            try:
                # Other scales would make products round where all arithmetic takes them
                # to be exact.
                check_powers(np.asarray(x.scale.addressable_data(0)))
            except ValueError as error:
                raise UserError(
                    f"{where}: {leaf_name(path)}: {error}; {advice}"
                ) from error


@jax.jit
def _all_finite(x: jax.Array, scale: Any) -> jax.Array:
    return jnp.all(jnp.isfinite(x.astype(jnp.float32) * jnp.max(scale)))
