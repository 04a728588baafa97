"""U-Nets: one that segments images, one that finds the noise in them."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from zoo.case import Case, images


class UNet(nn.Module):
    """Two convolutions a level, max-pooling down, transposed convolutions up, skips by
    concatenation."""

    levels: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        skips = []
        for level in range(self.levels):
            x = self.convolved(x, self.width * 2**level)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = self.convolved(x, self.width * 2**self.levels)
        for level in reversed(range(self.levels)):
            x = nn.ConvTranspose(self.width * 2**level, (2, 2), (2, 2))(x)
            x = self.convolved(
                jnp.concatenate([skips.pop(), x], -1), self.width * 2**level
            )
        return nn.Conv(1, (1, 1))(x)

    def convolved(self, x: jax.Array, channels: int) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.Conv(channels, (3, 3))(x))
        return x


def unet(depth: int = 9, width: int = 8) -> Case:
    """Segmentation: binary cross-entropy of each pixel plus the Dice loss. `depth`
    counts pairs of convolutions."""
    model = UNet(max(1, min(3, depth // 3)), width)
    x = images(4, 16)
    batch = {"image": x, "mask": (x.mean(-1, keepdims=True) > 0.2).astype(jnp.float32)}
    params = model.init(jax.random.key(0), x)["params"]

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": params}, batch["image"])
        crossed = optax.sigmoid_binary_cross_entropy(logits, batch["mask"]).mean()
        p = jax.nn.sigmoid(jnp.asarray(logits))
        dice = 1 - (2 * (p * batch["mask"]).sum() + 1) / (
            p.sum() + batch["mask"].sum() + 1
        )
        return crossed + dice

    return Case("unet", loss, params, batch)


def time_embedding(t: jax.Array, width: int) -> jax.Array:
    """Sines and cosines of times `[B]`: `[B, width]`."""
    frequency = jnp.exp(-math.log(10_000.0) * jnp.arange(width // 2) / (width // 2))
    angle = t.astype(jnp.float32)[:, None] * frequency[None]
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)


class TimedBlock(nn.Module):
    """A residual block with GroupNorm, to which the time adds; its last convolution
    starts at zero."""

    channels: int

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        y = nn.Conv(self.channels, (3, 3))(nn.silu(nn.GroupNorm(4)(x)))
        y = y + nn.Dense(self.channels)(nn.silu(t))[:, None, None]
        y = nn.Conv(self.channels, (3, 3))(nn.silu(nn.GroupNorm(4)(y)))
        return (x if x.shape == y.shape else nn.Conv(self.channels, (1, 1))(x)) + y


class Denoiser(nn.Module):
    """A U-Net of timed blocks, with attention in the middle."""

    blocks: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        t = time_embedding(t, self.width).astype(x.dtype)
        t = nn.Dense(4 * self.width)(nn.silu(nn.Dense(4 * self.width)(t)))
        x = nn.Conv(self.width, (3, 3))(x)
        skips = [x]
        for i in range(self.blocks):
            x = TimedBlock(self.width * (1 + i % 2))(x, t)
            skips.append(x)
        x = nn.Conv(2 * self.width, (3, 3), (2, 2))(x)
        flat = nn.GroupNorm(4)(x).reshape(x.shape[0], -1, x.shape[-1])
        x = x + nn.MultiHeadDotProductAttention(2)(flat, flat).reshape(x.shape)
        x = jax.image.resize(
            x, (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), "nearest"
        )
        for i in range(self.blocks):
            x = TimedBlock(self.width * (1 + i % 2))(
                jnp.concatenate([x, skips.pop()], -1), t
            )
        return nn.Conv(3, (3, 3))(nn.silu(nn.GroupNorm(4)(x)))


def diffusion(depth: int = 8, width: int = 8) -> Case:
    """The mean squared error of the noise found in noisy images, at times of the cosine
    schedule."""
    model = Denoiser(max(1, depth // 2), width)
    x = images(4, 8)
    times = jax.random.randint(jax.random.key(3), (4,), 0, 1000)
    batch = {
        "image": x,
        "noise": jax.random.normal(jax.random.key(4), x.shape),
        "time": times,
    }
    params = model.init(jax.random.key(0), x, times)["params"]

    def loss(params: Any, batch: Any) -> jax.Array:
        share = jnp.cos((batch["time"] / 1000 + 0.008) / 1.008 * jnp.pi / 2) ** 2
        share = share[:, None, None, None].astype(batch["image"].dtype)
        noisy = jnp.sqrt(share) * batch["image"] + jnp.sqrt(1 - share) * batch["noise"]
        actual = model.apply({"params": params}, noisy, batch["time"])
        return jnp.mean((actual - batch["noise"]) ** 2)

    return Case("diffusion", loss, params, batch)
