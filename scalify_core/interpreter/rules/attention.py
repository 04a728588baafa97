"""Rules of attention, rotary positions, the losses and the embedding.

Attention's kernel reads the narrow data; the scales of q and k are in that of the
logits. A rotation changes no size: the scale stays, and the data is rotated before it
is rounded.
"""

import math
from typing import Any

import numpy as np

from scalify_core.interpreter import value as v
from scalify_core.interpreter.composite_calls import unbatched_shape
from scalify_core.interpreter.registry import composite_rule, forward_rule
from scalify_core.interpreter.rules.composites import (
    SQRT_2,
    as_value,
    kernel_operands,
    on_data,
    on_values,
    scale_out_of_data,
    size_of,
)
from scalify_core.interpreter.rules.matmul import saturated
from scalify_core.interpreter.value import Value
from scalify_core.numerics import formats
from scalify_core.numerics import scales as sc
from scalify_core.numerics.formats import pow2_round
from scalify_core.ops.attention_blocks import Sees


def _attention_operands(*operands: Any) -> tuple[list[Value], tuple]:
    """Return q, k and v for a kernel, and the scales that are in their data.

    Attention is linear in v, so its data enters at scale 1, and the result gets its
    scale.
    """
    q, k, values = (as_value(x, *operands) for x in operands)
    (q, k, unscaled), scales = kernel_operands(
        q, k, values.with_scale(values.data, 1.0)
    )
    return [q, k, values.with_scale(unscaled.data, values.scale)], scales


def attention_growth(call: Any, sees: Sees, q: Value, k: Value) -> float:
    """Return the RMS of a row of probabilities, times sqrt(keys).

    After t keys of equal weight it is 1/sqrt(t), averaged over t; t ends at the window.
    """
    queries, keys = unbatched_shape(call, 0, q)[1], unbatched_shape(call, 1, k)[1]
    if not sees.causal:
        return keys**-0.5
    window = sees.window or queries
    # The sum of 1/t: a plain scale of v gives an RMS of 0.085 at 1024 keys.
    total = math.log(window) + (queries - window) / window
    return math.sqrt(max(total, 1) / queries)


def shared_heads(call: Any, q: Value, k: Value) -> float:
    """Return the growth of the gradients of keys and values that heads share.

    The queries of several heads add to the gradients of one key and one value.
    """
    heads, groups = unbatched_shape(call, 0, q)[2], unbatched_shape(call, 1, k)[2]
    return math.sqrt(heads / groups)


@forward_rule("attention")
def _attention(call: Any, q: Any, k: Any, values: Any, segments: Any) -> Any:
    residuals = q, k, values, segments
    (q, k, values), _ = _attention_operands(q, k, values)
    logit_scale = call.settings["logit_scale"] * q.scale * k.scale
    made = on_data(call, q, k, values, segments, logit_scale=logit_scale)
    out, log_norm = made[0], made[-1]
    rms = values.expected_rms * attention_growth(call, call.settings["sees"], q, k)
    # The backward reads the kernel's own output, at the scale of v.
    kernel_output = v.value(out, values.scale, values.expected_rms, q.dtype)
    y = v.settled(out, values.scale, rms, q.dtype, SQRT_2)
    return y, (*residuals, kernel_output, log_norm)


@composite_rule("attention.bwd", wide=True)
def _attention_bwd(call: Any, residuals: Any, gradient: Any) -> Any:
    *qkv, segments, kernel_output, log_norm = residuals
    (q, k, values), (q_scale, k_scale, _) = _attention_operands(*qkv)
    gradient = as_value(gradient, q)
    growth = attention_growth(call, call.settings["sees"], q, k)
    shared = shared_heads(call, q, k)
    # Gradients are multiplied by `lift`, and results divided by it. In a simulation
    # errors are the same without it at 1024 and 4096 tokens: it stays because golden
    # runs have other bits then (docs/lab.md).
    lift = 2.0 ** round(-math.log2(growth)) if q.data.dtype == np.float16 else 1.0
    # The kernel wants all operands in one dtype.
    raised = formats.saturating_cast(sc.times(v.data32(gradient), lift), q.data.dtype)
    residuals = (q, k, values, segments, kernel_output, log_norm)
    # The scale of the logits: the function differentiates with respect to the data.
    both = q.scale * k.scale
    out = on_data(
        call, residuals, raised, logit_scale=call.settings["logit_scale"] * both
    )
    logits_scale = sc.product(gradient.multiple, values.scale)
    logits_rms = gradient.expected_rms * values.expected_rms * both
    sizes = (
        (sc.ratio(logits_scale, q.scale), logits_rms * k.expected_rms),
        (sc.ratio(logits_scale, k.scale), logits_rms * q.expected_rms * shared),
        (gradient.multiple, gradient.expected_rms * shared),
    )
    # What is in k's data is in that of q's gradient, and the reverse.
    return [
        scale_out_of_data(
            v.settled(
                # cuDNN stores infinity where a sum over all queries leaves FP16, and
                # the next norm would make NaN of it: a flagship of 124M skipped 6 of
                # 283 steps.
                saturated(x),
                sc.product(scale, 1 / lift),
                rms * growth * lift,
                y.dtype,
                SQRT_2,
            ),
            data_scale,
        )
        for x, (scale, rms), y, data_scale in zip(
            out, sizes, (q, k, values), (k_scale, q_scale, 1.0), strict=True
        )
    ]


@forward_rule("rope", wide=True)
def _rope(call: Any, x: Any, *tables: Any) -> Any:
    x = as_value(x, *tables)
    out, *_ = on_data(call, v.data32(x), *map(v.unscaled, tables))
    return x.with_data(out), tables


@composite_rule("rope.bwd", wide=True)
def _rope_bwd(call: Any, tables: Any, gradient: Any) -> Any:
    gradient = as_value(gradient, *tables)
    (out,) = on_data(call, tuple(map(v.unscaled, tables)), v.data32(gradient))
    return gradient.with_data(out), None, None


@forward_rule("cross_entropy")
def _cross_entropy(call: Any, logits: Value, targets: Any) -> Any:
    loss, *rest = call.bind(v.unscaled(logits), formats.materialize(targets))
    log_norm = rest[1] if rest else None
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


@forward_rule("linear_cross_entropy")
def _linear_cross_entropy_fwd(call: Any, x: Any, head: Any, targets: Any) -> Any:
    (x, head), (x_scale, head_scale) = kernel_operands(x, head)
    # The scales stand in the function's factor of the logits, so FP16 data enters the
    # product as it is.
    loss, *residuals = on_data(call, x, head, targets, logit_scale=x.scale * head.scale)
    if not residuals:  # not differentiated
        return v.value(loss, 1.0), None
    dx, dhead, like = residuals
    tokens, vocab = unbatched_shape(call, 0, x)[0], unbatched_shape(call, 1, head)[0]
    # A row of the table is the target of tokens / vocabulary tokens, whose gradients it
    # adds up.
    dhead_rms = x.expected_rms * math.sqrt(max(tokens / vocab, 1.0))
    # (softmax - onehot) head, and its transpose with x: a row of the error has norm
    # about 1.
    return v.value(loss, 1.0), (
        scale_out_of_data(
            v.value(dx, head.scale, head.expected_rms, x.dtype), head_scale
        ),
        scale_out_of_data(
            v.settled(dhead, x.scale, dhead_rms, np.dtype(np.float32), SQRT_2), x_scale
        ),
        head.with_scale(like, head.scale),
    )


@composite_rule("linear_cross_entropy.bwd")
def _linear_cross_entropy_bwd(call: Any, residuals: Any, gradient: Any) -> Any:
    dx, dhead, like_head = residuals
    tokens = unbatched_shape(call, 0, dx)[0]
    # The gradient of a loss is mostly the 1 that JAX starts with: then no
    # element is multiplied.
    number = v.uniform(gradient)
    values = [as_value(x, gradient) for x in (dx, dhead)]
    if number is None or call.in_axes:
        # `fun` multiplies by gradient * logit_scale / tokens, under the call's vmaps.
        # With logit_scale=tokens the last factor is 1.
        gradient, number = as_value(gradient, values[0]), 1.0
        wide = (*map(v.data32, values), formats.as_float32(v.data_of(like_head)))
        out = on_data(call, wide, v.data32(gradient), logit_scale=float(tokens))
        values = [
            v.value(
                y,
                sc.product(x.scale, gradient.scale),
                x.expected_rms * gradient.expected_rms,
            )
            for x, y in zip(values, out, strict=True)
        ]
    return [
        _multiplied(x, number / tokens, like.dtype)
        for x, like in zip(values, (dx, like_head), strict=True)
    ]


def _multiplied(x: Value, constant: float, dtype: np.dtype) -> Value:
    """Return `x * constant`; the power of two goes into the scale."""
    if constant == 0:
        return v.value(sc.times(v.data32(x), 0.0), x.scale, x.expected_rms, dtype)
    # 1/tokens in FP16 data would make subnormal numbers of gradients.
    power = pow2_round(constant)
    return v.settled(
        sc.times(x.data, constant / power),
        sc.product(x.scale, power),
        x.expected_rms * abs(constant) / power,
        dtype,
    )


@forward_rule("embedding")
def _embedding(call: Any, table: Value, ids: Any) -> Any:
    scaled = v.scalar_scale(table)
    out, *_ = on_data(call, scaled, ids)
    return scaled.with_scale(out, scaled.scale), (table, ids)


@composite_rule("embedding.bwd")
def _embedding_bwd(call: Any, residuals: Any, gradient: Any) -> Any:
    table, ids = residuals
    table, gradient = as_value(table, gradient), as_value(gradient, table)
    # In FP32: a frequent token's row adds up thousands of gradients.
    (out,) = on_data(call, (v.data32(table), ids), v.data32(gradient))
    per_row = max(math.prod(ids.shape) / table.shape[0], 1.0)
    rms = gradient.expected_rms * math.sqrt(per_row)
    return [v.settled(out, gradient.scale, rms, table.dtype, SQRT_2)]
