"""Sequence models that are no transformers: Mamba, RWKV, an LSTM; a mixture of experts.
Plain JAX, but the LSTM."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax

from zoo.case import Case, keys, layer_norm, normal, tokens, uniform
from zoo.llama import rms_norm

VOCAB, STATE, RANK, TAPS = 64, 8, 4, 4


def next_token(name: str, forward: Any, params: Any, time: int = 16) -> Case:
    """The case of a language model: `forward(params, ids)` gives the logits."""

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = forward(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch[:, 1:]
        ).mean()

    return Case(name, loss, params, tokens(2, time + 1, VOCAB))


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
        dt = jnp.exp(
            jax.random.uniform(
                key(), (e,), minval=math.log(1e-3), maxval=math.log(1e-1)
            )
        )
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
    }
    params["norm"] = jnp.ones(width)

    def forward(params: Any, ids: jax.Array) -> jax.Array:
        x = params["embedding"][ids]
        for p in params["blocks"]:
            x = x + mamba_block(p, rms_norm(x, p["norm"]))
        return rms_norm(x, params["norm"]) @ params["embedding"].T

    return next_token("mamba", forward, params)


def wkv(
    k_TxBxD: jax.Array, v_TxBxD: jax.Array, decay: jax.Array, bonus: jax.Array
) -> jax.Array:
    """RWKV-4's weighted mean of the past, its exponents kept from overflowing by a
    running maximum."""

    def step(carry: Any, now: Any) -> Any:
        (num, den, top), (k, v) = carry, now
        most = jnp.maximum(top, bonus + k)
        old, new = jnp.exp(top - most), jnp.exp(bonus + k - most)
        out = (old * num + new * v) / (old * den + new)
        most = jnp.maximum(top - decay, k)
        old, new = jnp.exp(top - decay - most), jnp.exp(k - most)
        return (old * num + new * v, old * den + new, most), out

    zero = jnp.zeros_like(k_TxBxD[0])
    return lax.scan(step, (zero, zero, jnp.full_like(zero, -1e38)), (k_TxBxD, v_TxBxD))[
        1
    ]


def shifted(x_BxTxD: jax.Array) -> jax.Array:
    """The token before each."""
    return jnp.pad(x_BxTxD, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def rwkv_block(p: Any, x: jax.Array) -> jax.Array:
    """Time mixing, then channel mixing."""

    def mixed(y: jax.Array, share: jax.Array) -> jax.Array:
        return y * share + shifted(y) * (1 - share)

    y = layer_norm(x, *p["ln_1"])
    k, v, r = (mixed(y, p[f"mix_{name}"]) @ p[name] for name in "kvr")
    out = wkv(
        k.swapaxes(0, 1), v.swapaxes(0, 1), jnp.exp(p["decay"]), p["bonus"]
    ).swapaxes(0, 1)
    x = x + (jax.nn.sigmoid(r) * out) @ p["out"]
    y = layer_norm(x, *p["ln_2"])
    hidden = jnp.square(jax.nn.relu(mixed(y, p["mix_c"]) @ p["up"]))
    return x + jax.nn.sigmoid(mixed(y, p["mix_c"]) @ p["gate"]) * (hidden @ p["down"])


def rwkv(depth: int = 8, width: int = 16) -> Case:
    """Decays and mixes graded over channels, as published."""
    key, d = keys(0), width
    graded = jnp.arange(d) / d

    def block(i: int) -> dict[str, Any]:
        share = 1 - i / depth
        out = {f"mix_{name}": graded**share for name in "kvrc"}
        out |= {name: normal(key(), d, d) for name in ("k", "v", "r", "out", "gate")}
        out |= {"up": normal(key(), d, 4 * d), "down": normal(key(), 4 * d, d)}
        out |= {
            "decay": -5 + 8 * graded ** (0.7 + 1.3 * i / depth),
            "bonus": jnp.full(d, math.log(0.3)),
        }
        return out | {name: (jnp.ones(d), jnp.zeros(d)) for name in ("ln_1", "ln_2")}

    params = {
        "embedding": normal(key(), VOCAB, d, std=1e-2),
        "ln_0": (jnp.ones(d), jnp.zeros(d)),
        "blocks": [block(i) for i in range(depth)],
        "ln_out": (jnp.ones(d), jnp.zeros(d)),
        "head": normal(key(), d, VOCAB),
    }

    def forward(params: Any, ids: jax.Array) -> jax.Array:
        x = layer_norm(params["embedding"][ids], *params["ln_0"])
        for p in params["blocks"]:
            x = rwkv_block(p, x)
        return layer_norm(x, *params["ln_out"]) @ params["head"]

    return next_token("rwkv", forward, params)


class Recurrent(nn.Module):
    """LSTMs upon each other, and a linear readout of the last state."""

    depth: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.depth):
            x = jnp.asarray(nn.RNN(nn.OptimizedLSTMCell(self.width))(x))
        return nn.Dense(1)(x[:, -1])[:, 0]


def lstm(depth: int = 2, width: int = 16) -> Case:
    """The adding problem over 200 steps: the sum of the two numbers that are marked."""
    model = Recurrent(depth, width)
    k1, k2 = jax.random.split(jax.random.key(1))
    numbers = jax.random.uniform(k1, (8, 200))
    marks = jax.nn.one_hot(jax.random.randint(k2, (8, 2), 0, 200), 200).sum(1)
    batch = {"x": jnp.stack([numbers, marks], -1), "y": (numbers * marks).sum(1)}
    params = model.init(jax.random.key(0), batch["x"])["params"]

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

    return Case("lstm", loss, params, batch)


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
        crossed = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return crossed.mean() + 0.01 * balance / len(params["blocks"])

    return Case("moe", loss, params, tokens(4, 17, VOCAB))
