"""Functions of pytrees in which a ScaledArray is one leaf, and not two."""

import importlib
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from scalify_core.array.scaled_array import (
    ScaledArray,
    is_scaled_array,
    value_of,
    with_valid_scales,
)
from scalify_core.numerics.formats import is_float
from scalify_core.numerics.scales import rms_of


def map_arrays(fun: Callable, tree: Any, *rest: Any) -> Any:
    """Return `jax.tree.map` over a tree, with `fun` taking ScaledArrays as leaves."""
    return jax.tree.map(fun, tree, *rest, is_leaf=is_scaled_array)


def structure_of(tree: Any) -> Any:
    """Return the structure of a tree, a ScaledArray being a leaf."""
    return jax.tree.structure(tree, is_leaf=is_scaled_array)


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree, a ScaledArray being a leaf."""
    return jax.tree.leaves(tree, is_leaf=is_scaled_array)


def with_static_scales(tree: Any) -> Any:
    """Return a tree with dynamic scalar scales made static, constants of later
    programs.

    It reads the scales from the device. A ScaledArray with one scale per layer is
    unchanged.
    """

    def convert(x: Any) -> Any:
        if is_scaled_array(x) and not x.is_static and x.scale.ndim == 0:
            return ScaledArray(x.data, float(x.scale))
        return x

    return map_arrays(convert, tree)


def with_dynamic_scales(tree: Any) -> Any:
    """Return a tree with static scales made FP32 arrays, each in a buffer of its own.

    Checkpoints and donated state need this form.
    """

    def convert(x: Any) -> Any:
        if is_scaled_array(x) and x.is_static:
            # A new array each time: XLA refuses to donate one buffer for several
            # leaves.
            return ScaledArray(x.data, jnp.full((), x.scale, jnp.float32))
        return x

    return map_arrays(convert, tree)


def global_norm(tree: Any) -> jax.Array:
    """Return the Euclidean norm of all floating-point values of a tree, an FP32 scalar.

    `optax.global_norm` squares FP16 leaves in FP16, so from 256 on it is infinite, and
    it takes data and scale of a ScaledArray for two arrays. Here logical values are
    squared in FP32, in units of the largest.

    Args:
        tree: ScaledArrays and plain arrays; others are left out.
    """
    tree = with_valid_scales("tree.global_norm", tree)
    values = [jnp.asarray(value_of(x)) for x in leaves(tree)]
    norms = [rms_of(x) * x.size**0.5 for x in values if is_float(x) and x.size]
    # Each norm once more in units of the largest: its square may be beyond FP32, too.
    return rms_of(jnp.stack(norms)) * len(norms) ** 0.5 if norms else jnp.float32(0)


def register_flax() -> None:
    """Let `flax.serialization` store ScaledArrays, as `{"data": ..., "scale": ...}`.

    Call it once. This library does not import Flax by itself. A static scale comes back
    as that of the target, `from_bytes(target, ...)`, if the target's is static.

    Raises:
        ImportError: Flax is not installed.
    """
    serialization = importlib.import_module("flax.serialization")

    def to_state(x: ScaledArray) -> dict[str, Any]:
        scale = jnp.float32(x.scale) if x.is_static else x.scale
        return {"data": x.data, "scale": scale}

    def from_state(target: ScaledArray, state: dict[str, Any]) -> ScaledArray:
        scale = state["scale"]
        # A scale in NumPy would be static.
        new = float(scale) if target.is_static else jnp.asarray(scale)
        return ScaledArray(state["data"], new)

    # A second call, as from another notebook cell, is no error.
    serialization.register_serialization_state(
        ScaledArray, to_state, from_state, override=True
    )


# A serialized program names the structure of its arguments.
export.register_pytree_node_serialization(
    ScaledArray,
    serialized_name="scalify_core.ScaledArray",
    # JSON has each power of two exactly, and null for a scale that is a leaf.
    serialize_auxdata=lambda scale: json.dumps(scale).encode(),
    deserialize_auxdata=json.loads,
)
