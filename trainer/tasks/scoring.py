"""Log-likelihoods of the last tokens of sequences, in the precision of a run or any
other.

Legend: B sequences of a batch, T tokens of each, C of them scored, D model, V
vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core import asarray
from trainer.models.functional import Params
from trainer.tasks.batching import Sized, batches_of
from trainer.workload import Model, TrainTask

AT_ONCE = 2048  # rows of logits: with 50,257 tokens 0.4 GiB


class Question(NamedTuple):
    """Token ids, at least one of each: what stands before, and what may follow, whose
    likelihood is asked for.
    """

    before: Sequence[int]
    after: Sequence[int]


class Answer(NamedTuple):
    """The log-likelihood of what follows, in nats, and whether each of its tokens is
    the likeliest one.
    """

    logprob: float
    greedy: bool


def cut(question: Question, context: int) -> tuple[list[int], list[int]]:
    """Inputs and targets: the last `context` tokens before the last one, and what is to
    follow the last of these.

    ValueError where there is nothing to score, or more than fits.
    """
    before, after = list(question.before), list(question.after)
    if not before or not 0 < len(after) <= context:
        raise ValueError(
            f"{len(before)} tokens before, {len(after)} after: expected 1 or more, and"
            f" 1 to {context}"
        )
    return [*before, *after][-(context + 1) :][:-1], after


def make_score(model: Model) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`(params, scaling, tokens [B, T], first [B], targets [B, C]) -> (log-likelihoods,
    is likeliest) [B, C]`.

    Target c of a row follows its token `first + c`; beyond the row's end both results
    mean nothing. Parameters and `scaling` are those of a `TrainState`: the products are
    those of the validation.
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
        at_BxC = jnp.minimum(
            first_B[:, None] + jnp.arange(C)[None], tokens_BxT.shape[1] - 1
        )
        h_BxCxD = jnp.take_along_axis(
            bound.hidden(tokens_BxT), at_BxC[:, :, None], axis=1
        )
        together = max(
            n for n in range(1, B + 1) if B % n == 0 and (n == 1 or n * C <= AT_ONCE)
        )

        def of(some: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            h_NxD, targets_N = some
            logits_NxV = bound.logits(h_NxD)
            chosen_N = jnp.take_along_axis(logits_NxV, targets_N[:, None], axis=1)[:, 0]
            largest_N = jnp.max(logits_NxV, axis=1)
            total_N = jnp.sum(jnp.exp(logits_NxV - largest_N[:, None]), axis=1)
            return (
                chosen_N - largest_N - jnp.log(total_N),
                jnp.argmax(logits_NxV, axis=1) == targets_N,
            )

        groups = (
            h_BxCxD.reshape(-1, together * C, h_BxCxD.shape[-1]),
            targets_BxC.reshape(-1, together * C),
        )
        found, likeliest = jax.lax.map(of, groups)
        return found.reshape(B, C), likeliest.reshape(B, C)

    through = method.through(logprobs, model.policy)

    def score(
        params: Params, scaling: Any, *batch: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        found, likeliest = asarray(through(params, *batch, **method.arguments(scaling)))
        return found.astype(jnp.float32), likeliest

    return score


class Scorer:
    """`scorer(params, scaling, questions)`: the answers, in the order of the questions.

    Args:
      task: whose model it is, in its precision; one device computes.
      batch: B.
    """

    def __init__(self, task: TrainTask, batch: int) -> None:
        self.batch, self.context = batch, task.model.spec.context
        self._score = task.jit(make_score(task.model))

    def __call__(
        self, params: Params, scaling: Any, questions: Sequence[Question]
    ) -> list[Answer]:
        """Answers of all questions, whose order does not matter for the numbers.
        ValueError as of `cut`.
        """
        parts = [cut(question, self.context) for question in questions]
        sizes = [Sized(len(inputs), len(targets)) for inputs, targets in parts]
        answers: dict[int, Answer] = {}
        # the device computes one while the host reads another
        waiting: list[tuple[tuple[int, ...], Any]] = []
        for rows, length, scored in batches_of(sizes, self.batch, self.context):
            tokens_BxT = np.zeros((self.batch, length), np.int32)
            first_B = np.zeros(self.batch, np.int32)
            targets_BxC = np.zeros((self.batch, scored), np.int32)
            for place, row in enumerate(rows):
                inputs, targets = parts[row]
                tokens_BxT[place, : len(inputs)] = inputs
                first_B[place] = len(inputs) - len(targets)
                targets_BxC[place, : len(targets)] = targets
            waiting.append(
                (rows, self._score(params, scaling, tokens_BxT, first_B, targets_BxC))
            )
            if len(waiting) > 1:
                answers |= self._read(sizes, *waiting.pop(0))
        for rest in waiting:
            answers |= self._read(sizes, *rest)
        return [answers[row] for row in range(len(parts))]

    def _read(
        self, sizes: Sequence[Sized], rows: tuple[int, ...], found: Any
    ) -> dict[int, Answer]:
        """The answers of a batch by the numbers of its questions."""
        logprobs, likeliest = (np.asarray(x) for x in found)
        ends = {row: sizes[row].scored for row in rows}
        return {
            row: Answer(
                float(logprobs[i, :end].sum(dtype=np.float64)),
                bool(likeliest[i, :end].all()),
            )
            for i, (row, end) in enumerate(ends.items())
        }
