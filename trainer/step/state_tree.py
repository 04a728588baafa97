"""The leaves of a state: their names, shapes and dtypes, and a checksum of their
bits.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalify_core.array.scaled_array import (
    ScaledArray,
    check_powers,
    is_scaled_array,
)
from scalify_core.numerics import compiler_hints
from trainer.errors import UserError


def leaf_names(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """Return the path of every leaf, such as `params/h_0/attn/kernel`, in the order of
    `jax.tree.leaves`.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf)]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]


def subtree_like(tree: Any, like: Any) -> Any:
    """Return the part of `tree`, nested dictionaries, whose keys are in `like`."""
    if not isinstance(like, dict):
        return tree
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


def as_saved(like: Any, saved: Description) -> Any:
    """Return a tree like `like` with the dtypes and ScaledArrays of the saved leaves.

    Leaves that were not saved stay unchanged: `mismatch` reports them.
    """

    def dtype(name: str) -> np.dtype:
        return jnp.dtype(saved[name]["dtype"])

    def convert(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if f"{name}/data" in saved:
            data = jax.ShapeDtypeStruct(
                leaf.shape, dtype(f"{name}/data"), sharding=leaf.sharding
            )
            replicated = leaf.sharding
            if isinstance(replicated, NamedSharding):
                replicated = NamedSharding(replicated.mesh, PartitionSpec())
            return ScaledArray(
                data, jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)
            )
        if name in saved:
            return jax.ShapeDtypeStruct(leaf.shape, dtype(name), sharding=leaf.sharding)
        return leaf

    return jax.tree_util.tree_map_with_path(convert, like)


def checksum(leaf: jax.Array, start: Sequence[Any] = ()) -> jax.Array:
    """Return two sums (uint32 [2]) of the leaf's scrambled bits times odd factors that
    depend on the position.

    Scrambling, by a different function in each sum, is one-to-one, and odd factors are
    invertible modulo 2^32: one changed element always changes the sums. Several changes
    cancel in both sums with a probability of 2^-50. Integer sums do not depend on their
    order, and the sums of an array are those of its parts, added.

    Args:
      leaf: an array, or a part of one.
      start: index of the part's first element in the whole array; empty: the leaf is
        the whole array.
    """
    leaf = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(leaf, unsigned).reshape(leaf.shape or (1,))

    def total(sum_index: int) -> jax.Array:
        x = bits
        for axis, size in enumerate(bits.shape):
            factors = _odd_numbers(size, start[axis] if start else 0, axis, sum_index)
            column = jnp.expand_dims(factors, [i for i in range(x.ndim) if i != axis])
            # Split for `_sum`, which adds parts elementwise.
            parts = _parts(x, axis)
            if axis == 0:  # later axes add sums, which are not scrambled again
                parts = [_scrambled(part, sum_index) for part in parts]
            x = _sum(
                [
                    part * factor
                    for part, factor in zip(parts, _parts(column, axis), strict=True)
                ],
                axis,
            )
        return x.reshape(())

    return jnp.stack([total(0), total(1)])


def _odd_numbers(size: int, start: Any, axis: int, sum_index: int) -> jax.Array:
    """Return pseudorandom odd factors for positions along an axis, uint32 [size].

    `start` is the first of the `size` positions.
    """
    x = (
        jnp.arange(size, dtype=jnp.uint32)
        + jnp.asarray(start).astype(jnp.uint32)
        + np.uint32(1)
    )
    x = x * np.uint32((0x9E3779B1, 0x85EBCA77)[sum_index]) + np.uint32(
        (axis * 0x27D4EB2F) % 2**32
    )
    x = (x ^ (x >> 15)) * np.uint32(0x2C1B3C6D)
    x = (x ^ (x >> 12)) * np.uint32(0x297A2D39)
    # Without the barrier XLA computes the factors again for every element.
    return compiler_hints.barrier((x ^ (x >> 15)) | np.uint32(1))


def _scrambled(bits: jax.Array, sum_index: int) -> jax.Array:
    """Return the bits scrambled one-to-one.

    Without it two flipped sign bits would cancel: together they change the sum by 2^31
    times an even number, which is 0 modulo 2^32.
    """
    x = bits.astype(jnp.uint32)
    x = (x ^ (x >> (16, 15)[sum_index])) * np.uint32(
        (0x7FEB352D, 0x846CA68B)[sum_index]
    )
    return x ^ (x >> (15, 16)[sum_index])


def _parts(x: jax.Array, axis: int) -> list[jax.Array]:
    """Split an array into four, three or two equal parts along an axis, or one part if
    none of these divide it.
    """
    size = x.shape[axis]
    return jnp.split(x, next((n for n in (4, 3, 2) if size and size % n == 0), 1), axis)


def _sum(parts: list[jax.Array], axis: int) -> jax.Array:
    """Return the sum of equal parts of an array along an axis, which keeps length 1.

    It adds elementwise as far as possible: XLA's reductions of integers are slow on
    CPUs.
    """
    total = functools.reduce(jnp.add, parts)
    if len(parts) > 1:
        return _sum(_parts(total, axis), axis)
    return jnp.sum(total, axis, keepdims=True, dtype=jnp.uint32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def checksums_of_parts(leaf: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Return the checksum of each device's part of a sharded leaf, [devices, 2]."""
    entries = (*spec, *(None,) * (leaf.ndim - len(spec)))

    def part_checksum(part: jax.Array) -> jax.Array:
        start = [
            0 if axes is None else jax.lax.axis_index(axes) * size
            for axes, size in zip(entries, part.shape, strict=True)
        ]
        return checksum(part, start)[None]

    devices = PartitionSpec(mesh.axis_names)
    return jax.shard_map(
        part_checksum, mesh=mesh, in_specs=spec, out_specs=devices, check_vma=False
    )(leaf)


def checksums(leaves: list[jax.Array]) -> list[str]:
    """Return the checksum of each leaf, sixteen hexadecimal digits.

    Waits until the leaves are computed. For sharded leaves all processes must call
    this. Devices do not communicate: many small collective programs at once can
    deadlock.
    """
    parts, leaf_indices = [], []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf.sharding, NamedSharding):
            first_copies = {
                shard.device
                for shard in leaf.addressable_shards
                if shard.replica_id == 0
            }
            part_sums = checksums_of_parts(leaf, leaf.sharding.mesh, leaf.sharding.spec)
            leaf_parts = [
                shard.data
                for shard in part_sums.addressable_shards
                if shard.device in first_copies
            ]
        else:
            leaf_parts = [_checksum(leaf)]
        parts += leaf_parts
        leaf_indices += [i] * len(leaf_parts)
    sums = np.zeros((len(leaves), 2), np.uint32)
    for i, pair in zip(leaf_indices, jax.device_get(parts), strict=True):
        sums[i] += pair.reshape(2)
    if any(not leaf.is_fully_addressable for leaf in leaves):
        local = [i for i, leaf in enumerate(leaves) if leaf.is_fully_addressable]
        # Every process has these leaves: only process 0 counts them.
        sums[local] *= np.uint32(jax.process_index() == 0)
        sums = np.sum(multihost_utils.process_allgather(sums), axis=0, dtype=np.uint32)
    return [f"{int(high):08x}{int(low):08x}" for high, low in sums]


_checksum = jax.jit(checksum)


def first_nonfinite_leaf(tree: Any) -> str | None:
    """Return the name of the first floating-point leaf that is not finite, or None.

    Waits until the leaves are computed. If a leaf is sharded over processes, all of
    them must call this. Devices do not communicate, as in `checksums`.
    """
    leaves = jax.tree.leaves(tree)
    flags = []
    for leaf in leaves:
        shards = []
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating):
            shards = [s for s in leaf.addressable_shards if s.replica_id == 0]
        flags.append([_all_finite(shard.data) for shard in shards])
    is_finite = np.array(
        [all(flags_of_leaf) for flags_of_leaf in jax.device_get(flags)], bool
    )
    if any(
        isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in leaves
    ):
        is_finite = np.all(multihost_utils.process_allgather(is_finite), axis=0)
    if is_finite.all():
        return None
    return leaf_names(tree)[int(np.argmin(is_finite))]


def check_scales(tree: Any, where: str, advice: str) -> None:
    """Raise UserError for a ScaledArray whose scale is not a power of two.

    The message begins with `where`, the origin of the tree, and ends with `advice`.
    """
    with_paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled_array)
    for path, x in with_paths:
        if is_scaled_array(x):
            try:
                check_powers(np.asarray(x.scale.addressable_data(0)))
            except ValueError as error:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise UserError(f"{where}: {name}: {error}; {advice}") from error


@jax.jit
def _all_finite(x: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(x.astype(jnp.float32)))
