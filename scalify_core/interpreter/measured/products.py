"""The parts of a product's operands that may have their own scale.

A power of two that all terms of a sum share can be multiplied in afterwards. So each
index along the axes of an operand that are not contracted may have its own scale. Each
block of an axis that is split into groups may have one, too. The *parts* of an operand
are the number of scales for each axis: 1, the number of groups, or the axis's size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from scalify_core.array.scaled_array import ScaledArray
from scalify_core.interpreter.measured.batch_axes import Labels, placed, scale_for
from scalify_core.numerics.amax import Parts


def readings(eqn: Any) -> tuple[tuple[Parts, Parts], tuple[Parts, Parts]]:
    """Return the parts that a product must have, and may have, of each operand."""
    parts_of = {
        "dot_general": _of_dot,
        "conv_general_dilated": _of_conv,
        "ragged_dot_general": _of_ragged,
    }
    lhs, rhs = parts_of[eqn.primitive.name](eqn)
    return lhs, rhs


def scales_of_result(
    eqn: Any, a: ScaledArray, b: ScaledArray, group_sizes: Any = None
) -> tuple[Any, Any]:
    """Return the scales of a product of the data of `a` and `b`, one for each operand.

    Both broadcast to the result.
    """
    name, ndim = eqn.primitive.name, len(eqn.outvars[0].aval.shape)
    if name == "conv_general_dilated":
        return _conv_scales(eqn.params, a, b, eqn.outvars[0].aval.shape)
    if name == "dot_general":
        (lhs, rhs), result = dot_labels(eqn.params["dimension_numbers"], a.ndim, b.ndim)
        return scale_for(a, lhs, result), scale_for(b, rhs, result)
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    dims, (ragged,) = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    (lhs, rhs), result = dot_labels(
        dims, a.ndim, b.ndim, group=numbers.rhs_group_dimensions
    )
    # The contracted axis is grouped: the groups are the leading axis of the result.
    if len(result) < ndim:
        result = [None, *result]
    if numbers.rhs_group_dimensions and _has_parts(b, numbers.rhs_group_dimensions[0]):
        (group,) = numbers.rhs_group_dimensions
        ids = _group_of_each(group_sizes, a.shape[ragged])
        of_rows = jnp.take(b.scale, ids, axis=group)
        return scale_for(a, lhs, result), placed(
            of_rows, [*rhs[:group], lhs[ragged], *rhs[group + 1 :]], result
        )
    return scale_for(a, lhs, result), scale_for(b, rhs, result)


def dot_labels(
    dims: Any, lhs_rank: int, rhs_rank: int, group: Sequence[int] = ()
) -> tuple[tuple[Labels, Labels], Labels]:
    """Return the labels of the axes of both operands and the result of a `dot_general`.

    Contracted axes have the label None.
    """
    contracted, batches = dims
    out: list[Labels] = []
    for side, rank in enumerate((lhs_rank, rhs_rank)):
        numbers = {axis: number for number, axis in enumerate(batches[side])}
        without = {*contracted[side], *(group if side else ())}
        out.append(
            [
                numbers.get(axis, None if axis in without else (side, axis))
                for axis in range(rank)
            ]
        )
    lhs, rhs = out
    free = [label for label in (*lhs, *rhs) if isinstance(label, tuple)]
    return (lhs, rhs), [*range(len(batches[0])), *free]


def lines(eqn: Any) -> tuple[Sequence[int], Sequence[int]]:
    """Return the axes of a product's result that come from one operand alone.

    The first axes are those of the left operand, the second those of the right one.
    """
    rank = len(eqn.outvars[0].aval.shape)
    if eqn.primitive.name == "conv_general_dilated":
        batch, feature, *positions = eqn.params["dimension_numbers"].out_spec
        return (batch, *positions), (feature,)
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    dims = (
        eqn.params["dimension_numbers"]
        if numbers is None
        else numbers.dot_dimension_numbers
    )
    group = () if numbers is None else numbers.rhs_group_dimensions
    _, result = dot_labels(
        dims, len(eqn.invars[0].aval.shape), len(eqn.invars[1].aval.shape), group
    )
    of_both = rank - len(result)  # the groups, where the contracted axis is grouped
    sides = [label[0] if isinstance(label, tuple) else None for label in result]
    first, second = (
        [of_both + i for i, side in enumerate(sides) if side == number]
        for number in (0, 1)
    )
    return first, second


def contracted_size(eqn: Any) -> int:
    """Return the number of terms in each element of a product's result.

    Convolutions and grouped products return 2: any number above 1 serves.
    """
    if eqn.primitive.name != "dot_general":
        return 2
    (axes, _), _ = eqn.params["dimension_numbers"]
    return math.prod(eqn.invars[0].aval.shape[axis] for axis in axes)


def each_index(shape: Sequence[int], axes: Any) -> Parts:
    """Return the parts in which each index along these axes is one part."""
    return tuple(max(n, 1) if axis in axes else 1 for axis, n in enumerate(shape))


def _of_dot(eqn: Any) -> list[tuple[Parts, Parts]]:
    contracted, batches = eqn.params["dimension_numbers"]
    shapes = (x.aval.shape for x in eqn.invars[:2])
    return [
        (
            each_index(shape, batch),
            each_index(shape, set(range(len(shape))) - set(axes)),
        )
        for shape, axes, batch in zip(shapes, contracted, batches, strict=True)
    ]


def _of_ragged(eqn: Any) -> list[tuple[Parts, Parts]]:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = (
        numbers.dot_dimension_numbers
    )
    lhs, rhs, sizes = (x.aval.shape for x in eqn.invars[:3])
    groups = numbers.rhs_group_dimensions if len(sizes) == 1 else ()
    without = {*rhs_contracted, *numbers.rhs_group_dimensions} - set(groups)
    return [
        (
            each_index(lhs, lhs_batch),
            each_index(lhs, set(range(len(lhs))) - set(lhs_contracted)),
        ),
        (
            each_index(rhs, (*rhs_batch, *groups)),
            each_index(rhs, set(range(len(rhs))) - without),
        ),
    ]


def _of_conv(eqn: Any) -> list[tuple[Parts, Parts]]:
    """Return the parts of the operands of a convolution.

    They are the batch on the left, output features on the right, and groups in both.
    """
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    (batch, feature, *_), (out_feature, *_) = numbers.lhs_spec, numbers.rhs_spec
    lhs, rhs = (x.aval.shape for x in eqn.invars[:2])
    features, batches = params["feature_group_count"], params["batch_group_count"]
    must_lhs, may_lhs, must_rhs = [1] * len(lhs), [1] * len(lhs), [1] * len(rhs)
    must_lhs[batch], must_lhs[feature] = batches, features
    may_lhs[batch], may_lhs[feature] = max(lhs[batch], 1), features
    must_rhs[out_feature] = max(features, batches)
    return [
        (tuple(must_lhs), tuple(may_lhs)),
        (tuple(must_rhs), each_index(rhs, (out_feature,))),
    ]


def _conv_scales(
    params: Any, a: ScaledArray, b: ScaledArray, out: Sequence[int]
) -> tuple[Any, Any]:
    numbers = params["dimension_numbers"]
    batch, feature, *_ = numbers.out_spec

    def on_result(scale: Any) -> Any:
        """Reshape a scale [batch, features] to the axes of the result."""
        shape = [1] * len(out)
        shape[batch], shape[feature] = scale.shape
        return lax.reshape(scale if batch < feature else scale.T, shape)

    scales: list[Any] = []
    for x, (first, second, *_) in ((a, numbers.lhs_spec), (b, numbers.rhs_spec)):
        if x.is_static or jnp.size(x.scale) == 1:
            scales.append(scale_for(x, [], []))
            continue
        scale = jnp.reshape(x.scale, _shape(x))
        rest = [axis for axis in range(x.ndim) if axis not in (first, second)]
        table = lax.reshape(
            lax.transpose(scale, (first, second, *rest)),
            (scale.shape[first], scale.shape[second]),
        )
        scales.append(
            on_result(_of_groups(table, params, out[feature]) if x is a else table.T)
        )
    return scales[0], scales[1]


def _of_groups(table: Any, params: Any, features: int) -> Any:
    """Return scales [batch, features] of the left operand as those of a result."""
    groups, batches = params["feature_group_count"], params["batch_group_count"]
    if table.shape[1] > 1:
        return jnp.repeat(
            table[:, :: table.shape[1] // groups], features // groups, axis=1
        )
    if batches > 1 and table.shape[0] > 1:
        return jnp.repeat(table.reshape(batches, -1).T, features // batches, axis=1)
    return table


def _group_of_each(group_sizes: Any, rows: int) -> Any:
    """Return the group of each row.

    Rows behind the last group are zero in a result, so any group serves.
    """
    ends = jnp.cumsum(group_sizes)
    ids = jnp.sum(
        lax.broadcasted_iota(ends.dtype, (rows, len(ends)), 0) >= ends[None], axis=1
    )
    return jnp.minimum(ids, len(ends) - 1)


def _shape(x: ScaledArray) -> tuple[int, ...]:
    """Return the shape of a dynamic scale, with the rank of the data."""
    return (*jnp.shape(x.scale), *(1,) * (x.ndim - jnp.ndim(x.scale)))


def _has_parts(x: ScaledArray, axis: int) -> bool:
    return not x.is_static and _shape(x)[axis] > 1


def is_finer(parts: Parts, than: Parts) -> bool:
    """Return whether each of `parts` is a multiple of that of `than`."""
    return all(a % b == 0 for a, b in zip(parts, than, strict=True))
