"""Gather, scatter and dynamic slices. Scatter-add accumulates in FP32."""

from __future__ import annotations

import math
from typing import Any

from jax import lax

from scalify_core.interpreter import registry
from scalify_core.interpreter import value as v
from scalify_core.interpreter.registry import bind, rule, structural, unscaled
from scalify_core.interpreter.rules.elementwise import common
from scalify_core.interpreter.value import Value
from scalify_core.numerics import storage

structural(
    "dynamic_slice",
    along=lambda eqn, scale, *starts: lax.dynamic_slice(
        scale,
        [storage.materialise(i) for i in starts],
        tuple(map(min, scale.shape, eqn.params["slice_sizes"])),
    ),
)
unscaled("scatter-mul", as_traced=True)


@rule("gather", lazy=True)
def _gather(eqn: Any, operand: Value, indices: Any) -> Value:
    fill = eqn.params["fill_value"]
    if fill is None or fill == 0 or not math.isfinite(fill):
        return registry.on_data(eqn, operand, indices)
    # the number to fill with is a logical one
    return registry.on_logical(eqn, operand, indices)


@rule("dynamic_update_slice")
def _dynamic_update_slice(eqn: Any, operand: Any, update: Any, *indices: Any) -> Value:
    (operand, update), scale, rms, dtype = common(*v.scalar_scales([operand, update]))
    return v.value(
        bind(eqn, operand, update, *(storage.materialise(i) for i in indices)),
        scale,
        rms,
        dtype,
    )


@rule("scatter", "scatter-add", "scatter-sub", "scatter-min", "scatter-max")
def _scatter(eqn: Any, operand: Any, indices: Any, updates: Any) -> Value:
    (operand, updates), scale, rms, dtype = common(*v.scalar_scales([operand, updates]))
    # FP32: sums, and because the equation's inner jaxpr was traced so.
    out = bind(
        eqn,
        storage.as_float32(operand),
        storage.materialise(indices),
        storage.as_float32(updates),
    )
    if eqn.primitive.name in ("scatter-add", "scatter-sub"):
        # So many to an element, if they are spread evenly.
        rms *= math.sqrt(
            max(math.prod(updates.shape) / max(math.prod(operand.shape), 1), 1.0)
        )
    return v.settled(out, scale, rms, dtype)
