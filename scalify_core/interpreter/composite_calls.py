"""Helpers for the rules of composites, under either policy of scales: the axes of the
vmaps around a call, and calls of another function.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core.interpreter import value as v
from scalify_core.interpreter.value import Value
from scalify_core.ops.matmul import Product


def in_order(call: Any, x: Any) -> Any:
    """Return the one operand of a call with its axes in the order of results.

    The axes of the vmaps around the call come first, the outermost first.
    """
    axes = [axis for (axis,) in reversed(call.in_axes)]
    if not any(axes):
        return x
    if isinstance(x, Value):
        # A scale that differs along axes would have to be moved as they are.
        x = v.scalar_scale(x)
        return dataclasses.replace(x, data=in_order(call, x.data), pre_rescale=None)
    # A rule's results have the vmaps' axes in front, as JAX takes them from the
    # batching rule of a composite.
    for depth, axis in enumerate(axes):
        x = jnp.moveaxis(x, depth + axis, depth)
    return x


def unbatched_shape(call: Any, index: int, x: Any) -> tuple[int, ...]:
    """Return the shape of operand `index` without the axes of the vmaps around the
    call.
    """
    shape = list(x.shape)
    for axes in reversed(call.in_axes):  # the outermost first
        if axes[index] is not None:
            del shape[axes[index]]
    return tuple(shape)


def unused_scales(product: Product) -> tuple:
    """Return placeholders for the plain program's measured scales, in the residuals."""
    if product.current_scaling:
        # The backward pass has one tree of residuals, whether scales were measured or
        # not.
        return np.float32(1), np.float32(1)
    return ()


def call_on_data(call: Any, fun: Callable, *operands: Any) -> Any:
    """Return the results of `fun` on pytrees of arrays, under the vmaps of the call."""
    in_tree = jax.tree.structure(operands)
    # As a call: its vmaps are then applied to any function, also where operands have
    # their axes in different places.
    on_data = call.replace(fun=fun, static={}, in_tree=in_tree)
    return on_data.tree(*jax.tree.leaves(operands))
