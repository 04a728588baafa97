"""The training step, whole: loss, gradients over micro-batches, clip and optimiser, skip when not finite.

Legend: A micro-batches per step, B sequences per micro-batch, T tokens per sequence.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trainer.state import TrainState


class Hyper(NamedTuple):
    """What changes from step to step without a recompilation: learning rate (FP32) and step number (int32), scalars."""

    lr: jax.Array | np.floating
    step: jax.Array | np.integer


class Tokens(NamedTuple):
    """A step's input. Segment ids tell packed documents apart; None: sequences attend across documents."""

    tokens_AxBxT1: jax.Array
    segments_AxBxT1: jax.Array | None


Metrics = dict[str, jax.Array]
LossFn = Callable[[Any, jax.Array, jax.Array | None, jax.Array | None], jax.Array]
StepFn = Callable[[TrainState, Tokens, Hyper], tuple[TrainState, Metrics]]


def mean_gradient(loss_fn: LossFn, params: Any, batch: Tokens, key: jax.Array) -> tuple[jax.Array, Any]:
    """Loss and gradient of `loss_fn(params, tokens, segments, key)`, averaged over the micro-batches in FP32."""
    micro_batches = batch.tokens_AxBxT1.shape[0]
    value_and_grad = jax.value_and_grad(loss_fn)
    if micro_batches == 1:
        segments = None if batch.segments_AxBxT1 is None else batch.segments_AxBxT1[0]
        return value_and_grad(params, batch.tokens_AxBxT1[0], segments, jax.random.fold_in(key, 0))

    def add(total: Any, index_and_batch: tuple[jax.Array, Tokens]) -> tuple[Any, None]:
        index, micro = index_and_batch
        new = value_and_grad(params, *micro, jax.random.fold_in(key, index))
        return jax.tree.map(lambda t, n: t + n.astype(jnp.float32) / micro_batches, total, new), None

    zero = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), (jnp.zeros(()), params))
    (loss, grads), _ = jax.lax.scan(add, zero, (jnp.arange(micro_batches), batch))
    return loss, grads


def first_true(flags: list[jax.Array]) -> jax.Array:
    """Index (int32) of the first true flag; -1: none."""
    stacked = jnp.stack(flags)
    return jnp.where(jnp.any(stacked), jnp.argmax(stacked), -1).astype(jnp.int32)


def make_train_step(loss_fn: LossFn, optimizer: optax.GradientTransformation) -> StepFn:
    """The pure function `(state, batch, hyper) -> (state, metrics)`.

    Metrics are device scalars: `loss` (nats per token), `grad_norm` (before the clip), `finite`, and `bad_leaf`, the
    index among the flattened parameters of the first gradient that is not finite (-1: none).
    """

    def train_step(state: TrainState, batch: Tokens, hyper: Hyper) -> tuple[TrainState, Metrics]:
        loss, grads = mean_gradient(loss_fn, state.params, batch, jax.random.fold_in(state.key, hyper.step))
        grad_norm = optax.global_norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p + (hyper.lr * u).astype(p.dtype), state.params, updates)

        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        updated = TrainState(params, opt_state, state.key)
        new_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)
        bad_leaf = first_true([~jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)])
        return new_state, {"loss": loss, "grad_norm": grad_norm, "finite": finite, "bad_leaf": bad_leaf}

    return train_step
