"""Composites under measured scales: FP8 products and attention read narrow formats."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from scalify_core.interpreter import value as v
from scalify_core.interpreter.composite_calls import (
    call_on_data,
    in_order,
    unused_scales,
)
from scalify_core.interpreter.measured.policy import (
    like,
    measured_composite,
    quantized_copy,
    wide_results,
    wide_value,
)
from scalify_core.interpreter.measured.products import (
    Labels,
    Reading,
    dot_labels,
    each_index,
    scale_for,
    scaled_by,
    shared,
    vmap_labels,
    with_vmaps,
)
from scalify_core.interpreter.measured.quantize import stored_value
from scalify_core.interpreter.value import Value, logical
from scalify_core.numerics import amax, formats
from scalify_core.numerics.formats import FloatFormat
from scalify_core.ops.matmul import dot_fp8, gradients

_F32 = np.dtype(np.float32)
# The exponent of the largest element of attention's gradient: in FP16 its products with
# v must not overflow, nor those with small probabilities vanish.
_GRADIENT_TOP = 4
_E4M3 = np.dtype(jnp.float8_e4m3fn)


@measured_composite("materialized", "materialized.fwd", "materialized.bwd")
def _materialized(call: Any, eqn: Any, x: Any) -> Sequence[Any]:
    """Return the operand: in FP32 it need not be written to memory."""
    return [like(x, in_order(call, logical(x)))]


# `set_scaling`, `rebalance` and `dynamic_rescale_*` have no rule: their functions are
# the identity, and scales are measured.


@measured_composite("cast_on_forward", "cast_on_forward.fwd", "cast_on_backward.bwd")
def _quantized(call: Any, eqn: Any, *operands: Any) -> Sequence[Any]:
    """Round to a format at a measured scale, as storing in that format does."""
    fmt: FloatFormat = call.settings["fmt"]
    x = operands[-1]
    data = in_order(call, logical(x))
    unit = amax.unit_of(data, fmt.top)
    # The inverse of a power of two: exact, where a quotient may be approximate.
    return [like(x, fmt.quantize(data * (1 / unit)) * unit)]


@measured_composite("fp8_dot_general", "fp8_dot_general.fwd")
def _fp8(call: Any, eqn: Any, *operands: Any) -> Sequence[Any]:
    """Evaluate an FP8 product.

    Each entry of a batch is cast at its own scale. A batch is the product's own, or
    that of a vmap of both operands.
    """
    product = call.settings["product"]
    axis_labels, (of_lhs, of_rhs, of_result) = _labels(call, eqn, product, (0, 1))
    lhs, rhs = (
        _quantized_operand(x, _E4M3, axes)
        for x, axes in zip(operands, shared(axis_labels), strict=True)
    )
    unused: Any = unused_scales(product)

    def forward(lhs8: Any, rhs8: Any) -> Any:
        # FP32 out: the product of two operands at the top of their formats is beyond
        # FP16, and its scales come after it.
        return dot_fp8(lhs8, rhs8, product.dims, _F32, fast=True), lhs8, rhs8, *unused

    # The residuals, too: under vmap all results have the axis of the batch in front,
    # whatever that of the operands is.
    out, lhs8, rhs8, *unused = call_on_data(call, forward, lhs.data, rhs.data)
    lhs_labels, rhs_labels = axis_labels
    value = _scaled(out, (lhs, rhs), axis_labels, of_result, v.result_dtype(*operands))
    if call.name == "fp8_dot_general":
        return [value]
    return [
        value,
        stored_value(lhs8, scale_for(lhs.scale, lhs_labels, of_lhs)),
        stored_value(rhs8, scale_for(rhs.scale, rhs_labels, of_rhs)),
        *unused,
    ]


@measured_composite("fp8_dot_general.bwd")
def _fp8_bwd(call: Any, eqn: Any, *operands: Any) -> Sequence[Any]:
    product, last = call.settings["product"], len(operands) - 1
    axis_labels, (of_lhs, of_rhs, _) = _labels(call, eqn, product, (0, 1, last))
    dtypes = (_E4M3, _E4M3, product.gradient.dtype)
    # The residuals in between are scales that plain programs measure.
    read = (*operands[:2], operands[last])
    lhs, rhs, gradient = (
        _quantized_operand(x, np.dtype(dtype), axes)
        for x, dtype, axes in zip(read, dtypes, shared(axis_labels), strict=True)
    )
    # The axes of the call's vmaps are those of all operands, also of unused ones.
    unused = map(logical, operands[2:-1])

    def backward(lhs8: Any, rhs8: Any, *rest: Any) -> tuple:
        return gradients(lhs8, rhs8, rest[-1], product.dims, [_F32] * 2)

    d_lhs, d_rhs = call_on_data(
        call, backward, lhs.data, rhs.data, *unused, gradient.data
    )
    lhs_labels, rhs_labels, gradient_labels = axis_labels
    dtype = v.result_dtype(*operands)
    return [
        _scaled(d_lhs, (gradient, rhs), (gradient_labels, rhs_labels), of_lhs, dtype),
        _scaled(d_rhs, (gradient, lhs), (gradient_labels, lhs_labels), of_rhs, dtype),
    ]


def _scaled(
    data: Any,
    operands: Sequence[Value],
    axis_labels: Sequence[Labels],
    result: Labels,
    dtype: np.dtype,
) -> Value:
    """Return a product of two operands' data times their scales."""
    scales = [x.scale for x in operands]
    return wide_value(scaled_by(data, scales, axis_labels, result), dtype)


@measured_composite("attention", "attention.fwd", "attention.bwd")
def _attention(call: Any, eqn: Any, *operands: Any) -> Sequence[Any]:
    """Evaluate attention on FP16 or BF16 operands, which a GPU's fused kernel reads.

    The kernel takes one constant factor of the logits. So q is multiplied by k's scale,
    and k divided by it. v and the gradient are divided by theirs, and what is linear in
    them is multiplied by it.
    """
    q, k, values, *others = operands
    dtype = v.result_dtype(q, k, values)
    # cuDNN's kernel reads 16 bits.
    if dtype.itemsize >= 4:
        return wide_results(eqn, *operands)
    backward = call.name.endswith(".bwd")
    # Elements of at most 2, not near the format's top: the kernel stores its results in
    # the same 16 bits without a scale of their own.
    of_k, of_v = (amax.unit_of(logical(x), 0) for x in (k, values))
    units = [1 / of_k, of_k, of_v]
    if backward:
        *others, gradient = others
        of_gradient = amax.unit_of(logical(gradient), _GRADIENT_TOP)
    data = [
        formats.saturating_cast(logical(x) * (1 / unit), dtype)
        for x, unit in zip((q, k, values), units, strict=True)
    ]
    rest = [_in_dtype(x, dtype) for x in others]
    if backward:
        rest.append(
            formats.saturating_cast(logical(gradient) * (1 / of_gradient), dtype)
        )
        # The kernel's gradient of the logits is too small by both units: it multiplies
        # the gradient with v.
        both = of_gradient * of_v
        factors = [both * of_k, both / of_k, of_gradient]
    else:
        # Residuals return as the operands that they are; the kernel's own output and
        # its logarithms stay, for the backward kernel.
        factors = [of_v, *units][: len(eqn.outvars)]
    out = call.bind(*data, *rest)
    scaled = [
        formats.as_float32(x) * factor for x, factor in zip(out, factors, strict=False)
    ]
    made = [*scaled, *out[len(scaled) :]]
    return [wide_value(x, dtype) for x in made]


def _in_dtype(x: Any, dtype: np.dtype) -> Any:
    """Return the kernel's own output, a residual, in its dtype; others as they are."""
    x_wide = logical(x)
    # Not the logarithms of the softmax's sums [..., 1], which the kernel reads in FP32.
    if isinstance(x, Value) and x.shape[-1:] != (1,):
        return formats.saturating_cast(x_wide, dtype)
    return x_wide


def _quantized_operand(x: Any, dtype: np.dtype, axes: Sequence[int]) -> Value:
    """Return an operand in a format, each index along these axes at its own scale."""
    shape = x.shape if isinstance(x, Value) else np.shape(x)
    reading = Reading(*(each_index(shape, axes),) * 2)
    return quantized_copy(x, dtype, reading, reading)


def _labels(
    call: Any, eqn: Any, product: Any, operands: Sequence[int]
) -> tuple[list[Labels], list[Labels]]:
    """Return the labels of the operands of these numbers, under the vmaps of the call.

    And those of the left operand, the right operand and the product, where each is a
    result.
    """
    mapped = [[axes[i] for axes in call.in_axes] for i in operands]
    # `dims` counts the axes without those of vmaps.
    ranks = [
        len(eqn.invars[i].aval.shape) - len(axes) + axes.count(None)
        for i, axes in zip(operands, mapped, strict=True)
    ]
    (lhs, rhs), result = dot_labels(product.dims, ranks)
    without_vmaps = lhs, rhs, result
    vmaps = vmap_labels(len(call.in_axes))
    return (
        list(map(with_vmaps, without_vmaps, mapped)),
        [[*vmaps, *axis_labels] for axis_labels in without_vmaps],
    )
