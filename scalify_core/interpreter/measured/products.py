"""Where the operands of a product may have more than one scale, and what that makes of
the scale of its result.

A power of two that all of what is summed over has in common can be multiplied in
afterwards. So each index along the axes of an operand that are not contracted may have
a scale of its own, and so may each block of an axis that is split into groups. The
*parts* of an operand say how many that are, axis by axis: 1, the number of groups, or
all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from scalify_core.array.scaled_array import ScaledArray
from scalify_core.interpreter.measured.batch_axes import Labels, placed, scale_for

# of each axis: into how many pieces of equal size it is cut, each with a scale of its
# own
Parts = tuple[int, ...]


def readings(eqn: Any) -> tuple[tuple[Parts, Parts], tuple[Parts, Parts]]:
    """Return the parts that a product must and may have of each of its operands."""
    of = {
        "dot_general": _of_dot,
        "conv_general_dilated": _of_conv,
        "ragged_dot_general": _of_ragged,
    }
    lhs, rhs = of[eqn.primitive.name](eqn)
    return lhs, rhs


def scales_of_result(
    eqn: Any, a: ScaledArray, b: ScaledArray, group_sizes: Any = None
) -> tuple[Any, Any]:
    """The scales that a product of the data of `a` and `b` has because of either; both
    broadcast to the result.
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
    # a group is what is summed over: it is the leading axis of the result
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
    """What the axes of both operands and of the result of a `dot_general` are of; None:
    they are contracted.
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
    """The axes of a product's result that are of its left operand alone, and those of
    its right one.
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
    of_both = rank - len(result)  # the group, if that is what is summed over
    sides = [label[0] if isinstance(label, tuple) else None for label in result]
    first, second = (
        [of_both + i for i, side in enumerate(sides) if side == number]
        for number in (0, 1)
    )
    return first, second


def contracted_size(eqn: Any) -> int:
    """How many terms a product adds up for each element of its result; of convolutions
    and groups not 1.
    """
    if eqn.primitive.name != "dot_general":
        return 2
    (axes, _), _ = eqn.params["dimension_numbers"]
    return math.prod(eqn.invars[0].aval.shape[axis] for axis in axes)


def each_index(shape: Sequence[int], axes: Any) -> Parts:
    """Parts of which each index along these axes is one."""
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
    """The batch on the left, output features on the right, and groups in both."""
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    (batch, feature, *_), (out_feature, *_) = numbers.lhs_spec, numbers.rhs_spec
    lhs, rhs = (x.aval.shape for x in eqn.invars[:2])
    features, batches = params["feature_group_count"], params["batch_group_count"]
    must_lhs = [
        features if axis == feature else batches if axis == batch else 1
        for axis in range(len(lhs))
    ]
    may_lhs = [
        features if axis == feature else max(n, 1) if axis == batch else 1
        for axis, n in enumerate(lhs)
    ]
    must_rhs = [
        max(features, batches) if axis == out_feature else 1 for axis in range(len(rhs))
    ]
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
        """Of the batch and the features of a result, in this order."""
        shape = [1] * len(out)
        shape[batch], shape[feature] = scale.shape
        return lax.reshape(scale if batch < feature else scale.T, shape)

    found: list[Any] = []
    for x, (first, second, *_) in ((a, numbers.lhs_spec), (b, numbers.rhs_spec)):
        if x.is_static or jnp.size(x.scale) == 1:
            found.append(scale_for(x, [], []))
            continue
        scale = jnp.reshape(x.scale, _shape(x))
        rest = [axis for axis in range(x.ndim) if axis not in (first, second)]
        table = lax.reshape(
            lax.transpose(scale, (first, second, *rest)),
            (scale.shape[first], scale.shape[second]),
        )
        found.append(
            on_result(_of_groups(table, params, out[feature]) if x is a else table.T)
        )
    return found[0], found[1]


def _of_groups(table: Any, params: Any, features: int) -> Any:
    """Scales of the batch and the features on the left as those of the batch and the
    features of a result.
    """
    groups, batches = params["feature_group_count"], params["batch_group_count"]
    if table.shape[1] > 1:
        return jnp.repeat(
            table[:, :: table.shape[1] // groups], features // groups, axis=1
        )
    if batches > 1 and table.shape[0] > 1:
        return jnp.repeat(table.reshape(batches, -1).T, features // batches, axis=1)
    return table


def _group_of_each(group_sizes: Any, rows: int) -> Any:
    """The group that each row belongs to; what is behind the last one is zero in a
    result, of any.
    """
    ends = jnp.cumsum(group_sizes)
    found = jnp.sum(
        lax.broadcasted_iota(ends.dtype, (rows, len(ends)), 0) >= ends[None], axis=1
    )
    return jnp.minimum(found, len(ends) - 1)


def _shape(x: ScaledArray) -> tuple[int, ...]:
    """The shape of a dynamic scale, with the rank of the data."""
    return (*jnp.shape(x.scale), *(1,) * (x.ndim - jnp.ndim(x.scale)))


def _has_parts(x: ScaledArray, axis: int) -> bool:
    return not x.is_static and _shape(x)[axis] > 1


def is_finer(parts: Parts, than: Parts) -> bool:
    """Whether each of `than` is one or more of `parts`."""
    return all(a % b == 0 for a, b in zip(parts, than, strict=True))
