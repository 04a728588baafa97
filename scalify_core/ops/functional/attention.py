"""Softmax attention: cuDNN's fused kernel where the program is compiled for CUDA,
blocks of queries elsewhere.

Shape legend: B batch, T query positions, S key positions, H query heads, G heads of
keys and values, K head dim.

Grouped queries (G < H) meet the keys and values of their group as more rows of one
product: nothing is repeated.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from scalify_core.numerics.formats import saturating_cast
from scalify_core.ops.attention_blocks import (
    Sees,
    blocks_of_queries,
    heads_first,
    masked_logits,
    over_rows,
    rows_dot,
)
from scalify_core.ops.composite import composite

_CUDNN_DTYPES = (jnp.float16, jnp.bfloat16)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Return `softmax(q k^T / sqrt(K) + mask) v`, softmax in FP32.

    Args:
        q: [B, T, H, K].
        k: [B, S, G, K]; each of its G heads serves H / G successive heads of `q`.
        v: [B, S, G, K].
        causal: query t sees the keys s <= t. Needs S = T.
        window: query t sees the last `window` of these keys, t itself among them; None:
            all.
        segments: [B, T] integers, or None: with them a query sees only keys of its own
            segment (a packed document). Needs S = T. On CUDA, cuDNN reads a mask [B, 1,
            T, S] and a bias of that size: its layout for packed documents wants a limit
            of documents a row, and statistics for each of them.

    Returns:
        [B, T, H, K] in the dtype of `q`. Without segments, no array of T x S is kept
        for the backward pass.

    Raises:
        ValueError: `causal` or `segments` with S different from T, `window` without
            `causal` or below 1, or H that is no multiple of G.

    References:
        Ainslie et al., GQA, 2023 (https://arxiv.org/abs/2305.13245).
    """
    if q.shape[2] % k.shape[2] or k.shape[2] != v.shape[2]:
        heads = (
            f"{q.shape[2]} heads of queries, {k.shape[2]} of keys, {v.shape[2]} of"
            " values"
        )
        raise ValueError(
            f"attention: {heads}: keys and values need as many, and queries a multiple"
            " of them"
        )
    if q.shape[1] != k.shape[1] and (causal or segments is not None):
        raise ValueError(
            f"attention: {q.shape[1]} queries and {k.shape[1]} keys: causal and"
            " segments need as many"
        )
    if window is not None and (window < 1 or not causal):
        raise ValueError(
            f"attention: window={window}, causal={causal}: a window is of at least one"
            " key, and causal"
        )
    if window is not None and window >= q.shape[1]:
        window = None  # each query sees all keys before it
    logit_scale = 1 / math.sqrt(q.shape[-1])
    sees = Sees(causal, window)
    return _attention(q, k, v, segments, sees=sees, logit_scale=logit_scale)


@composite(name="attention")
def _attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    **settings: Any,
) -> jax.Array:
    return _attention_fwd(q, k, v, segments, **settings)[0]


def _attention_fwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    *,
    sees: Sees,
    logit_scale: float,
) -> tuple:
    qh, kh, vh = (heads_first(x) for x in (q, k, v))
    outs, log_norms = [], []
    for rows, cols in blocks_of_queries(q.shape[1], k.shape[1], sees):
        logits = masked_logits(qh, kh, segments, rows, cols, sees, logit_scale)
        # Finite: a query sees at least itself, so -inf never meets -inf.
        peak = jnp.max(logits, axis=-1, keepdims=True)
        p = jnp.exp(logits - peak)
        norm = jnp.sum(p, axis=-1, keepdims=True)
        # The sum divides K numbers a query in place of S, the probabilities.
        outs.append(rows_dot(p.astype(v.dtype), vh[:, :, cols], 2) / norm)
        log_norms.append(peak + jnp.log(norm))
    out = heads_first(jnp.concatenate(outs, axis=2)).astype(q.dtype)
    return out, (q, k, v, segments, out, jnp.concatenate(log_norms, axis=2))


def _attention_bwd(
    residuals: tuple,
    gradient: jax.Array,
    *,
    sees: Sees,
    logit_scale: float,
) -> tuple:
    q, k, v, segments, out, log_norm = residuals
    qh, kh, vh, gh = (heads_first(x) for x in (q, k, v, gradient.astype(q.dtype)))
    # [B, H, T, 1]: sum of gradient * out, which is the softmax's own term.
    delta = jnp.sum(
        gh.astype(jnp.float32) * heads_first(out).astype(jnp.float32),
        axis=-1,
        keepdims=True,
    )
    # Keys are seen by many blocks of queries: their gradients add up in FP32.
    dqs, dk, dv = [], jnp.zeros(kh.shape, jnp.float32), jnp.zeros(vh.shape, jnp.float32)
    for rows, cols in blocks_of_queries(q.shape[1], k.shape[1], sees):
        # Computed again: the probabilities of all blocks would be arrays of T x S.
        logits = masked_logits(qh, kh, segments, rows, cols, sees, logit_scale)
        p = jnp.exp(logits - log_norm[:, :, rows])
        dp = rows_dot(gh[:, :, rows], vh[:, :, cols], 3)
        # without the logits' scale, which may be any size
        ds = saturating_cast(p * (dp - delta[:, :, rows]), q.dtype)
        dqs.append(rows_dot(ds, kh[:, :, cols], 2))
        dk = dk.at[:, :, cols].add(over_rows(ds, qh[:, :, rows], kh.shape[1]))
        dv = dv.at[:, :, cols].add(
            over_rows(p.astype(q.dtype), gh[:, :, rows], kh.shape[1])
        )
    dq, dk = jnp.concatenate(dqs, axis=2) * logit_scale, dk * logit_scale
    # A sum over all queries that see one key grows in training (six layers, step 610:
    # 12,400 of FP16's 65,504), and a norm makes NaN of an infinity.
    return (
        *(
            saturating_cast(heads_first(d), x.dtype)
            for d, x in ((dq, q), (dk, k), (dv, v))
        ),
        None,
    )


def _cudnn(
    segments: jax.Array | None, *, sees: Sees, logit_scale: float
) -> Callable[..., jax.Array]:
    """Return the function of q, k and v that cuDNN computes."""
    mask = window = None
    if segments is not None:
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]
    if sees.window is not None:
        # JAX counts the keys on the left without the query's own.
        window = sees.window - 1, 0
    return functools.partial(
        jax.nn.dot_product_attention,
        mask=mask,
        is_causal=sees.causal,
        local_window_size=window,
        scale=logit_scale,
        implementation="cudnn",
    )


def _is_for_cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> bool:
    return (
        # JAX raises for other sizes; it takes heads of 256 channels from Hopper on.
        q.dtype in _CUDNN_DTYPES
        and q.dtype == k.dtype == v.dtype
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 128
    )


def _attention_cuda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    **settings: Any,
) -> jax.Array:
    if not _is_for_cudnn(q, k, v):
        return _attention.fun(q, k, v, segments, **settings)
    return _cudnn(segments, **settings)(q, k, v)


def _attention_fwd_cuda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    **settings: Any,
) -> tuple:
    if not _is_for_cudnn(q, k, v):
        return _attention_fwd(q, k, v, segments, **settings)
    out, pullback = jax.vjp(_cudnn(segments, **settings), q, k, v)
    # The statistics are in no result of JAX's function, only among what its backward
    # pass keeps.
    (log_norm,) = (x for x in jax.tree.leaves(pullback) if _is_log_norm(x, q))
    # With the statistics kept, a scan of 12 layers has 24 attention kernels and not 36:
    # at 8192 tokens 46.8 ms a step and not 50.6 (124M, H100, predicted).
    return out, (q, k, v, segments, out, log_norm[..., None])


def _attention_bwd_cuda(
    residuals: tuple, gradient: jax.Array, **settings: Any
) -> tuple:
    q, k, v, segments, out, log_norm = residuals
    if not _is_for_cudnn(q, k, v):
        return _attention_bwd(residuals, gradient, **settings)
    recomputed, pullback = jax.vjp(_cudnn(segments, **settings), q, k, v)

    def saved(x: jax.Array) -> jax.Array:
        if x is recomputed:
            return out
        return log_norm[..., 0] if _is_log_norm(x, q) else x

    # JAX gives the backward kernel only with a forward call. Nothing reads the results
    # of that call now, so the compiler removes it; in a loop over layers, whose forward
    # pass is another loop, it would run.
    pullback = jax.tree.map(saved, pullback)
    return *pullback(gradient.astype(q.dtype)), None


def _is_log_norm(x: jax.Array, q: jax.Array) -> bool:
    """Return whether a residual of cuDNN's call has the logarithms of its sums."""
    batch, queries, heads, _ = q.shape
    return x.dtype == jnp.float32 and x.shape == (batch, heads, queries)


_attention.defvjp(
    _attention_fwd,
    _attention_bwd,
    cuda=(_attention_cuda, _attention_fwd_cuda, _attention_bwd_cuda),
)
