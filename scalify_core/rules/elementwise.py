"""Elementwise arithmetic. It runs in FP32, in the logical value's own order of operations."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from scalify_core import value as v
from scalify_core.formats import pow2_floor, pow2_round
from scalify_core.registry import bind, logical, rule, structural, unscaled
from scalify_core.value import Value

structural("abs", "copy", "real", "stop_gradient", along=lambda _, scale: scale)
unscaled(
    "exp", "exp2", "expm1", "log", "log2", "log1p", "logistic", "tanh", "one_minus_square",
    "sin", "cos", "tan", "asin", "acos", "atan", "atan2",
    "sinh", "cosh", "asinh", "acosh", "atanh",
    "erf", "erfc", "erf_inv", "lgamma", "digamma", "polygamma", "zeta",
    "igamma", "igammac", "igamma_grad_a", "random_gamma", "regularized_incomplete_beta",
    "bessel_i0e", "bessel_i1e", "pow",
)  # fmt: skip
logical("nextafter", "reduce_precision", "floor", "ceil", "round", "rem")


def lifted(*operands: Any) -> tuple[list[Value], np.dtype]:
    """The operands as values, and the format of an arithmetic result."""
    dtype = v.result_dtype(*operands)
    return [x if isinstance(x, Value) else v.lift(x, dtype) for x in operands], dtype


@rule("add", "sub", "add_any", lazy=True)
def _add(eqn: Any, a: Any, b: Any) -> Value:
    if v.uniform(b) == 0 and a.shape == eqn.outvars[0].aval.shape:
        return a
    if v.uniform(a) == 0 and b.shape == eqn.outvars[0].aval.shape:
        return _times_constant(b, -1.0) if eqn.primitive.name == "sub" else b
    (a, b), dtype = lifted(a, b)
    scale, rho, excess = v.hypot(a, b)
    return v.value(bind(eqn, v.wide_at(a, scale), v.wide_at(b, scale)), scale, rho, dtype, excess=excess)


@rule("mul", lazy=True)
def _mul(eqn: Any, a: Any, b: Any) -> Value:
    for x, other in ((a, b), (b, a)):
        constant = v.uniform(x)
        if constant is not None and math.isfinite(constant) and other.shape == eqn.outvars[0].aval.shape:
            return _times_constant(other, constant)
    (a, b), dtype = lifted(a, b)
    data = bind(eqn, v.wide(a), v.wide(b))
    return v.settled(data, v.product(a.scale, b.scale), a.rho * b.rho, dtype, factor=a.factor * b.factor)


def _times_constant(x: Value, constant: float) -> Value:
    """The power of two goes into the scale, the rest into the factor; no operation."""
    if constant == 0:
        return v.value(v.times(x.data, 0.0), x.scale, x.rho, x.dtype)
    size = x.rho * abs(constant)
    factor = pow2_round(size)
    scale = v.product(x.scale, factor)
    if v.is_static(scale) and not v.MIN_SCALE <= scale <= v.MAX_SCALE:
        scale = pow2_round(scale)
        factor = scale / x.scale
    return v.value(x.data, scale, size / factor, x.dtype, x.factor * (constant / factor), x.excess)


@rule("neg", lazy=True)
def _neg(eqn: Any, x: Value) -> Value:
    del eqn
    return v.value(x.data, x.scale, x.rho, x.dtype, -x.factor, x.excess)


@rule("div", lazy=True)
def _div(eqn: Any, a: Any, b: Any) -> Value:
    constant = v.uniform(b)
    if constant and math.isfinite(constant) and a.shape == eqn.outvars[0].aval.shape:
        return _times_constant(a, 1 / constant)
    (a, b), dtype = lifted(a, b)
    b = v.as_divisor(b)
    data = bind(eqn, v.wide(a), v.wide(b))
    return v.settled(data, v.ratio(a.scale, b.scale), a.rho / b.rho, dtype, factor=a.factor / b.factor)


@rule("integer_pow", "square", lazy=True)
def _integer_pow(eqn: Any, x: Value) -> Value:
    n = eqn.params.get("y", 2)
    dtype = v.result_dtype(x)
    x = v.as_divisor(x) if n < 0 else x
    scale: Any = 1.0
    if v.is_static(x.scale):
        scale = x.scale**n
    else:
        for _ in range(abs(n)):
            scale = v.product(scale, x.scale) if n > 0 else v.ratio(scale, x.scale)
    return v.settled(bind(eqn, v.wide(x)), scale, x.rho**n, dtype, factor=x.factor**n)


def _root(degree: int, inverse: bool) -> Any:
    """Rule of the root: the scale becomes the power of two whose power it is; the remainder goes into the data."""

    def root(eqn: Any, x: Value) -> Value:
        dtype = v.result_dtype(x)
        if v.is_static(x.scale):
            out: Any = 2.0 ** (round(math.log2(x.scale)) // degree)
            rest: Any = x.scale / out**degree
        else:
            # A little up before rounding down: the root of a power of two must not fall short of itself.
            out = pow2_floor(lax.mul(lax.pow(x.scale, np.float32(1 / degree)), np.float32(1 + 2**-12)))
            zeros = lax.lt(x.scale, np.float32(v.OF_ZEROS))  # of which the root is zeros, or infinities
            out = lax.select(zeros, lax.full_like(out, 1.0 if inverse else v.MIN_SCALE), out)
            rest = x.scale
            for _ in range(degree):
                rest = v.ratio(rest, out)
        data = bind(eqn, v.times(v.wide(x), rest))
        rho = x.rho * rest if v.is_static(rest) else x.rho
        rho = rho ** (-1 / degree if inverse else 1 / degree)
        return v.settled(data, v.ratio(1.0, out) if inverse else out, rho, dtype)

    return root


rule("sqrt")(_root(2, inverse=False))
rule("rsqrt")(_root(2, inverse=True))
rule("cbrt")(_root(3, inverse=False))


@rule("sign")
def _sign(eqn: Any, x: Value) -> Value:
    return v.value(bind(eqn, x.data), 1.0, 1.0, x.dtype)


@rule("is_finite")
def _is_finite(eqn: Any, x: Value) -> Any:
    return bind(eqn, x.data)


@rule("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "le_to", "lt_to")
def _compare(eqn: Any, a: Any, b: Any) -> Any:
    for x, other in ((a, b), (b, a)):
        constant = v.uniform(x)
        if constant is not None and (constant == 0 or not math.isfinite(constant)):
            number = np.asarray(constant, other.data.dtype)
            return bind(eqn, *((number, other.data) if x is a else (other.data, number)))
    (a, b), _ = lifted(a, b)
    scale = v.largest(a.scale, b.scale)
    return bind(eqn, v.wide_at(a, scale), v.wide_at(b, scale))


def common(*operands: Any) -> tuple[list[Any], Any, float, np.dtype]:
    """FP32 data of all operands at the largest of their scales; constants take that of the others, and saturate."""
    values = [x for x in operands if isinstance(x, Value)]
    dtype = v.result_dtype(*values)
    arrays = [x if isinstance(x, Value) or v.uniform(x) is not None else v.lift(x, dtype) for x in operands]
    values = [x for x in arrays if isinstance(x, Value)]
    scale = v.largest(*(x.scale for x in values))
    rho = max(x.rho for x in values if x.scale is scale or not v.is_static(scale) or x.scale == scale)
    constants = [c for c in (v.uniform(x) for x in arrays if not isinstance(x, Value)) if c and math.isfinite(c)]
    if constants and not v.is_static(scale):
        # Beside zeros a constant keeps its own scale: at theirs it would saturate at nearly nothing.
        scale = v.unless_of_zeros(scale, pow2_round(max(map(abs, constants))))
    keep = all(x.data.dtype == dtype and v.same_scale(x.scale, scale) for x in values)
    data = [constant_at(x, scale, dtype, keep) if not isinstance(x, Value)
            else (x.data if keep else v.wide_at(x, scale)) for x in arrays]  # fmt: skip
    return data, scale, rho, dtype


def constant_at(x: Any, scale: Any, dtype: np.dtype, keep: bool) -> Any:
    """A uniform constant at a scale: within what the format holds, unless it is infinite or NaN."""
    constant: Any = v.uniform(x)
    out_dtype = dtype if keep else np.dtype(np.float32)
    limit = float(jnp.finfo(dtype).max)
    if constant == 0 or not math.isfinite(constant):
        return lax.full(np.shape(x), np.asarray(constant, out_dtype), out_dtype)
    if v.is_static(scale):
        number = min(max(constant / scale, -limit), limit)
        return lax.full(np.shape(x), np.asarray(number, out_dtype), out_dtype)
    # Divided in two steps: the reciprocal of a scale is a scale, the quotient may leave FP32 and is then the limit.
    number = lax.clamp(np.float32(-limit), lax.div(np.float32(constant), scale), np.float32(limit))
    number = lax.convert_element_type(number, out_dtype)
    return number if np.shape(x) == () else jnp.broadcast_to(number, np.shape(x))


@rule("max", "min", "clamp")
def _extreme(eqn: Any, *operands: Any) -> Value:
    if eqn.primitive.name == "clamp" and not isinstance(operands[1], Value):
        operands = (operands[0], v.lift(operands[1], v.result_dtype(*operands)), operands[2])
    data, scale, rho, dtype = common(*operands)
    return v.value(bind(eqn, *data), scale, rho, dtype)


@rule("select_n")
def _select_n(eqn: Any, which: Any, *cases: Any) -> Value:
    # Not for static scales: clipping by a global norm is such a choice, and would make all of an optimiser dynamic.
    if not np.shape(which) and any(isinstance(x, Value) and not v.is_static(x.scale) for x in cases):
        return _select_whole(eqn, v.materialise(which), *cases)
    data, scale, rho, dtype = common(*cases)
    return v.value(bind(eqn, v.materialise(which), *data), scale, rho, dtype)


def _select_whole(eqn: Any, which: Any, *cases: Any) -> Value:
    """One case whole, with its scale: that of a case which is not selected does not count."""
    values, dtype = lifted(*cases)
    values = [v.scalar_scale(x) for x in values]
    scale = lax.select_n(which, *(jnp.asarray(x.scale, jnp.float32) for x in values))
    return v.value(bind(eqn, which, *(v.wide(x) for x in values)), scale, max(x.rho for x in values), dtype)


@rule("convert_element_type")
def _convert(eqn: Any, x: Value) -> Any:
    dtype = np.dtype(eqn.params["new_dtype"])
    if not jnp.issubdtype(dtype, jnp.floating):
        return bind(eqn, v.unscaled(x, eqn.invars[0].aval.dtype))
    return v.value(v.saturating_cast(x.data, dtype), x.scale, x.rho, dtype)


@rule("bitcast_convert_type")
def _bitcast(eqn: Any, x: Value) -> Any:
    out = bind(eqn, v.unscaled(x, eqn.invars[0].aval.dtype))
    return v.value(out, 1.0) if jnp.issubdtype(out.dtype, jnp.floating) else out
