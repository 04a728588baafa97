"""Matrix products and convolutions: the narrow data multiplied, the result moved by one
power of two.

The expected RMS of a sum of K products of independent terms is sqrt(K) times that of
one.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core.interpreter import value as v
from scalify_core.interpreter.registry import rule, unscaled
from scalify_core.interpreter.rules.elementwise import lifted
from scalify_core.interpreter.value import Value
from scalify_core.numerics import precision_warnings, storage
from scalify_core.numerics import scales as sc
from scalify_core.numerics.formats import FP16
from scalify_core.numerics.shard_map_types import as_traced

unscaled(
    "cholesky", "cholesky_update", "lu", "qr", "svd", "eig", "eigh", "schur",
    "hessenberg", "tridiagonal",
    "tridiagonal_solve", "triangular_solve", "householder_product", "geqrf", "geqp3",
    "ormqr", "symmetric_product",
    "fft",
)  # fmt: skip
unscaled("custom_linear_solve", as_traced=True)


def _contract(eqn: Any, a: Any, b: Any, *rest: Any, count: float) -> Value:
    (a, b), dtype = lifted(a, b)
    a, b = (v.scalar_scale(x) for x in (a, b))
    operands = as_traced(eqn, [storage.saturating_cast(x.data, dtype) for x in (a, b)])
    if eqn.outvars[0].aval.dtype.itemsize > eqn.invars[0].aval.dtype.itemsize:
        # the user cast to a narrow dtype, and wants a wide result
        dtype = eqn.outvars[0].aval.dtype
    params = {**eqn.params, "preferred_element_type": np.dtype(dtype)}
    data = saturated(eqn.primitive.bind(*operands, *rest, **params))
    rms = a.expected_rms * b.expected_rms * math.sqrt(max(count, 1))
    scale = sc.product(a.multiple, b.multiple)
    if a.static is None and b.static is None:
        scale, beyond = sc.product_and_rest(a.multiple, b.multiple)
        data = sc.times(data, beyond)
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
    return (
        precision_warnings.rounded(x, jnp.clip(x, -FP16.max, FP16.max))
        if x.dtype == jnp.float16
        else x
    )


@rule("dot_general", wide=False)
def _dot_general(eqn: Any, a: Any, b: Any) -> Value:
    (contracting, _), _ = eqn.params["dimension_numbers"]
    return _contract(eqn, a, b, count=math.prod(a.shape[axis] for axis in contracting))


@rule("ragged_dot_general", wide=False)
def _ragged_dot_general(eqn: Any, a: Any, b: Any, group_sizes: Any) -> Value:
    (contracting, _), _ = eqn.params[
        "ragged_dot_dimension_numbers"
    ].dot_dimension_numbers
    return _contract(
        eqn, a, b, group_sizes, count=math.prod(a.shape[axis] for axis in contracting)
    )


@rule("conv_general_dilated", wide=False)
def _conv(eqn: Any, x: Any, kernel: Any) -> Value:
    outputs = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
    return _contract(eqn, x, kernel, count=math.prod(kernel.shape) / outputs)
