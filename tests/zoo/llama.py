"""Llama in plain JAX: RMSNorm, rotary positions, grouped queries, SwiGLU; layers
unrolled, scanned or recomputed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zoo.case import VOCAB, Case, DotGeneral, keys, matmul, next_token, normal

HEADS, GROUPS = 4, 2


def rms_norm(x: jax.Array, gain: jax.Array, eps: float = 1e-5) -> jax.Array:
    """As published: the statistics in float32, the result in the input's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return wide.astype(x.dtype) * gain


def rope(x_BxTxHxK: jax.Array, theta: float = 10_000.0) -> jax.Array:
    """Rotary positions, the halves of a head's channels being the pairs."""
    half = x_BxTxHxK.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half) / half)
    angle = jnp.arange(x_BxTxHxK.shape[1])[:, None] * frequency[None]
    cos, sin = (
        f(angle)[None, :, None].astype(x_BxTxHxK.dtype) for f in (jnp.cos, jnp.sin)
    )
    a, b = jnp.split(x_BxTxHxK, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(
    p: dict[str, jax.Array], x_BxTxD: jax.Array, dot_general: DotGeneral
) -> jax.Array:
    """Causal, each key and value head serving HEADS / GROUPS query heads."""
    batch, time, _ = x_BxTxD.shape
    q, k, v = (
        matmul(dot_general, x_BxTxD, p[name]).reshape(batch, time, heads, -1)
        for name, heads in (("wq", HEADS), ("wk", GROUPS), ("wv", GROUPS))
    )
    q, k = rope(q), rope(k)
    k, v = (jnp.repeat(y, HEADS // GROUPS, axis=2) for y in (k, v))
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / math.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones((time, time), bool))
    scores = jnp.where(mask[None, None], scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(x_BxTxD.dtype)
    mixed = jnp.einsum("bhqs,bshk->bqhk", weights, v).reshape(batch, time, -1)
    return matmul(dot_general, mixed, p["wo"])


def layer(
    p: dict[str, jax.Array], x_BxTxD: jax.Array, dot_general: DotGeneral
) -> jax.Array:
    """One block."""
    x = x_BxTxD + attention(p, rms_norm(x_BxTxD, p["attention_norm"]), dot_general)
    y = rms_norm(x, p["ffn_norm"])
    hidden = jax.nn.silu(matmul(dot_general, y, p["w_gate"])) * matmul(
        dot_general, y, p["w_up"]
    )
    return x + matmul(dot_general, hidden, p["w_down"])


def init(
    depth: int, width: int, std: float | None, residual: float, seed: int
) -> dict[str, Any]:
    """`std` of all matrices, 1/sqrt(fan_in) if None; those that write to the residual
    stream times `residual`."""
    key, d, kv, f = keys(seed), width, width * GROUPS // HEADS, 2 * width

    def one() -> dict[str, jax.Array]:
        shapes = {"wq": (d, d), "wk": (d, kv), "wv": (d, kv), "wo": (d, d)}
        shapes |= {"w_gate": (d, f), "w_up": (d, f), "w_down": (f, d)}
        out = {name: normal(key(), *shape, std=std) for name, shape in shapes.items()}
        out |= {name: residual * out[name] for name in ("wo", "w_down")}
        return out | {"attention_norm": jnp.ones(d), "ffn_norm": jnp.ones(d)}

    embedding = normal(key(), VOCAB, d, std=0.02 if std else 1.0)
    head = normal(key(), d, VOCAB, std=std)
    layers = [one() for _ in range(depth)]
    return {"embedding": embedding, "layers": layers, "norm": jnp.ones(d), "head": head}


def llama(
    depth: int = 8,
    width: int = 32,
    dot_general: DotGeneral = lax.dot_general,
    *,
    std: float | None = 0.02,
    is_deep: bool = False,
    scan: bool = False,
    remat: bool = False,
    seed: int = 0,
) -> Case:
    """Build a Llama.

    Args:
        depth: the number of layers.
        width: of the residual stream.
        dot_general: of the layers' matrices.
        std: the deviation of every matrix, 0.02 in the published code at any width.
            None: 1/sqrt(fan_in), so that each block moves the stream as much as the
            first.
        is_deep: whether residual writes are divided by sqrt(2 depth).
        scan: whether the layers are scanned.
        remat: whether each block is recomputed in the backward pass.
        seed: of the weights.
    """
    residual = 1 / math.sqrt(2 * depth) if is_deep else 1.0
    params = init(depth, width, std, residual, seed)
    if scan:
        params["layers"] = jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"])
    block: Callable = functools.partial(layer, dot_general=dot_general)
    block = jax.checkpoint(block) if remat else block

    def forward(params: Any, ids: Any) -> jax.Array:
        x = params["embedding"][ids]
        if scan:
            x, _ = lax.scan(lambda x, p: (block(p, x), None), x, params["layers"])
        else:
            for p in params["layers"]:
                x = block(p, x)
        return (rms_norm(x, params["norm"]) @ params["head"]).astype(jnp.float32)

    return next_token(forward, params, batch=4)
