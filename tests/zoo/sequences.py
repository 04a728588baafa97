"""Sequence models in plain JAX: Mamba, and a mixture of experts."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zoo.case import (
    VOCAB,
    Case,
    cross_entropy,
    keys,
    next_token,
    normal,
    tokens,
    uniform,
)
from zoo.llama import rms_norm

STATE, RANK, TAPS = 8, 4, 4


def selective_scan(
    x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array
) -> jax.Array:
    """h_t = exp(dt_t a) h_(t-1) + dt_t b_t x_t, y_t = c_t h_t: x, dt `[B, T, E]`, a
    `[E, N]`, b, c `[B, T, N]`."""
    decay = jnp.exp(dt[..., None] * a[None, None])
    inflow = (dt * x)[..., None] * b[:, :, None]

    def combine(first: Any, then: Any) -> Any:
        return first[0] * then[0], first[1] * then[0] + then[1]

    _, h = lax.associative_scan(combine, (decay, inflow), axis=1)
    return jnp.einsum("bten,btn->bte", h, c)


def mamba_block(p: Any, x_BxTxD: jax.Array) -> jax.Array:
    """A gated selective scan behind a causal convolution."""
    x, z = jnp.split(x_BxTxD @ p["w_in"], 2, axis=-1)
    time = x.shape[1]
    padded = jnp.pad(x, ((0, 0), (TAPS - 1, 0), (0, 0)))
    x = (
        sum(padded[:, i : i + time] * p["conv"][i][None, None] for i in range(TAPS))
        + p["conv_bias"]
    )
    x = jax.nn.silu(x)
    dt, b, c = jnp.split(x @ p["w_x"], [RANK, RANK + STATE], axis=-1)
    dt = jax.nn.softplus(dt @ p["w_dt"] + p["dt_bias"])
    y = selective_scan(x, dt, -jnp.exp(p["a_log"]), b, c) + x * p["d"]
    return (y * jax.nn.silu(z)) @ p["w_out"]


def mamba(depth: int = 8, width: int = 16) -> Case:
    """Initialised as published: A from 1 to N, steps from 0.001 to 0.1."""
    key, e = keys(0), 2 * width

    def block() -> dict[str, jax.Array]:
        low, high = math.log(1e-3), math.log(1e-1)
        dt = jnp.exp(jax.random.uniform(key(), (e,), minval=low, maxval=high))
        return {
            "norm": jnp.ones(width),
            "w_in": normal(key(), width, 2 * e),
            "conv": normal(key(), TAPS, e),
            "conv_bias": jnp.zeros(e),
            "w_x": normal(key(), e, RANK + 2 * STATE),
            "w_dt": normal(key(), RANK, e),
            "dt_bias": dt + jnp.log(-jnp.expm1(-dt)),
            "a_log": jnp.log(jnp.broadcast_to(jnp.arange(1.0, STATE + 1), (e, STATE))),
            "d": jnp.ones(e),
            "w_out": normal(key(), e, width, std=1 / math.sqrt(e * depth)),
        }

    params = {
        "embedding": normal(key(), VOCAB, width, std=0.02),
        "blocks": [block() for _ in range(depth)],
        "norm": jnp.ones(width),
    }

    def forward(params: Any, ids: jax.Array) -> jax.Array:
        x = params["embedding"][ids]
        for p in params["blocks"]:
            x = x + mamba_block(p, rms_norm(x, p["norm"]))
        return rms_norm(x, params["norm"]) @ params["embedding"].T

    return next_token(forward, params, batch=2)


def shifted(x_BxTxD: jax.Array) -> jax.Array:
    """The token before each."""
    return jnp.pad(x_BxTxD, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def experts(p: Any, x_NxD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two best experts of each token, weighted by the router; and the loss that
    balances their load."""
    probabilities = jax.nn.softmax(x_NxD @ p["router"], -1)
    best, index = lax.top_k(probabilities, 2)
    best = best / best.sum(-1, keepdims=True)
    chosen = jax.nn.one_hot(index, probabilities.shape[-1], dtype=x_NxD.dtype)
    gates = jnp.einsum("nk,nke->ne", best, chosen)
    hidden = jax.nn.gelu(jnp.einsum("nd,edf->nef", x_NxD, p["up"]))
    out = jnp.einsum("ne,nef,efd->nd", gates, hidden, p["down"])
    load, importance = chosen[:, 0].mean(0), probabilities.mean(0)
    return out, probabilities.shape[-1] * jnp.sum(load * importance)


def moe(depth: int = 8, width: int = 16) -> Case:
    """A residual stack of experts upon token pairs: cross-entropy plus 0.01 of the
    balance losses."""
    key, number = keys(0), 4
    blocks = [
        {
            "norm": jnp.ones(width),
            "mix": uniform(key(), width, width),
            "router": normal(key(), width, number, std=0.02),
            "up": normal(key(), number, width, 2 * width),
            "down": normal(key(), number, 2 * width, width),
        }
        for _ in range(depth)
    ]
    params = {
        "embedding": normal(key(), VOCAB, width, std=1.0),
        "blocks": blocks,
        "head": normal(key(), width, VOCAB),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embedding"][batch[:, :-1]]
        balance = jnp.float32(0)
        for p in params["blocks"]:
            x = x + shifted(x) @ p["mix"]
            out, extra = experts(p, rms_norm(x, p["norm"]).reshape(-1, x.shape[-1]))
            x, balance = x + out.reshape(x.shape), balance + extra
        logits = rms_norm(x, jnp.ones_like(x[0, 0])) @ params["head"]
        crossed = cross_entropy(logits, batch[:, 1:])
        return crossed + 0.01 * balance / len(params["blocks"])

    return Case(loss, params, tokens(4, 17))
