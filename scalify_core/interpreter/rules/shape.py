"""Rules of operations that move elements: shapes, gather, scatter and slices."""

import math
from typing import Any

from scalify_core.interpreter import registry
from scalify_core.interpreter import value as v
from scalify_core.interpreter.registry import bind, rule, structural
from scalify_core.interpreter.rules.elementwise import common
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
    data, like = common(*map(v.scalar_scale, operands))
    return like.with_data(bind(eqn, *data))


@rule("gather")
def _gather(eqn: Any, operand: Value, indices: Any) -> list[Any]:
    fill = eqn.params["fill_value"]
    if fill is None or fill == 0 or not math.isfinite(fill):
        return registry.apply_to_data(eqn, operand, indices)
    # the number to fill with is a logical one
    return registry.apply_to_logical(eqn, operand, indices)


@rule("dynamic_update_slice")
def _dynamic_update_slice(eqn: Any, operand: Any, update: Any, *indices: Any) -> Value:
    data, like = common(*map(v.scalar_scale, (operand, update)))
    return like.with_data(bind(eqn, *data, *map(formats.materialize, indices)))


@rule("scatter", "scatter-add", "scatter-sub", "scatter-min", "scatter-max")
def _scatter(eqn: Any, operand: Any, indices: Any, updates: Any) -> Value:
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
    return v.settled(out, like.scale, rms, like.dtype)
