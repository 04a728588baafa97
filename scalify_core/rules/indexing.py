"""Gather, scatter and dynamic slices. Scatter-add accumulates in FP32."""

from __future__ import annotations

from typing import Any

from jax import lax

from scalify_core import value as v
from scalify_core.registry import bind, rule, structural, unscaled
from scalify_core.rules.elementwise import common
from scalify_core.value import Value

structural("gather")
structural(
    "dynamic_slice",
    along=lambda eqn, scale, *starts: lax.dynamic_slice(
        scale, [v.materialise(i) for i in starts], tuple(map(min, scale.shape, eqn.params["slice_sizes"]))
    ),
)
unscaled("scatter-mul")


@rule("dynamic_update_slice")
def _dynamic_update_slice(eqn: Any, operand: Any, update: Any, *indices: Any) -> Value:
    (operand, update), scale, rho, dtype = common(*v.scalar_scales([operand, update]))
    return v.value(bind(eqn, operand, update, *(v.materialise(i) for i in indices)), scale, rho, dtype)


@rule("scatter", "scatter-add", "scatter-sub", "scatter-min", "scatter-max")
def _scatter(eqn: Any, operand: Any, indices: Any, updates: Any) -> Value:
    (operand, updates), scale, rho, dtype = common(*v.scalar_scales([operand, updates]))
    # FP32: sums, and because the equation's inner jaxpr was traced so.
    out = bind(eqn, v.as_float32(operand), v.materialise(indices), v.as_float32(updates))
    return v.value(out, scale, rho, dtype)
