"""The objects of a run: those that all its phases share, and those of one phase."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.data import Batch
from trainer.observe.display import Display
from trainer.observe.throughput import Throughput
from trainer.observe.trackers.protocol import Tracker
from trainer.run.callbacks import Callback
from trainer.run.checkpoint import Checkpointer
from trainer.run.shutdown import Timeouts
from trainer.run.totals import Totals
from trainer.run.watchdog import Watchdog
from trainer.step.schedule import LearningRates
from trainer.step.state import TrainState
from trainer.step.step import StepFn, StepInputs, Tokens


@dataclass(frozen=True)
class Session:
    """The parts that all phases of a run share: its outputs, and how its process stops.

    Attributes:
      run_dir: the run directory.
      verify_run_dir: raises RunDirLost if another trainer may use the run directory;
        called before each checkpoint.
      restore_config: writes config.yaml again if it was removed.
      checkpointer: saves and restores the run's checkpoints.
      tracker: gets every row, event, text and picture.
      display: shows progress and messages on the terminal.
      max_over_processes: returns the largest of the processes' numbers. All processes
        must call it equally often.
      timeouts: the `Guard`'s.
      owns_process: whether the run may end the process; see `Guard`.
      remote_signal: returns the number of a signal that another process received for
        this run; 0: none.
    """

    run_dir: Path
    verify_run_dir: Callable[[], None]
    restore_config: Callable[[], None]
    checkpointer: Checkpointer
    tracker: Tracker
    display: Display
    max_over_processes: Callable[[int], int]
    timeouts: Timeouts
    owns_process: bool
    remote_signal: Callable[[], int]


class PhasePlan(NamedTuple):
    """The steps of a phase.

    Attributes:
      steps: number of steps of the whole run.
      phase_end: number of steps taken when the phase ends.
      learning_rates: that of every step of the run.
      seed: the run's.
      log_every: steps between two logged rows; a row with metrics of callbacks is
        always logged.
      profile: the first and the last step to trace, counted from 1; None: no trace.
    """

    steps: int
    phase_end: int
    learning_rates: LearningRates
    seed: np.uint32
    log_every: int
    profile: tuple[int, int] | None

    def step_inputs(self, step: int) -> StepInputs:
        """Return the inputs of a step, counted from 1, as host scalars."""
        return StepInputs(self.learning_rates[step - 1], np.int32(step - 1), self.seed)


class TrainData(NamedTuple):
    """The batches of a phase.

    Attributes:
      batches: `batches(n)` yields `(n, batch)`, `(n + 1, batch)`, ...: the number of
        steps taken before, and the host batch.
      place: `place(batch)` returns a host batch as sharded global arrays.
    """

    # By position, without the state of an iterator: a resumed run needs the step alone.
    batches: Callable[[int], Iterator[tuple[int, Batch]]]
    place: Callable[[Batch], Tokens]


class Recovery(NamedTuple):
    """The parts that take a run back to an earlier state, or explain a failure.

    Attributes:
      watchdog: checks the metrics of every step.
      restore: `restore(state, steps)` returns the state of the first intact checkpoint
        among those steps, its step, and the train step compiled for it (None: the one
        in use fits). The argument `state` is deleted.
      diagnose: `diagnose(state, batch, step)` returns a description of the first bad
        tensor of a step that is not finite; `step` as in `StepInputs`.
    """

    watchdog: Watchdog
    restore: Callable[[TrainState, list[int]], tuple[TrainState, int, StepFn | None]]
    diagnose: Callable[[TrainState, Tokens, int], str]


@dataclass
class TrainLoop:
    """The training loop of a run in one of its phases, and how far it has come.

    Attributes:
      session: the parts that all phases share.
      plan: the steps, and the learning rate of each.
      data: the batches.
      callbacks: called between two steps, in this order.
      recovery: rollback and NaN diagnosis.
      throughput: counts tokens/s and MFU.
      totals: returns the totals after a step.
      meta: JSON values that are saved with every checkpoint.
      state: the training state, on the devices.
      train_step: the step, compiled for `state`.
      step: steps taken so far, which is also the position in the data.
      last_logged_step: the last step whose row is logged.
      unfinished: the encoded row of step `step`, if the callbacks after that step were
        interrupted by a signal or a UserError; else None.
    """

    session: Session
    plan: PhasePlan
    data: TrainData
    callbacks: Sequence[Callback]
    recovery: Recovery
    throughput: Throughput
    totals: Callable[[int], Totals]
    meta: dict[str, Any]
    state: TrainState
    train_step: StepFn
    step: int
    last_logged_step: int
    unfinished: str | None
