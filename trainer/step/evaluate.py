"""Validation on a fixed set of batches: loss, perplexity, bits per byte."""

import lzma
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainer.step.state import TrainState
from trainer.step.step import Tokens

EvalFn = Callable[[TrainState, Tokens], jax.Array]


def make_eval_step(
    eval_loss: Callable[[TrainState, jax.Array, jax.Array | None], jax.Array],
) -> EvalFn:
    """Return `(state, batch) -> mean loss` in nats per token.

    `eval_loss` takes the state, tokens [B, T+1] and segments.
    """

    def eval_step(state: TrainState, batch: Tokens) -> jax.Array:
        # Micro-batches as in training, so that what trains also fits in validation.
        def loss(micro: Tokens) -> jax.Array:
            return eval_loss(state, micro.tokens_AxBxT1, micro.segments_AxBxT1)

        return jnp.mean(jax.lax.map(loss, batch))

    return eval_step


class Evaluation(NamedTuple):
    """The result of a validation.

    Attributes:
      row: means over all batches, for the dashboard.
      comparable: the mean loss in nats over the first batches, which every validation
        of a run has in common.
    """

    row: dict[str, float]
    comparable: float


def evaluate(
    eval_step: EvalFn,
    state: TrainState,
    batches: Iterable[Tokens],
    *,
    first: int,
    bytes_per_token: float,
    should_stop: Callable[[], bool],
) -> Evaluation | None:
    """Return means over equally large batches; None if `should_stop()` became true.

    Perplexity is e^loss. Bits per byte are loss / ln 2 / bytes_per_token, which
    compares runs with different tokenizers.

    Args:
      eval_step: returns the mean loss of a batch.
      state: of the training.
      batches: placed on the devices.
      first: number of batches that every validation has.
      bytes_per_token: of the validation text.
      should_stop: called before each batch.
    """
    losses: list[float] = []
    # The device computes the next batch while the host reads the loss of one.
    ahead: list[jax.Array] = []
    for batch in batches:
        if should_stop():
            return None
        ahead.append(eval_step(state, batch))
        if len(ahead) > 1:
            losses.append(float(ahead.pop(0)))
    losses += map(float, ahead)
    loss = math.fsum(losses) / len(losses)
    row = {
        "val/loss": loss,
        "val/perplexity": math.exp(min(loss, 700.0)),
        "val/bits_per_byte": loss / math.log(2) / bytes_per_token,
    }
    return Evaluation(row, math.fsum(losses[:first]) / len(losses[:first]))


def xz_bits_per_byte(text: str) -> float:
    """Return the bits per byte of xz on a text, to compare a model with; NaN for an
    empty text.

    xz starts without knowledge, so a short text compresses badly.
    """
    raw = text.encode()
    return 8 * len(lzma.compress(raw)) / len(raw) if raw else math.nan
