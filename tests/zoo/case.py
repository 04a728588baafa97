"""What a model of the zoo is, and the small things that their authors all write:
initial weights, batches, losses.

The models are ordinary JAX: nothing in them knows of scales. B batch, T time, D width,
V vocabulary, F hidden channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

DotGeneral = Callable[..., jax.Array]


class Case(NamedTuple):
    """One model with its weights and a batch.

    Attributes:
        name: of the model.
        loss: of `(params, batch)`, an FP32 scalar; with `has_aux` a pair of it and
            other results.
        params: a pytree of float32 arrays.
        batch: a pytree of arrays: int32 tokens, float32 images.
        has_aux: whether `loss` gives more than the scalar.
        powers: trees like `params`, `batch` and the gradient: times any factor to these
            powers, the former give the latter. None: no such are known.
        reach: the exponent of the largest power of two that such a factor's power may
            be: plain FP32 can do that.
    """

    name: str
    loss: Callable[[Any, Any], Any]
    params: Any
    batch: Any
    has_aux: bool = False
    powers: tuple[Any, Any, Any] | None = None
    reach: int = 100


def keys(seed: int) -> Callable[[], jax.Array]:
    """A function that gives another key at each call."""
    rest = iter(jax.random.split(jax.random.key(seed), 512))
    return lambda: next(rest)


def normal(key: jax.Array, *shape: int, std: float | None = None) -> jax.Array:
    """Gaussian weights; 1/sqrt(fan_in), where the last axis but one is contracted, if
    no deviation is given."""
    std = 1 / math.sqrt(shape[-2]) if std is None else std
    return std * jax.random.normal(key, shape)


def uniform(key: jax.Array, *shape: int) -> jax.Array:
    """Glorot-uniform weights."""
    limit = math.sqrt(6 / (shape[-1] + shape[-2]))
    return jax.random.uniform(key, shape, minval=-limit, maxval=limit)


def tokens(batch: int, time: int, vocab: int, seed: int = 1) -> jax.Array:
    """Token ids `[B, T]`, int32, the small ones more frequent, as words are."""
    weights = -1.0 * jnp.log(jnp.arange(1, vocab + 1))
    return jax.random.categorical(
        jax.random.key(seed), weights, shape=(batch, time)
    ).astype(jnp.int32)


def images(batch: int, size: int, channels: int = 3, seed: int = 1) -> jax.Array:
    """Images `[B, size, size, channels]` of smooth colours and some noise, normalised
    as data loaders do."""
    k1, k2, k3 = jax.random.split(jax.random.key(seed), 3)
    place = jnp.arange(size) / size
    wave = jax.random.uniform(k1, (batch, 1, 1, channels), minval=1.0, maxval=6.0)
    phase = jax.random.uniform(k2, (batch, 1, 1, channels), maxval=6.0)
    smooth = jnp.sin(wave * place[None, :, None, None] + phase) * jnp.cos(
        wave * place[None, None, :, None]
    )
    return smooth + 0.3 * jax.random.normal(k3, (batch, size, size, channels))


def labels(batch: int, classes: int, seed: int = 2) -> jax.Array:
    """Class ids `[B]`, int32."""
    return jax.random.randint(jax.random.key(seed), (batch,), 0, classes)


def matmul(dot_general: DotGeneral, x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w`, by the given `dot_general`: `[..., D]` and `[D, F]` give `[..., F]`."""
    return dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    """Over the last axis."""
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * gain + bias
