"""The FP8 product: a cast of data whose RMS is near 1, so no scale is computed.

The residuals are the left operand in FP8, and the right operand, a parameter, as given.
With `keep_rhs` the right one is kept in FP8, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from scalify_core.interpreter import value as v
from scalify_core.interpreter.registry import composite_rule
from scalify_core.interpreter.rules.elementwise import lifted
from scalify_core.interpreter.rules.matmul import saturated
from scalify_core.interpreter.value import Value
from scalify_core.numerics import scales as sc
from scalify_core.numerics.compiler_hints import row_major, stored, stored_both_ways
from scalify_core.numerics.formats import E4M3
from scalify_core.numerics.storage import fp8_cast, saturating_cast
from scalify_core.ops.matmul import Product, dot_fp8, lhs_gradient, rhs_gradient

_MATRICES = (((1,), (0,)), ((), ()))


@composite_rule("fp8_dot_general", wide=True)
def _product(call: Any, lhs: Any, rhs: Any) -> Value:
    return _forward(call, lhs, rhs)[0]


@composite_rule("fp8_dot_general.fwd", wide=True)
def _forward(call: Any, lhs: Any, rhs: Any) -> tuple[Value, tuple]:
    product = dict(call.static)["product"]
    (lhs, rhs), dtype = lifted(lhs, rhs)
    lhs, rhs = v.scalar_scale(lhs), v.scalar_scale(rhs)

    def forward(lhs: Any, rhs: Any) -> tuple:
        lhs8, rhs8 = fp8_cast(lhs, E4M3), fp8_cast(rhs, E4M3)
        lhs_kept, rhs_kept = lhs8, rhs8 if rhs.dtype == np.float32 else rhs
        if lhs.dtype == np.float32:  # its producer writes it in FP8
            lhs8, lhs_kept = (
                stored_both_ways(lhs8)
                if product.dims == _MATRICES
                else (stored(lhs8),) * 2
            )
        if product.keep_rhs and rhs.dtype.itemsize == 2:
            rhs_kept, rhs8 = (
                stored_both_ways(rhs8)
                if product.dims == _MATRICES
                else (stored(rhs8),) * 2
            )
        return (
            dot_fp8(lhs8, rhs8, product.dims, dtype, 1 / power, fast=True),
            lhs_kept,
            rhs_kept,
        )

    power, rms = _sum_of(product.sizes[2], lhs, rhs)
    out, lhs_kept, rhs_kept = call_on_data(call, forward, lhs.data, rhs.data)
    operands = (
        v.value(lhs_kept, lhs.scale, lhs.expected_rms),
        v.value(rhs_kept, rhs.scale, rhs.expected_rms),
    )
    return v.value(saturated(out), _scale(lhs, rhs, power), rms, dtype), (
        *operands,
        *_unused(product),
    )


@composite_rule("fp8_dot_general.bwd")
def _backward(call: Any, residuals: tuple, gradient: Any) -> tuple[Value, Value]:
    product = dict(call.static)["product"]
    rows, columns, _ = product.sizes
    dtype = (
        v.result_dtype(gradient)
        if isinstance(gradient, Value)
        else np.dtype(product.dtypes[2])
    )
    lhs, rhs, gradient = (
        x if isinstance(x, Value) else v.lift(x, dtype)
        for x in (*residuals[:2], gradient)
    )
    gradient = v.scalar_scale(gradient)
    summed = gradient.pre_rescale is not None and gradient.pre_rescale.sums is not None

    lhs_power, lhs_rms = _sum_of(columns, gradient, rhs)
    rhs_power, rhs_rms = _sum_of(rows, lhs, gradient)

    def backward(lhs8: Any, rhs8: Any, *rest: Any) -> tuple:
        if rhs8.dtype != E4M3.dtype:
            # A parameter exists in any case, so it is cast again: `stored` separates
            # the two casts. It is row-major: the product contracts its last axis.
            rhs8 = row_major(fp8_cast(stored(rhs8), E4M3))
        # Not `saturated`, which would make large numbers of infinities.
        gradient8 = fp8_cast(rest[-1], product.gradient)
        # If the gradient's rows are added up, that pass writes both orders.
        both = (
            stored_both_ways(gradient8)
            if summed and gradient8.ndim == 2
            else (stored(gradient8),) * 2
        )
        d_lhs = lhs_gradient(both[0], rhs8, product.dims, dtype, 1 / lhs_power)
        return d_lhs, rhs_gradient(lhs8, both[1], product.dims, dtype, 1 / rhs_power)

    d_lhs, d_rhs = call_on_data(
        call, backward, lhs.data, rhs.data, *_unused(product), gradient.data
    )
    d_rhs, rhs_dtype = saturated(d_rhs), np.dtype(product.rhs_gradient or dtype)
    return (
        v.value(saturated(d_lhs), _scale(gradient, rhs, lhs_power), lhs_rms, dtype),
        v.value(
            saturating_cast(d_rhs, rhs_dtype),
            _scale(lhs, gradient, rhs_power),
            rhs_rms,
            rhs_dtype,
        ),
    )


def _sum_of(count: int, a: Value, b: Value) -> tuple[float, float]:
    """Return the power of two of a sum of `count` products, and the remaining RMS.

    The power goes from the data into the scale. The product itself divides it out
    before rounding its result: as a constant of the GEMM it costs nothing.
    """
    return sc.rounded(a.expected_rms * b.expected_rms * math.sqrt(count))


def _scale(a: Value, b: Value, power: float) -> Any:
    return sc.product(sc.product(a.multiple, b.multiple), power)


def _unused(product: Product) -> tuple:
    """Return placeholders for the plain program's traced scales, in the residuals."""
    return tuple(
        np.float32(1) for scale in product.scaling[:2] if not isinstance(scale, float)
    )


def call_on_data(call: Any, fun: Callable, *operands: Any) -> list[Any]:
    """Call `fun` on the data, under the vmaps of the call."""
    in_tree = jax.tree.structure(operands)
    return call.replace(fun=fun, static={}, in_tree=in_tree)(*operands)
