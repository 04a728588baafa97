"""The loop around the step: batches in, rows out, checkpoints, validation, samples, stop requests.

The metrics of step n are read after step n+1 was dispatched, so that the device never waits for the host. Step n in a
row, a checkpoint or a message means: after n steps.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

import jax
import numpy as np

from trainer.checkpoint import Checkpointer
from trainer.data import Batch
from trainer.display import Display
from trainer.errors import Diverged
from trainer.evaluate import Evaluation
from trainer.metrics import Throughput, memory
from trainer.records import read_rows
from trainer.state import TrainState, to_stored
from trainer.step import Hyper, Metrics, StepFn, Tokens
from trainer.tracking import Tracker
from trainer.watchdog import Watchdog


@dataclass(frozen=True)
class Cadence:
    """How often, in steps; 0: only at the end, but `rescale` and `numerics`: never."""

    log: int
    evaluate: int
    checkpoint: int
    sample: int
    rescale: int
    numerics: int


@dataclass
class Run:
    """All that a training run consists of, built once by `build`.

    Attributes:
      step: steps taken so far; the data position.
      batches: yields (step, host batch) from a step on.
      place: host batch to sharded global arrays.
      agree: the largest number that any process gives; asked once a step by all of them.
      evaluate: state and whether it is the final time, to what validation finds.
      numerics: state, batch and the number of the step that took it, to figures of every layer.
      rescale: None while every weight's data is near RMS 1; else the state with new scales, the step compiled for
        them, and what was done, in words.
      sample: parameters to a text.
      diagnose: state and batch of a non-finite step, to a description of the first bad tensor.
    """

    state: TrainState
    step: int
    steps: int
    seed: np.uint32
    batch_tokens: int
    learning_rates: np.ndarray
    train_step: StepFn
    batches: Callable[[int], Iterator[tuple[int, Batch]]]
    place: Callable[[Batch], Tokens]
    agree: Callable[[int], int]
    evaluate: Callable[[TrainState, bool], Evaluation]
    numerics: Callable[[TrainState, Tokens, int], dict[str, float]]
    rescale: Callable[[TrainState], tuple[TrainState, StepFn, str] | None]
    sample: Callable[[Any], str]
    diagnose: Callable[[TrainState, Tokens, int], str]
    checkpointer: Checkpointer
    meta: dict[str, Any]
    tracker: Tracker
    display: Display
    watchdog: Watchdog
    throughput: Throughput
    cadence: Cadence
    run_dir: Path
    profile: tuple[int, int] | None


@dataclass(frozen=True)
class Pending:
    """A dispatched step whose metrics were not read yet. `step` counts it."""

    step: int
    metrics: Metrics
    batch: Batch


class StopRequest:
    """Set by SIGTERM or Ctrl-C; the loop finishes the step in flight and saves. A second signal acts at once.

    Attributes:
      signal: its number; 0: none came.
    """

    def __init__(self) -> None:
        self.signal = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catch SIGTERM and SIGINT for the duration of the block."""
    request = StopRequest()
    before = {number: signal.signal(number, request) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps (0: never) happens after `step` steps."""
    return every > 0 and step % every == 0


def train(run: Run) -> int:
    """Train to the end or to a stop request. Exit code 0, 130 (Ctrl-C) or 143 (SIGTERM), each after a checkpoint."""
    pending: Pending | None = None
    with stop_requests() as stop, Profiler(run) as profiler:
        batches = run.batches(run.step)
        waited = time.perf_counter()
        for step, batch in batches:
            run.throughput.waited(time.perf_counter() - waited)
            tokens = run.place(batch)
            profiler.before(step + 1)
            hyper = Hyper(run.learning_rates[step], np.int32(step), run.seed)
            run.state, metrics = run.train_step(run.state, tokens, hyper)
            profiler.after(step + 1, run.state.params)
            if pending is not None:
                log(run, pending.step, observe(run, pending))
            pending = Pending(step + 1, metrics, batch)
            run.step = step + 1
            # Looked at once a step, since a signal may come between two looks; a signal to one process stops them all.
            stopping = run.agree(stop.signal)
            if stopping or boundary(run):
                row = observe(run, pending)
                pending = None
                settle(run, row, tokens, stopping=stopping > 0)
            run.checkpointer.check()
            if stopping:
                return 128 + stopping
            waited = time.perf_counter()
        return 0


def boundary(run: Run) -> bool:
    """Whether this step's own metrics are needed before the next one starts."""
    c = run.cadence
    return run.step == run.steps or any(
        due(run.step, every) for every in (c.evaluate, c.checkpoint, c.sample, c.rescale, c.numerics)
    )


def observe(run: Run, pending: Pending) -> dict[str, float]:
    """Wait for a step's metrics; its row. A step that was not finite is reported; too many in a row stop the run."""
    metrics = {name: value.item() for name, value in jax.device_get(pending.metrics).items()}
    row = {
        "train/loss": metrics["loss"],
        "grad_norm": metrics["grad_norm"],
        "lr": float(run.learning_rates[pending.step - 1]),
        "tokens": pending.step * run.batch_tokens,
    }
    event = run.watchdog.observe(pending.step, metrics)
    if event is not None:
        keep_batch(run, pending)
        run.tracker.event(pending.step, event)
        run.display.event(pending.step, event)
    row |= run.watchdog.row() | run.throughput.row() | memory()
    if run.watchdog.exhausted:
        log(run, pending.step, row)
        stop_diverged(run, pending)
    return row


def settle(run: Run, row: dict[str, float], tokens: Tokens, *, stopping: bool) -> None:
    """What happens between two steps: validation, the row, a sample, a checkpoint; not counted as training time."""
    started = time.perf_counter()
    last, val_loss = run.step == run.steps, None
    figures = {}
    if due(run.step, run.cadence.numerics) or (last and run.cadence.numerics):
        figures = run.numerics(run.state, tokens, run.step - 1)
    if due(run.step, run.cadence.rescale) and not last:
        rescale(run)
    if last or due(run.step, run.cadence.evaluate):
        found = run.evaluate(run.state, last)
        row |= found.row
        val_loss = found.comparable
    log(run, run.step, row | figures)
    if last or due(run.step, run.cadence.sample):
        show_sample(run)
    if last:
        run.tracker.summary({f"final/{name}": value for name, value in row.items()})
    if last or stopping or due(run.step, run.cadence.checkpoint):
        if run.cadence.numerics:
            show_numerics(run)
        save(run, val_loss)
    run.throughput.pause(time.perf_counter() - started)


def rescale(run: Run) -> None:
    """Give weights that have left their place new scales. A function of the step and the state: resumed runs agree."""
    done = run.rescale(run.state)
    if done is not None:
        run.state, run.train_step, text = done
        run.tracker.event(run.step, text)
        run.display.event(run.step, text)


def log(run: Run, step: int, row: dict[str, float]) -> None:
    """A step's row, once and whole, to the display and, when it is due or holds more than a step's, to the tracker."""
    run.display.update(step, row)
    if due(step, run.cadence.log) or any(name.startswith(("val/", "numerics/")) for name in row):
        run.tracker.log(step, row)


def save(run: Run, val_loss: float | None) -> None:
    """Checkpoint the state after `run.step` steps with what is needed to go on; the log up to there comes first."""
    run.tracker.flush()
    run.checkpointer.save(
        run.step, to_stored(run.state), run.meta | {"watchdog": run.watchdog.state()}, val_loss=val_loss
    )


def show_numerics(run: Run) -> None:
    """Pictures of all numerics so far, those before a resumption too, to `numerics/` and the tracker."""
    from trainer.heatmap import draw_all  # a plotting library, half a second to import; not every run gets here

    if jax.process_index() == 0:
        rows = read_rows(run.run_dir / "metrics.jsonl")
        for kind, path in draw_all(rows, run.run_dir / "numerics").items():
            run.tracker.image(run.step, f"numerics/{kind}/picture", path)


def show_sample(run: Run) -> None:
    """A generated text, to the tracker and the display."""
    text = run.sample(run.state.params)
    run.tracker.text(run.step, "samples", text)
    run.display.event(run.step, f"sample: {text}")


def keep_batch(run: Run, pending: Pending) -> None:
    """Save the tokens of a skipped step as `skipped/<step>.npy` [sequences, T+1]."""
    if jax.process_index() == 0:
        folder = run.run_dir / "skipped"
        folder.mkdir(exist_ok=True)
        np.save(folder / f"{pending.step}.npy", pending.batch.tokens)


def stop_diverged(run: Run, pending: Pending) -> None:
    """Write `divergence.txt`, which names the first tensor that is not finite, and raise Diverged."""
    report = (
        run.watchdog.report(pending.step)
        + "\n"
        + run.diagnose(run.state, run.place(pending.batch), pending.step - 1)
        + "\n"
    )
    path = run.run_dir / "divergence.txt"
    if jax.process_index() == 0:
        path.write_text(report, encoding="utf-8")
    raise Diverged(f"{report.splitlines()[0]}; the first bad tensor and the batch are in {path}")


class Profiler:
    """Traces the steps of `run.profile`, or those of them that this process takes; a context manager, which ends it."""

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
            self.run.display.event(step, f"profile of steps up to {step}: {self.run.run_dir / 'profile'}")

    def stop(self) -> None:
        """Write what was traced so far."""
        if self.running:
            self.running = False
            jax.profiler.stop_trace()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
