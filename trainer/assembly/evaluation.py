"""The loss of a saved run's weights, and their scores in tasks, in several precisions.

All precisions get the same weights and batches. Weights are rounded to the other
precision's format.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scalify_core import weights
from trainer.data import Batch, Loader, TextSource
from trainer.data.corpus import open_corpus
from trainer.data.loader import segments
from trainer.data.target_bytes import bytes_per_target
from trainer.errors import UserError
from trainer.observe.progress import log_first_duration
from trainer.parallel.mesh import place_batch
from trainer.precision.arrays import store_weights
from trainer.precision.policy import Policy
from trainer.report.run_records import AS_TRAINED
from trainer.step.state import TrainState
from trainer.tasks.choose import Tasks
from trainer.tasks.eval_model import EvalModel
from trainer.tasks.intervals import half_width
from trainer.text import note
from trainer.workload import TrainTask, Workload, jitted_eval_step

MICRO_BATCH = 1 << 16  # tokens at once on the one device of an evaluation


class EvalBatches(NamedTuple):
    """The batches of an evaluation.

    Attributes:
      batch: returns the batch of a number below `n_batches`.
      n_batches: the number of batches.
      bytes_per_token: bytes of text for each predicted token; NaN: unknown.
      left_out: tokens after the last batch, too few for another; None: the limit on
        batches ended the text.
    """

    batch: Callable[[int], Batch]
    n_batches: int
    bytes_per_token: float
    left_out: int | None


class PrecisionResult(NamedTuple):
    """The loss of one precision.

    Attributes:
      precision: the name of the precision, or AS_TRAINED.
      loss: nats per token, the mean over the batches.
      bits_per_byte: bits per byte of text; NaN: unknown.
      difference: the loss minus that of AS_TRAINED, nats; negative is better.
      half_width: half the width of the difference's 95% interval over batches; infinite
        for one batch.
    """

    precision: str
    loss: float
    bits_per_byte: float
    difference: float
    half_width: float


def validation_text(w: Workload, max_batches: int) -> EvalBatches:
    """Return at most `max_batches` batches of the validation part."""
    val = w.data.val
    count = min(max_batches, val.steps_per_epoch)
    # With as many batches as are allowed, nobody asked for the rest.
    left_out = None
    if count < max_batches:
        left_out = val.tokens - 1 - count * val.batch_size * val.context
    return EvalBatches(val.batch, count, bytes_per_token(w, val, count), left_out)


def bytes_per_token(w: Workload, loader: Loader, count: int) -> float:
    """Return the mean bytes of text for each predicted token of the first batches.

    NaN: unknown, or the model learns no boundaries of documents. Then the first token
    of a document adds no nats, but its bytes are counted: bits per byte would be too
    low.
    """
    if w.model.loss_boundary_id is not None:
        return math.nan
    # A batch is a function of its number, so the loss reads these again.
    batches = map(loader.batch, range(count))
    source_bytes = loader.validation_bytes_per_token(count)
    return bytes_per_target(batches, w.data.tokenizer, source_bytes)


def source_text(
    source: TextSource, cache_dir: Path, w: Workload, max_batches: int
) -> EvalBatches:
    """Return at most `max_batches` batches of consecutive windows of a text.

    Raises:
      UserError: files that cannot be read, or too little text for one batch.
    """
    tokenizer, loader, context = w.data.tokenizer, w.data.val, w.model.spec.context
    # Windows share a token: the last target of one is the first input of the next.
    max_tokens = max_batches * loader.batch_size * context + 1
    corpus = open_corpus(source, cache_dir)
    arrays: list[Any] = []
    n_tokens = n_bytes = 0
    pieces = (
        (rows, text)
        for rows in corpus.batches_for(tokenizer, None)
        for text in rows.texts
        if text  # The preparation skips empty documents, too.
    )
    for rows, text in pieces:
        # Pieces of a long text are encoded with their neighbors, so that words at the
        # cuts stay whole.
        ids = tokenizer.encode_array(text, rows.preceding, rows.following)
        if corpus.length is None:  # a document, which ends with eot
            ids = np.append(ids, ids.dtype.type(tokenizer.eot))
        arrays.append(ids)
        n_tokens += len(ids)
        n_bytes += len(text.encode())
        # No more is read than is used: the text may be a directory of terabytes.
        if n_tokens >= max_tokens:
            break
    # The last token is a target alone, so it begins no window.
    count = min(max_batches, (n_tokens - 1) // (loader.batch_size * context))
    if count < 1:
        raise UserError(
            f"text: {n_tokens:,} tokens, one batch needs"
            f" {loader.batch_size * context + 1:,} (train.batch_tokens + 1); give more"
            " text"
        )
    stream = np.concatenate(arrays).astype(np.int32)
    starts = context * np.arange(count * loader.batch_size)
    starts_NxBx1 = starts.reshape(count, loader.batch_size, 1)
    # One array of all windows: twice the tokens, and no loop over rows.
    windows = stream[starts_NxBx1 + np.arange(context + 1)]

    def batch(i: int) -> Batch:
        # As in training: without a mask documents of a window see each other.
        if not loader.document_mask:
            return Batch(windows[i], None)
        return Batch(windows[i], segments(windows[i], tokenizer.eot))

    left_out = None
    if count < max_batches:
        left_out = n_tokens - 1 - count * loader.batch_size * context
    size = math.nan  # as in `bytes_per_token`
    if w.model.loss_boundary_id is None:
        batches = map(batch, range(count))
        size = bytes_per_target(batches, tokenizer, n_bytes / n_tokens)
    return EvalBatches(batch, count, size, left_out)


def evaluate(
    task: TrainTask,
    state: TrainState,
    others: Mapping[str, TrainTask],
    batches: EvalBatches,
    accum: int,
) -> Iterator[PrecisionResult]:
    """Yield the result of the run's own precision, then those of the others.

    Each batch has `accum` micro-batches, or more if these are too large.
    """
    # All precisions get the same micro-batches: another order of sums would count as a
    # difference.
    rows, tokens = batches.batch(0).tokens.shape
    accum = micro_batches(rows, tokens, accum)
    # The run's precision first: every other line is a difference from it.
    reference = batch_losses(task, state, batches, accum)
    yield result_of(batches, AS_TRAINED, reference, reference)
    for name, other in others.items():
        losses = batch_losses(
            other, in_policy(state, other.model.policy), batches, accum
        )
        yield result_of(batches, name, losses, reference)


def in_policy(state: TrainState, policy: Policy) -> TrainState:
    """Return a state whose weights are rounded to another precision's format."""
    # From FP32: the scales of the run's storage mean nothing to the other precision.
    params = store_weights(weights.wide(state.params), policy)
    # `cli.evaluate` refuses precisions whose forward pass reads such a state.
    return replace(state, params=params, scaling=())


def micro_batches(rows: int, tokens: int, accum: int) -> int:
    """Return the number of micro-batches for a batch of `rows` with `tokens` each.

    It is the least multiple of `accum` whose micro-batches have at most `MICRO_BATCH`
    tokens, or a row each.
    A run trains on several devices, but one evaluates it; and `train.batch_tokens` of a
    run may be a stranger's.
    """
    per_step = rows // accum
    # Micro-batches are of equal size, so their number divides the rows.
    divisors = {n for n in range(1, math.isqrt(per_step) + 1) if per_step % n == 0}
    divisors |= {per_step // n for n in divisors}
    for factor in sorted(divisors):
        if per_step // factor * tokens <= MICRO_BATCH:
            return accum * factor
    return rows


def batch_losses(
    task: TrainTask, state: TrainState, batches: EvalBatches, accum: int
) -> list[float]:
    """Return the mean loss of each batch."""
    place = functools.partial(place_batch, accum=accum, mesh=task.mesh)
    step = log_first_duration(jitted_eval_step(task), "compiling the evaluation", note)
    # One at a time: a device holds the tokens of one batch.
    return [
        float(step(state, place(batches.batch(i)))) for i in range(batches.n_batches)
    ]


def result_of(
    batches: EvalBatches, name: str, losses: Sequence[float], reference: Sequence[float]
) -> PrecisionResult:
    """Return the result of a precision.

    `losses` are its losses by batch, `reference` those of the run's own precision.
    """
    loss = statistics.fmean(losses)
    # Batch by batch: the same text in both cancels most of the spread over batches.
    differences = [loss - base for loss, base in zip(losses, reference, strict=True)]
    bits = loss / math.log(2) / batches.bytes_per_token
    mean = statistics.fmean(differences)
    return PrecisionResult(name, loss, bits, mean, half_width(differences))


def evaluate_tasks(
    w: Workload,
    state: TrainState,
    policies: Mapping[str, Policy],
    tasks: Tasks,
    batch: int,
) -> Iterator[tuple[str, Any]]:
    """Yield each precision, the run's own first, with the scores of its tasks.

    `batch`: the number of sequences that are scored at once.
    """
    for name, policy in {AS_TRAINED: w.model.policy, **policies}.items():
        # The run's own weights as they are stored, not rounded once more.
        task, stored = w.task, state
        if name != AS_TRAINED:
            task, stored = task.in_precision(policy), in_policy(state, policy)
        eval_model = EvalModel(task, w.data.tokenizer, batch).at(
            stored.params, stored.scaling
        )
        yield name, tasks.scores(eval_model)
