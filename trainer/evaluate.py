"""Validation on a fixed set of batches: loss, perplexity, bits per byte."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.step import LossFn, Tokens

EvalFn = Callable[[Any, Tokens], jax.Array]


def make_eval_step(loss_fn: LossFn) -> EvalFn:
    """`(params, batch) -> mean loss` in nats per token, without dropout."""

    def eval_step(params: Any, batch: Tokens) -> jax.Array:
        # Micro-batches as in training, so that what trains also fits in validation.
        def loss(micro: Tokens) -> jax.Array:
            return loss_fn(params, micro.tokens_AxBxT1, micro.segments_AxBxT1, None)

        return jnp.mean(jax.lax.map(loss, batch))

    return eval_step


class Evaluation(NamedTuple):
    """What a validation found.

    Attributes:
      row: the means over all batches, for the dashboard.
      comparable: nats; the mean over the first batches, the same ones in every validation of a run.
    """

    row: dict[str, float]
    comparable: float


def evaluate(
    eval_step: EvalFn, params: Any, batches: Iterable[Tokens], *, first: int, bytes_per_token: float
) -> Evaluation:
    """Means over equally large batches.

    Perplexity is e^loss; bits per byte is loss / ln 2 / bytes_per_token, which compares runs with different tokenizers.
    `first`: how many batches are those of every validation.
    """
    losses = [float(x) for x in jax.device_get([eval_step(params, batch) for batch in batches])]
    loss = math.fsum(losses) / len(losses)
    row = {
        "val/loss": loss,
        "val/perplexity": math.exp(min(loss, 700.0)),
        "val/bits_per_byte": loss / math.log(2) / bytes_per_token,
    }
    return Evaluation(row, math.fsum(losses[:first]) / len(losses[:first]))
