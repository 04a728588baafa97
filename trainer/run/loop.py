"""The loop around the step: batches in, rows out, callbacks, stop requests.

The metrics of step n are read after step n+1 was dispatched, so that the device never
waits for the host. Step n in a row, a checkpoint or a message means: after n steps.
What happens between two steps, and that each of its effects happens exactly once, is in
`trainer.run.callbacks`.
"""

import io
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from trainer.data import Batch
from trainer.errors import Diverged
from trainer.files import write_atomically, write_text
from trainer.observe.display import Display
from trainer.observe.metrics import Throughput, memory
from trainer.observe.records import decode_row, encode_row
from trainer.observe.trackers.protocol import Tracker
from trainer.run.builtin_callbacks import CHECKPOINT
from trainer.run.callbacks import Callback, Interrupted, Phase, StepContext
from trainer.run.checkpoint import Checkpointer
from trainer.run.shutdown import Guard, Timeouts
from trainer.run.watchdog import Watchdog
from trainer.step.state import TrainState, first_nonfinite, to_stored
from trainer.step.step import Hyper, Metrics, StepFn, Tokens


@dataclass
class Run:
    """All that a training run consists of, built once by `build`.

    Attributes:
      step: steps taken so far; the data position.
      steps: of the whole run.
      until: steps taken when this phase of it ends.
      batches: yields (step, host batch) from a step on.
      place: host batch to sharded global arrays.
      agree: the largest number that any process gives; all of them must ask equally
          often.
      callbacks: what happens between two steps, in this order.
      log_every: steps between two rows that hold no more than a step's figures.
      restore: the state in use and steps, to the state of the first of their
        checkpoints that is whole, that step, and the step compiled for it, None: the
        one in use. The state in use is deleted.
      diagnose: state and batch of a non-finite step, to a description of the first bad
          tensor.
      unfinished: the row of step `step` as a line, when a signal broke off what was to
          be found out after that step.
      recorded: the last step whose row is out.
      own_process: whether the process may be ended for the run; see `Guard`.
    """

    state: TrainState
    step: int
    steps: int
    until: int
    seed: np.uint32
    batch_tokens: int
    learning_rates: np.ndarray
    train_step: StepFn
    batches: Callable[[int], Iterator[tuple[int, Batch]]]
    place: Callable[[Batch], Tokens]
    agree: Callable[[int], int]
    callbacks: Sequence[Callback]
    log_every: int
    restore: Callable[[TrainState, list[int]], tuple[TrainState, int, StepFn | None]]
    diagnose: Callable[[TrainState, Tokens, int], str]
    checkpointer: Checkpointer
    meta: dict[str, Any]
    tracker: Tracker
    display: Display
    watchdog: Watchdog
    throughput: Throughput
    run_dir: Path
    profile: tuple[int, int] | None
    timeouts: Timeouts
    unfinished: str | None
    recorded: int
    own_process: bool


@dataclass(frozen=True)
class Pending:
    """A dispatched step whose metrics were not read yet. `step` counts it."""

    step: int
    metrics: Metrics
    batch: Batch


class Stop:
    """Whether to stop, the same answer in all processes: a signal to one of them stops
    them all.

    Attributes:
      signal: its number; 0: none yet.
    """

    def __init__(self, run: Run, guard: Guard) -> None:
        self.signal = 0
        self.guard = guard
        self._run = run

    def __call__(self, doing: str) -> bool:
        """Ask, before `doing` something."""
        self.guard.beat(doing)
        self.signal = self.signal or self._run.agree(self.guard.signal)
        return self.signal > 0


def train(run: Run) -> int:
    """Train to the end of the phase or to a stop request.

    Exit code 0, 130 (Ctrl-C) or 143 (SIGTERM), each after a checkpoint.
    """

    def report(text: str) -> None:
        tell(run, run.recorded, text, alert="stall")

    with (
        Guard(run.timeouts, run.run_dir, report, own_process=run.own_process) as guard,
        Profiler(run) as profiler,
    ):
        stop = Stop(run, guard)
        if run.unfinished is not None:
            finish_step(run, run.unfinished, stop)
        pending: Pending | None = None
        batches = run.batches(run.step)
        waited = time.perf_counter()
        guard.beat(f"waiting for the batch of step {run.step + 1}")
        for step, batch in batches if not stop.signal else ():
            run.throughput.waited(time.perf_counter() - waited)
            guard.beat(f"in step {step + 1}")
            tokens = run.place(batch)
            profiler.before(step + 1)
            hyper = Hyper(run.learning_rates[step], np.int32(step), run.seed)
            run.state, metrics = run.train_step(run.state, tokens, hyper)
            profiler.after(step + 1, run.state.params)
            if pending is not None:
                log(run, pending.step, observe(run, pending))
            pending = Pending(step + 1, metrics, batch)
            run.step = step + 1
            # Looked at once a step, since a signal may come between two looks.
            if stop(f"in step {run.step}") or boundary(run):
                row = observe(run, pending)
                run.watchdog.inspect(run.step, first_nonfinite(run.state))
                if run.watchdog.verdict is not None:
                    intervene(run, pending, row)
                    row |= run.watchdog.row()
                pending = None
                settle(run, row, tokens, stop)
            run.checkpointer.check()
            if stop.signal:
                break
            waited = time.perf_counter()
            guard.beat(f"waiting for the batch of step {run.step + 1}")
        guard.beat("saving the last checkpoint")
        run.checkpointer.wait()
        if run.step >= run.steps and run.watchdog.failure is not None:
            raise Diverged(
                f"all {run.steps} steps were taken, but {run.watchdog.failure}; see"
                f" {run.run_dir}/report.html"
            )
        return 128 + stop.signal if stop.signal else 0


def boundary(run: Run) -> bool:
    """Return whether this step's own metrics are needed before the next one starts."""
    return (
        run.step == run.until or run.watchdog.suspect_since is not None or planned(run)
    )


def planned(run: Run) -> bool:
    """Return whether something happens after this step."""
    return any(callback.is_regular(run.step) for callback in run.callbacks)


def observe(run: Run, pending: Pending) -> dict[str, float]:
    """Wait for a step's metrics; its row. What the watchdog says of it is told, and a
    skipped batch kept.
    """
    metrics = {
        name: value.item() for name, value in jax.device_get(pending.metrics).items()
    }
    row = {
        "train/loss": metrics["loss"],
        "grad_norm": metrics["grad_norm"],
        "lr": float(run.learning_rates[pending.step - 1]),
        "tokens": pending.step * run.batch_tokens,
    }
    event = run.watchdog.observe(pending.step, metrics)
    if not metrics["finite"]:
        keep_batch(run, pending)
    if event is not None:
        tell(run, pending.step, event)
    return row | run.watchdog.row() | run.throughput.row() | memory()


def intervene(run: Run, pending: Pending, row: dict[str, float]) -> None:
    """Go back to a state from before the steps that went wrong, while steps and batches
    go on. Else raise Diverged.
    """
    dog, verdict = run.watchdog, run.watchdog.verdict
    run.checkpointer.wait()  # or how far back depends on how fast the disk was
    before = [
        step
        for step in run.checkpointer.steps()
        if step < (dog.suspect_since or pending.step)
    ]
    if not before and dog.in_doubt:
        tell(
            run,
            run.step,
            f"{verdict}; there is no checkpoint from before: going on",
            alert="spike",
        )
        dog.forgive()
    elif not before or not dog.may_roll_back:
        log(run, pending.step, row)
        stop_diverged(run, pending)
    else:
        # The newest of the regular ones first: a run that was stopped in between has
        # them too, and does the same.
        regular = next(
            callback.is_regular
            for callback in run.callbacks
            if callback.name == CHECKPOINT
        )
        order = sorted(before, key=lambda step: (not regular(step), -step))
        run.state, step, compiled = run.restore(run.state, order)
        run.train_step = compiled or run.train_step
        dog.rolled_back(run.step)
        count = f"rollback {dog.rollbacks} of {dog.bounds.max_rollbacks}"
        text = (
            f"{verdict}; rolled back to step {step}; skipping the batches of steps"
            f" {step + 1} to {run.step}"
        )
        tell(run, run.step, f"{text} ({count})", alert="rollback")


def settle(run: Run, row: dict[str, float], tokens: Tokens, stop: Stop) -> None:
    """What happens between two steps, phase by phase (see `trainer.run.callbacks`); not
    counted as training time.
    """
    started = time.perf_counter()
    context = StepContext(
        step=run.step,
        last=run.step == run.steps,
        state=run.state,
        train_step=run.train_step,
        tokens=tokens,
        row=dict(row),
        run_dir=run.run_dir,
        ask=stop,
        save=lambda: save(run, context.val_loss),
        say=lambda text: tell(run, run.step, text),
    )

    def due(phase: Phase) -> list[Callback]:
        # The end of a phase is kept, as what the next one starts from.
        stopping, in_doubt = (
            stop.signal > 0 or run.step == run.until,
            run.watchdog.in_doubt,
        )
        callbacks = [callback for callback in run.callbacks if callback.phase == phase]
        return [
            callback
            for callback in callbacks
            if callback.is_due(context, stopping=stopping, in_doubt=in_doubt)
        ]

    try:
        for callback in due(Phase.EVALUATE):
            context.pause(f"at the {callback.name} after step {run.step}")
            context.take(callback.run(context))
    except Interrupted:
        save(run, None, unfinished=encode_row(run.step, row).decode())
        return
    if context.last:
        run.watchdog.end(run.step, context.val_loss)
    for callback in due(Phase.UPDATE):
        stop.guard.beat(f"at the {callback.name} after step {run.step}")
        callback.run(context)
        run.state, run.train_step = context.state, context.train_step
        if (name := first_nonfinite(run.state)) is not None:
            raise Diverged(
                f"{name} is not finite after the {callback.name} after step {run.step};"
                " nothing was saved of it"
            )
    log(run, run.step, context.row, whole=context.row.keys() > row.keys())
    if context.last:
        run.tracker.summary(
            {f"final/{name}": value for name, value in context.row.items()}
        )
    pass_on(run, context)
    for callback in due(Phase.SAVE):
        stop.guard.beat(f"at the {callback.name} after step {run.step}")
        callback.run(context)
        pass_on(run, context)
    run.throughput.pause(time.perf_counter() - started)


def pass_on(run: Run, context: StepContext) -> None:
    """Record the texts and pictures that callbacks have found."""
    for name, text in context.texts:
        run.tracker.sample(run.step, name, text)
        run.display.event(run.step, f"{name}: {text}")
    for name, path in context.pictures:
        run.tracker.picture(run.step, name, path)
    context.texts.clear()
    context.pictures.clear()


def finish_step(run: Run, row: str, stop: Stop) -> None:
    """What a signal broke off after the last step, from its row on."""
    _, batch = next(run.batches(run.step - 1))
    settle(run, decode_row(row), run.place(batch), stop)


def tell(run: Run, step: int, text: str, *, alert: str = "") -> None:
    """A line for the log, the rows and the dashboard; with the title of an alert, for
    who does not look there too.
    """
    run.tracker.event(step, text)
    if alert:
        run.tracker.alert(alert, f"step {step}: {text}")
    run.display.event(step, text)


def log(run: Run, step: int, row: dict[str, float], *, whole: bool = False) -> None:
    """Log a step's row, once: to the display and, if due or if callbacks have added to
    it (`whole`), to the tracker.
    """
    run.display.update(step, row)
    if whole or step % run.log_every == 0:
        run.tracker.row(step, row)
    run.recorded = step


def save(run: Run, val_loss: float | None, *, unfinished: str | None = None) -> None:
    """Checkpoint the state after `run.step` steps with what is needed to go on; the log
    up to there comes first.
    """
    run.tracker.flush()
    carried = {
        "watchdog": run.watchdog.state(),
        "unfinished": unfinished,
        "log": run.tracker.written(),
    }
    run.checkpointer.save(
        run.step, to_stored(run.state), run.meta | carried, val_loss=val_loss
    )


def keep_batch(run: Run, pending: Pending) -> None:
    """Save the tokens of a skipped step as `skipped/<step>.npy` [sequences, T+1]."""
    if jax.process_index() == 0:
        folder = run.run_dir / "skipped"
        folder.mkdir(exist_ok=True)
        array = io.BytesIO()
        np.save(array, pending.batch.tokens)
        write_atomically(folder / f"{pending.step}.npy", array.getvalue())


def stop_diverged(run: Run, pending: Pending) -> None:
    """Write `divergence.txt`, which names the first tensor that is not finite, and
    raise Diverged.
    """
    reason = f"step {pending.step}: {run.watchdog.verdict}"
    if run.watchdog.rollbacks:
        reason += f", after {run.watchdog.rollbacks} rollbacks"
    tell(run, pending.step, f"stopped: {reason}", alert="diverged")
    found = run.diagnose(run.state, run.place(pending.batch), pending.step - 1)
    path = run.run_dir / "divergence.txt"
    if jax.process_index() == 0:
        write_text(path, f"{reason}\n{found}\n")
    raise Diverged(f"{reason}; the first bad tensor and the batch are in {path}")


class Profiler:
    """Traces the steps of `run.profile`, or those of them that this process takes; a
    context manager, which ends it.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.first, self.last = run.profile or (0, 0)
        self.running = False

    def before(self, step: int) -> None:
        """Start, if this step is the first one to trace."""
        if self.first <= step <= self.last and not self.running:
            self.running = True
            jax.profiler.start_trace(self.run.run_dir / "profile")

    def after(self, step: int, result: Any) -> None:
        """Stop, if this step was the last one to trace, when it is computed."""
        if self.running and step == self.last:
            jax.block_until_ready(result)
            self.stop()
            self.run.display.event(
                step, f"profile of steps up to {step}: {self.run.run_dir / 'profile'}"
            )

    def stop(self) -> None:
        """Write what was traced so far."""
        if self.running:
            self.running = False
            jax.profiler.stop_trace()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
