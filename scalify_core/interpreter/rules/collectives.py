"""Collectives over mesh axes, inside shard_map, and over those of vmap. A static scale
is the same on every device.

In `axes`, an integer is an axis of the array: that of a vmap inside the function. A
string is a mesh axis, or that of a vmap around the call.
"""

import functools
import math
from typing import Any

import jax
from jax import lax

from scalify_core.interpreter import value as v
from scalify_core.interpreter.registry import bind_all, rule, structural
from scalify_core.interpreter.rules.matmul import saturated
from scalify_core.interpreter.value import Value
from scalify_core.numerics import scales as sc


def equal_scale(x: Value, axes: tuple) -> Value:
    """Return the value with a scale that is equal along axes.

    It is the largest, where a dynamic scale may differ. A scale is known not to differ
    only along a mesh axis that the data is known to vary over. Under `vmap`, and in a
    `shard_map` that does not check, neither is known.
    """
    x = v.scalar_scale(x)
    # Along an axis of the array there is one scale for all already.
    axes = tuple(axis for axis in axes if not isinstance(axis, int))
    if sc.is_static(x.scale):
        return x
    data, scale = (jax.typeof(y).mat.varying for y in (x.data, x.scale))
    varying = tuple(axis for axis in axes if axis in scale)
    unknown = tuple(axis for axis in axes if axis not in scale and axis not in data)
    if not varying and not unknown:
        return x
    # The largest: at any smaller one the data of some device would saturate.
    largest = x.scale
    # one `pmax` takes no axes of both kinds
    for group in filter(None, (varying, unknown)):
        largest = lax.pmax(largest, group)
    return v.at_scale(x, largest, x.expected_rms)


def _axes(eqn: Any) -> tuple:
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    if isinstance(axes, (tuple, list)):
        return tuple(axes)
    return (axes,)


def _collective(eqn: Any, *operands: Any, adds: bool = False) -> Any:
    axes = _axes(eqn)
    operands = tuple(
        equal_scale(x, axes) if isinstance(x, Value) else x for x in operands
    )
    out = bind_all(eqn, *map(v.data_of, operands))
    for i, x in enumerate(operands):
        if isinstance(x, Value):
            rms = x.expected_rms
            if adds:
                # A sum of devices' FP16 data may overflow, as a product's result may.
                out[i], rms = saturated(out[i]), rms * _growth(eqn, x)
            out[i] = v.settled(out[i], x.multiple, rms, x.dtype)
    return out


def _growth(eqn: Any, x: Value) -> float:
    """Return the growth of the expected RMS in a sum over axes, as if it were over all
    devices of an axis, of which `axis_index_groups` may take fewer.
    """
    return math.sqrt(
        math.prod(
            x.shape[a] if isinstance(a, int) else lax.axis_size(a) for a in _axes(eqn)
        )
    )


# Rounded first, all of them: links between devices are to carry the narrow format.
rule("psum", "psum_invariant", "reduce_scatter", wide=False)(
    functools.partial(_collective, adds=True)
)
rule(
    "pmax",
    "pmin",
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "ppermute",
    "pbroadcast",
    wide=False,
)(_collective)
# These only change the type on a mesh: each device keeps its own data and scale.
structural("pvary", "preduced")
