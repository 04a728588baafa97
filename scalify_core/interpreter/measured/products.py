"""The granularity of the scales of a product's operands.

A power of two that all terms of a sum share can be multiplied in afterwards. So each
index along the axes of an operand that are not contracted may have its own scale. The
*parts* of an operand (the granularity: per tensor, per row) are the number of scales
for each axis: 1, or the axis's size.

`policy._product` decides the format of a product, and uses this.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from scalify_core.interpreter.value import Value
from scalify_core.numerics import amax
from scalify_core.numerics.amax import Parts
from scalify_core.numerics.jaxprs import (
    CALLS,
    IN_FULL,
    PRODUCTS,
    inner_jaxpr,
    per_jaxpr,
)
from scalify_core.numerics.scales import is_static, times

# For each axis of an operand or result, a label: axes of one label are the same axis.
# None: contracted. An integer: an axis of the batch. `_GROUP`: the matrices of a ragged
# product. (0, axis) or (1, axis): an axis of that operand only. ("vmap", number): the
# axis of a vmap around the call.
Labels = list[Any]
_GROUP = "group"


class Reading(NamedTuple):
    """The coarsest and the finest granularity in which products can read a value.

    Of x[B, T, D] in a product over D with a batch B: (B, 1, 1) and (B, T, 1).

    Attributes:
        must: one scale for each entry of a batch, and each group: these are unrelated,
            so their sizes are.
        may: one scale for each index of every axis that no reader contracts.
    """

    must: Parts
    may: Parts


def readings(eqn: Any) -> list[Reading]:
    """Return how a product can read each operand."""
    operands, _ = product_labels(eqn)
    out = []
    for x, axis_labels in zip(eqn.invars, operands, strict=False):
        kept = [i for i, label in enumerate(axis_labels) if label is not None]
        shared_axes = [i for i in kept if not isinstance(axis_labels[i], tuple)]
        shape = x.aval.shape
        out.append(Reading(each_index(shape, shared_axes), each_index(shape, kept)))
    return out


def scaled_result(
    eqn: Any, data: Any, a: Value, b: Value, group_sizes: Any = None
) -> Any:
    """Return a product of the data of `a` and `b`, in FP32, times both scales."""
    (lhs, rhs), result = product_labels(eqn)
    scale = b.scale
    if _GROUP in rhs and _shape(scale, rhs)[rhs.index(_GROUP)] > 1:
        # The result has no axis of groups: which matrix's scale belongs to a row is
        # known at run time only.
        group = rhs.index(_GROUP)
        (rows,) = eqn.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
        ids = _group_of_each(group_sizes, a.shape[rows])
        scale = jnp.take(jnp.reshape(scale, _shape(scale, rhs)), ids, axis=group)
        rhs[group] = lhs[rows]
    return scaled_by(data, (a.scale, scale), (lhs, rhs), result)


def product_labels(eqn: Any) -> tuple[tuple[Labels, Labels], Labels]:
    """Return the labels of the axes of a product's operands and result."""
    ranks = [len(x.aval.shape) for x in eqn.invars]
    if eqn.primitive.name == "conv_general_dilated":
        return _conv_labels(eqn.params["dimension_numbers"], ranks[0])
    if eqn.primitive.name == "dot_general":
        return dot_labels(eqn.params["dimension_numbers"], ranks)
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (lhs, rhs), result = dot_labels(numbers.dot_dimension_numbers, ranks)
    for axis in numbers.rhs_group_dimensions:
        result.remove(rhs[axis])
        # Groups may have other sizes for each entry of the batch.
        rhs[axis] = _GROUP if ranks[2] == 1 else None
    if len(result) < len(eqn.outvars[0].aval.shape):
        # A contracted axis is grouped, as for the gradient of the matrices: JAX puts an
        # axis of groups in front.
        result = [None, *result]
    return (lhs, rhs), result


def dot_labels(dims: Any, ranks: Sequence[int]) -> tuple[tuple[Labels, Labels], Labels]:
    """Return the labels of the axes of a `dot_general`, given its dimensions."""
    lhs: Labels = [(0, axis) for axis in range(ranks[0])]
    rhs: Labels = [(1, axis) for axis in range(ranks[1])]
    for operand, contracted, batch in zip((lhs, rhs), *dims, strict=True):
        for axis in contracted:
            operand[axis] = None
        for number, axis in enumerate(batch):
            operand[axis] = number
    free = [label for label in (*lhs, *rhs) if isinstance(label, tuple)]
    return (lhs, rhs), [*range(len(dims[1][0])), *free]


def each_index(shape: Sequence[int], axes: Any) -> Parts:
    """Return the parts in which each index along these axes is one part."""
    return tuple(_indices(n) if axis in axes else 1 for axis, n in enumerate(shape))


def _indices(size: Any) -> int:
    """Return the number of parts along an axis of which each index is one.

    It is 1 along an axis whose size `jax.export` leaves open.
    """
    if isinstance(size, int):
        return max(size, 1)
    return 1


def _conv_labels(numbers: Any, rank: int) -> tuple[tuple[Labels, Labels], Labels]:
    """Return the labels of a convolution: one of images, and one of kernels."""
    lhs: Labels = [None] * rank
    rhs: Labels = [None] * rank
    result: Labels = [None] * rank
    image, kernel = numbers.lhs_spec[0], numbers.rhs_spec[0]
    # Windows overlap, so an element of an image is in several sums: spatial axes and
    # channels have no scales of their own.
    lhs[image] = result[numbers.out_spec[0]] = (0, image)
    rhs[kernel] = result[numbers.out_spec[1]] = (1, kernel)
    return (lhs, rhs), result


def _group_of_each(group_sizes: Any, rows: int) -> Any:
    """Return the group of each row.

    Rows behind the last group are zero in a result, so any group serves.
    """
    ends = jnp.cumsum(group_sizes)
    ids = jnp.sum(
        lax.broadcasted_iota(ends.dtype, (rows, len(ends)), 0) >= ends[None], axis=1
    )
    return jnp.minimum(ids, len(ends) - 1)


def _shape(scale: Any, axis_labels: Labels) -> tuple[int, ...]:
    """Return the shape of a scale, with the rank of its operand."""
    shape = jnp.shape(scale)
    return (*shape, *(1,) * (len(axis_labels) - len(shape)))


def is_finer(parts: Parts, than: Parts) -> bool:
    """Return whether parts are as many as others along each axis, or more."""
    return all(a >= b for a, b in zip(parts, than, strict=True))


# A vmap makes an axis of the batch in the dimensions of a plain product. A composite
# stays one call, of which its rule alone knows the axes of the vmaps around it.


def vmap_labels(count: int) -> Labels:
    """Return the labels of the axes of vmaps in results: the outermost first."""
    return [("vmap", number) for number in reversed(range(count))]


def with_vmaps(axis_labels: Labels, mapped: Sequence[int | None]) -> Labels:
    """Return the labels of an operand under vmaps, given those without.

    `mapped` is the axis of each vmap, innermost first, or None.
    """
    out = list(axis_labels)
    for number, axis in enumerate(mapped):
        if axis is not None:
            out.insert(axis, ("vmap", number))
    return out


def shared(operands: Sequence[Labels]) -> list[tuple[int, ...]]:
    """Return the axes of each operand that all operands have.

    Each index along these axes may have its own scale.
    """
    common = set.intersection(*(set(axis_labels) for axis_labels in operands)) - {None}
    return [
        tuple(axis for axis, label in enumerate(axis_labels) if label in common)
        for axis_labels in operands
    ]


def scaled_by(
    x: jax.Array, scales: Sequence[Any], axis_labels: Sequence[Labels], result: Labels
) -> jax.Array:
    """Return the FP32 product of two operands' data times both scales.

    The smaller scale is multiplied in first: FP16 operands are stored 14 octaves above
    1. So the product of two scales leaves FP32 where that of the logical operands is 28
    octaves from its limit. An infinite scale would make NaN of zeros.

    Args:
        x: the product.
        scales: of the operands.
        axis_labels: the labels of each operand's axes.
        result: the labels of the product's axes.
    """
    if all(map(is_static, scales)):
        # They cost nothing: their product is a number of Python, beyond FP32 if need
        # be.
        return times(x, math.prod(scales))
    pairs = zip(scales, map(tuple, axis_labels), strict=True)
    factors = [pair for pair in pairs if not is_static(pair[0]) or pair[0] != 1.0]
    return _scaled_by(x, *zip(*factors, strict=True), tuple(result))


# One equation for each product of a program, whose shapes mostly recur.
@functools.partial(jax.jit, static_argnums=(2, 3))
def _scaled_by(
    x: jax.Array, scales: Sequence[Any], axis_labels: Sequence[Labels], result: Labels
) -> jax.Array:
    parts = [
        scale_for(scale, labels, result)
        for scale, labels in zip(scales, axis_labels, strict=True)
    ]
    if len(parts) == 2:
        a, b = jnp.broadcast_arrays(*parts)
        parts = [lax.min(a, b), lax.max(a, b)]
    for scale in parts:
        x = lax.mul(x, amax.spread(scale, x.shape))
    return x


def scale_for(scale: Any, axis_labels: Labels, result: Labels) -> Any:
    """Return the scale of an operand, shaped for a result.

    It is a scalar, or of size 1 along the axes that the operand does not have.

    Args:
        scale: the scale.
        axis_labels: the labels of the operand's axes.
        result: the labels of the result's axes.
    """
    if is_static(scale):
        return scale
    if scale.size == 1:
        return jnp.reshape(scale, ())
    scale = jnp.reshape(scale, _shape(scale, axis_labels))
    axes = {label: i for i, label in enumerate(axis_labels) if label is not None}
    order = [axes[label] for label in result if label in axes]
    shape = [scale.shape[axes[label]] if label in axes else 1 for label in result]
    rest = [axis for axis in range(len(axis_labels)) if axis not in order]
    return lax.reshape(lax.transpose(scale, (*order, *rest)), shape)


# Find the parts in which the products of a program read its variables.
# A value that several products read is stored once, with as many scales as suit all of
# them. So the readers of a variable are found before it is stored, in its own jaxpr and
# in the jaxprs of calls and loops.

# Elements move or change sign, so a stored copy may be moved without storing it anew.
MOVES = frozenset(
    {
        "reshape", "transpose", "broadcast_in_dim", "squeeze", "rev", "slice",
        "dynamic_slice", "gather", "split", "copy", "stop_gradient", "name",
        "sharding_constraint", "reshard", "unstack", "tile", "neg",
    }
)  # fmt: skip
KEEP_AXES = frozenset(
    {"copy", "stop_gradient", "name", "sharding_constraint", "reshard", "neg"}
)
# Not slices: in a copy of the whole operand a slice would have the scale of the largest
# element outside of it.
_MOVES_ALL = MOVES - {"slice", "dynamic_slice", "gather", "split", "unstack"}


def is_narrow_product(eqn: Any) -> bool:
    """Return whether a product may read its operands in a narrow format."""
    params = eqn.params
    if params["precision"] == IN_FULL:
        return False
    if eqn.primitive.name == "dot_general":
        (axes, _), _ = params["dimension_numbers"]
        # A sum of one term would only be rounded.
        return any(eqn.invars[0].aval.shape[axis] != 1 for axis in axes)
    # Groups of a convolution, such as the entries of a vmap, may have other sizes,
    # which FP32 holds without scales of their own.
    groups = params.get("feature_group_count", 1), params.get("batch_group_count", 1)
    return max(groups) == 1


@per_jaxpr
def reads_in(jaxpr: Any) -> dict[Any, Reading]:
    """Return how products in a jaxpr, and in its inner jaxprs, read its variables."""
    readings_of: dict[Any, list[Reading]] = {}
    reads: dict[Any, Reading] = {}

    def settle(var: Any) -> Reading | None:
        if var in readings_of and var not in reads:
            reads[var] = _common(readings_of[var])
        return reads.get(var)

    for eqn in reversed(jaxpr.eqns):
        result_readings = list(map(settle, eqn.outvars))
        for atom, reading in zip(
            eqn.invars, operand_readings(eqn, result_readings), strict=True
        ):
            if reading is not None and not isinstance(atom, Literal):
                readings_of.setdefault(atom, []).append(reading)
    for var in (*jaxpr.constvars, *jaxpr.invars):
        settle(var)
    return reads


def operand_readings(
    eqn: Any, result_readings: Sequence[Reading | None]
) -> Sequence[Reading | None]:
    """Return the reading of each operand of an equation, given those of its results."""
    name = eqn.primitive.name
    nothing = [None] * len(eqn.invars)
    if name in PRODUCTS and is_narrow_product(eqn):
        # The third operand, the sizes of a ragged product's groups, is integers.
        return [*readings(eqn), *nothing[2:]]
    if name in MOVES:
        return [reading_before_move(eqn, result_readings[0]), *nothing[1:]]
    if name == "scan":
        reads = reads_in(eqn.params["jaxpr"])
        inner = [reads.get(var) for var in eqn.params["jaxpr"].invars]
        consts, carry, xs = eqn.params["ft_in"].update(inner).unpack()
        # An iteration reads a slice.
        length = _indices(eqn.params["length"])
        # Layers are as unrelated as entries of a batch, so each must have a scale.
        stacks = [x and Reading((length, *x.must), (length, *x.may)) for x in xs]
        return [*consts, *[None] * len(carry), *stacks]
    if name in CALLS and name != "shard_map":  # a device's shard has its own readers
        reads = reads_in(inner_jaxpr(eqn))
        return [reads.get(var) for var in inner_jaxpr(eqn).invars]
    return nothing


def reading_before_move(eqn: Any, reading: Reading | None) -> Reading | None:
    """Return the reading of the operand of a move, given that of its result."""
    name = eqn.primitive.name
    if reading is None or name not in _MOVES_ALL:
        return None
    if name in KEEP_AXES:
        return reading
    if name == "transpose":
        back = np.argsort(eqn.params["permutation"])
        return Reading(*(tuple(parts[i] for i in back) for parts in reading))
    # Through a reshape or broadcast parts are not followed: it may join an axis of many
    # scales with one of a single scale.
    if max(reading.may, default=1) > 1:
        return None
    ones = (1,) * len(eqn.invars[0].aval.shape)
    return Reading(ones, ones)


def _common(readings: Sequence[Reading]) -> Reading:
    # At finer scales some reader would sum over elements of different ones. At coarser
    # ones errors grow from 2.7e-4 to 1.8e-3 for rows 30 octaves apart, to 1 for 40.
    may = tuple(map(min, zip(*(x.may for x in readings), strict=True)))
    fits = [x.must for x in readings if is_finer(may, x.must)]
    ones = (1,) * len(may)
    return Reading(max(fits, key=math.prod, default=ones), may)
