"""Reductions, cumulative and windowed ones among them. Sums add up in FP32."""

from __future__ import annotations

import math
from typing import Any

from scalify_core.interpreter import value as v
from scalify_core.interpreter.registry import bind, rule, structural, unscaled
from scalify_core.interpreter.value import Value
from scalify_core.numerics import storage

structural(
    "reduce_max",
    "reduce_min",
    "cummax",
    "cummin",
    "reduce_window_max",
    "reduce_window_min",
)
unscaled("reduce_prod", "cumprod", "cumlogsumexp")


def summed(eqn: Any, x: Value, count: float) -> Value:
    """Return a sum of `count` terms."""
    x = v.scalar_scale(x)
    out = bind(eqn, v.wide(x))
    rms = x.expected_rms * math.sqrt(max(count, 1))
    return v.settled(
        out, x.multiple, rms, v.result_dtype(x), slack=math.sqrt(2), factor=x.factor
    )


@rule("reduce_sum", lazy=True)
def _reduce_sum(eqn: Any, x: Value) -> Value:
    axes = tuple(range(len(x.shape) - 1))
    if (
        x.pre_rescale is not None
        and x.pre_rescale.sums is not None
        and eqn.params["axes"] == axes
    ):
        rms = x.expected_rms * math.sqrt(max(math.prod(x.shape[:-1]), 1))
        return v.settled(
            x.pre_rescale.sums, x.multiple, rms, v.result_dtype(x), slack=math.sqrt(2)
        )
    return summed(eqn, x, math.prod(x.shape[axis] for axis in eqn.params["axes"]))


@rule("cumsum", lazy=True)
def _cumsum(eqn: Any, x: Value) -> Value:
    return summed(eqn, x, x.shape[eqn.params["axis"]])


@rule("reduce_window_sum", lazy=True)
def _reduce_window_sum(eqn: Any, x: Value) -> Value:
    return summed(eqn, x, math.prod(eqn.params["window_dimensions"]))


@rule("argmax", "argmin")
def _argmax(eqn: Any, x: Value) -> Any:
    return bind(eqn, v.scalar_scale(x).data)


@rule("select_and_scatter_add")
def _select_and_scatter_add(eqn: Any, source: Any, operand: Any) -> Value:
    """Evaluate the gradient of max pooling: scatter `source` to the maxima of
    `operand`.
    """
    if not isinstance(source, Value):
        source = v.lift(source, operand.dtype)
    where = (
        v.wide(v.scalar_scale(operand))
        if isinstance(operand, Value)
        else storage.as_float32(operand)
    )
    source = v.scalar_scale(source)
    return v.value(
        bind(eqn, v.wide(source), where),
        source.scale,
        source.expected_rms,
        source.dtype,
    )


@rule("select_and_gather_add")
def _select_and_gather_add(eqn: Any, tangents: Any, operand: Any) -> Value:
    return _select_and_scatter_add(eqn, tangents, operand)
