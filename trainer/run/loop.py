"""The training loop: batches in, metrics out, callbacks, stop requests, rollbacks.

The metrics of step n are read after step n+1 was dispatched, so that the device never
waits for the host. Steps are counted from 1: step n takes the batch at position n - 1,
and its row, its checkpoint and its messages are of the state after it.
`trainer.run.callbacks` says what happens between two steps, and why each effect happens
exactly once.
"""

import dataclasses
import functools
import io
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from trainer.data import Batch
from trainer.errors import Diverged, UserError
from trainer.files import write_atomically, write_text
from trainer.observe.records import decode_row, encode_row
from trainer.observe.throughput import memory
from trainer.run.callbacks import Callback, CallbackKind, Interrupted, StepContext
from trainer.run.session import Session, TrainLoop
from trainer.run.shutdown import Guard
from trainer.step.state import first_nonfinite_array, to_checkpoint_form
from trainer.step.step import Metrics, Tokens


@dataclass(frozen=True)
class PendingStep:
    """A dispatched step whose metrics were not read yet; `step` counts from 1."""

    step: int
    metrics: Metrics
    batch: Batch


class StopRequest:
    """A stop request that all processes agree on: a signal to one stops them all.

    Attributes:
      signal: the number of the signal; 0: none yet.
    """

    def __init__(self, session: Session, guard: Guard) -> None:
        self.signal = 0
        self.guard = guard
        self._session = session

    def requested(self, doing: str) -> bool:
        """Return whether to stop; `doing` describes what the run does if it goes on."""
        self.guard.beat(doing)
        signal = self.guard.signal or self._session.remote_signal()
        self.signal = self.signal or self._session.max_over_processes(signal)
        return self.signal > 0


def train(loop: TrainLoop) -> int:
    """Train to the end of the phase, or to a stop request.

    Returns:
      0, 130 (Ctrl-C) or 143 (SIGTERM), each after a checkpoint.

    Raises:
      Diverged: the watchdog found no way to go on.
    """
    session = loop.session

    def report_stall(text: str) -> None:
        # Rows of later steps, up to `loop.step`, are not logged yet.
        log_event(loop, loop.last_logged_step, text, alert="stall")

    with (
        Guard(
            session.timeouts,
            session.run_dir,
            report_stall,
            session.display.message,
            owns_process=session.owns_process,
        ) as guard,
        Profiler(loop.plan.profile, session.run_dir / "profile") as profiler,
    ):
        stop = StopRequest(session, guard)
        if loop.unfinished is not None:
            finish_interrupted_step(loop, loop.unfinished, stop)
        if not stop.signal:
            take_steps(loop, stop, profiler)
        # The save may outlast the last step: a message about a hang names it.
        guard.beat("saving the last checkpoint")
        session.checkpointer.wait()
    failure = loop.recovery.watchdog.failure
    if loop.step >= loop.plan.steps and failure is not None:
        # A resumed run removes all records of steps after its checkpoint. This event is
        # recorded under the next step, so it is removed too.
        session.tracker.event(loop.step + 1, f"stopped: {failure}")
        session.tracker.alert("diverged", f"step {loop.step}: {failure}")
        raise Diverged(
            f"all {loop.plan.steps} steps were taken, but {failure}; see"
            f" {session.run_dir}/report.html"
        )
    if stop.signal:
        # As a shell reports a process that a signal ended.
        return 128 + stop.signal
    return 0


def take_steps(loop: TrainLoop, stop: StopRequest, profiler: "Profiler") -> None:
    """Take the steps of the phase; return early after a stop request."""
    guard = stop.guard
    pending: PendingStep | None = None
    batches = loop.data.batches(loop.step)
    wait_started = time.perf_counter()
    guard.beat(f"waiting for the batch of step {loop.step + 1}")
    for steps_taken, batch in batches:
        step = steps_taken + 1
        loop.throughput.waited(time.perf_counter() - wait_started)
        guard.beat(f"in step {step}")
        tokens = loop.data.place(batch)
        profiler.before(step)
        # Asynchronous: the host reads the previous step's metrics in the meantime.
        loop.state, metrics = loop.train_step(
            loop.state, tokens, loop.plan.step_inputs(step)
        )
        if profiler.after(step, loop.state.params):
            loop.session.display.event(
                step, f"profile of steps up to {step}: {profiler.directory}"
            )
        if pending is not None:
            log_row(loop, pending.step, step_row(loop, pending))
        pending = PendingStep(step, metrics, batch)
        loop.step = step
        # All processes call `stop.requested` once a step, before any returns early.
        if stop.requested(f"in step {loop.step}") or needs_metrics_now(loop):
            finish_step(loop, pending, tokens, stop)
            pending = None
        # Report a full disk now, not at the next save.
        loop.session.checkpointer.check()
        if stop.signal:
            return
        wait_started = time.perf_counter()
        guard.beat(f"waiting for the batch of step {loop.step + 1}")


def finish_step(
    loop: TrainLoop, pending: PendingStep, tokens: Tokens, stop: StopRequest
) -> None:
    """Wait for a step, roll back if its state is bad, and run the callbacks."""
    watchdog = loop.recovery.watchdog
    # The row first: the watchdog decides by the metrics of this step.
    row = step_row(loop, pending)
    # A weight can be infinite although loss and gradients are finite.
    watchdog.check_state(loop.step, first_nonfinite_array(loop.state))
    if watchdog.rollback_reason is not None:
        recover(loop, pending, row)
        # The row keeps the loss of the bad step; callbacks get the restored state.
        row |= watchdog.row()
    run_callbacks(loop, row, tokens, stop)


def needs_metrics_now(loop: TrainLoop) -> bool:
    """Return whether this step's metrics are needed before the next step starts."""
    return (
        loop.step == loop.plan.phase_end
        # While steps are suspect each is judged before the next is taken, so a rollback
        # follows the bad step at once.
        or loop.recovery.watchdog.suspect_since is not None
        or any(callback.is_regular(loop.step) for callback in loop.callbacks)
    )


def step_row(loop: TrainLoop, pending: PendingStep) -> dict[str, float]:
    """Wait for a step's metrics, and return its row.

    The watchdog gets the metrics. The batch of a skipped step is saved.
    """
    # One transfer: each `item` of a device array would be a transfer of its own.
    metrics = {
        name: value.item() for name, value in jax.device_get(pending.metrics).items()
    }
    row = {
        "train/loss": metrics["loss"],
        "grad_norm": metrics["grad_norm"],
        # Steps of a row count from 1, and those of the schedule from 0.
        "lr": float(loop.plan.learning_rates[pending.step - 1]),
        "tokens": loop.totals(pending.step).tokens,
    }
    event = loop.recovery.watchdog.observe(pending.step, metrics)
    if not metrics["finite"]:
        save_skipped_batch(loop.session.run_dir, pending)
    if event is not None:
        log_event(loop, pending.step, event)
    return row | loop.recovery.watchdog.row() | loop.throughput.row() | memory()


def recover(loop: TrainLoop, pending: PendingStep, row: dict[str, float]) -> None:
    """Roll back to a checkpoint from before the bad steps; the step count goes on.

    Raises:
      Diverged: there is no such checkpoint, or there were too many rollbacks.
    """
    watchdog = loop.recovery.watchdog
    checkpointer = loop.session.checkpointer
    # Without this wait, disk speed would decide which checkpoint is the newest.
    checkpointer.wait()
    first_bad_step = watchdog.suspect_since or pending.step
    # Strictly before: a checkpoint of the first bad step may have its update.
    # Not those of stop requests: a run that is never stopped has none of them.
    good_steps = [s for s in checkpointer.planned_steps() if s < first_bad_step]
    # After a spike the state is finite, so training may recover by itself.
    if not good_steps and watchdog.is_spiking:
        text = (
            f"{watchdog.rollback_reason}; there is no checkpoint from before the spike,"
            " so training continues without a rollback"
        )
        log_event(loop, loop.step, text, alert="spike")
        watchdog.restart_spike_window()
    elif not good_steps or not watchdog.may_roll_back:
        # The row of the step that ends the run would not be logged otherwise.
        log_row(loop, pending.step, row)
        stop_diverged(loop, pending)
    else:
        roll_back(loop, good_steps)


def roll_back(loop: TrainLoop, good_steps: list[int]) -> None:
    """Restore the newest of these checkpoints that is intact."""
    watchdog = loop.recovery.watchdog
    candidates = sorted(good_steps, reverse=True)
    loop.state, step, train_step = loop.recovery.restore(loop.state, candidates)
    # An older state may have other scales, which are constants of its step.
    loop.train_step = train_step or loop.train_step
    text = (
        f"{watchdog.rollback_reason}; rolled back to step {step}; skipping the batches"
        f" of steps {step + 1} to {loop.step}"
    )
    watchdog.rolled_back(loop.step)
    count = f"rollback {watchdog.rollbacks} of {watchdog.bounds.max_rollbacks}"
    log_event(loop, loop.step, f"{text} ({count})", alert="rollback")


def run_callbacks(
    loop: TrainLoop, row: dict[str, float], tokens: Tokens, stop: StopRequest
) -> None:
    """Run the callbacks that are due after this step, kind by kind, and log its row.

    Their time does not count as training time.
    """
    started = time.perf_counter()
    context = StepContext(
        step=loop.step,
        last=loop.step == loop.plan.steps,
        state=loop.state,
        train_step=loop.train_step,
        tokens=tokens,
        # A copy, so that `row` stays without the results of callbacks that are
        # interrupted.
        row=dict(row),
        run_dir=loop.session.run_dir,
        should_stop=stop.requested,
        save_with_loss=functools.partial(save, loop, planned=False),
        log_event=lambda text: log_event(loop, loop.step, text),
    )
    try:
        for callback in due_callbacks(loop, CallbackKind.EVALUATE, context, stop):
            context.raise_if_stopped(f"at the {callback.name} after step {loop.step}")
            context.add_metrics(run_callback(loop, callback, context))
    except (Interrupted, UserError) as error:
        # If a callback raises UserError, no step is lost: the user changes the setting,
        # and the run resumes from this checkpoint.
        row = row | loop.throughput.mean_since_last_call()
        loop.unfinished = encode_row(loop.step, row).decode()
        # No loss: a validation that was interrupted has none, and is repeated.
        save(loop, None, planned=False)
        if isinstance(error, UserError):
            raise
        return
    loop.unfinished = None
    if context.last:
        # Of all batches, and of each source of a mixture: `val_loss` is of the first
        # batches.
        losses = [
            value
            for name, value in context.row.items()
            if name.startswith("val/") and name.endswith("/loss")
        ]
        loop.recovery.watchdog.finish(loop.step, losses)
    update_state(loop, context, stop)
    # Metrics of callbacks are logged whatever `train.log_every` is.
    has_new_metrics = len(context.row) > len(row)
    context.row = log_row(loop, loop.step, context.row, always=has_new_metrics)
    if context.last:
        final = {f"final/{name}": value for name, value in context.row.items()}
        loop.session.tracker.summary(final)
    record_media(loop, context)
    # After the row and the texts: a resumed run does not repeat what the checkpoint
    # covers.
    for callback in due_callbacks(loop, CallbackKind.SAVE, context, stop):
        stop.guard.beat(f"at the {callback.name} after step {loop.step}")
        context.save_with_loss = functools.partial(
            save,
            loop,
            planned=callback.is_regular(loop.step) or loop.step == loop.plan.phase_end,
        )
        run_callback(loop, callback, context)
        record_media(loop, context)
    loop.throughput.exclude(time.perf_counter() - started)


def update_state(loop: TrainLoop, context: StepContext, stop: StopRequest) -> None:
    """Run the UPDATE callbacks that are due; raise Diverged if one makes the state not
    finite.
    """
    for callback in due_callbacks(loop, CallbackKind.UPDATE, context, stop):
        stop.guard.beat(f"at the {callback.name} after step {loop.step}")
        run_callback(loop, callback, context)
        loop.state, loop.train_step = context.state, context.train_step
        # A program's own UPDATE callback may set any state.
        if (name := first_nonfinite_array(loop.state)) is not None:
            reason = f"{name} is not finite after the {callback.name}"
            log_event(loop, loop.step, f"stopped: {reason}", alert="diverged")
            raise Diverged(f"{reason} after step {loop.step}; this state was not saved")


def run_callback(
    loop: TrainLoop, callback: Callback, context: StepContext
) -> Mapping[str, float] | None:
    """Run a callback, and tell the display how long it took.

    Raises ValueError if it returns metrics after those of the step's row were taken.
    """
    started = time.perf_counter()
    metrics = callback.run(context)
    seconds = time.perf_counter() - started
    loop.session.display.record_pause(callback.name, callback.every, seconds)
    if metrics and callback.kind is not CallbackKind.EVALUATE:
        raise ValueError(
            f"step {loop.step}: the callback {callback.name} returned metrics, which"
            f" are not logged: it is a {callback.kind}; leave them out, or return them"
            f" from a {CallbackKind.EVALUATE}"
        )
    return metrics


def due_callbacks(
    loop: TrainLoop, kind: CallbackKind, context: StepContext, stop: StopRequest
) -> list[Callback]:
    """Return the callbacks of a kind that run now.

    The end of a training phase counts as a stop: the next phase starts from the state
    that is saved there.
    """
    stopping = stop.signal > 0 or loop.step == loop.plan.phase_end
    is_spiking = loop.recovery.watchdog.is_spiking
    return [
        callback
        for callback in loop.callbacks
        if callback.kind == kind
        and callback.is_due(context, stopping=stopping, is_spiking=is_spiking)
    ]


def record_media(loop: TrainLoop, context: StepContext) -> None:
    """Record the texts and pictures of callbacks."""
    for name, text in context.texts:
        loop.session.tracker.sample(loop.step, name, text)
        loop.session.display.event(loop.step, f"{name}: {text}")
    for name, path in context.pictures:
        loop.session.tracker.picture(loop.step, name, path)
    context.texts.clear()
    context.pictures.clear()


def finish_interrupted_step(loop: TrainLoop, saved_row: str, stop: StopRequest) -> None:
    """Run the interrupted callbacks of the last step, starting from its saved row."""
    # A batch is a function of the step, so it is not saved.
    _, batch = next(loop.data.batches(loop.step - 1))
    run_callbacks(loop, decode_row(saved_row), loop.data.place(batch), stop)


def log_event(loop: TrainLoop, step: int, text: str, *, alert: str = "") -> None:
    """Write an event to the log, the tracker and the display.

    `alert`: the title of an alert that the tracker sends as well; empty: none.
    """
    loop.session.tracker.event(step, text)
    if alert:
        loop.session.tracker.alert(alert, f"step {step}: {text}")
    loop.session.display.event(step, text)


def log_row(
    loop: TrainLoop, step: int, row: dict[str, float], *, always: bool = False
) -> dict[str, float]:
    """Show a step's row, and give it to the tracker every `log_every` steps or
    `always`.

    Returns the row; if the tracker got it, with the mean throughput since the last one.
    """
    loop.session.display.update(step, row)
    if always or step % loop.plan.log_every == 0:
        row = row | loop.throughput.mean_since_last_call()
        loop.session.tracker.row(step, row)
    loop.last_logged_step = step
    return row


def meta_of(loop: TrainLoop) -> dict[str, Any]:
    """Return the meta of the state after `loop.step`, without the state of the log."""
    return loop.meta | {
        "watchdog": loop.recovery.watchdog.state(),
        "unfinished": loop.unfinished,
        "totals": dataclasses.asdict(loop.totals(loop.step)),
    }


def save(loop: TrainLoop, val_loss: float | None, *, planned: bool) -> None:
    """Write the log up to `loop.step`, then save a checkpoint of the state after it.

    `planned`: see `Checkpointer.save`.
    """
    tracker = loop.session.tracker
    loop.session.verify_run_dir()
    # Without it the checkpoint that follows could not be resumed by `resume=RUN`.
    loop.session.restore_config()
    # A run that resumes here does not repeat these rows.
    tracker.flush()
    loop.session.checkpointer.save(
        loop.step,
        to_checkpoint_form(loop.state),
        meta_of(loop) | {"log": tracker.checkpoint_state()},
        val_loss=val_loss,
        planned=planned,
    )


def save_skipped_batch(run_dir: Path, pending: PendingStep) -> None:
    """Save the tokens of a skipped step as `skipped/<step>.npy`, int [sequences,
    T+1].
    """
    if jax.process_index() == 0:
        folder = run_dir / "skipped"
        folder.mkdir(exist_ok=True)
        array = io.BytesIO()
        np.save(array, pending.batch.tokens)
        write_atomically(folder / f"{pending.step}.npy", array.getvalue())


def stop_diverged(loop: TrainLoop, pending: PendingStep) -> None:
    """Write `divergence.txt`, which names the first tensor that is not finite, and
    raise Diverged.
    """
    watchdog = loop.recovery.watchdog
    reason = f"step {pending.step}: {watchdog.rollback_reason}"
    if watchdog.rollbacks:
        reason += f", after {watchdog.rollbacks} rollbacks"
    # Told first: the search may take minutes, and memory that the run does not have.
    log_event(loop, pending.step, f"stopped: {reason}", alert="diverged")
    tokens = loop.data.place(pending.batch)
    diagnosis = loop.recovery.diagnose(loop.state, tokens, pending.step - 1)
    path = loop.session.run_dir / "divergence.txt"
    if jax.process_index() == 0:
        write_text(path, f"{reason}\n{diagnosis}\n")
    raise Diverged(f"{reason}; the first bad tensor and the batch are in {path}")


class Profiler:
    """Traces the steps of an interval, as far as this process takes them; a context
    manager, which ends the trace.
    """

    def __init__(self, steps: tuple[int, int] | None, directory: Path) -> None:
        self.first, self.last = steps or (0, 0)
        self.directory = directory
        self.running = False

    def before(self, step: int) -> None:
        """Start the trace if this is the first step in the interval."""
        # Not only at the first: a resumed run may begin inside the interval.
        if self.first <= step <= self.last and not self.running:
            self.running = True
            jax.profiler.start_trace(self.directory)

    def after(self, step: int, result: Any) -> bool:
        """Write the trace if this step ends the interval; return whether it does."""
        if not self.running or step != self.last:
            return False
        # Without this wait, the trace would end before the device computed the step.
        jax.block_until_ready(result)
        self.stop()
        return True

    def stop(self) -> None:
        """Write the trace of the steps so far."""
        if self.running:
            self.running = False
            jax.profiler.stop_trace()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
