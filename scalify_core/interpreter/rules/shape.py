"""Rules of operations that move elements: shapes, gather, scatter and slices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import lax

from scalify_core.interpreter import registry
from scalify_core.interpreter import value as v
from scalify_core.interpreter.registry import bind, rule, structural, unscaled
from scalify_core.interpreter.rules.elementwise import common
from scalify_core.interpreter.value import Value
from scalify_core.numerics import formats
from scalify_core.numerics import scales as sc

structural("tile", "optimization_barrier", "tie", "device_put", "sort", "top_k")

# What becomes of a scale that differs along axes (that of a stack of layers): its other
# axes have size 1.
structural(
    "copy_p",
    "name",
    "stage",
    "sharding_constraint",
    "reshard",
    "layout_constraint",
    along=lambda _, scale: scale,
)
structural(
    "transpose",
    along=lambda eqn, scale: lax.transpose(scale, eqn.params["permutation"]),
)
structural(
    "squeeze", along=lambda eqn, scale: lax.squeeze(scale, eqn.params["dimensions"])
)
structural(
    "rev",
    along=lambda eqn, scale: lax.rev(
        scale, [d for d in eqn.params["dimensions"] if scale.shape[d] > 1]
    ),
)


def _of_slice(eqn: Any, scale: jax.Array) -> jax.Array:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * scale.ndim
    cuts = zip(scale.shape, starts, limits, strides, strict=True)
    return scale[tuple(slice(None) if n == 1 else slice(*cut) for n, *cut in cuts)]


def _of_broadcast(eqn: Any, scale: jax.Array) -> jax.Array:
    shape = [1] * len(eqn.params["shape"])
    for axis, n in zip(eqn.params["broadcast_dimensions"], scale.shape, strict=True):
        shape[axis] = n
    return scale.reshape(shape)


def _of_reshape(eqn: Any, scale: jax.Array) -> jax.Array | None:
    """Return the scale of a reshaped value; None if it is not known.

    It is known if the axes up to the last along which the scale differs are unchanged.
    """
    shape, (old,) = eqn.params["new_sizes"], (var.aval.shape for var in eqn.invars)
    leading = max(axis for axis, n in enumerate(scale.shape) if n > 1) + 1
    if shape[:leading] != old[:leading]:
        return None
    return scale.reshape(scale.shape[:leading] + (1,) * (len(shape) - leading))


def _of_unstack(eqn: Any, scale: jax.Array) -> list[jax.Array]:
    axis = eqn.params["axis"]
    return [
        lax.index_in_dim(scale, i % scale.shape[axis], axis, keepdims=False)
        for i in range(len(eqn.outvars))
    ]


def _of_split(eqn: Any, scale: jax.Array) -> Sequence[jax.Array]:
    axis = eqn.params["axis"]
    if scale.shape[axis] == 1:
        return [scale] * len(eqn.outvars)
    return lax.split(scale, eqn.params["sizes"], axis)


structural("slice", along=_of_slice)
structural("split", along=_of_split)
structural("broadcast_in_dim", along=_of_broadcast)
structural("reshape", along=_of_reshape)
structural("unstack", along=_of_unstack)


@rule("concatenate", "pad", "stack")
def _join(eqn: Any, *operands: Any) -> Value:
    # Scales may differ along the axes that are not joined; the number that is padded
    # with is one.
    joined: Iterable[int] = range(eqn.invars[0].aval.ndim)
    if eqn.primitive.name == "concatenate":
        joined = [eqn.params["dimension"]]
    if any(_differs_along(x, joined) for x in operands):
        operands = tuple(v.scalar_scales(operands))
    data, scale, rms, dtype = common(*operands)
    return v.value(bind(eqn, *data), scale, rms, dtype)


def _differs_along(x: Any, axes: Iterable[int]) -> bool:
    """Return whether a dynamic scale differs along one of the axes of the data."""
    if not isinstance(x, Value) or sc.is_static(x.scale) or not x.scale.ndim:
        return False
    return any(x.scale.shape[axis] > 1 for axis in axes)


# Gather, scatter and dynamic slices. Scatter-add accumulates in FP32.

structural(
    "dynamic_slice",
    along=lambda eqn, scale, *starts: lax.dynamic_slice(
        scale,
        [formats.materialise(i) for i in starts],
        tuple(map(min, scale.shape, eqn.params["slice_sizes"])),
    ),
)
unscaled("scatter-mul", as_traced=True)


@rule("gather", lazy=True)
def _gather(eqn: Any, operand: Value, indices: Any) -> list[Any]:
    fill = eqn.params["fill_value"]
    if fill is None or fill == 0 or not math.isfinite(fill):
        return registry.on_data(eqn, operand, indices)
    # the number to fill with is a logical one
    return registry.on_logical(eqn, operand, indices)


@rule("dynamic_update_slice")
def _dynamic_update_slice(eqn: Any, operand: Any, update: Any, *indices: Any) -> Value:
    (operand, update), scale, rms, dtype = common(*v.scalar_scales([operand, update]))
    return v.value(
        bind(eqn, operand, update, *(formats.materialise(i) for i in indices)),
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
        formats.as_float32(operand),
        formats.materialise(indices),
        formats.as_float32(updates),
    )
    if eqn.primitive.name in ("scatter-add", "scatter-sub"):
        # So many to an element, if they are spread evenly.
        rms *= math.sqrt(
            max(math.prod(updates.shape) / max(math.prod(operand.shape), 1), 1.0)
        )
    return v.settled(out, scale, rms, dtype)
