"""Functions of pytrees in which a ScaledArray is one leaf, and not two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from scalify_core.array import ScaledArray, is_scaled_array


def map_arrays(fun: Callable, tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` in which `fun` is given whole ScaledArrays."""
    return jax.tree.map(fun, tree, *rest, is_leaf=is_scaled_array)


def leaves(tree: Any) -> list[Any]:
    """`jax.tree.leaves` in which a ScaledArray is a leaf."""
    return jax.tree.leaves(tree, is_leaf=is_scaled_array)


def with_static_scales(tree: Any) -> Any:
    """Every dynamic scalar scale as a static one, a constant of the programs that are compiled next.

    Reads the scales from the device; a ScaledArray with one scale per layer stays as it is.
    """

    def convert(x: Any) -> Any:
        if is_scaled_array(x) and not x.is_static and x.scale.ndim == 0:
            return ScaledArray(x.data, float(x.scale))
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
