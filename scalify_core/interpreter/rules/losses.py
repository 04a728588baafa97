"""Rules of softmax, the losses and the embedding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from scalify_core.interpreter import value as v
from scalify_core.interpreter.registry import composite_rule
from scalify_core.interpreter.rules.composites import (
    SQRT_2,
    as_value,
    dtype_of,
    is_value,
    kernel_operands,
    moved,
    on_data,
    on_values,
    size_of,
    unbatched_shape,
)
from scalify_core.interpreter.value import Value
from scalify_core.numerics import scales as sc
from scalify_core.numerics import storage
from scalify_core.numerics.formats import pow2_round

# Softmax. FP32 inside; of n probabilities the RMS is between 1/n and 1/sqrt(n).


@composite_rule("softmax")
def _softmax(call: Any, x: Value) -> Any:
    return on_values(call, [(x.shape[dict(call.static)["axis"]] ** -0.5, x.dtype)], x)


@composite_rule("softmax.fwd")
def _softmax_fwd(call: Any, x: Value) -> Any:
    y, _ = on_values(
        call, [(x.shape[dict(call.static)["axis"]] ** -0.5, x.dtype)] * 2, x
    )
    return y, y


@composite_rule("softmax.bwd")
def _softmax_bwd(call: Any, y: Any, gradient: Any) -> Any:
    y, gradient = as_value(y, gradient), as_value(gradient, y)
    return on_values(call, [(size_of(y.size, gradient.size), y.dtype)], y, gradient)


@composite_rule("log_softmax")
def _log_softmax(call: Any, x: Value) -> Any:
    return on_values(call, [(1.0, x.dtype)], x)


@composite_rule("log_softmax.fwd")
def _log_softmax_fwd(call: Any, x: Value) -> Any:
    y, _ = on_values(call, [(1.0, x.dtype)] * 2, x)
    return y, y


@composite_rule("log_softmax.bwd")
def _log_softmax_bwd(call: Any, y: Any, gradient: Any) -> Any:
    gradient = as_value(gradient, y)
    return on_values(call, [(gradient.size, dtype_of(y, gradient))], y, gradient)


# Losses: an FP32 result of scale 1.


@composite_rule("cross_entropy")
def _cross_entropy(call: Any, logits: Value, targets: Any) -> Any:
    return on_values(call, [(1.0, np.dtype(np.float32))], logits, targets)


@composite_rule("cross_entropy.fwd")
def _cross_entropy_fwd(call: Any, logits: Value, targets: Any) -> Any:
    loss, _, log_norm, _ = call.bind(v.unscaled(logits), storage.materialise(targets))
    return v.value(loss, 1.0), (logits, log_norm, targets)


@composite_rule("cross_entropy.bwd")
def _cross_entropy_bwd(call: Any, residuals: Any, gradient: Any) -> Any:
    logits, log_norm, targets = residuals
    # In FP32 the gradient is small but normal: softmax - onehot has RMS about V^-1/2,
    # over N averaged tokens.
    gradient = as_value(gradient, logits)
    (tokens,) = unbatched_shape(call, 2, targets)
    size = size_of(
        gradient.size, 1 / (tokens * math.sqrt(unbatched_shape(call, 0, logits)[-1]))
    )
    return on_values(
        call, [(size, logits.dtype)], (logits, log_norm, targets), gradient
    )


@composite_rule("linear_cross_entropy")
def _linear_cross_entropy(call: Any, x: Any, head: Any, targets: Any) -> Any:
    (x, head), _ = kernel_operands(x, head)
    return v.value(
        on_data(call, x, head, targets, logit_scale=x.scale * head.scale)[0], 1.0
    )


@composite_rule("linear_cross_entropy.fwd")
def _linear_cross_entropy_fwd(call: Any, x: Any, head: Any, targets: Any) -> Any:
    (x, head), (x_scale, head_scale) = kernel_operands(x, head)
    loss, dx, dhead, like = on_data(
        call, x, head, targets, logit_scale=x.scale * head.scale
    )
    tokens, vocab = unbatched_shape(call, 0, x)[0], unbatched_shape(call, 1, head)[0]
    dhead_rms = x.expected_rms * math.sqrt(max(tokens / vocab, 1.0))
    # (softmax - onehot) head, and its transpose with x: a row of the error has norm
    # about 1.
    return v.value(loss, 1.0), (
        moved(v.value(dx, head.scale, head.expected_rms, x.dtype), head_scale),
        moved(
            v.settled(dhead, x.scale, dhead_rms, np.dtype(np.float32), SQRT_2), x_scale
        ),
        v.value(like, head.scale, head.expected_rms, head.dtype),
    )


@composite_rule("linear_cross_entropy.bwd")
def _linear_cross_entropy_bwd(call: Any, residuals: Any, gradient: Any) -> Any:
    dx, dhead, like_head = residuals
    dtypes = dx.dtype, like_head.dtype
    tokens = unbatched_shape(call, 0, dx)[0]
    number = v.uniform(gradient)
    dx, dhead = (as_value(x, gradient) for x in (dx, dhead))
    if number is None or call.in_axes:
        # The function multiplies by the gradient, under the call's vmaps, and by
        # logit_scale / tokens: here by 1.
        gradient, number = as_value(gradient, dx), 1.0
        wide = (
            v.wide(dx),
            v.wide(dhead),
            storage.as_float32(like_head.data if is_value(like_head) else like_head),
        )
        out = on_data(call, wide, v.wide(gradient), logit_scale=float(tokens))
        dx, dhead = (
            v.value(
                y,
                sc.product(x.scale, gradient.scale),
                x.expected_rms * gradient.expected_rms,
            )
            for x, y in zip((dx, dhead), out, strict=True)
        )
    return [
        _multiplied(x, number / tokens, dtype)
        for x, dtype in zip((dx, dhead), dtypes, strict=True)
    ]


def _multiplied(x: Value, constant: float, dtype: np.dtype) -> Value:
    """Return `x * constant`; the power of two goes into the scale."""
    if constant == 0:
        return v.value(sc.times(v.wide(x), 0.0), x.scale, x.expected_rms, dtype)
    power = pow2_round(constant)
    return v.settled(
        x.data,
        sc.product(x.scale, power),
        x.expected_rms * abs(constant) / power,
        dtype,
        factor=constant / power,
    )


# Embedding.


@composite_rule("embedding")
def _embedding(call: Any, table: Value, ids: Any) -> Any:
    table = v.scalar_scale(table)
    (out,) = on_data(call, table, ids)
    return v.value(out, table.scale, table.expected_rms, table.dtype)


@composite_rule("embedding.fwd")
def _embedding_fwd(call: Any, table: Value, ids: Any) -> Any:
    static = v.scalar_scale(table)
    out, *_ = on_data(call, static, ids)
    return v.value(out, static.scale, static.expected_rms, static.dtype), (table, ids)


@composite_rule("embedding.bwd")
def _embedding_bwd(call: Any, residuals: Any, gradient: Any) -> Any:
    table, ids = residuals
    gradient = as_value(gradient, table)
    (out,) = on_data(
        call, (v.wide(table) if is_value(table) else table, ids), v.wide(gradient)
    )
    per_row = max(math.prod(ids.shape) / table.shape[0], 1.0)
    dtype = table.dtype if is_value(table) else gradient.dtype
    return [
        v.settled(
            out,
            gradient.scale,
            gradient.expected_rms * math.sqrt(per_row),
            dtype,
            SQRT_2,
        )
    ]
