"""Rules of attention and of rotary positions.

Of attention, the kernel reads the narrow data, the scales of q and k are in that of the
logits. A rotation changes no size: the scale stays, the data is rotated before it is
rounded.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from scalify_core.interpreter import value as v
from scalify_core.interpreter.registry import composite_rule
from scalify_core.interpreter.rules.composites import (
    SQRT_2,
    as_value,
    kernel_operands,
    moved,
    on_data,
    unbatched_shape,
)
from scalify_core.interpreter.value import Value
from scalify_core.numerics import scales as sc
from scalify_core.numerics import storage


def _attention_operands(*operands: Any) -> tuple[list[Value], list[Any]]:
    """Return q, k and v for a kernel, and the scales that are in their data.

    Attention is linear in v.
    """
    q, k, values = (as_value(x, *operands) for x in operands)
    (q, k, static), scales = kernel_operands(
        q, k, v.value(values.data, 1.0, values.expected_rms, values.dtype)
    )
    values = v.value(static.data, values.scale, values.expected_rms, values.dtype)
    return [q, k, values], scales


def _attention_growth(call: Any, q: Value, k: Value) -> float:
    """Return the RMS of a row of probabilities, times sqrt(keys).

    After t keys of equal weight it is 1/sqrt(t), averaged over t; t ends at the window.
    """
    static = dict(call.static)
    queries, keys = unbatched_shape(call, 0, q)[1], unbatched_shape(call, 1, k)[1]
    if not static["causal"]:
        return keys**-0.5
    window = static["window"] or queries
    total = math.log(window) + (queries - window) / window
    return math.sqrt(max(total, 1) / queries)


def _attend(
    call: Any, q: Any, k: Any, values: Any, segments: Any
) -> tuple[Value, list[Any], Value]:
    (q, k, values), _ = _attention_operands(q, k, values)
    static = dict(call.static)
    out = on_data(
        call,
        q,
        k,
        values,
        segments,
        logit_scale=static["logit_scale"] * q.scale * k.scale,
    )
    growth = _attention_growth(call, q, k)
    return (
        v.settled(out[0], values.scale, values.expected_rms * growth, q.dtype, SQRT_2),
        out,
        values,
    )


@composite_rule("attention")
def _attention(call: Any, q: Any, k: Any, values: Any, segments: Any) -> Any:
    return _attend(call, q, k, values, segments)[0]


@composite_rule("attention.fwd")
def _attention_fwd(call: Any, q: Any, k: Any, values: Any, segments: Any) -> Any:
    y, out, static = _attend(call, q, k, values, segments)
    # The backward reads the kernel's own output, at the scale of v.
    kernel_output = v.value(out[0], static.scale, static.expected_rms, y.dtype)
    return y, (q, k, values, segments, kernel_output, out[-1])


@composite_rule("attention.bwd", wide=True)
def _attention_bwd(call: Any, residuals: Any, gradient: Any) -> Any:
    *qkv, segments, kernel_output, log_norm = residuals
    (q, k, values), (q_scale, k_scale, _) = _attention_operands(*qkv)
    gradient = as_value(gradient, q)
    static = dict(call.static)
    growth = _attention_growth(call, q, k)
    # Probabilities of 1/T times FP16 gradients of 1 would be among the subnormal
    # numbers: up, and down again.
    lift = 2.0 ** round(-math.log2(growth)) if q.data.dtype == np.float16 else 1.0
    raised = storage.saturating_cast(sc.times(v.wide(gradient), lift), q.data.dtype)
    residuals = (q, k, values, segments, kernel_output, log_norm)
    out = on_data(
        call, residuals, raised, logit_scale=static["logit_scale"] * q.scale * k.scale
    )
    heads, groups = unbatched_shape(call, 0, q)[2], unbatched_shape(call, 1, k)[2]
    # The queries of several heads add to the gradients of one key and one value.
    shared = math.sqrt(heads / groups)
    # The scale of the logits: the function differentiates with respect to the data.
    both = k.scale * q.scale
    sizes = (
        (
            sc.ratio(sc.product(gradient.multiple, values.scale), q.scale),
            gradient.expected_rms * values.expected_rms * k.expected_rms * both,
        ),
        (
            sc.ratio(sc.product(gradient.multiple, values.scale), k.scale),
            gradient.expected_rms
            * values.expected_rms
            * q.expected_rms
            * both
            * shared,
        ),
        (gradient.multiple, gradient.expected_rms * shared),
    )
    return [
        moved(
            v.settled(
                x, sc.product(scale, 1 / lift), rms * growth * lift, y.dtype, SQRT_2
            ),
            data_scale,
        )
        for x, (scale, rms), y, data_scale in zip(
            out, sizes, (q, k, values), (k_scale, q_scale, 1.0), strict=True
        )
    ]


def _as_rotated(x: Value, out: Any) -> Value:
    """Return the rotated data of `x` as a value of the scale and size of `x`."""
    return v.value(out, x.multiple, x.expected_rms, x.dtype, x.factor, x.rms_correction)


@composite_rule("rope", wide=True)
def _rope(call: Any, x: Any, *tables: Any) -> Any:
    x = as_value(x, *tables)
    out, *_ = on_data(call, v.wide(x), *map(v.unscaled, tables))
    return _as_rotated(x, out)


@composite_rule("rope.fwd", wide=True)
def _rope_fwd(call: Any, x: Any, *tables: Any) -> Any:
    return _rope(call, x, *tables), tables


@composite_rule("rope.bwd", wide=True)
def _rope_bwd(call: Any, tables: Any, gradient: Any) -> Any:
    gradient = as_value(gradient, *tables)
    (out,) = on_data(call, tuple(map(v.unscaled, tables)), v.wide(gradient))
    return _as_rotated(gradient, out), None, None
