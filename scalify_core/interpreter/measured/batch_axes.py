"""Which axes of an FP8 product's operands and results are a batch: its own, and those
of the vmaps around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from scalify_core.array.scaled_array import ScaledArray

# of axes: what an axis is of, in operands and results alike; None: no batch
Labels = list[Any]


def labels(ndim: int, batch: Sequence[int], mapped: Sequence[int | None]) -> Labels:
    """Of the axes of an operand of rank `ndim`, vmaps included.

    `batch`: the axes that are the product's own batch, in its order, as without vmaps;
    `mapped`: the axis of each vmap, innermost first, or None.
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


def labels_of_result(own: Labels, vmaps: int) -> Labels:
    """Of a result whose axes without vmaps are `own`: the axis of each vmap comes in
    front.
    """
    return [("vmap", number) for number in reversed(range(vmaps))] + own


def shared(operands: Sequence[Labels]) -> list[tuple[int, ...]]:
    """The axes of each operand that all of them have: where each index may have its own
    scale.
    """
    common = set.intersection(*(set(found) for found in operands)) - {None}
    return [
        tuple(axis for axis, label in enumerate(found) if label in common)
        for found in operands
    ]


def scale_for(x: ScaledArray, of: Labels, result: Labels) -> Any:
    """The scale of an operand, for a result: a scalar, or of size 1 along axes that the
    operand's has no part in.
    """
    if x.is_static or jnp.size(x.scale) == 1:
        return x.scale if x.is_static else jnp.reshape(x.scale, ())
    return placed(
        jnp.reshape(x.scale, jnp.shape(x.scale) + (1,) * (x.ndim - jnp.ndim(x.scale))),
        of,
        result,
    )


def placed(scale: Any, of: Labels, result: Labels) -> Any:
    """A scale whose axes are `of` these labels, for a result: of size 1 along axes that
    it has no part in.
    """
    order = [of.index(label) for label in result if label is not None and label in of]
    shape = [
        scale.shape[of.index(label)] if label is not None and label in of else 1
        for label in result
    ]
    rest = [axis for axis in range(len(of)) if axis not in order]
    return lax.reshape(lax.transpose(scale, (*order, *rest)), shape)
