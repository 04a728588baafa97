"""Transformers and image models as users of Flax write them: Linen and NNX, default
initialisers."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from zoo.case import Case, DotGeneral, images, labels, tokens

VOCAB, TIME = 64, 16


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
    name: str, depth: int, width: int, pre: bool, dot_general: DotGeneral, seed: int
) -> Case:
    """Masked tokens are to be found: the sum over them divided by their number."""
    ids = tokens(4, TIME, VOCAB)
    mask = (jax.random.uniform(jax.random.key(7), ids.shape) < 0.25).astype(jnp.float32)
    model = Encoder(depth, width, pre, dot_general)
    params = model.init(jax.random.key(seed), ids)["params"]

    def loss(params: Any, batch: Any) -> jax.Array:
        seen = jnp.where(batch["mask"] > 0, 0, batch["ids"])
        logits = model.apply({"params": params}, seen)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"])
        return (each * batch["mask"]).sum() / batch["mask"].sum()

    return Case(name, loss, params, {"ids": ids, "mask": mask})


def encoder_pre_ln(
    depth: int = 8,
    width: int = 32,
    dot_general: DotGeneral = lax.dot_general,
    seed: int = 0,
) -> Case:
    """Norms before the branches."""
    return encoder("encoder_pre_ln", depth, width, True, dot_general, seed)


def encoder_post_ln(
    depth: int = 8,
    width: int = 32,
    dot_general: DotGeneral = lax.dot_general,
    seed: int = 0,
) -> Case:
    """Norms after the sums, as in the first Transformer."""
    return encoder("encoder_post_ln", depth, width, False, dot_general, seed)


class DecoderBlock(nnx.Module):
    """GPT-like, of NNX's own layers."""

    def __init__(self, width: int, dot_general: DotGeneral, rngs: nnx.Rngs) -> None:
        self.norm_1, self.norm_2 = (
            nnx.LayerNorm(width, rngs=rngs),
            nnx.LayerNorm(width, rngs=rngs),
        )
        self.attention = nnx.MultiHeadAttention(
            4,
            width,
            decode=False,
            qkv_dot_general=dot_general,
            out_dot_general=dot_general,
            rngs=rngs,
        )
        self.up = nnx.Linear(width, 4 * width, dot_general=dot_general, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dot_general=dot_general, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class Decoder(nnx.Module):
    """Logits of the next token; the head is the embedding."""

    def __init__(
        self, depth: int, width: int, dot_general: DotGeneral, rngs: nnx.Rngs
    ) -> None:
        self.embed, self.positions = (
            nnx.Embed(VOCAB, width, rngs=rngs),
            nnx.Embed(TIME, width, rngs=rngs),
        )
        self.blocks = nnx.List(
            [DecoderBlock(width, dot_general, rngs) for _ in range(depth)]
        )
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids) + self.positions(jnp.arange(ids.shape[1]))[None]
        mask = nnx.make_causal_mask(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


def nnx_decoder(
    depth: int = 8, width: int = 32, dot_general: DotGeneral = lax.dot_general
) -> Case:
    """Pre-LN, by `nnx.split` and `nnx.merge`."""
    graph, params = nnx.split(
        Decoder(depth, width, dot_general, nnx.Rngs(0)), nnx.Param
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = nnx.merge(graph, params)(batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch[:, 1:]
        ).mean()

    return Case("nnx_decoder", loss, params, tokens(4, TIME + 1, VOCAB))


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

    return Case("vit", loss, params, batch)


class ResBlock(nn.Module):
    """Two convolutions with BatchNorm, and a projection where the size changes."""

    channels: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        s = (self.stride, self.stride)
        y = nn.Conv(self.channels, (3, 3), s, use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(y))
        y = nn.Conv(self.channels, (3, 3), use_bias=False)(y)
        y = nn.BatchNorm(
            use_running_average=False, momentum=0.9, scale_init=nn.initializers.ones
        )(y)
        if x.shape != y.shape:
            x = nn.Conv(self.channels, (1, 1), s, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """As for CIFAR: three stages, whose blocks have two layers each."""

    depth: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))
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
        return (
            optax.softmax_cross_entropy_with_integer_labels(
                logits, batch["label"]
            ).mean(),
            updated,
        )

    return Case("resnet", loss, variables["params"], batch, has_aux=True)
