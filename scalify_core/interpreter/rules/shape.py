"""Rules of operations that move elements (shapes, gather, scatter and slices), and of
reductions, cumulative and windowed ones among them.

Sums add up in FP32. The expected RMS of a sum of K independent terms is sqrt(K) times
that of one.
"""

import dataclasses
import math
from typing import Any

from scalify_core.interpreter import registry
from scalify_core.interpreter import value as v
from scalify_core.interpreter.registry import bind, rule, structural
from scalify_core.interpreter.rules.elementwise import common, lifted
from scalify_core.interpreter.value import Value
from scalify_core.numerics import formats

structural(
    "broadcast_in_dim", "device_put", "dynamic_slice", "layout_constraint",
    "name", "optimization_barrier", "reshape", "reshard", "rev", "sharding_constraint",
    "slice", "sort", "split", "squeeze", "stage", "tie", "tile", "top_k", "transpose",
    "unstack",
)  # fmt: skip


@rule("concatenate", "pad", "stack")
def _join(eqn: Any, *operands: Any) -> Value:
    # Rows with scales of their own would need one along the joined axis of all
    # operands.
    data, like = common(*map(v.scalar_scale, operands))
    return like.with_data(bind(eqn, *data))


@rule("gather")
def _gather(eqn: Any, operand: Value, indices: Any) -> list[Any]:
    fill = eqn.params["fill_value"]
    if fill is None or fill == 0 or not math.isfinite(fill):
        return registry.apply_to_data(eqn, operand, indices)
    # The number to fill with is a logical one: in the data it would be times the scale.
    # One scale, since rows do not stay in their places.
    return registry.apply_to_logical(eqn, v.scalar_scale(operand), indices)


@rule("dynamic_update_slice")
def _dynamic_update_slice(eqn: Any, operand: Any, update: Any, *indices: Any) -> Value:
    data, like = common(*map(v.scalar_scale, (operand, update)))
    return like.with_data(bind(eqn, *data, *map(formats.materialize, indices)))


@rule("scatter", "scatter-add", "scatter-sub", "scatter-min", "scatter-max")
def _scatter(eqn: Any, operand: Any, indices: Any, updates: Any) -> Any:
    if eqn.primitive.name == "scatter" and eqn.params["update_jaxpr"] is not None:
        # The user's function of elements, `x.at[i].apply(f)`, is of logical ones.
        operand = v.scalar_scale(operand)
        return registry.apply_to_logical(eqn, operand, indices, updates)
    (operand, updates), like = common(*map(v.scalar_scale, (operand, updates)))
    # FP32: sums, and because the equation's inner jaxpr was traced so.
    out = bind(
        eqn,
        formats.as_float32(operand),
        formats.materialize(indices),
        formats.as_float32(updates),
    )
    terms = 1.0
    if eqn.primitive.name in ("scatter-add", "scatter-sub"):
        # Updates per element, if the indices are spread evenly.
        terms = max(math.prod(updates.shape) / max(math.prod(operand.shape), 1), 1.0)
    rms = like.expected_rms * math.sqrt(terms)
    return dataclasses.replace(
        v.settled(out, like.scale, rms, like.dtype), is_fill_value=like.is_fill_value
    )


# Scales are positive, so the largest element of the data is that of the value.
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
    # In FP32: sums of 200,000 rows saturated in FP16.
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
    # The size of the last element; the first is smaller by the root of the length.
    return summed(eqn, x, x.shape[eqn.params["axis"]])


@rule("reduce_window_sum")
def _reduce_window_sum(eqn: Any, x: Value) -> Value:
    return summed(eqn, x, math.prod(eqn.params["window_dimensions"]))


@rule("select_and_scatter_add", "select_and_gather_add")
def _select_and_scatter_add(eqn: Any, source: Any, operand: Any) -> Value:
    """Evaluate a gradient of max pooling: `source`, or tangents, at the maxima of
    `operand`.
    """
    # Operands are only compared with each other, so their scale plays no part.
    source, operand = map(v.scalar_scale, lifted(source, operand)[0])
    return source.with_data(bind(eqn, v.data32(source), v.data32(operand)))
