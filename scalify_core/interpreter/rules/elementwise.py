"""Elementwise arithmetic, in FP32 and in the logical value's order of operations."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from scalify_core.interpreter import value as v
from scalify_core.interpreter.registry import (
    apply_to_logical,
    bind,
    default,
    rule,
    structural,
)
from scalify_core.interpreter.value import Value
from scalify_core.numerics import compiler_hints, formats
from scalify_core.numerics import scales as sc
from scalify_core.numerics.formats import pow2_floor, pow2_round

# 24 octaves below FP32's largest: what a mask that stands for -1e9 is added to, or
# multiplied by, does not make it infinite.
_LARGE = 2.0**104

structural("abs", "copy", "is_finite", "neg", "real", "stop_gradient")
rule("nextafter", "reduce_precision")(apply_to_logical)


def lifted(*operands: Any) -> tuple[list[Value], np.dtype]:
    """Return the operands as values, and the format of an arithmetic result."""
    dtype = v.result_dtype(*operands)
    return [v.lift(x, dtype) for x in operands], dtype


@rule("add", "sub", "add_any")
def _add(eqn: Any, a: Any, b: Any) -> Value:
    (a, b), dtype = lifted(a, b)
    # Operands that were just rescaled enter as they were before: their scales, that of
    # the sum, and the factors of both are one kernel.
    (a, b), sources = zip(*map(v.before_rescaling, (a, b)), strict=True)
    scale, rms, correction = v.hypot(a, b)
    factors = [sc.ratio(x.multiple, scale) for x in sources]
    if correction is not None and not scale.ndim:
        scale, correction, *factors = compiler_hints.in_one_kernel(
            scale, correction, *factors
        )
    data = [sc.times(v.data32(x), y) for x, y in zip(sources, factors, strict=True)]
    return v.value(bind(eqn, *data), scale, rms, dtype, rms_correction=correction)


@rule("mul")
def _mul(eqn: Any, a: Any, b: Any) -> Value:
    for x, other in ((a, b), (b, a)):
        constant = v.uniform(x)
        if (
            constant is not None
            and math.isfinite(constant)
            and other.shape == eqn.outvars[0].aval.shape
        ):
            return _times_constant(other, constant)
    (a, b), dtype = lifted(a, b)
    return _product(functools.partial(bind, eqn), a, b, dtype)


def _product(on_data: Callable, a: Value, b: Value, dtype: np.dtype) -> Value:
    """Return the product of two values, of whose data `on_data` is the product."""
    # A run-time scale of 2^-65 squared stays at 2^-126: the factor that is missing goes
    # into the data.
    scale, rest = sc.product_and_rest(a.multiple, b.multiple)
    data = sc.times(on_data(v.data32(a), v.data32(b)), rest)
    return v.settled(data, scale, a.expected_rms * b.expected_rms, dtype)


def _times_constant(x: Value, constant: float) -> Value:
    """Return the product with a constant, whose power of two goes into the scale."""
    dtype = v.result_dtype(x)
    if constant == 0:
        # Multiplied, and not zeros: an infinity or NaN becomes NaN, as in plain code.
        # The scale of zeros would say that nothing else is in it.
        return v.value(sc.times(x.data, 0.0), x.scale, x.expected_rms, dtype)
    size = x.expected_rms * abs(constant)
    factor = pow2_round(size)
    scale = sc.product(x.multiple, factor)
    # Nothing keeps a number of Python in the range of scales: the rest goes into the
    # data.
    if sc.is_static(scale):
        scale = pow2_round(scale)
        factor = scale / x.scale
    return v.value(
        sc.times(x.data, constant / factor),
        scale,
        size / factor,
        dtype,
        x.rms_correction,
        # A fill value outlives its factor: else -maximum(x, 1e-12) would be zero when
        # it is stored, and infinite as a divisor.
        is_fill_value=x.is_fill_value,
    )


@rule("div")
def _div(eqn: Any, a: Any, b: Any) -> Value:
    # One multiplication, and none by a power of two, which moves the scale alone. A
    # quotient is dearer, and a GPU's is approximate in any case.
    constant = v.uniform(b)
    if constant and math.isfinite(constant) and a.shape == eqn.outvars[0].aval.shape:
        return _times_constant(a, 1 / constant)
    (a, b), dtype = lifted(a, b)
    if sc.has_any_scale(constant):
        # `lift` gives zero and infinity the smallest scale: x / inf would get the
        # largest, and set that of the sum that it is added to.
        b = v.value(b.data, 1.0, 1.0, dtype)
    else:
        b = v.as_divisor(b)
    inverse = v.value(b.data, sc.ratio(1.0, b.scale), 1 / b.expected_rms, dtype)
    return _product(functools.partial(bind, eqn), a, inverse, dtype)


@rule("integer_pow", "square")
def _integer_pow(eqn: Any, x: Value) -> Any:
    n = eqn.params.get("y", 2)
    # Further powers of the data itself may leave FP32.
    if not 1 <= abs(n) <= 4:
        return default(eqn, x)
    dtype = v.result_dtype(x)
    if n < 0:
        x = v.as_divisor(x)
        inverse = sc.ratio(1.0, x.scale)
        x = v.value(1 / v.data32(x), inverse, 1 / x.expected_rms, dtype)
    out = x
    for _ in range(abs(n) - 1):
        # One factor at a time: the fourth power of 2^-40 leaves the range of scales.
        out = _product(lax.mul, out, x, dtype)
    return out


def _root(degree: int, inverse: bool) -> Any:
    """Return the rule of a root.

    The scale becomes the power of two whose power it is; the remainder goes into the
    data.
    """

    def root(eqn: Any, x: Value) -> Value:
        dtype, rms = v.result_dtype(x), x.expected_rms
        x = v.as_divisor(x) if inverse else v.exact(x)
        # A little up before rounding down: the root of a power of two must not fall
        # short of itself.
        out = pow2_floor(x.scale ** (1 / degree) * (1 + 2**-12))
        rest = x.scale
        for _ in range(degree):
            rest = sc.ratio(rest, out)
        data = bind(eqn, sc.times(v.data32(x), rest))
        # A run-time rest is not known. Its root is below 2, so the data is off by less
        # than an octave.
        if sc.is_static(rest):
            rms *= rest
        if inverse:
            return v.settled(data, sc.ratio(1.0, out), rms ** (-1 / degree), dtype)
        if not sc.is_static(out):
            # The root of zeros is zeros: their scale says nothing of others.
            zeros = lax.lt(x.scale, np.float32(sc.LEAST_NONZERO_SCALE))
            out = lax.select(zeros, x.scale, out)
        return v.settled(data, out, rms ** (1 / degree), dtype)

    return root


rule("sqrt")(_root(2, inverse=False))
rule("rsqrt")(_root(2, inverse=True))
rule("cbrt")(_root(3, inverse=False))


@rule(
    "expm1",
    "log1p",
    "tanh",
    "sin",
    "tan",
    "asin",
    "atan",
    "sinh",
    "asinh",
    "atanh",
    "erf",
    "erf_inv",
)
def _near_argument(eqn: Any, x: Value) -> Value:
    """Evaluate a function that is nearly its argument where that is small.

    There the result has the argument's scale.
    """
    (y,) = default(eqn, x)
    if sc.is_static(x.scale):
        # At scale 1 FP16 has no number for results below 2^-25. Above 1 all are taken
        # to be of size 1, as tanh is.
        return v.settled(y.data, 1.0, min(x.size, 1.0), y.dtype)
    return v.at_scale(y, sc.smallest(sc.unless_of_zeros(x.scale, 1.0), 1.0))


@rule("floor", "ceil", "round")
def _to_integers(eqn: Any, x: Value) -> Value:
    """Evaluate a rounding to integers, at a scale of at least 1.

    At a scale below 1 an integer would be large data.
    """
    (y,) = default(eqn, x)
    # floor and ceil of numbers of 2^-20 are -1, 0 and 1, of which 1 is 2^20 at their
    # scale: beyond FP16.
    return v.at_scale(y, sc.largest(x.scale, 1.0), x.expected_rms)


@rule("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "le_to", "lt_to")
def _compare(eqn: Any, a: Any, b: Any) -> Any:
    (a, b), _ = lifted(a, b)
    # At a common scale: numbers of 2^100 are compared without being formed.
    scale = sc.largest(a.scale, b.scale)
    return bind(eqn, v.data32_at(a, scale), v.data32_at(b, scale))


def common(*operands: Any) -> tuple[list[Any], Value]:
    """Return the data of all operands at the largest of their scales.

    Constants take the scale of the other operands. The data is FP32, unless all
    operands are at that scale already and the format can represent the constants. A
    mask's -1e9 beside logits of 2^-30 must not become the format's -65504 * 2^-30, nor
    a divisor's 1e-12 a zero: they saturate when they are stored.

    Returns:
        The data, and the value that such data belongs to, without data. It is a fill
        value if it may hold a constant that the format cannot represent.
    """
    dtype = v.result_dtype(*operands)
    arrays = [x if v.uniform(x) is not None else v.lift(x, dtype) for x in operands]
    values = [x for x in arrays if isinstance(x, Value)]
    scales = [x.scale for x in values]
    scale = sc.largest(*scales)
    is_static = sc.is_static(scale)
    # The others are smaller: their expected RMS belongs to another scale.
    rms = max(x.expected_rms for x in values if not is_static or x.scale == scale)
    if formats.has_range_of_float32(dtype):
        # At the largest scale the smallest would leave FP32: one in between holds all.
        scale = sc.between(scales)
    constants = [c for c in map(v.uniform, arrays) if c and math.isfinite(c)]
    if constants and not is_static:
        # Beside zeros a constant keeps its own scale: at theirs it would saturate at
        # nearly nothing.
        scale = sc.unless_of_zeros(scale, pow2_round(max(map(abs, constants))))
    held = all(is_static and formats.holds(dtype, c / scale) for c in constants)
    keep = held and all(
        x.data.dtype == dtype and sc.same_scale(own_scale, scale)
        for x, own_scale in zip(values, scales, strict=True)
    )
    data = []
    for x in arrays:
        if not isinstance(x, Value):
            data.append(constant_at(x, scale, dtype, keep))
        elif keep:
            data.append(x.data)
        else:
            data.append(v.data32_at(x, scale))
    fills = not held or any(x.is_fill_value for x in values)
    return data, v.value(None, scale, rms, dtype, is_fill_value=fills)


def constant_at(x: Any, scale: Any, dtype: np.dtype, keep: bool) -> Any:
    """Return a uniform constant at a scale, in the format (`keep`) or in FP32.

    Finite constants saturate.
    """
    constant: Any = v.uniform(x)
    # FP32 data of a narrower format leaves room for later operations, such as the
    # difference of two.
    out_dtype, limit = np.dtype(np.float32), _LARGE
    if keep or dtype == out_dtype:
        out_dtype, limit = dtype, float(jnp.finfo(dtype).max)
    if sc.has_any_scale(constant):
        return lax.full(np.shape(x), np.asarray(constant, out_dtype), out_dtype)
    if sc.is_static(scale):
        number = min(max(constant / scale, -limit), limit)
        return lax.full(np.shape(x), np.asarray(number, out_dtype), out_dtype)
    # The quotient may leave FP32, and is then the limit.
    number = lax.clamp(
        np.float32(-limit), lax.div(np.float32(constant), scale), np.float32(limit)
    )
    number = lax.convert_element_type(number, out_dtype)
    if np.shape(x) == ():
        return number
    return jnp.broadcast_to(number, np.shape(x))


@rule("max", "min", "clamp")
def _extreme(eqn: Any, *operands: Any) -> Value:
    data, like = common(*operands)
    # At a scale for each row a scalar bound is a column, which clamp does not take.
    shape = eqn.outvars[0].aval.shape
    data = [jnp.broadcast_to(x, shape) if np.shape(x) else x for x in data]
    return like.with_data(bind(eqn, *data))


@rule("select_n")
def _select_n(eqn: Any, which: Any, *cases: Any) -> Value:
    # Not for static scales: clipping by a global norm is such a choice, and would make
    # all of an optimizer dynamic.
    if not np.shape(which) and any(
        isinstance(x, Value) and not sc.is_static(x.scale) for x in cases
    ):
        return _select_whole(eqn, formats.materialize(which), *cases)
    data, like = common(*cases)
    return like.with_data(bind(eqn, formats.materialize(which), *data))


def _select_whole(eqn: Any, which: Any, *cases: Any) -> Value:
    """Return the selected case, with its own scale.

    The scale of a case that is not selected does not count.
    """
    values, dtype = lifted(*cases)
    values = [v.scalar_scale(v.exact(x)) for x in values]
    scale = lax.select_n(which, *(jnp.asarray(x.scale, jnp.float32) for x in values))
    return v.value(
        bind(eqn, which, *(v.data32(x) for x in values)),
        scale,
        max(x.expected_rms for x in values),
        dtype,
        is_fill_value=any(x.is_fill_value for x in values),
    )


@rule("convert_element_type")
def _convert(eqn: Any, x: Any) -> Any:
    dtype, x = np.dtype(eqn.params["new_dtype"]), v.lift(x, eqn.invars[0].aval.dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        # The integer of the number as the user cast it: int(float16(2049)) is 2048.
        return bind(eqn, v.unscaled(x, eqn.invars[0].aval.dtype))
    # The power of two stays apart from a run-time scale: multiplied out, it is a kernel
    # on a GPU.
    return v.value(
        formats.saturating_cast(x.data, dtype), x.multiple, x.expected_rms, dtype
    )
