"""Transformers and image models as users of Flax Linen write them: default
initialisers."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax

from zoo.case import (
    VOCAB,
    Case,
    DotGeneral,
    cross_entropy,
    images,
    labels,
    tokens,
)

TIME = 16


class EncoderBlock(nn.Module):
    """Self-attention and an MLP; the norm before each (`pre`) or after each residual
    sum."""

    pre: bool
    dot_general: DotGeneral
    heads: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        d, dot = x.shape[-1], self.dot_general

        def attend(y: jax.Array) -> jax.Array:
            return nn.MultiHeadDotProductAttention(
                self.heads, qkv_dot_general=dot, out_dot_general=dot
            )(y, y)

        def mlp(y: jax.Array) -> jax.Array:
            return nn.Dense(d, dot_general=dot)(
                nn.gelu(nn.Dense(4 * d, dot_general=dot)(y))
            )

        if self.pre:
            x = x + attend(nn.LayerNorm()(x))
            return x + mlp(nn.LayerNorm()(x))
        x = nn.LayerNorm()(x + attend(x))
        return nn.LayerNorm()(x + mlp(x))


class Encoder(nn.Module):
    """BERT-like: logits of the token at every position."""

    depth: int
    width: int
    pre: bool
    dot_general: DotGeneral

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        positions = self.param(
            "positions", nn.initializers.normal(0.02), (TIME, self.width)
        )
        x = nn.Embed(VOCAB, self.width)(ids) + positions[None]
        x = x if self.pre else nn.LayerNorm()(x)
        for _ in range(self.depth):
            x = EncoderBlock(self.pre, self.dot_general)(x)
        return nn.Dense(VOCAB)(nn.LayerNorm()(x) if self.pre else x)


def encoder(
    depth: int = 8,
    width: int = 32,
    dot_general: DotGeneral = lax.dot_general,
    *,
    pre: bool = True,
    seed: int = 0,
) -> Case:
    """Masked tokens are to be found: the sum over them divided by their number. The
    norms stand before the branches (`pre`), or, as in the first Transformer, after the
    sums."""
    ids = tokens(4, TIME)
    mask = (jax.random.uniform(jax.random.key(7), ids.shape) < 0.25).astype(jnp.float32)
    model = Encoder(depth, width, pre, dot_general)
    params = model.init(jax.random.key(seed), ids)["params"]

    def loss(params: Any, batch: Any) -> jax.Array:
        seen = jnp.where(batch["mask"] > 0, 0, batch["ids"])
        logits = model.apply({"params": params}, seen)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"])
        return (each * batch["mask"]).sum() / batch["mask"].sum()

    return Case(loss, params, {"ids": ids, "mask": mask})


class ViT(nn.Module):
    """Patches of 4x4 by a convolution, learnt positions, pre-LN blocks, the mean of the
    tokens."""

    depth: int
    width: int
    dot_general: DotGeneral

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (4, 4), (4, 4), padding="VALID")(x)
        x = x.reshape(x.shape[0], -1, self.width)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        for _ in range(self.depth):
            x = EncoderBlock(True, self.dot_general)(x)
        return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


def vit(
    depth: int = 8,
    width: int = 32,
    dot_general: DotGeneral = lax.dot_general,
    seed: int = 0,
) -> Case:
    """Classes of images, labels smoothed."""
    model = ViT(depth, width, dot_general)
    batch = {"image": images(4, 16), "label": labels(4, 10)}
    params = model.init(jax.random.key(seed), batch["image"])["params"]

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": params}, batch["image"])
        target = optax.smooth_labels(jax.nn.one_hot(batch["label"], 10), 0.1)
        return optax.softmax_cross_entropy(logits, target).mean()

    return Case(loss, params, batch)


def batch_norm(x: jax.Array) -> jax.Array:
    """Normalize by the statistics of the batch, inside a module."""
    return nn.BatchNorm(use_running_average=False, momentum=0.9)(x)


class ResBlock(nn.Module):
    """Two convolutions with BatchNorm, and a projection where the size changes."""

    channels: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        s = (self.stride, self.stride)
        y = nn.Conv(self.channels, (3, 3), s, use_bias=False)(x)
        y = nn.relu(batch_norm(y))
        y = batch_norm(nn.Conv(self.channels, (3, 3), use_bias=False)(y))
        if x.shape != y.shape:
            x = batch_norm(nn.Conv(self.channels, (1, 1), s, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """As for CIFAR: three stages, whose blocks have two layers each."""

    depth: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (3, 3), use_bias=False)(x)
        x = nn.relu(batch_norm(x))
        blocks = max(3, (self.depth - 2) // 2)
        for i in range(blocks):
            stage = 3 * i // blocks
            first = i > 0 and 3 * (i - 1) // blocks < stage
            x = ResBlock(self.width * 2**stage, 2 if first else 1)(x)
        return nn.Dense(10)(x.mean((1, 2)))


def resnet(depth: int = 14, width: int = 8) -> Case:
    """The running statistics of its BatchNorms come back as aux."""
    model = ResNet(depth, width)
    batch = {"image": images(8, 8), "label": labels(8, 10)}
    variables = model.init(jax.random.key(0), batch["image"])
    batch["stats"] = variables["batch_stats"]

    def loss(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": batch["stats"]}
        logits, updated = model.apply(
            variables, batch["image"], mutable=["batch_stats"]
        )
        return cross_entropy(logits, batch["label"]), updated

    return Case(loss, variables["params"], batch, has_aux=True)
