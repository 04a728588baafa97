"""Reductions, cumulative and windowed ones among them. Sums add up in FP32.

The expected RMS of a sum of K independent terms is sqrt(K) times that of one.
"""

import math
from typing import Any

from scalify_core.interpreter import value as v
from scalify_core.interpreter.registry import bind, rule, structural
from scalify_core.interpreter.rules.elementwise import lifted
from scalify_core.interpreter.value import Value

structural(
    "argmax",
    "argmin",
    "reduce_max",
    "reduce_min",
    "cummax",
    "cummin",
    "reduce_window_max",
    "reduce_window_min",
)


def summed(eqn: Any, x: Value, count: float) -> Value:
    """Return a sum of `count` terms."""
    x = v.scalar_scale(x)
    out = bind(eqn, v.data32(x))
    rms = x.expected_rms * math.sqrt(max(count, 1))
    return v.settled(out, x.multiple, rms, v.result_dtype(x), slack=math.sqrt(2))


@rule("reduce_sum")
def _reduce_sum(eqn: Any, x: Value) -> Value:
    if x.pre_rescale is not None:
        # A sum is that of what is not rounded yet: many small terms would be zeros.
        x = x.with_data(v.data32_at(x.pre_rescale.value, x.scale))
    return summed(eqn, x, math.prod(x.shape[axis] for axis in eqn.params["axes"]))


@rule("cumsum")
def _cumsum(eqn: Any, x: Value) -> Value:
    return summed(eqn, x, x.shape[eqn.params["axis"]])


@rule("reduce_window_sum")
def _reduce_window_sum(eqn: Any, x: Value) -> Value:
    return summed(eqn, x, math.prod(eqn.params["window_dimensions"]))


@rule("select_and_scatter_add", "select_and_gather_add")
def _select_and_scatter_add(eqn: Any, source: Any, operand: Any) -> Value:
    """Evaluate a gradient of max pooling: `source`, or tangents, at the maxima of
    `operand`.
    """
    source, operand = map(v.scalar_scale, lifted(source, operand)[0])
    return source.with_data(bind(eqn, v.data32(source), v.data32(operand)))
