"""Products: matrix products in FP16 and FP8, and convolutions.

The narrow data is multiplied, and the result moved by one power of two. The expected
RMS of a sum of K independent terms is sqrt(K) times that of one.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core.interpreter import value as v
from scalify_core.interpreter.composite_calls import (
    call_on_data,
    unused_scales,
)
from scalify_core.interpreter.registry import (
    composite_rule,
    forward_rule,
    rule,
)
from scalify_core.interpreter.rules.elementwise import lifted
from scalify_core.interpreter.value import Value
from scalify_core.numerics import formats, precision_warnings
from scalify_core.numerics import scales as sc
from scalify_core.numerics.compiler_hints import (
    kept_in_both_orders,
    kept_narrow,
    row_major,
)
from scalify_core.numerics.formats import E4M3, FP16, fp8_cast, saturating_cast
from scalify_core.numerics.jaxprs import as_traced
from scalify_core.ops.matmul import Product, dot_fp8, gradients


def _summed_products(data: Any, a: Value, b: Value, count: float, dtype: Any) -> Value:
    """Return sums of `count` products of the data of `a` and `b`."""
    # Independent terms add up as their squares do. Where they agree, as over the tokens
    # of a batch, the sum is larger, and a rescale belongs there.
    rms = a.expected_rms * b.expected_rms * math.sqrt(max(count, 1))
    scale = sc.product(a.multiple, b.multiple)
    if a.static is None and b.static is None:
        # Two run-time scales may multiply to less than 2^-126: the rest goes into the
        # data.
        scale, beyond = sc.product_and_rest(a.multiple, b.multiple)
        data = sc.times(data, beyond)
    # To the nearest power of two, and not within an octave as elementwise results: the
    # kernel of the product multiplies it in, so it saves no operation to leave it out.
    return v.settled(data, scale, rms, dtype, slack=math.sqrt(2))


def saturated(x: jax.Array) -> jax.Array:
    """Return `x`; in FP16 infinities become the largest number.

    Sums of many terms that are not independent overflow a product's FP16 result, and
    would spread as NaN. An infinity among the operands, which only comes from infinite
    FP32 numbers, shows as the largest number, too; a NaN stays NaN. To tell the two
    apart, the operands would have to be read again, or the result written in FP32
    first. An FP8 product makes NaN of its operands' infinities at no cost, as it casts
    them.
    """
    if x.dtype == jnp.float16:
        return precision_warnings.observe_rounding(x, jnp.clip(x, -FP16.max, FP16.max))
    return x


@rule("dot_general", "ragged_dot_general", "conv_general_dilated", wide=False)
def _product(eqn: Any, a: Any, b: Any, *rest: Any) -> Value:
    count = _terms(eqn, a, b)
    (a, b), dtype = lifted(*map(v.scalar_scale, (a, b)))
    operands = as_traced(eqn, [formats.saturating_cast(x.data, dtype) for x in (a, b)])
    if eqn.outvars[0].aval.dtype.itemsize > eqn.invars[0].aval.dtype.itemsize:
        # `preferred_element_type` behind a cast: only the operands are to be rounded.
        dtype = eqn.outvars[0].aval.dtype
    params = {**eqn.params, "preferred_element_type": np.dtype(dtype)}
    data = saturated(eqn.primitive.bind(*operands, *rest, **params))
    return _summed_products(data, a, b, count, dtype)


def _terms(eqn: Any, a: Any, b: Any) -> float:
    """Return the number of terms in each element of a product's result."""
    params = eqn.params
    if eqn.primitive.name == "conv_general_dilated":
        # The input channels of a kernel are those of one group.
        return math.prod(b.shape) / b.shape[params["dimension_numbers"].rhs_spec[0]]
    if eqn.primitive.name == "ragged_dot_general":
        dims = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    else:
        dims = params["dimension_numbers"]
    (contracting, _), _ = dims
    return math.prod(a.shape[axis] for axis in contracting)


# The FP8 product: a cast of data whose RMS is near 1, which E4M3 holds with 31.5 dB, as
# well as at a measured scale. So no scale is computed.
# The residuals are the left operand in FP8, and the right operand, a parameter, as
# given: in FP8, too, where its data is FP32, or with `keep_rhs`.

_MATRICES = (((1,), (0,)), ((), ()))


@forward_rule("fp8_dot_general", wide=True)
def _forward(call: Any, lhs: Any, rhs: Any) -> tuple[Value, tuple]:
    product = call.settings["product"]
    (lhs, rhs), dtype = lifted(*map(v.scalar_scale, (lhs, rhs)))
    power, rms = _sum_of(product.sizes[2], lhs, rhs)

    def forward(lhs: Any, rhs: Any) -> tuple:
        lhs8, rhs8 = fp8_cast(lhs, E4M3), fp8_cast(rhs, E4M3)
        lhs_kept, rhs_kept = lhs8, rhs8 if rhs.dtype == np.float32 else rhs
        # The second order is for products that sum over rows: the backward one of the
        # left operand, which is kept, and the forward one of the right.
        if lhs.dtype == np.float32:  # its producer writes it in FP8
            lhs8, lhs_kept = _kept_twice(lhs8, product)
        if product.keep_rhs and rhs.dtype.itemsize == 2:
            rhs_kept, rhs8 = _kept_twice(rhs8, product)
        return (
            dot_fp8(lhs8, rhs8, product.dims, dtype, 1 / power, fast=True),
            lhs_kept,
            rhs_kept,
        )

    out, lhs_kept, rhs_kept = call_on_data(call, forward, lhs.data, rhs.data)
    operands = (
        v.value(lhs_kept, lhs.scale, lhs.expected_rms),
        v.value(rhs_kept, rhs.scale, rhs.expected_rms),
    )
    return v.settled(saturated(out), _scale(lhs, rhs, power), rms, dtype), (
        *operands,
        *unused_scales(product),
    )


@composite_rule("fp8_dot_general.bwd")
def _backward(call: Any, residuals: tuple, gradient: Any) -> tuple[Value, Value]:
    product = call.settings["product"]
    rows, columns, _ = product.sizes
    if isinstance(gradient, Value):
        dtype = v.result_dtype(gradient)
    else:
        dtype = np.dtype(product.dtypes[2])
    lhs, rhs, gradient = (v.lift(x, dtype) for x in (*residuals[:2], gradient))
    gradient = v.scalar_scale(gradient)
    lhs_power, lhs_rms = _sum_of(columns, gradient, rhs)
    rhs_power, rhs_rms = _sum_of(rows, lhs, gradient)

    def backward(lhs8: Any, rhs8: Any, *rest: Any) -> tuple:
        if rhs8.dtype != E4M3.dtype:
            # A parameter exists in any case, so it is cast again: `kept_narrow`
            # separates the two casts. It is row-major: the product contracts its last
            # axis.
            rhs8 = row_major(fp8_cast(kept_narrow(rhs8), E4M3))
        # Not `saturated`, which would make large numbers of infinities.
        gradient8 = fp8_cast(rest[-1], product.gradient)
        gradient8 = kept_narrow(gradient8)
        alphas = 1 / lhs_power, 1 / rhs_power
        return gradients(lhs8, rhs8, gradient8, product.dims, [dtype] * 2, alphas)

    d_lhs, d_rhs = call_on_data(
        call, backward, lhs.data, rhs.data, *unused_scales(product), gradient.data
    )
    # Cast here and not by the optimizer: a scan over layers stacks what its body
    # returns, and FP16 stacks took Llama-2 7B from 33 to 45 GiB.
    d_rhs, rhs_dtype = saturated(d_rhs), np.dtype(product.rhs_gradient or dtype)
    return (
        v.settled(saturated(d_lhs), _scale(gradient, rhs, lhs_power), lhs_rms, dtype),
        v.settled(
            saturating_cast(d_rhs, rhs_dtype),
            _scale(lhs, gradient, rhs_power),
            rhs_rms,
            rhs_dtype,
        ),
    )


def _kept_twice(x8: jax.Array, product: Product) -> tuple[jax.Array, jax.Array]:
    """Return an FP8 operand twice; that of a matrix product in both orders."""
    if product.dims == _MATRICES:
        return kept_in_both_orders(x8)
    return (kept_narrow(x8),) * 2


def _sum_of(count: int, a: Value, b: Value) -> tuple[float, float]:
    """Return the power of two of a sum of `count` products, and the remaining RMS.

    The power goes from the data into the scale. The product itself divides it out
    before rounding its result: as a constant of the GEMM it costs nothing.
    """
    return sc.scale_and_rms(a.expected_rms * b.expected_rms * math.sqrt(count))


def _scale(a: Value, b: Value, power: float) -> Any:
    return sc.product(sc.product(a.multiple, b.multiple), power)


# A product of operands that the caller rounds, in blocks with powers of two of their
# own. These do not see a tensor's scale, so the product is that of the data.


@forward_rule("rounded_product", wide=True)
def _rounded_forward(call: Any, lhs: Any, rhs: Any) -> tuple[Value, tuple]:
    rounded, sizes = call.settings["rounded"], call.settings["sizes"]
    (lhs, rhs), dtype = lifted(*map(v.scalar_scale, (lhs, rhs)))
    out, *residuals = call_on_data(call, rounded.forward, v.data32(lhs), v.data32(rhs))
    return _summed_products(out, lhs, rhs, sizes[2], dtype), tuple(
        _with_scale_of(x, residual)
        for x, residual in zip((lhs, rhs), residuals, strict=True)
    )


@composite_rule("rounded_product.bwd", wide=True)
def _rounded_backward(call: Any, residuals: tuple, gradient: Any) -> tuple:
    rounded, (rows, columns, _) = call.settings["rounded"], call.settings["sizes"]
    lhs, rhs = (jax.tree.leaves(x, is_leaf=v.is_value)[0] for x in residuals)
    data = jax.tree.map(v.data_of, residuals, is_leaf=v.is_value)
    (gradient,), dtype = lifted(v.scalar_scale(gradient))
    d_lhs, d_rhs = call_on_data(call, rounded.backward, *data, v.data32(gradient))
    return (
        _summed_products(d_lhs, gradient, rhs, columns, dtype),
        _summed_products(d_rhs, lhs, gradient, rows, dtype),
    )


def _with_scale_of(x: Value, residual: Any) -> Any:
    """Return a rounded operand whose first array has the scale of the operand."""
    first, *rest = jax.tree.leaves(residual)
    return jax.tree.unflatten(
        jax.tree.structure(residual), [v.value(first, x.scale, x.expected_rms), *rest]
    )
