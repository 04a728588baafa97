"""Softmax attention with E4M3 operands in all seven products, forward and backward.

    S  = q8 k8^T           P8 = E4M3(softmax(S))       o8 = E4M3(P8 v8)
    dP = do8 v8^T          dS8 = E4M3(P (dP - sum(do8 o8)))
    dV = E4M3(P8^T do8)    dQ = E4M3(dS8 k8)           dK = E4M3(dS8^T q8)

Where the program is compiled for CUDA this is cuDNN's kernel; elsewhere it is the same
roundings at the same scales, with FP32 products in blocks of queries. cuDNN's
description rounds normalized probabilities, and so does this simulation. A kernel that
divides by the sum of a row at its end would round larger numbers.

Each rounded tensor has one scale, a power of two, and none comes from an earlier step:

- q, k, v, do (the gradient): the largest magnitude is brought to [128, 256).
- P is at most 1: its scale is the constant 256, so 448 is never reached. A probability
  below 2^-14 is subnormal, one below 2^-18 is zero.
- o is an average of rows of v: it has the unit of v.
- dS, times the factor of the logits: 448 over `score_gradient_bound`.
- dQ, dK and dV are sums over any number of positions, so no useful bound exists. The
  kernel rounds them at guessed scales, and returns their largest magnitudes before
  that. Where one of these at its scale is not within `RESULT_RANGE`, the kernel runs
  again at scales from the magnitudes.

So no finite number saturates, and the largest element of each result is at least 1
where the smallest E4M3 number is 2^-9.

Shape legend: B batch, T query positions, S key positions, H query heads, G heads of
keys and values, K head dim.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from scalify_core.interpreter.registry import composite_rule, forward_rule
from scalify_core.interpreter.rules.attention import attention_growth, shared_heads
from scalify_core.interpreter.rules.composites import (
    as_value,
    on_gradient,
    size_of,
    value_of_size,
)
from scalify_core.interpreter.value import (
    Value,
    data_of,
    is_value,
    unscaled,
    value,
)
from scalify_core.numerics.amax import measured
from scalify_core.numerics.formats import (
    E4M3,
    pow2_floor,
    pow2_inverse,
    saturating_cast,
)
from scalify_core.numerics.scales import is_static
from scalify_core.ops.attention_blocks import (
    Sees,
    blocks_of_queries,
    heads_first,
    masked_logits,
    over_rows,
    rows_dot,
)
from scalify_core.ops.composite import composite
from trainer.precision import cudnn_fp8_attention as cudnn

P_SCALE = 256.0
# For a result's largest magnitude: at most what saturates nothing, and at least 9
# octaves above the smallest E4M3 number.
RESULT_RANGE = (1.0, E4M3.max)
# The name scope of the second kernel, which predictions of a step's time leave out: in
# a probe on an H100 no guess was wrong.
RERUN = "fp8_attention_rerun"
# Where the guesses put the bounds of `backward_scales`, far above typical results.
DQ_TARGET, DK_TARGET, DV_TARGET = 2.0**10, 2.0**8, 2.0**4


def fp8_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    segments: jax.Array | None = None,
    simulate: bool = False,
) -> jax.Array:
    """Return `softmax(q k^T / sqrt(K) + mask) v` of E4M3 operands.

    Args:
        q: [B, T, H, K].
        k: [B, S, G, K]; each of its G heads serves H / G successive heads of `q`.
        v: [B, S, G, K].
        causal: query t sees the keys s <= t. Needs S = T.
        window: None, or T or more: the kernel has no window.
        segments: None: the kernel has no mask.
        simulate: whether programs for CUDA, too, compute in FP32, which takes any size.

    Returns:
        [B, T, H, K] in the dtype of `q`. It is differentiable once.

    Raises:
        ValueError: operands of several dtypes, heads or lengths that do not fit, or a
            window or segments; without `simulate`, in a program for CUDA, heads of
            other than 128 channels, or a training step whose T or S is no multiple of
            128.
        RuntimeError: a program for CUDA with another version of JAX than that of
            `cudnn_fp8_attention`.
    """
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"fp8_attention: operands of {q.dtype}, {k.dtype} and {v.dtype}: they need"
            " one dtype"
        )
    if q.shape[2] % k.shape[2] or k.shape != v.shape:
        raise ValueError(
            f"fp8_attention: q {q.shape}, k {k.shape}, v {v.shape}: keys and values"
            " need one shape, and queries a multiple of their heads"
        )
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"fp8_attention: {q.shape[1]} queries and {k.shape[1]} keys: causal needs"
            " as many"
        )
    # Refused and not ignored: attention in 16 bits has both, and the model would be
    # another one.
    if segments is not None or (window is not None and window < q.shape[1]):
        raise ValueError(
            f"fp8_attention: window={window}, segments"
            f" {'given' if segments is not None else 'None'}: FP8 attention has neither"
        )
    logit_scale = 1 / math.sqrt(q.shape[-1])
    return _fp8_attention(
        q, k, v, causal=causal, logit_scale=logit_scale, simulate=simulate
    )


class Operands(NamedTuple):
    """The rounded operands; the factors `units` [3] of q, k and v give their values."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    units: jax.Array

    @classmethod
    def quantize(cls, q: jax.Array, k: jax.Array, v: jax.Array) -> "Operands":
        """Round q, k and v."""
        (q8, q_unit), (k8, k_unit), (v8, v_unit) = (
            measured(x, E4M3.dtype) for x in (q, k, v)
        )
        return cls(q8, k8, v8, jnp.stack([q_unit, k_unit, v_unit]))


class Residuals(NamedTuple):
    """What the forward pass keeps: a byte for each element of q, k, v and the output,
    and the logarithms of the sums of exponentials, FP32 [B, H, T], in training.
    """

    operands: Operands
    out: jax.Array
    log_norm: Any


class Scales(NamedTuple):
    """The factors of the backward pass's numbers before they are rounded.

    Attributes:
        ds: of the logits' gradients, a scalar.
        results: of dQ, dK and dV, [3].
    """

    ds: jax.Array
    results: jax.Array


def score_gradient_bound(
    v: jax.Array, gradient: jax.Array, logit_scale: float
) -> jax.Array:
    """Return a bound of the logits' gradients, in units of `v` and `gradient`.

    Element (i, j) is c P_ij do_i (v_j - o_i). With the exact average o_i of values of
    norm at most n, P_ij |v_j - o_i| <= 2 n P_ij (1 - P_ij). The rounding of P and of o
    moves o_i by at most (2^-4 + T 2^-18) n and 2^-4 n, together 3/8 n up to T = 2^16.
    The largest P (2 (1 - P) + 3/8) is 0.71, so c |do_i| n is a bound with a margin of
    more than a quarter.
    """
    return logit_scale * _largest_norm(v) * _largest_norm(gradient)


def backward_scales(
    operands: Operands, gradient: jax.Array, logit_scale: float
) -> Scales:
    """Return the factor of the logits' gradients, and guesses for dQ, dK and dV.

    The bound of |dQ| is `bound` times the largest element of k, the same of dK if no
    key gets more than the attention of one query; dV is then at most the largest
    element of the gradient. Typical sums are 2^-3 to 2^-8 of the first two; keys that
    many queries attend to raise the last two by the root of their number or more.
    """
    bound = score_gradient_bound(operands.v, gradient, logit_scale)
    top = 2.0 ** (E4M3.top + 1)
    units = operands.units[:2][::-1]  # dQ has that of k, dK that of q
    targets = jnp.float32([DQ_TARGET, DK_TARGET]) / top
    # One division after the other: the product of bound and unit may leave FP32.
    guesses = [targets / bound / units, jnp.float32([DV_TARGET / top])]
    return Scales(pow2_floor(E4M3.max / bound), pow2_floor(jnp.concatenate(guesses)))


def settled(guesses: jax.Array, amax: jax.Array, largest: jax.Array) -> jax.Array:
    """Return the scales of results: the guesses, or those from their amax where a
    guess did not bring them into `RESULT_RANGE`.

    Zeros and numbers that are not finite have no better scale than the guess.

    Args:
        guesses: the scales.
        amax: the largest magnitudes of the results before their scales. cuDNN takes a
            maximum in a buffer that XLA may not have cleared, so they may be too large:
            they only count where the results themselves do not tell.
        largest: the largest magnitudes of the E4M3 results at the guesses.
    """
    low, high = RESULT_RANGE
    # The negation is true for NaN, too. E4M3 has no infinity: a cast that does not
    # saturate gives NaN for a result that the guess makes too large.
    is_large = ~(largest < high) & (amax * guesses > high)
    amax = jnp.where((largest > 0) & (largest < low), largest / guesses, amax)
    is_measured = jnp.isfinite(amax) & (amax > 0)
    is_wrong = is_measured & ((largest < low) | is_large)
    return jnp.where(is_wrong, pow2_floor(2.0**E4M3.top / amax), guesses)


@composite(name="fp8_attention")
def _fp8_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, **settings: Any
) -> jax.Array:
    return _forward(q, k, v, **settings)[0]


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    logit_scale: float,
    **_: Any,
) -> tuple[jax.Array, Residuals]:
    operands = Operands.quantize(q, k, v)
    qh, kh, vh = (heads_first(x).astype(jnp.float32) for x in operands[:3])
    q_unit, k_unit, _ = operands.units
    sees = Sees(causal, None)
    outs, log_norms = [], []
    # A block of queries leaves out the keys behind its last one: nearly twice as fast.
    for rows, cols in blocks_of_queries(q.shape[1], k.shape[1], sees):
        logits = masked_logits(qh, kh, None, rows, cols, sees, logit_scale)
        # The units follow the product, as in cuDNN's kernel, which multiplies the E4M3
        # numbers.
        logits = logits * q_unit * k_unit
        # As in cuDNN's description, and unlike in `attention`, probabilities are
        # normalized before they are rounded.
        log_norm = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        # In integer arithmetic: XLA removes a cast to E4M3 and back on GPUs.
        p = E4M3.quantize(jnp.exp(logits - log_norm) * P_SCALE)
        outs.append(rows_dot(p, vh[:, :, cols], 2) / P_SCALE)
        log_norms.append(log_norm[..., 0])
    out = E4M3.cast_or_nan(heads_first(jnp.concatenate(outs, axis=2)))
    residuals = Residuals(operands, out, jnp.concatenate(log_norms, axis=2))
    return _in_unit_of_v(out, operands, q.dtype), residuals


def _backward(
    residuals: Residuals,
    gradient: jax.Array,
    *,
    causal: bool,
    logit_scale: float,
    **_: Any,
) -> tuple[jax.Array, ...]:
    operands, out, log_norm = residuals
    rounded, unit = measured(gradient, E4M3.dtype)
    scales = backward_scales(operands, rounded, logit_scale)
    qh, kh, vh, gh, oh = (
        heads_first(x).astype(jnp.float32) for x in (*operands[:3], rounded, out)
    )
    q_unit, k_unit, _ = operands.units
    sees = Sees(causal, None)
    # Of the rounded output, as in cuDNN. Where one key takes most of the attention,
    # `dp - delta` is a small difference: dQ and dK have errors of 0.25 and not 0.06.
    delta = jnp.sum(gh * oh, axis=-1, keepdims=True)
    dqs, dk, dv = [], jnp.zeros_like(kh), jnp.zeros_like(vh)
    for rows, cols in blocks_of_queries(gh.shape[2], kh.shape[2], sees):
        logits = masked_logits(qh, kh, None, rows, cols, sees, logit_scale)
        logits = logits * q_unit * k_unit
        p = jnp.exp(logits - log_norm[:, :, rows, None])
        dp = rows_dot(gh[:, :, rows], vh[:, :, cols], 3)
        ds = E4M3.quantize(p * (dp - delta[:, :, rows]) * logit_scale * scales.ds)
        p = E4M3.quantize(p * P_SCALE)
        dqs.append(rows_dot(ds, kh[:, :, cols], 2))
        dk = dk.at[:, :, cols].add(over_rows(ds, qh[:, :, rows], kh.shape[1]))
        # In FP32. Hopper's FP8 sums keep 13 bits of fraction: of terms that agree, dV
        # is 3% smaller there (docs/lab.md).
        dv = dv.at[:, :, cols].add(over_rows(p, gh[:, :, rows], kh.shape[1]))
    ds_unit = pow2_inverse(scales.ds)
    results = (
        jnp.concatenate(dqs, axis=2) * ds_unit * k_unit,
        dk * ds_unit * q_unit,
        dv / P_SCALE,
    )
    amax = jnp.stack([jnp.max(jnp.abs(x)) for x in results])
    # cuDNN's results saturate in E4M3, and `settled` is made for these.
    largest = E4M3.quantize(jnp.minimum(amax * scales.results, E4M3.max))
    final = settled(scales.results, amax, largest)
    narrow = [
        heads_first(E4M3.quantize(x * scale))
        for x, scale in zip(results, final, strict=True)
    ]
    return _in_units(narrow, final, unit, operands, gradient.dtype)


def _in_unit_of_v(out: jax.Array, operands: Operands, dtype: Any) -> jax.Array:
    """Return the output's values in `dtype`."""
    return saturating_cast(out.astype(jnp.float32) * operands.units[2], dtype)


def _in_units(
    gradients: Sequence[jax.Array],
    scales: jax.Array,
    unit: jax.Array,
    operands: Operands,
    dtype: Any,
) -> tuple[jax.Array, ...]:
    """Return the values of dQ, dK and dV in `dtype`.

    Args:
        gradients: rounded, at `scales`; in the unit of the gradient, dQ and dK also in
            that of v.
        scales: [3].
        unit: of the gradient.
        operands: of the forward pass.
        dtype: of the result.
    """
    dq_scale, dk_scale, dv_scale = map(pow2_inverse, scales)
    dq, dk, dv = (x.astype(jnp.float32) for x in gradients)
    # One after the other: the product of the factors may leave the range of FP32.
    dq, dk = (
        x * scale * unit * operands.units[2]
        for x, scale in ((dq, dq_scale), (dk, dk_scale))
    )
    return tuple(saturating_cast(x, dtype) for x in (dq, dk, dv * dv_scale * unit))


def _cuda(q: jax.Array, k: jax.Array, v: jax.Array, **settings: Any) -> jax.Array:
    return _cuda_forward(q, k, v, is_training=False, **settings)[0]


def _cuda_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    simulate: bool,
    is_training: bool = True,
    **settings: Any,
) -> tuple[jax.Array, Residuals]:
    if simulate:
        return _forward(q, k, v, **settings)
    _check_kernel(q, k, is_training=is_training)
    operands = Operands.quantize(q, k, v)
    out, log_norm = cudnn.forward(
        *operands[:3],
        units=tuple(operands.units[:2]),
        p_scale=P_SCALE,
        is_training=is_training,
        **settings,
    )
    residuals = Residuals(operands, out, log_norm)
    return _in_unit_of_v(out, operands, q.dtype), residuals


def _cuda_backward(
    residuals: Residuals,
    gradient: jax.Array,
    *,
    simulate: bool,
    **settings: Any,
) -> tuple[jax.Array, ...]:
    if simulate:
        return _backward(residuals, gradient, **settings)
    operands, out, log_norm = residuals
    rounded, unit = measured(gradient, E4M3.dtype)
    scales = backward_scales(operands, rounded, settings["logit_scale"])
    kernel = functools.partial(
        cudnn.backward,
        *operands[:3],
        out,
        rounded,
        log_norm,
        units=tuple(operands.units[:2]),
        p_scale=P_SCALE,
        ds_scale=scales.ds,
        **settings,
    )
    # Measured and then rounded would be two calls each time, which costs what FP8
    # gains. A scale of the step before would be a history to save.
    first = kernel(scales=scales.results)
    largest = [jnp.max(jnp.abs(x.astype(jnp.float32))) for x in first[:3]]
    final = settled(scales.results, first.amax, jnp.stack(largest))

    def values(results: cudnn.Gradients) -> tuple[jax.Array, ...]:
        return _in_units(results[:3], final, unit, operands, gradient.dtype)

    # A branch that returned its operands would copy them.
    with jax.named_scope(RERUN):
        return jax.lax.cond(
            jnp.any(final != scales.results),
            lambda: values(kernel(scales=final)),
            lambda: values(first),
        )


def _check_kernel(q: jax.Array, k: jax.Array, *, is_training: bool) -> None:
    """Raise ValueError for sizes that cuDNN's kernels do not take."""
    lengths = (q.shape[1], k.shape[1])
    # Padding heads of 64 channels to 128 would double the FLOPs: so such models have no
    # FP8 attention.
    has_length = not any(length % cudnn.LENGTH_MULTIPLE for length in lengths)
    if q.shape[3] != cudnn.HEAD_WIDTH or (is_training and not has_length):
        raise ValueError(
            f"fp8_attention: heads of {q.shape[3]} channels, {lengths[0]} queries and"
            f" {lengths[1]} keys: cuDNN's FP8 kernels take {cudnn.HEAD_WIDTH} channels,"
            f" and in training lengths of a multiple of {cudnn.LENGTH_MULTIPLE}"
        )


_fp8_attention.defvjp(_forward, _backward, cuda=(_cuda, _cuda_forward, _cuda_backward))


def _largest_norm(x: jax.Array) -> jax.Array:
    """Return the largest norm of a row of E4M3 `x` along its last axis, FP32."""
    squares = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1)
    # E4M3 numbers are at most 448: no square overflows FP32.
    return jnp.sqrt(jnp.max(squares))


# The rules of propagated scales. FP8 attention measures the scales of its operands and
# results, because no rule bounds them: a key may add up 2^15 gradients (8192 tokens,
# four heads a group), or a thousandth of one. So it takes logical values, and gives
# FP32.


@forward_rule("fp8_attention")
def _forward_rule(call: Any, *operands: Any) -> Any:
    q, k, values = (as_value(x, *operands) for x in operands)
    # Its copies in E4M3 have scales of their own: the propagated ones tell sizes of
    # results alone.
    out, *residuals = call.bind(*map(unscaled, (q, k, values)))
    size = size_of(values.size, _growth(call, q, k))
    y = value_of_size(out, size, values.dtype)
    copies = zip(residuals, (q, k, values), strict=False)
    return y, (*(_sized(x8, x.size) for x8, x in copies), *residuals[3:])


def _sized(x8: Any, size: Any) -> Value:
    """Return an E4M3 copy, which has a unit of its own, with the size of its source:
    the backward pass derives the sizes of its results from it.
    """
    if is_static(size):
        return value(x8, 1.0, size, x8.dtype)
    return value(x8, size, 1.0, x8.dtype)


@composite_rule("fp8_attention.bwd", wide=True)
def _backward_rule(call: Any, residuals: Any, gradient: Any) -> Any:
    (q, k, values, _), *_ = residuals
    q, k, values, gradient = map(as_value, (q, k, values, gradient))
    data = jax.tree.map(data_of, residuals, is_leaf=is_value)
    growth, shared = _growth(call, q, k), shared_heads(call, q, k)
    sizes = (
        size_of(values.size, k.size, growth),
        size_of(values.size, q.size, growth * shared),
        growth * shared,
    )
    return on_gradient(call, [(size, gradient.dtype) for size in sizes], data, gradient)


def _growth(call: Any, q: Value, k: Value) -> float:
    return attention_growth(call, Sees(call.settings["causal"], None), q, k)
