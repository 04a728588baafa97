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
MAX_EXPONENT = 700.0  # math.exp raises an error above 709


def make_eval_step(
    eval_loss: Callable[[TrainState, jax.Array, jax.Array | None], jax.Array],
) -> EvalFn:
    """Return `(state, batch) -> mean loss` in nats per token.

    `eval_loss` takes the state, tokens [B, T+1] and segments.
    """

    def eval_step(state: TrainState, batch: Tokens) -> jax.Array:
        # One micro-batch at a time, so that validation needs no more memory than
        # training.
        def loss(micro: Tokens) -> jax.Array:
            return eval_loss(state, micro.tokens_AxBxT1, micro.segments_AxBxT1)

        # The mean of means is the mean over all tokens, since micro-batches are equally
        # large.
        return jnp.mean(jax.lax.map(loss, batch))

    return eval_step


class Evaluation(NamedTuple):
    """The result of a validation.

    Attributes:
      row: means over all batches, for the dashboard.
      common_loss: the mean loss in nats over the first `common_batches` batches, which
        every validation of a run reads.
    """

    row: dict[str, float]
    common_loss: float


def evaluate(
    eval_step: EvalFn,
    state: TrainState,
    batches: Iterable[Tokens],
    *,
    common_batches: int,
    bytes_per_token: float,
    should_stop: Callable[[], bool],
) -> Evaluation | None:
    """Return means over equally large batches; None if `should_stop()` became true.

    Perplexity is e^loss. Bits per byte are loss / ln 2 / bytes_per_token, which
    compares runs with different tokenizers.

    Args:
      eval_step: returns the mean loss of a batch.
      state: the training state.
      batches: batches on the devices.
      common_batches: number of batches that every validation reads.
      bytes_per_token: bytes per token of the validation text; NaN: unknown, so the row
        has no bits per byte.
      should_stop: called before each batch.
    """
    losses: list[float] = []
    # The device computes a batch while the host reads the loss of the previous one.
    pending: list[jax.Array] = []
    for batch in batches:
        if should_stop():
            return None
        pending.append(eval_step(state, batch))
        if len(pending) > 1:
            losses.append(float(pending.pop(0)))
    losses += map(float, pending)
    # fsum rounds once, so the mean does not depend on the order of the batches.
    loss = math.fsum(losses) / len(losses)
    row = {
        "val/loss": loss,
        "val/perplexity": math.exp(min(loss, MAX_EXPONENT)),
    }
    if not math.isnan(bytes_per_token):
        row["val/bits_per_byte"] = loss / math.log(2) / bytes_per_token
    # The last validation may read more batches than the others. Losses of checkpoints
    # are compared on those that all of them read.
    common_losses = losses[:common_batches]
    return Evaluation(row, math.fsum(common_losses) / len(common_losses))


def xz_bits_per_byte(text: str) -> float:
    """Return the bits per byte of a text compressed by xz, a baseline for a model.

    An empty text gives NaN. xz has no prior knowledge, so a short text compresses
    badly.
    """
    raw = text.encode()
    if raw:
        return 8 * len(lzma.compress(raw)) / len(raw)
    return math.nan
