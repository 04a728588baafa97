"""Helpers for the rules of composites; the rules of activations and norms.

A rule that calls the function on *data* passes the scales in its static parameters (the
scale of attention's logits, a norm's epsilon). So kernels read the narrow arrays
directly. A scale that is not static is multiplied into the data first, which is then in
FP32 (`with_static_scale`). The result is near RMS 1 only after the powers of two are
taken out again (`scale_out_of_data`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core.interpreter import value as v
from scalify_core.interpreter.composite_calls import in_order
from scalify_core.interpreter.registry import composite_rule, forward_rule
from scalify_core.interpreter.value import Value
from scalify_core.numerics import compiler_hints, formats
from scalify_core.numerics import scales as sc
from scalify_core.numerics.formats import pow2_round

_SQRT_HALF = math.sqrt(0.5)
SQRT_2 = math.sqrt(2)


def on_data(call: Any, *args: Any, **static: Any) -> list[Any]:
    """Return the call's flat results on the data of `args`, with other parameters.

    `args` are pytrees of values and plain arrays.
    """
    leaves = [
        formats.materialize(v.data_of(x))
        for x in jax.tree.leaves(args, is_leaf=v.is_value)
    ]
    return call.replace(static={**call.settings, **static}).bind(*leaves)


def on_values(call: Any, results: list[tuple[Any, Any]], *args: Any) -> list[Value]:
    """Return results of the call in FP32, on the logical values of `args`.

    Result i gets `results[i]`, its expected size and format. Further results, as
    residuals that are arguments, are left out.
    """
    out = call.bind(*map(v.unscaled, jax.tree.leaves(args, is_leaf=v.is_value)))
    return [
        value_of_size(x, size, dtype)
        for x, (size, dtype) in zip(out, results, strict=False)
    ]


def on_gradient(
    call: Any, results: list[tuple[float, Any]], residuals: Any, gradient: Value
) -> list[Value]:
    """Return the results of a call that is linear in its gradient.

    The gradient's scale stays out of the arithmetic.

    Args:
        call: the call, of `(residuals, gradient)`.
        results: the expected sizes for a gradient of size 1, and the formats.
        residuals: its residuals.
        gradient: its gradient.
    """
    # A static scale is a constant, which the compiler folds into the function's own;
    # beside a run-time size the result needs arithmetic on scales in any case.
    if sc.is_static(gradient.scale) or not all(
        sc.is_static(size) for size, _ in results
    ):
        sized = [(size_of(gradient.size, size), dtype) for size, dtype in results]
        return on_values(call, sized, residuals, gradient)
    # Linear in the gradient, so its run-time scale goes by: into the data and out again
    # it would be two multiplications of every element.
    data = gradient.with_scale(gradient.data, 1.0)
    out = on_values(
        call,
        [(gradient.expected_rms * size, dtype) for size, dtype in results],
        residuals,
        data,
    )
    return [
        dataclasses.replace(
            x.with_scale(x.data, sc.product(x.scale, gradient.multiple)),
            rms_correction=gradient.rms_correction,
        )
        for x in out
    ]


def value_of_size(x: Any, size: Any, dtype: Any) -> Value:
    """Return a plain FP32 array as a value of this expected size.

    The size is a number, or an FP32 scalar.
    """
    scale, rms = pow2_round(size), 1.0
    if sc.is_static(size):
        rms = size / scale
    return v.value(sc.times(x, sc.ratio(1.0, scale)), scale, rms, dtype)


def with_static_scale(x: Value) -> tuple[Value, Any]:
    """Return a value whose scale is static, and the scale that is in its data.

    A dynamic scale is multiplied into FP32 data; the second result is 1 otherwise.
    """
    x = v.scalar_scale(x)
    if sc.is_static(x.scale):
        return x, 1.0
    return x.with_scale(v.unscaled(x), 1.0), x.scale


def kernel_operands(*operands: Any) -> tuple[list[Value], tuple]:
    """Return operands with static scales and data in their formats, and their scales.

    The data of all operands is FP32 where FP16 or FP8 would have to hold a scale. A
    GPU's fused attention kernel, which reads 16 bits, is then not used.
    """
    dtype = v.result_dtype(*operands)
    values, scales = zip(
        *(with_static_scale(v.lift(x, dtype)) for x in operands),
        strict=True,
    )
    # BF16 holds any scale in its data, so kernels read its 16 bits at run-time scales,
    # too. In FP16 all data was zero at 2^-30.
    if all(map(sc.is_static, scales)) or formats.has_range_of_float32(dtype):
        return list(map(v.narrow, values)), scales
    return [x.with_scale(v.data32(x), x.scale) for x in values], scales


def scale_out_of_data(x: Value, scale: Any) -> Value:
    """Return the same value, with a dynamic scale taken out of its FP32 data."""
    if sc.is_static(scale):
        return x
    data = sc.times(v.data32(x), sc.ratio(1.0, scale))
    return x.with_scale(data, sc.product(x.scale, scale))


def size_of(*factors: Any) -> Any:
    """Return the product of sizes, of which some may be dynamic."""
    out: Any = 1.0
    for factor in factors:
        if sc.is_static(out) and sc.is_static(factor):
            out = out * factor
        else:
            out = sc.as_number(sc.product(out, factor))
    return out


def as_value(x: Any, *others: Any) -> Value:
    """Return an operand as a value with one scale.

    A plain operand takes the format of the others.
    """
    if v.is_value(x):
        return v.scalar_scale(x)
    return v.lift(x, v.result_dtype(*others))


# Activations: x * g(x). Their result is known for a Gaussian of the expected size: near
# zero, gelu only halves.


def _silu(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    sigmoid = (1 + np.tanh(x / 2)) / 2
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


def _gelu(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # The error function's form, which differs from the tanh form by less than 1e-3, has
    # the simpler slope.
    below = np.asarray([math.erfc(-y * _SQRT_HALF) / 2 for y in x])
    return x * below, below + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


_ACTIVATIONS = {"gelu": _gelu, "silu": _silu}
# The mean over a normal variable by quadrature: more than 16 nodes change little, so 64
# is no tuned number.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(64)
_WEIGHTS /= _WEIGHTS.sum()


# Each layer asks anew while tracing, mostly for a size that another layer has had.
@functools.lru_cache(maxsize=4096)
def activated(name: str, size: float) -> tuple[float, float]:
    """Return the RMS of an activation, and of its slope, for Gaussian numbers of RMS
    `size`.
    """
    # Beyond 2^30 both are `max(x, 0)`; the squares of larger numbers would leave FP64.
    y, slope = _ACTIVATIONS[name](_NODES * min(size, 2.0**30))
    rms, slope_rms = (math.sqrt(float(_WEIGHTS @ x**2)) for x in (y, slope))
    return rms * max(size / 2.0**30, 1.0), slope_rms


def _sizes(name: str, x: Value) -> tuple[Any, float]:
    """Return the sizes of `activated`.

    A size that is unknown while tracing counts as large.
    """
    if sc.is_static(x.scale):
        return activated(name, x.size)
    # Near zero GELU and SiLU halve their argument, and of large numbers they keep 0.71,
    # the RMS of `max(x, 0)`: half an octave apart, which is what this may be off by.
    return (size_of(x.size, _SQRT_HALF), _SQRT_HALF)


def _biased(x: Any, bias: Any) -> tuple[Value, Any, Value]:
    """Return both as values, and a value of their sum's size with the data of `x`."""
    x = as_value(x, bias)
    if bias is None:
        return x, None, x
    bias = as_value(bias, x)
    # Not added here: the function adds it, or XLA would store its argument twice, with
    # the bias and without.
    scale, rms, _ = v.hypot(x, bias)
    return x, bias, v.value(x.data, scale, rms, x.dtype)


@forward_rule("gelu")
def _gelu_fwd(call: Any, x: Any, bias: Any) -> Any:
    x, bias, total = _biased(x, bias)
    size = _sizes("gelu", total)[0]
    return *on_values(call, [(size, x.dtype)], x, bias), (x, bias)


@composite_rule("gelu.bwd")
def _gelu_bwd(call: Any, residuals: Any, gradient: Any) -> Any:
    x, bias, total = _biased(*residuals)
    gradient = as_value(gradient, x)
    size = _sizes("gelu", total)[1]
    if bias is None:
        return on_gradient(call, [(size, gradient.dtype)], (x, None), gradient)
    rows = math.prod(x.shape[:-1])
    # FP32 for the bias, as for others: a sum over all rows, whose terms may agree.
    results = [(size, gradient.dtype), (size * math.sqrt(rows), np.dtype(np.float32))]
    dx, dbias = on_gradient(call, results, (x, bias), gradient)
    dx = v.narrow(dx)
    # Under vmap the leading axes are not all rows of one bias.
    if not call.in_axes:
        # The rows are computed twice, and `kept_narrow` separates the two computations.
        # The compiler then makes one kernel of their sum and their cast to FP8.
        # Otherwise it stores the rows in between.
        apart = v.value(compiler_hints.kept_narrow(v.unscaled(bias)), 1.0)
        recomputed = v.narrow(on_gradient(call, results, (x, apart), gradient)[0])
        # Sums in FP32, of the numbers that the products read.
        added = jnp.sum(
            recomputed.data, axis=tuple(range(dx.data.ndim - 1)), dtype=jnp.float32
        )
        dbias = v.settled(
            added, dx.multiple, dx.expected_rms * math.sqrt(rows), np.dtype(np.float32)
        )
    return dx, dbias


@forward_rule("swiglu")
def _swiglu(call: Any, gate: Any, up: Any) -> Any:
    values = [as_value(x, gate, up) for x in (gate, up)]
    # As if the branches were independent. Training aligns them, so a model brings
    # hidden channels to size by a power of two of its own, or places its weights
    # together.
    size = size_of(_sizes("silu", values[0])[0], values[1].size)
    results = [(size, v.result_dtype(*values))]
    return *on_values(call, results, *values), (gate, up)


@composite_rule("swiglu.bwd")
def _swiglu_bwd(call: Any, residuals: Any, gradient: Any) -> Any:
    gate, up, gradient = (
        as_value(x, *residuals, gradient) for x in (*residuals, gradient)
    )
    silu, slope = _sizes("silu", gate)
    return on_gradient(
        call,
        [(size_of(up.size, slope), gate.dtype), (silu, up.dtype)],
        (gate, up),
        gradient,
    )


@forward_rule("materialized")
def _materialized(call: Any, x: Any) -> Any:
    x = in_order(call, x)
    # The rule reads data in its format (`wide` is false): several kernels begin by
    # rounding a residual stream, and would store it in FP32 for that.
    if v.is_value(x):
        x = dataclasses.replace(x, data=compiler_hints.kept_narrow(x.data))
    return x, None


composite_rule("materialized.bwd", wide=True)(
    lambda call, _, gradient: (in_order(call, gradient),)
)


# A norm does not see the scale of its argument, but by epsilon: so that is divided by
# the scale's square, and kernels read the data as it is.


def _normalized(
    call: Any, x: Any, weight: Any, bias: Any = None
) -> tuple[Value, list[Any], Value]:
    """Return the result, all flat results on data, and `x` with a static scale."""
    # A norm divides its argument's scale out again, so FP32 data at scale 1 serves for
    # a run-time scale.
    x, _ = with_static_scale(as_value(x, weight, bias))
    parameters = [as_value(p, x) for p in (weight, bias) if p is not None]
    scales, unit = [p.scale for p in parameters], 1.0
    if (
        len(scales) == 2
        and all(map(sc.is_static, scales))
        and 2.0**-24 <= scales[0] / scales[1] <= 2.0**24
    ):
        # Use the bias's data, and multiply the result by its scale: scaling the vector
        # could become a separate kernel. The scale of zeros is too far from others.
        unit = scales[1]
    data = [v.data32_at(p, unit) for p in parameters]
    eps = call.settings["eps"]
    # Not below FP32's smallest number: a row of zeros must stay one.
    out = on_data(
        call, v.data32(x), *data, eps=eps and max(eps / x.scale**2, sc.MIN_SCALE)
    )
    size = _weight_size(parameters[0])
    return value_of_size(sc.times(out[0], unit), size, x.dtype), out, x


def _weight_size(weight: Any) -> float:
    """Return the size of a norm's output, as far as its weight determines it."""
    if v.is_value(weight) and sc.is_static(weight.scale):
        return weight.size
    return 1.0


def _norm_fwd(call: Any, x: Any, weight: Any, *bias: Any) -> Any:
    y, out, scaled = _normalized(call, x, weight, *bias)
    if len(out) == 1:  # not differentiated
        return y, None
    # (out, x, mean, rstd, weight, bias) or (out, x, rrms, weight): the statistics are
    # those of the data.
    *mean, rstd = out[2 : 3 + len(bias)]
    # The backward pass reads the same data, so it needs the data's own statistics;
    # their scales only tell `explain` what they stand for.
    statistics = [v.value(m, scaled.scale) for m in mean]
    statistics.append(v.value(rstd, 1 / scaled.scale))
    # The argument and not what was computed: the residual stream is stored in any case.
    return y, (x, *statistics, weight, *bias)


def _norm_bwd(call: Any, residuals: Any, gradient: Any) -> Any:
    # (x, mean, rstd, weight, bias) or (x, rrms, weight)
    x, *rest = residuals
    statistics, parameters = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    weight = parameters[0]
    gradient = as_value(gradient, x, weight)
    x, scale = with_static_scale(as_value(x, weight, gradient))
    logical = map(v.unscaled, parameters)
    dx, *sums = on_data(call, (v.data32(x), *statistics, *logical), v.data32(gradient))
    # Rows smaller than sqrt(eps) were divided by sqrt(eps), so their gradient is, too.
    least = math.sqrt(call.settings["eps"])
    size, divisor = x.expected_rms, sc.largest(scale, pow2_round(least))
    if sc.is_static(scale):
        size, divisor = max(x.expected_rms, least / x.scale), 1.0
    rms = gradient.expected_rms * _weight_size(weight) / size
    rows = math.prod(x.shape[:-1])
    dx = v.settled(dx, sc.ratio(gradient.multiple, x.scale), rms, x.dtype, SQRT_2)
    if sc.is_static(divisor):
        # Stored: a rescale in front of the norm reads it several times.
        dx = v.narrow(dx)
        dx = dataclasses.replace(dx, data=compiler_hints.kept_narrow(dx.data))
    return [
        scale_out_of_data(dx, sc.ratio(1.0, divisor)),
        *(
            v.settled(
                d,
                gradient.multiple,
                gradient.expected_rms * math.sqrt(rows),
                p.dtype if v.is_value(p) else x.dtype,
                SQRT_2,
            )
            for d, p in zip(sums, parameters, strict=False)
        ),
    ]


for _name in ("layer_norm", "rms_norm"):
    forward_rule(_name)(_norm_fwd)
    composite_rule(f"{_name}.bwd", wide=True)(_norm_bwd)


# The functions of `scalify_core.ops.rescale`. Their rules take data that is not rounded
# yet: a rescale after the rounding would come too late for what that loses.


def _rescaling(name: str, forward: Callable | None, backward: Callable | None) -> None:
    """Register a composite of one array; None leaves the value unchanged."""

    def apply(change: Callable | None, call: Any, x: Any) -> Any:
        x = in_order(call, x)
        if change is None or not v.is_value(x):
            return x
        return change(x, **call.settings)

    forward_rule(name, wide=True)(lambda call, x: (apply(forward, call, x), None))
    composite_rule(f"{name}.bwd", wide=True)(
        lambda call, _, g: (apply(backward, call, g),)
    )


def _at_static_scale(x: Value, *, scale: float) -> Value:
    return v.value(v.data32_at(x, scale), scale, 1.0, x.dtype)


def _rebalanced(x: Value, *, factor: float) -> Value:
    return v.settled(
        sc.times(v.data32(x), 1 / factor),
        sc.product(x.scale, factor),
        x.expected_rms / factor,
        x.dtype,
        slack=math.inf,  # only to stay in the range of scales
    )


def _quantized(x: Value, *, fmt: Any) -> Value:
    # The data is rounded, as storing it would: the user simulates a format of the data.
    data = formats.saturating_cast(fmt.quantize(v.data32(x)), x.dtype)
    return x.with_scale(data, x.scale)


_rms = v.rescaled_by_rms
# An empty array has no largest element; 0 leaves its scale.
_max = functools.partial(
    v.rescaled_by, lambda data: jnp.max(jnp.abs(data), initial=0.0)
)
_rescaling("set_scaling", _at_static_scale, None)
_rescaling("rebalance", _rebalanced, None)
_rescaling("rebalance_grad", None, _rebalanced)
_rescaling("cast_on_forward", _quantized, None)
_rescaling("cast_on_backward", None, _quantized)
_rescaling("dynamic_rescale_rms", _rms, None)
_rescaling("dynamic_rescale_max", _max, None)
_rescaling("dynamic_rescale_rms_grad", None, _rms)
_rescaling("dynamic_rescale_max_grad", None, _max)


@composite_rule("get_data_scale")
def _get_data_scale(call: Any, x: Value) -> Any:
    del call
    x = v.scalar_scale(x)
    return v.data32(x), jnp.asarray(x.scale, jnp.float32)
