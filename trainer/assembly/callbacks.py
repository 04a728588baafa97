"""Build the callbacks of a run from its configuration."""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from trainer.assembly.evaluation import bytes_per_token
from trainer.config import schema
from trainer.data import Loader
from trainer.data.mixture import Mixture
from trainer.errors import UserError
from trainer.observe.numerics import format_name, make_numerics
from trainer.observe.progress import log_first_duration
from trainer.observe.sampling import make_sample, on_one_device
from trainer.observe.sharpness import make_sharpness
from trainer.parallel.mesh import place_batch
from trainer.parallel.replicas import without_replicas
from trainer.run import builtin_callbacks as builtin
from trainer.run.callbacks import Callback
from trainer.run.totals import Totals
from trainer.step.evaluate import Evaluation, evaluate, xz_bits_per_byte
from trainer.step.state import TrainState
from trainer.step.step import Tokens
from trainer.tasks.choose import BATCH, choose_tasks
from trainer.tasks.eval_model import EvalModel
from trainer.workload import Workload, jitted_eval_step

# Bytes of text for the comparison with xz. With less, xz has seen too little to
# compress well; with more, it takes long.
MIN_XZ_BYTES, MAX_XZ_BYTES = 100_000, 2**22
NUMERICS = "compiling per-layer numerics"
TASKS = "compiling the tasks, and their first scores"
SAMPLING = "compiling the sampling, and the first sample"
VALIDATION = "compiling the validation"


def build_callbacks(
    c: schema.Config,
    w: Workload,
    batch: Tokens,
    log: Callable[[str], None],
    custom: Sequence[Callback] = (),
    *,
    totals: Callable[[int], Totals],
    tracked: bool = True,
) -> list[Callback]:
    """Return the callbacks in their order: built-in ones, `custom` ones, checkpoint.

    Args:
      c: the configuration.
      w: the workload.
      batch: shapes of a step's batch.
      log: prints a message.
      custom: the callbacks that the program passed to `train`.
      totals: returns the totals after a step.
      tracked: whether rows are stored; else numerics are not computed.

    Raises:
      UserError: two callbacks have one name.
    """
    eval_every = c.train.eval_every
    # They need a second compiled step, and nobody would read the figures.
    numerics_every = c.metrics.numerics_every if tracked else 0
    callbacks = []
    if numerics_every:
        figures = log_first_duration(build_numerics(c, w), NUMERICS, log)
        callbacks.append(builtin.numerics(numerics_every, figures))
    # Before the checkpoint, which stores the loss by which keep_best chooses.
    callbacks.append(builtin.evaluation(eval_every, Validation(c, w, log)))
    train_data = w.data.train
    if isinstance(train_data, Mixture):
        callbacks.append(
            builtin.mixture(
                eval_every,
                lambda step: train_data.source_progress(totals(step).samples),
            )
        )
    if c.eval.tasks:
        scores = log_first_duration(build_tasks(c, w), TASKS, log)
        callbacks.append(builtin.tasks(c.eval.tasks_every or 0, scores))
    if w.task.diloco:
        callbacks.append(builtin.exchanged_bytes(eval_every, totals))
    if c.sample.max_new_tokens:
        sample = log_first_duration(build_sample(c, w), SAMPLING, log)
        callbacks.append(builtin.samples(c.sample.every, sample))
    # Scales of weights are constants of the compiled step, so they are checked now and
    # then, between two steps.
    if c.precision.scaled and c.precision.rescale_every:
        rescale = builtin.rescale(c.precision.rescale_every, w.task, batch)
        callbacks.append(rescale)
    # Custom callbacks run before the checkpoint, which then covers their rows.
    callbacks += custom
    if numerics_every:
        format_name_for = functools.partial(format_name, w.task.model)
        callbacks.append(builtin.pictures(c.checkpoint.every, format_name_for))
    # Last, so that it covers the rows and the state of all others.
    callbacks.append(builtin.checkpoint(c.checkpoint.every))
    # Messages and measured pauses name a callback by it.
    for name, times in Counter(callback.name for callback in callbacks).items():
        if times > 1:
            raise UserError(
                f"two callbacks are called {name!r}; give yours another name"
            )
    return callbacks


def build_numerics(
    c: schema.Config, w: Workload
) -> Callable[[TrainState, Tokens, int], Any]:
    """Return `(state, batch, step) -> figures` of every layer."""
    sharpness = None
    if c.metrics.sharpness:
        sharpness = make_sharpness(w.task, c.optimizer.lr)
    measure = make_numerics(w.task, sharpness)
    if w.task.diloco is None:
        return measure
    # Measure only the first DiLoCo replica's optimizer state.
    select = jax.jit(without_replicas)
    return lambda state, tokens, step: measure(select(state), tokens, step)


class Validation:
    """Validation on `eval_batches` batches, and on `final_eval_batches` at the end.

    Each source of a mixture is also validated alone, always on `eval_batches`.
    """

    def __init__(
        self, c: schema.Config, w: Workload, log: Callable[[str], None]
    ) -> None:
        self._train, self._data, self._mesh = c.train, w.data, w.mesh
        # Decoding the text takes long, and every validation reads the same batches.
        self._bytes_per_token = functools.cache(functools.partial(bytes_per_token, w))
        self._eval_step = log_first_duration(jitted_eval_step(w.task), VALIDATION, log)

    def __call__(
        self, state: TrainState, final: bool, should_stop: Callable[[], bool]
    ) -> Evaluation | None:
        """Return the result; None if `should_stop()` became true before a batch."""
        train = self._train
        batches = train.final_eval_batches if final else train.eval_batches
        result = self._mean(self._data.val, state, batches, should_stop)
        # A stop request repeats the validation after the resume, so half of it is
        # dropped.
        if result is None:
            return None
        result.row["val/tokens"] = tokens_read(self._data.val, batches)
        # Of equal length at every step, so that a source's curve has no jump at the
        # end.
        for name, loader in self._data.sources.items():
            source = self._mean(loader, state, train.eval_batches, should_stop)
            if source is None:
                return None
            for key, value in source.row.items():
                result.row[key.replace("val/", f"val/{name}/")] = value
        # Without bits per byte of the model xz has nothing to be compared with.
        if final and "val/bits_per_byte" in result.row:
            text = self._validated_text(batches)
            if len(text) >= MIN_XZ_BYTES:
                result.row["val/xz_bits_per_byte"] = xz_bits_per_byte(text)
        return result

    def _mean(
        self,
        loader: Loader,
        state: TrainState,
        max_batches: int,
        should_stop: Callable[[], bool],
    ) -> Evaluation | None:
        train, count = self._train, min(loader.steps_per_epoch, max_batches)
        batches = (
            place_batch(loader.batch(i), accum=train.grad_accum_steps, mesh=self._mesh)
            for i in range(count)
        )
        return evaluate(
            self._eval_step,
            state,
            batches,
            # The loss by which step=best compares the final validation with the others.
            common_batches=train.eval_batches,
            bytes_per_token=self._bytes_per_token(loader, count),
            should_stop=should_stop,
        )

    def _validated_text(self, batches: int) -> str:
        """Return the text of the first batches, at most MAX_XZ_BYTES of it."""
        limit = int(MAX_XZ_BYTES / self._data.bytes_per_token)
        tokens = tokens_read(self._data.val, batches)
        return self._data.validation_text(min(tokens, limit))


def tokens_read(val: Loader, batches: int) -> int:
    """Return the tokens that a validation of at most `batches` batches reads."""
    return min(val.steps_per_epoch, batches) * val.batch_size * val.context


def build_tasks(
    c: schema.Config, w: Workload
) -> Callable[[TrainState], dict[str, float]]:
    """Return `state -> figures` of the configuration's tasks, on one device.

    Raises:
      UserError: a name is no task, or an item is too long for the context.
    """
    assert c.eval.tasks is not None
    tasks = choose_tasks(c.eval.tasks, w.data.first_documents, limit=c.eval.limit)
    eval_model = EvalModel(w.task, w.data.tokenizer, c.eval.batch_size or BATCH)
    # Otherwise a long item would end the run hours later, at the first scores.
    for item in itertools.chain(*tasks.items.values()):
        for choice in item.choices:
            eval_model.check_fits(item.context, choice)  # before the first step
    gather = on_one_device(w.task)

    def figures(state: TrainState) -> dict[str, float]:
        params, scaling = gather((state.params, state.scaling))
        row = {}
        for name, scores in tasks.scores(eval_model.at(params, scaling)).items():
            for metric, score in scores.items():
                row[f"tasks/{name}/{metric}"] = score.value
        return row

    return figures


def build_sample(
    c: schema.Config, w: Workload
) -> Callable[[Any, Callable[[], object]], str]:
    """Return `(params, before_window) -> text`, the prompt and its continuation.

    `before_window`: see `Generator`.
    """
    settings = dataclasses.asdict(c.sample)
    # The callback's interval; the sampler has no such argument.
    del settings["every"]
    return make_sample(w.task, w.data.tokenizer, **settings, seed=c.seed)
