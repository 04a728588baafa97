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
    """`(state, batch) -> mean loss` in nats per token, of
    `eval_loss(state, tokens, segments)`.
    """

    def eval_step(state: TrainState, batch: Tokens) -> jax.Array:
        # Micro-batches as in training, so that what trains also fits in validation.
        def loss(micro: Tokens) -> jax.Array:
            return eval_loss(state, micro.tokens_AxBxT1, micro.segments_AxBxT1)

        return jnp.mean(jax.lax.map(loss, batch))

    return eval_step


class Evaluation(NamedTuple):
    """What a validation found.

    Attributes:
      row: the means over all batches, for the dashboard.
      comparable: nats; the mean over the first batches, the same ones in every
          validation of a run.
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
    """Means over equally large batches.

    Perplexity is e^loss; bits per byte is loss / ln 2 / bytes_per_token, which compares
    runs with different tokenizers.

    Args:
      first: how many batches are those of every validation.
      should_stop: asked before each batch; once it says so, the result is None.
    """
    losses: list[float] = []
    ahead: list[jax.Array] = []  # what the device is at while the host asks
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
    """What the compressor xz makes of a text, as a figure to hold a model's own
    against; NaN of an empty one.

    It has seen nothing before; a short text it has little to learn from.
    """
    raw = text.encode()
    return 8 * len(lzma.compress(raw)) / len(raw) if raw else math.nan
