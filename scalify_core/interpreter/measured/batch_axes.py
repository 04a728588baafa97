"""The batch axes of an FP8 product's operands and results.

They are the axes of the product's own batch, and the axes of the vmaps around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from scalify_core.array.scaled_array import ScaledArray

# For each axis the batch axis that it is, in operands and results; None: no batch.
Labels = list[Any]


def labels(ndim: int, batch: Sequence[int], mapped: Sequence[int | None]) -> Labels:
    """Return the labels of the axes of an operand, vmaps included.

    Args:
        ndim: the operand's rank, vmaps included.
        batch: the axes of the product's own batch, in its order, as without vmaps.
        mapped: the axis of each vmap, innermost first, or None.
    """
    numbers = {axis: number for number, axis in enumerate(batch)}
    out: Labels = [
        numbers.get(axis)
        for axis in range(ndim - sum(axis is not None for axis in mapped))
    ]
    for number, axis in enumerate(mapped):
        if axis is not None:
            out.insert(axis, ("vmap", number))
    return out


def labels_of_result(axis_labels: Labels, vmaps: int) -> Labels:
    """Return the labels of a result; the axes of the vmaps come first.

    Args:
        axis_labels: the labels of the axes without vmaps.
        vmaps: the number of vmaps.
    """
    return [("vmap", number) for number in reversed(range(vmaps))] + axis_labels


def shared(operands: Sequence[Labels]) -> list[tuple[int, ...]]:
    """Return the axes of each operand that all operands have.

    Each index along these axes may have its own scale.
    """
    common = set.intersection(*(set(axis_labels) for axis_labels in operands)) - {None}
    return [
        tuple(axis for axis, label in enumerate(axis_labels) if label in common)
        for axis_labels in operands
    ]


def scale_for(x: ScaledArray, axis_labels: Labels, result: Labels) -> Any:
    """Return the scale of an operand, shaped for a result.

    It is a scalar, or of size 1 along the axes that the operand does not have.

    Args:
        x: the operand.
        axis_labels: the labels of the operand's axes.
        result: the labels of the result's axes.
    """
    if x.is_static or jnp.size(x.scale) == 1:
        return x.scale if x.is_static else jnp.reshape(x.scale, ())
    return placed(
        jnp.reshape(x.scale, jnp.shape(x.scale) + (1,) * (x.ndim - jnp.ndim(x.scale))),
        axis_labels,
        result,
    )


def placed(scale: Any, axis_labels: Labels, result: Labels) -> Any:
    """Return a scale, shaped for a result: of size 1 along axes that it does not have.

    Args:
        scale: the scale, of the rank of its operand.
        axis_labels: the labels of the scale's axes.
        result: the labels of the result's axes.
    """
    order = [
        axis_labels.index(label)
        for label in result
        if label is not None and label in axis_labels
    ]
    shape = [
        scale.shape[axis_labels.index(label)]
        if label is not None and label in axis_labels
        else 1
        for label in result
    ]
    rest = [axis for axis in range(len(axis_labels)) if axis not in order]
    return lax.reshape(lax.transpose(scale, (*order, *rest)), shape)
