"""A model of the zoo, and the small things that their authors all write: initial
weights, batches, losses.

The models are ordinary JAX: nothing in them knows of scales. B batch, T time, D width,
V vocabulary, F hidden channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

DotGeneral = Callable[..., jax.Array]
VOCAB = 64


class Case(NamedTuple):
    """One model with its weights and a batch.

    Attributes:
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

    loss: Callable[[Any, Any], Any]
    params: Any
    batch: Any
    has_aux: bool = False
    powers: tuple[Any, Any, Any] | None = None
    reach: int = 100


def keys(seed: int) -> Callable[[], jax.Array]:
    """Return a function that gives another key at each call."""
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


def tokens(batch: int, time: int, vocab: int = VOCAB) -> jax.Array:
    """Token ids `[B, T]`, int32, the small ones more frequent, as words are."""
    weights = -1.0 * jnp.log(jnp.arange(1, vocab + 1))
    ids = jax.random.categorical(jax.random.key(1), weights, shape=(batch, time))
    return ids.astype(jnp.int32)


def images(batch: int, size: int, channels: int = 3) -> jax.Array:
    """Images `[B, size, size, channels]` of smooth colours and some noise, normalised
    as data loaders do."""
    k1, k2, k3 = jax.random.split(jax.random.key(1), 3)
    place = jnp.arange(size) / size
    wave = jax.random.uniform(k1, (batch, 1, 1, channels), minval=1.0, maxval=6.0)
    phase = jax.random.uniform(k2, (batch, 1, 1, channels), maxval=6.0)
    x, y = place[None, :, None, None], place[None, None, :, None]
    smooth = jnp.sin(wave * x + phase) * jnp.cos(wave * y)
    return smooth + 0.3 * jax.random.normal(k3, (batch, size, size, channels))


def labels(batch: int, classes: int) -> jax.Array:
    """Class ids `[B]`, int32."""
    return jax.random.randint(jax.random.key(2), (batch,), 0, classes)


def matmul(dot_general: DotGeneral, x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w`, by the given `dot_general`: `[..., D]` and `[D, F]` give `[..., F]`."""
    return dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    """Over the last axis."""
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * gain + bias


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean over all labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def next_token(forward: Callable, params: Any, batch: int, time: int = 16) -> Case:
    """Return the case of a language model: `forward(params, ids)` gives the logits."""

    def loss(params: Any, ids: Any) -> jax.Array:
        return cross_entropy(forward(params, ids[:, :-1]), ids[:, 1:])

    return Case(loss, params, tokens(batch, time + 1))
