"""Scales that are placed by hand, for `scalify(f, scales="static")`.

With propagated scales a program says itself where a scale is measured, set or moved,
and in which format a value or its gradient is stored. Measured scales, the default of
`scalify`, need none of it: there, and in plain JAX, changes of scale are the identity.
"""

from scalify_core.interpreter.registry import composite_rule
from scalify_core.numerics.formats import FloatFormat
from scalify_core.ops.composite import composite
from scalify_core.ops.rescale import (
    cast_on_backward,
    cast_on_forward,
    dynamic_rescale_max,
    dynamic_rescale_max_grad,
    dynamic_rescale_rms,
    dynamic_rescale_rms_grad,
    get_data_scale,
    rebalance,
    rebalance_grad,
    set_scaling,
)

__all__ = [
    "FloatFormat",
    "cast_on_backward",
    "cast_on_forward",
    "composite",
    "composite_rule",
    "dynamic_rescale_max",
    "dynamic_rescale_max_grad",
    "dynamic_rescale_rms",
    "dynamic_rescale_rms_grad",
    "get_data_scale",
    "rebalance",
    "rebalance_grad",
    "set_scaling",
]
