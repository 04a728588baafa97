"""Llama in plain JAX: RMSNorm, rotary positions, grouped queries, SwiGLU; layers
unrolled, scanned or recomputed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from zoo.case import Case, DotGeneral, keys, matmul, normal, tokens

HEADS, GROUPS, VOCAB = 4, 2, 64


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
    return {
        "embedding": embedding,
        "layers": [one() for _ in range(depth)],
        "norm": jnp.ones(d),
        "head": head,
    }


def case(
    name: str,
    depth: int,
    width: int,
    dot_general: DotGeneral,
    *,
    std: float | None,
    residual: float = 1.0,
    scan: bool = False,
    remat: bool = False,
    seed: int = 0,
) -> Case:
    """Next-token prediction, the mean over all tokens."""
    params = init(depth, width, std, residual, seed)
    if scan:
        params["layers"] = jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"])
    block: Callable = functools.partial(layer, dot_general=dot_general)
    block = jax.checkpoint(block) if remat else block

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embedding"][batch[:, :-1]]
        if scan:
            x, _ = lax.scan(lambda x, p: (block(p, x), None), x, params["layers"])
        else:
            for p in params["layers"]:
                x = block(p, x)
        logits = (rms_norm(x, params["norm"]) @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch[:, 1:]
        ).mean()

    return Case(name, loss, params, tokens(4, 17, VOCAB))


def llama(
    depth: int = 8,
    width: int = 32,
    dot_general: DotGeneral = lax.dot_general,
    seed: int = 0,
) -> Case:
    """Every matrix with a deviation of 0.02, as the published code has it at any
    width."""
    return case("llama", depth, width, dot_general, std=0.02, seed=seed)


def llama_fan_in(
    depth: int = 8,
    width: int = 32,
    dot_general: DotGeneral = lax.dot_general,
    seed: int = 0,
) -> Case:
    """Matrices of 1/sqrt(fan_in): each block moves the stream as much as the first."""
    return case("llama_fan_in", depth, width, dot_general, std=None, seed=seed)


def llama_scan(
    depth: int = 16, width: int = 32, dot_general: DotGeneral = lax.dot_general
) -> Case:
    """Scanned over layers, residual writes divided by sqrt(2 depth)."""
    return case(
        "llama_scan",
        depth,
        width,
        dot_general,
        std=None,
        residual=1 / math.sqrt(2 * depth),
        scan=True,
    )


def llama_remat(
    depth: int = 8, width: int = 32, dot_general: DotGeneral = lax.dot_general
) -> Case:
    """Unrolled, each block recomputed in the backward pass."""
    return case(
        "llama_remat",
        depth,
        width,
        dot_general,
        std=None,
        residual=1 / math.sqrt(2 * depth),
        remat=True,
    )


def llama_scan_remat(
    depth: int = 16, width: int = 32, dot_general: DotGeneral = lax.dot_general
) -> Case:
    """Scanned over recomputed layers, deviation 0.02."""
    return case(
        "llama_scan_remat", depth, width, dot_general, std=0.02, scan=True, remat=True
    )
