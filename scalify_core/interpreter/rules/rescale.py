"""Rules of the functions of `scalify_core.ops.rescale`: powers of two move between data
and scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from scalify_core.interpreter import value as v
from scalify_core.interpreter.registry import composite_rule
from scalify_core.interpreter.rules.composites import in_order, is_value
from scalify_core.interpreter.value import Value
from scalify_core.numerics import scales as sc
from scalify_core.numerics import storage


def _rescaling(name: str, forward: Callable | None, backward: Callable | None) -> None:
    """Register a composite of one array; None leaves the value unchanged."""

    def apply(change: Callable | None, call: Any, x: Any) -> Any:
        x = in_order(call, x)
        return (
            x if change is None or not is_value(x) else change(x, **dict(call.static))
        )

    composite_rule(name, wide=True)(lambda call, x: apply(forward, call, x))
    composite_rule(f"{name}.fwd", wide=True)(
        lambda call, x: (apply(forward, call, x), None)
    )
    composite_rule(f"{name}.bwd", wide=True)(
        lambda call, _, g: (apply(backward, call, g),)
    )


def _at_static_scale(x: Value, *, scale: float) -> Value:
    return v.value(v.wide_at(x, scale), scale, 1.0, x.dtype)


def _rebalanced(x: Value, *, factor: float) -> Value:
    return v.value(
        sc.times(v.wide(x), 1 / factor),
        sc.product(x.scale, factor),
        x.expected_rms / factor,
        x.dtype,
    )


def _quantised(x: Value, *, fmt: Any) -> Value:
    return v.value(
        storage.saturating_cast(fmt.quantise(v.wide(x)), x.dtype),
        x.scale,
        x.expected_rms,
        x.dtype,
    )


_rms = v.rescaled_by_rms
_max = functools.partial(
    v.rescaled_by, lambda data: jnp.max(jnp.abs(data), initial=0.0)
)
_rescaling("set_scaling", _at_static_scale, None)
_rescaling("stop_scaling", v.unscaled, None)
_rescaling("rebalance", _rebalanced, None)
_rescaling("rebalance_grad", None, _rebalanced)
_rescaling("cast_on_forward", _quantised, None)
_rescaling("cast_on_backward", None, _quantised)
_rescaling("dynamic_rescale_rms", _rms, None)
_rescaling("dynamic_rescale_max", _max, None)
_rescaling("dynamic_rescale_rms_grad", None, _rms)
_rescaling("dynamic_rescale_max_grad", None, _max)


@composite_rule("get_data_scale")
def _get_data_scale(call: Any, x: Value) -> Any:
    del call
    x = v.scalar_scale(x)
    return v.wide(x), jnp.asarray(x.scale, jnp.float32)
