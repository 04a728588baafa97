"""Losses, solvers and loops that people write in plain JAX, and deep stacks of one
simple layer."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.experimental.ode import odeint

from zoo.case import Case, images, keys, layer_norm, normal, tokens, uniform
from zoo.llama import rms_norm

VOCAB = 64


def residual(depth: int = 16, width: int = 64) -> Case:
    """`h + tanh(rms_normalised(h) @ w)`, again and again; the mean square of the
    last."""
    key = keys(0)
    params = [normal(key(), width, width) for _ in range(depth)]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        h = x
        for w in params:
            h = h + jnp.tanh(
                h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) @ w
            )
        return jnp.mean(h**2)

    return Case(f"residual_{depth}", loss, params, normal(key(), 32, width, std=1.0))


def residual_24(depth: int = 24, width: int = 64) -> Case:
    """As `residual`, deeper."""
    return residual(depth, width)


def post_norm(depth: int = 16, width: int = 64) -> Case:
    """`normalised(h + tanh(h @ w))`, again and again, against a target."""
    key = keys(0)
    params = [normal(key(), width, width) for _ in range(depth)]
    batch = {
        "x": normal(key(), 32, width, std=1.0),
        "y": normal(key(), 32, width, std=1.0),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        h = batch["x"]
        for w in params:
            h = rms_norm(h + jnp.tanh(h @ w), jnp.ones_like(h[0]))
        return jnp.mean((h - batch["y"]) ** 2)

    return Case("post_norm", loss, params, batch)


def cross_entropy(count: float, name: str, *, masked: bool) -> Case:
    """A head of 256 classes upon 2,048 tokens, the mean divided so that it is one over
    `count` tokens."""
    time, vocab, width = 2048, 256, 16
    key = keys(0)
    params = {"head": normal(key(), width, vocab), "bias": jnp.zeros(vocab)}
    batch = {
        "x": normal(key(), time, width, std=1.0),
        "label": tokens(1, time, vocab)[0],
        "mask": jnp.ones(time, bool),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = batch["x"] @ params["head"] + params["bias"]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        if not masked:
            return each.mean() / (count / time)
        return (each * batch["mask"]).sum() / (batch["mask"].sum() * (count / time))

    powers = (
        {"head": -1, "bias": 0},
        {"x": 1, "label": 0, "mask": 0},
        {"head": 1, "bias": 0},
    )
    return Case(name, loss, params, batch, powers=powers)


def cross_entropy_64k(depth: int = 1, width: int = 16) -> Case:
    """The mean of 65,536 tokens."""
    return cross_entropy(2.0**16, "cross_entropy_64k", masked=False)


def cross_entropy_1m(depth: int = 1, width: int = 16) -> Case:
    """A million tokens, the sum of those that a mask of booleans leaves over their
    number."""
    return cross_entropy(2.0**20, "cross_entropy_1m", masked=True)


def cross_entropy_4m(depth: int = 1, width: int = 16) -> Case:
    """The mean of four million tokens."""
    return cross_entropy(2.0**22, "cross_entropy_4m", masked=False)


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
    return Case("stochastic_chain", loss, params, batch, powers=powers)


def contrastive(depth: int = 8, width: int = 32) -> Case:
    """CLIP-like: two residual towers, normalised, compared at a learnt temperature,
    both ways."""
    key = keys(0)

    def tower(inputs: int) -> dict[str, Any]:
        blocks = [
            (uniform(key(), width, width), jnp.zeros(width)) for _ in range(depth // 2)
        ]
        return {
            "in": uniform(key(), inputs, width),
            "blocks": blocks,
            "out": uniform(key(), width, width),
        }

    params = {
        "image": tower(48),
        "text": tower(VOCAB),
        "logit_scale": jnp.asarray(math.log(1 / 0.07)),
    }
    batch = {"image": images(16, 4).reshape(16, 48), "text": tokens(16, 12, VOCAB)}

    def embedded(p: Any, x: jax.Array) -> jax.Array:
        h = x @ p["in"]
        for w, b in p["blocks"]:
            h = h + jax.nn.relu(
                layer_norm(h, jnp.ones_like(b), jnp.zeros_like(b)) @ w + b
            )
        h = h @ p["out"]
        return h / jnp.linalg.norm(h, axis=-1, keepdims=True)

    def loss(params: Any, batch: Any) -> jax.Array:
        bags = jax.nn.one_hot(
            batch["text"], VOCAB, dtype=params["text"]["in"].dtype
        ).mean(1)
        a, b = embedded(params["image"], batch["image"]), embedded(params["text"], bags)
        logits = jnp.exp(params["logit_scale"]) * a @ b.T
        pairs = jnp.arange(len(logits))
        rows = optax.softmax_cross_entropy_with_integer_labels(logits, pairs).mean()
        return (
            rows
            + optax.softmax_cross_entropy_with_integer_labels(logits.T, pairs).mean()
        ) / 2

    def powers(power: int) -> Any:  # what comes out of the towers is normalised
        zero = jax.tree.map(lambda _: 0, params)
        return zero | {name: zero[name] | {"out": power} for name in ("image", "text")}

    return Case(
        "contrastive",
        loss,
        params,
        batch,
        powers=(powers(1), {"image": 0, "text": 0}, powers(-1)),
        reach=55,
    )


def ctc(depth: int = 8, width: int = 32) -> Case:
    """Speech-like: a residual stack of causal convolutions over 24 frames, and the CTC
    loss of 6 labels."""
    key, frames, classes, taps = keys(0), 24, 16, 3
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
        "label_pad": (
            (jnp.arange(6)[None] >= jnp.array([6, 5, 4, 6])[:, None]).astype(
                jnp.float32
            )
        ),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        h = batch["x"] @ params["in"]
        for w in params["blocks"]:
            padded = jnp.pad(h, ((0, 0), (taps - 1, 0), (0, 0)))
            seen = jnp.concatenate([padded[:, i : i + frames] for i in range(taps)], -1)
            h = h + jax.nn.relu(rms_norm(seen, jnp.ones_like(seen[0, 0])) @ w)
        logits = h @ params["out"] + params["bias"]
        return optax.ctc_loss(
            logits, batch["pad"], batch["label"], batch["label_pad"]
        ).mean()

    return Case("ctc", loss, params, batch)


def field(params: Any, y: jax.Array) -> jax.Array:
    """The velocity of a neural ODE."""
    return jnp.tanh(y @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def field_case(name: str, width: int, solve: Any) -> Case:
    """Points on a circle are to flow to another one; `solve(params, y0)` gives where
    they end."""
    key = keys(0)
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
        return jnp.mean((solve(params, batch["start"]) - batch["end"]) ** 2)

    return Case(name, loss, params, batch)


def ode_rk4(depth: int = 40, width: int = 32) -> Case:
    """`depth` steps of Runge-Kutta by `lax.scan`, differentiated through."""
    dt = 1.0 / depth

    def step(params: Any, y: jax.Array) -> jax.Array:
        k1 = field(params, y)
        k2 = field(params, y + dt / 2 * k1)
        k3 = field(params, y + dt / 2 * k2)
        k4 = field(params, y + dt * k3)
        return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    def solve(params: Any, y: jax.Array) -> jax.Array:
        return lax.scan(lambda y, _: (step(params, y), None), y, None, length=depth)[0]

    return field_case("ode_rk4", width, solve)


def ode_adaptive(depth: int = 1, width: int = 32) -> Case:
    """JAX's adaptive solver, whose gradient is another solve, backward in time."""

    def solve(params: Any, y: jax.Array) -> jax.Array:
        times = jnp.array([0.0, 1.0], y.dtype)
        return odeint(
            lambda y, t, p: field(p, y), y, times, params, rtol=1e-4, atol=1e-5
        )[-1]

    return field_case("ode_adaptive", width, solve)


def flash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, block: int, floor: float, *, fori: bool
) -> jax.Array:
    """Causal attention, `[B, H, T, K]`, over blocks of keys with an online softmax that
    starts at `floor`."""
    time, scale = q.shape[-2], 1 / math.sqrt(q.shape[-1])
    rows = jnp.arange(time)[:, None]

    def step(carry: Any, j: Any) -> Any:
        top, den, out = carry
        keys_, values = (
            lax.dynamic_slice_in_dim(y, j * block, block, axis=2) for y in (k, v)
        )
        s = jnp.einsum("bhqk,bhsk->bhqs", q, keys_) * scale
        seen = rows >= j * block + jnp.arange(block)[None]
        s = jnp.where(seen[None, None], s, floor)
        most = jnp.maximum(top, s.max(-1, keepdims=True))
        p = jnp.exp(s - most)
        old = jnp.exp(top - most)
        return (
            most,
            old * den + p.sum(-1, keepdims=True),
            old * out + jnp.einsum("bhqs,bhsk->bhqk", p, values),
        )

    start = (
        jnp.full_like(q[..., :1], floor),
        jnp.zeros_like(q[..., :1]),
        jnp.zeros_like(q),
    )
    if fori:
        _, den, out = lax.fori_loop(
            0, time // block, lambda j, carry: step(carry, j), start
        )
    else:
        (_, den, out), _ = lax.scan(
            lambda carry, j: (step(carry, j), None), start, jnp.arange(time // block)
        )
    return out / den


def flash(name: str, depth: int, width: int, floor: float, *, fori: bool) -> Case:
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

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embedding"][batch[:, :-1]]
        for p in params["blocks"]:
            qkv = jnp.split(rms_norm(x, p["norm"]) @ p["qkv"], 3, axis=-1)
            q, k, v = (y.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2) for y in qkv)
            mixed = (
                flash_attention(q, k, v, 8, floor, fori=fori)
                .swapaxes(1, 2)
                .reshape(x.shape)
            )
            x = x + mixed @ p["out"]
        logits = rms_norm(x, jnp.ones_like(x[0, 0])) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch[:, 1:]
        ).mean()

    return Case(name, loss, params, tokens(2, 33, VOCAB))


def flash_scan(depth: int = 8, width: int = 16) -> Case:
    """Blocks by `lax.scan`, from minus infinity."""
    return flash("flash_scan", depth, width, -math.inf, fori=False)


def flash_fori(depth: int = 8, width: int = 16) -> Case:
    """Blocks by `lax.fori_loop`, from -1e30."""
    return flash("flash_fori", depth, width, -1e30, fori=True)
