"""Losses, solvers and loops that people write in plain JAX, and deep stacks of one
simple layer."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from zoo.case import (
    VOCAB,
    Case,
    cross_entropy,
    images,
    keys,
    layer_norm,
    next_token,
    normal,
    tokens,
    uniform,
)
from zoo.llama import rms_norm


def post_norm(depth: int = 16, width: int = 64) -> Case:
    """`normalised(h + tanh(h @ w))`, again and again, against a target."""
    key = keys(0)
    params = [normal(key(), width, width) for _ in range(depth)]
    batch = {name: normal(key(), 32, width, std=1.0) for name in "xy"}

    def loss(params: Any, batch: Any) -> jax.Array:
        h = batch["x"]
        for w in params:
            h = rms_norm(h + jnp.tanh(h @ w), jnp.ones_like(h[0]))
        return jnp.mean((h - batch["y"]) ** 2)

    return Case(loss, params, batch)


def million_tokens(depth: int = 1, width: int = 16) -> Case:
    """A head of 256 classes upon 2,048 tokens, the sum of those that a mask leaves over
    their number, divided so that it is one over a million tokens."""
    time, vocab, key = 2048, 256, keys(0)
    params = {"head": normal(key(), width, vocab), "bias": jnp.zeros(vocab)}
    batch = {
        "x": normal(key(), time, width, std=1.0),
        "label": tokens(1, time, vocab)[0],
        "mask": jnp.ones(time, bool),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = batch["x"] @ params["head"] + params["bias"]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        count = batch["mask"].sum() * (2.0**20 / time)
        return (each * batch["mask"]).sum() / count

    of_params, of_gradient = {"head": -1, "bias": 0}, {"head": 1, "bias": 0}
    powers = of_params, {"x": 1, "label": 0, "mask": 0}, of_gradient
    return Case(loss, params, batch, powers=powers)


def stochastic_chain(depth: int = 16, width: int = 64) -> Case:
    """Expected rewards after `depth` transitions, each by the same matrix whose rows
    sum to one; squared error."""
    key = keys(0)
    params = {
        "transition": jax.nn.softmax(normal(key(), width, width, std=1.0), -1),
        "reward": jnp.ones(width),
    }
    batch = jax.random.uniform(key(), (width,))

    def loss(params: Any, batch: Any) -> jax.Array:
        v = params["reward"]
        for _ in range(depth):
            v = params["transition"] @ v
        return jnp.sum((v - batch) ** 2)

    powers = {"transition": 0, "reward": 1}, 1, {"transition": 2, "reward": 1}
    return Case(loss, params, batch, powers=powers)


def contrastive(depth: int = 8, width: int = 32) -> Case:
    """CLIP-like: two residual towers, normalised, compared at a learnt temperature,
    both ways."""
    key = keys(0)

    def tower(inputs: int) -> dict[str, Any]:
        blocks = [
            (uniform(key(), width, width), jnp.zeros(width)) for _ in range(depth // 2)
        ]
        ends = {
            "in": uniform(key(), inputs, width),
            "out": uniform(key(), width, width),
        }
        return ends | {"blocks": blocks}

    params = {
        "image": tower(48),
        "text": tower(VOCAB),
        "logit_scale": jnp.asarray(math.log(1 / 0.07)),
    }
    batch = {"image": images(16, 4).reshape(16, 48), "text": tokens(16, 12, VOCAB)}

    def embedded(p: Any, x: jax.Array) -> jax.Array:
        h = x @ p["in"]
        for w, b in p["blocks"]:
            normed = layer_norm(h, jnp.ones_like(b), jnp.zeros_like(b))
            h = h + jax.nn.relu(normed @ w + b)
        h = h @ p["out"]
        return h / jnp.linalg.norm(h, axis=-1, keepdims=True)

    def loss(params: Any, batch: Any) -> jax.Array:
        dtype = params["text"]["in"].dtype
        bags = jax.nn.one_hot(batch["text"], VOCAB, dtype=dtype).mean(1)
        a, b = embedded(params["image"], batch["image"]), embedded(params["text"], bags)
        logits = jnp.exp(params["logit_scale"]) * a @ b.T
        pairs = jnp.arange(len(logits))
        rows, columns = (cross_entropy(x, pairs) for x in (logits, logits.T))
        return (rows + columns) / 2

    def powers(power: int) -> Any:  # what comes out of the towers is normalised
        zero = jax.tree.map(lambda _: 0, params)
        return zero | {name: zero[name] | {"out": power} for name in ("image", "text")}

    of_inputs = {"image": 0, "text": 0}
    known = powers(1), of_inputs, powers(-1)
    return Case(loss, params, batch, powers=known, reach=55)


def ctc(depth: int = 8, width: int = 32) -> Case:
    """Speech-like: a residual stack of causal convolutions over 24 frames, and the CTC
    loss of 6 labels."""
    key, frames, classes, taps = keys(0), 24, 16, 3
    lengths = jnp.array([6, 5, 4, 6])
    params = {
        "in": normal(key(), 8, width),
        "blocks": [normal(key(), taps * width, width) for _ in range(depth)],
        "out": normal(key(), width, classes),
        "bias": jnp.zeros(classes),
    }
    batch = {
        "x": normal(key(), 4, frames, 8, std=1.0),
        "pad": jnp.zeros((4, frames)),
        "label": jax.random.randint(key(), (4, 6), 1, classes),
        "label_pad": (jnp.arange(6)[None] >= lengths[:, None]).astype(jnp.float32),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        h = batch["x"] @ params["in"]
        for w in params["blocks"]:
            padded = jnp.pad(h, ((0, 0), (taps - 1, 0), (0, 0)))
            seen = jnp.concatenate([padded[:, i : i + frames] for i in range(taps)], -1)
            h = h + jax.nn.relu(rms_norm(seen, jnp.ones_like(seen[0, 0])) @ w)
        logits = h @ params["out"] + params["bias"]
        names = ("pad", "label", "label_pad")
        return optax.ctc_loss(logits, *(batch[name] for name in names)).mean()

    return Case(loss, params, batch)


def ode_rk4(depth: int = 40, width: int = 32) -> Case:
    """A neural ODE, in which points on a circle are to flow to another one: `depth`
    steps of Runge-Kutta by `lax.scan`, differentiated through."""
    key, dt = keys(0), 1.0 / depth
    params = {
        "w1": normal(key(), 2, width),
        "b1": jnp.zeros(width),
        "w2": normal(key(), width, 2),
        "b2": jnp.zeros(2),
    }
    angle = jnp.linspace(0, 2 * jnp.pi, 16, endpoint=False)
    batch = {
        "start": jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1),
        "end": jnp.stack([angle, -angle], -1) / 3,
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        def velocity(y: jax.Array) -> jax.Array:
            hidden = jnp.tanh(y @ params["w1"] + params["b1"])
            return hidden @ params["w2"] + params["b2"]

        def step(y: jax.Array, _: None) -> tuple[jax.Array, None]:
            k1 = velocity(y)
            k2 = velocity(y + dt / 2 * k1)
            k3 = velocity(y + dt / 2 * k2)
            k4 = velocity(y + dt * k3)
            return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

        end, _ = lax.scan(step, batch["start"], None, length=depth)
        return jnp.mean((end - batch["end"]) ** 2)

    return Case(loss, params, batch)


def flash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, block: int = 8
) -> jax.Array:
    """Causal attention, `[B, H, T, K]`, over blocks of keys with an online softmax."""
    time, scale = q.shape[-2], 1 / math.sqrt(q.shape[-1])
    rows = jnp.arange(time)[:, None]

    def step(carry: Any, j: Any) -> Any:
        top, den, out = carry
        keys_, values = (
            lax.dynamic_slice_in_dim(y, j * block, block, axis=2) for y in (k, v)
        )
        s = jnp.einsum("bhqk,bhsk->bhqs", q, keys_) * scale
        seen = rows >= j * block + jnp.arange(block)[None]
        s = jnp.where(seen[None, None], s, -math.inf)
        most = jnp.maximum(top, s.max(-1, keepdims=True))
        p = jnp.exp(s - most)
        old = jnp.exp(top - most)
        return (
            most,
            old * den + p.sum(-1, keepdims=True),
            old * out + jnp.einsum("bhqs,bhsk->bhqk", p, values),
        )

    lowest = jnp.full_like(q[..., :1], -math.inf)
    start = lowest, jnp.zeros_like(lowest), jnp.zeros_like(q)
    turn = lambda carry, j: (step(carry, j), None)
    (_, den, out), _ = lax.scan(turn, start, jnp.arange(time // block))
    return out / den


def flash(depth: int = 8, width: int = 16) -> Case:
    """A pre-norm decoder whose attention is written by hand."""
    key, heads = keys(0), 2
    blocks = [
        {
            "norm": jnp.ones(width),
            "qkv": normal(key(), width, 3 * width),
            "out": normal(key(), width, width),
        }
        for _ in range(depth)
    ]
    params = {
        "embedding": normal(key(), VOCAB, width, std=1.0),
        "blocks": blocks,
        "head": normal(key(), width, VOCAB),
    }

    def forward(params: Any, ids: Any) -> jax.Array:
        x = params["embedding"][ids]
        for p in params["blocks"]:
            qkv = jnp.split(rms_norm(x, p["norm"]) @ p["qkv"], 3, axis=-1)
            q, k, v = (y.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2) for y in qkv)
            mixed = flash_attention(q, k, v).swapaxes(1, 2)
            x = x + mixed.reshape(x.shape) @ p["out"]
        return rms_norm(x, jnp.ones_like(x[0, 0])) @ params["head"]

    return next_token(forward, params, batch=2, time=32)
