"""Collectives over mesh axes, inside shard_map. A static scale is the same on every device."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax import lax

from scalify_core import value as v
from scalify_core.registry import bind, rule
from scalify_core.value import Value


def equal_scale(x: Value, axes: tuple) -> Value:
    """The value with a scale that is the same along mesh axes: the largest, where a dynamic one may differ."""
    x = v.scalar_scale(x)
    if v.is_static(x.scale):
        return x
    varying = tuple(axis for axis in axes if axis in jax.typeof(x.scale).mat.varying)
    if not varying:
        return x
    scale = lax.pmax(x.scale, varying)
    return v.value(v.at_scale(x, scale), scale, x.rho, x.dtype)


def _axes(eqn: Any) -> tuple:
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def _collective(eqn: Any, operands: tuple, *, adds: bool) -> Any:
    axes = _axes(eqn)
    operands = tuple(equal_scale(x, axes) if isinstance(x, Value) else x for x in operands)
    out = bind(eqn, *(x.data if isinstance(x, Value) else v.materialise(x) for x in operands))
    groups = eqn.params.get("axis_index_groups")
    count = len(groups[0]) if groups else math.prod(lax.axis_size(axis) for axis in axes)
    growth = math.sqrt(count) if adds else 1.0
    results = [
        v.settled(y, x.scale, x.rho * growth, x.dtype) if isinstance(x, Value) else y
        for x, y in zip(operands, out if eqn.primitive.multiple_results else [out], strict=True)
    ]
    return results if eqn.primitive.multiple_results else results[0]


@rule("psum", "psum_invariant", "reduce_scatter", wide=False)
def _psum(eqn: Any, *operands: Any) -> Any:
    return _collective(eqn, operands, adds=True)


@rule(
    "pmax", "pmin", "all_gather", "all_gather_invariant", "all_to_all", "ppermute", "pbroadcast", "pvary", "preduced",
    wide=False,
)  # fmt: skip
def _moved(eqn: Any, *operands: Any) -> Any:
    return _collective(eqn, operands, adds=False)
