"""Log-likelihoods of the last tokens of sequences, in a chosen precision.

Legend: B sequences of a batch, T tokens of each, C of them scored, D model, V
vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core import asarray
from trainer.model import Model
from trainer.models.model_functions import Params
from trainer.tasks.batching import Sized, make_batches, rows_at_once
from trainer.workload import TrainTask

AT_ONCE = 2048  # rows of logits: with 50,257 tokens 0.4 GiB


class Question(NamedTuple):
    """A context and a continuation to score, as token ids, at least one of each."""

    context: Sequence[int]
    continuation: Sequence[int]


class Answer(NamedTuple):
    """A continuation's log-likelihood in nats, and whether greedy decoding gives it."""

    logprob: float
    greedy: bool


def cut(question: Question, context: int) -> tuple[list[int], list[int]]:
    """Return inputs and targets, the inputs cut to the last `context` tokens.

    Raises:
      ValueError: no context, or a continuation that is empty or does not fit.
    """
    ids, targets = list(question.context), list(question.continuation)
    if not ids or not 0 < len(targets) <= context:
        raise ValueError(
            f"{len(ids)} tokens before, {len(targets)} after: expected 1 or more, and"
            f" 1 to {context}"
        )
    # The last target is no input.
    return [*ids, *targets][-(context + 1) :][:-1], targets


def make_score(model: Model) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return a function that scores targets.

    It takes params and scaling of a `TrainState`, tokens [B, T], first [B] and targets
    [B, C]. It returns log-likelihoods and whether each target is the likeliest token,
    both [B, C]. Target c of a row follows the token at `first + c`. Beyond a row's end
    the results are undefined. Matmuls are in the precision of the validation.
    """
    method = model.policy.method

    def logprobs(
        params: Params,
        tokens_BxT: jax.Array,
        first_B: jax.Array,
        targets_BxC: jax.Array,
        histories: Params | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        bound = model.training.bind(params, histories)
        B, C = targets_BxC.shape
        # A row with fewer targets than C may have positions beyond T; `_read` drops
        # their results.
        at_BxC = jnp.minimum(
            first_B[:, None] + jnp.arange(C)[None], tokens_BxT.shape[1] - 1
        )
        # Only what is scored goes on to the head: logits of all T positions would take
        # V/D times the memory of their hidden states.
        h_BxCxD = jnp.take_along_axis(
            bound.hidden(tokens_BxT), at_BxC[:, :, None], axis=1
        )
        # `lax.map` takes groups of one size, so it divides B.
        group_size = max(
            n for n in range(1, B + 1) if B % n == 0 and (n == 1 or n * C <= AT_ONCE)
        )

        def score_group(
            group: tuple[jax.Array, jax.Array],
        ) -> tuple[jax.Array, jax.Array]:
            h_NxD, targets_N = group
            logits_NxV = bound.logits(h_NxD)
            chosen_N = jnp.take_along_axis(logits_NxV, targets_N[:, None], axis=1)[:, 0]
            largest_N = jnp.max(logits_NxV, axis=1)
            total_N = jnp.sum(jnp.exp(logits_NxV - largest_N[:, None]), axis=1)
            return (
                chosen_N - largest_N - jnp.log(total_N),
                jnp.argmax(logits_NxV, axis=1) == targets_N,
            )

        groups = (
            h_BxCxD.reshape(-1, group_size * C, h_BxCxD.shape[-1]),
            targets_BxC.reshape(-1, group_size * C),
        )
        logprobs, likeliest = jax.lax.map(score_group, groups)
        return logprobs.reshape(B, C), likeliest.reshape(B, C)

    transformed = method.transform(logprobs, model.policy)

    def score(
        params: Params, scaling: Any, *batch: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        logprobs_BxC, likeliest = asarray(
            transformed(params, *batch, **method.loss_arguments(scaling))
        )
        return logprobs_BxC.astype(jnp.float32), likeliest

    return score


class Scorer:
    """`scorer(params, scaling, questions)` returns the answers, in order.

    Args:
      task: the model in its precision; one device computes.
      batch: B at most.
    """

    def __init__(self, task: TrainTask, batch: int) -> None:
        self.batch, self.context = batch, task.model.spec.context
        self._score = task.jit(make_score(task.model))

    def __call__(
        self, params: Params, scaling: Any, questions: Sequence[Question]
    ) -> list[Answer]:
        """Score all questions; ValueError as in `cut`.

        Their order does not change the numbers.
        """
        parts = [cut(question, self.context) for question in questions]
        sizes = [Sized(len(inputs), len(targets)) for inputs, targets in parts]
        answers: dict[int, Answer] = {}
        batch_size = rows_at_once(self.batch, len(parts))
        # The device computes one batch while the host reads the previous one.
        pending: list[tuple[tuple[int, ...], Any]] = []
        for rows, length, scored in make_batches(sizes, batch_size, self.context):
            # Padding comes after a row's tokens, which attend to nothing behind them.
            tokens_BxT = np.zeros((batch_size, length), np.int32)
            first_B = np.zeros(batch_size, np.int32)
            targets_BxC = np.zeros((batch_size, scored), np.int32)
            for place, row in enumerate(rows):
                inputs, targets = parts[row]
                tokens_BxT[place, : len(inputs)] = inputs
                # The first target follows the last token of the context.
                first_B[place] = len(inputs) - len(targets)
                targets_BxC[place, : len(targets)] = targets
            pending.append(
                (rows, self._score(params, scaling, tokens_BxT, first_B, targets_BxC))
            )
            if len(pending) > 1:
                answers |= self._read(sizes, *pending.pop(0))
        for batch in pending:
            answers |= self._read(sizes, *batch)
        return [answers[row] for row in range(len(parts))]

    def _read(
        self, sizes: Sequence[Sized], rows: tuple[int, ...], results: Any
    ) -> dict[int, Answer]:
        """Return the answers of a batch by the index of their question."""
        logprobs, likeliest = (np.asarray(x) for x in results)
        answers = {}
        for i, row in enumerate(rows):
            end = sizes[row].scored
            # Up to a context of terms, of which a sum in FP32 loses the last digits.
            logprob = float(logprobs[i, :end].sum(dtype=np.float64))
            answers[row] = Answer(logprob, bool(likeliest[i, :end].all()))
        return answers
