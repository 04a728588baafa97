"""Callbacks: functions that run between steps, and whose records are logged exactly
once.

`TrainLoop.callbacks` is the list of them. `trainer.run.builtin_callbacks` makes those
of every run; a program appends its own. After step n, the callbacks that are due run in
the order of the list, one kind after another:

1. EVALUATE callbacks change nothing. They return metrics for the row of step n, and
   record texts and pictures. A stop request may come before or inside one
   (`StepContext.raise_if_stopped`). Then no result of this step's callbacks is
   recorded. The checkpoint of step n keeps the row as `unfinished`, without these
   results, and the resumed run starts again with the EVALUATE callbacks of step n.
2. UPDATE callbacks replace the state. They do not run after the last step.
3. The row of step n is logged once, with all metrics; then the texts and pictures of
   the callbacks.
4. SAVE callbacks write the files that a resumed run starts from; the checkpoint is the
   last of them. They also run at a stop request and at the end of a training phase.
   During a spike of the loss they run only after the last step.

All kinds but UPDATE also run after the last step. With `every` 0 a callback runs only
then; a SAVE callback also at a stop request and at the end of a training phase.

Rules for a callback, and their consequences:

- A callback is a function of its context: step, state and batch. After a crash the run
  resumes from the newest checkpoint and repeats the later steps with their callbacks;
  trackers first remove their records of those steps. So everything that a callback
  returns or records through its `StepContext` is logged exactly once, with the value of
  a run without the crash.
- Its other effects (a file, a message) happen at least once. Name files after the step.
- After a rollback the state is older, but the step count goes on, so the callbacks of a
  step never run twice because of a rollback.
- In a run of several processes each process runs every callback, and all must call
  `raise_if_stopped` equally often.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.observe.records import is_metric
from trainer.step.state import TrainState
from trainer.step.step import StepFn, Tokens


class CallbackKind(enum.Enum):
    """The kind of a callback, which decides when it runs; see the module."""

    EVALUATE = 1
    UPDATE = 2
    SAVE = 3


class Interrupted(Exception):
    """A stop request came before all EVALUATE callbacks of a step were done."""


@dataclass
class StepContext:
    """The state of a run after a step, for callbacks.

    Attributes:
      step: steps taken.
      last: whether this was the last step of the run.
      state: the training state, on the devices. Do not donate it to a compiled
        function.
      train_step: the step, compiled for that state.
      tokens: the batch of the step, on the devices.
      row: the metrics of the step so far, with those of earlier callbacks.
      run_dir: the run directory.
      should_stop: `should_stop(doing)` returns whether a stop was requested, the same
        answer in every process. `doing` completes messages about a stall, such as `in
        the validation after step 3`.
      save_with_loss: writes a checkpoint of the run after this step, with a validation
        loss; `save` calls it with `val_loss`.
      log_event: writes an event to the log, the tracker and the display.
      val_loss: nats; the best checkpoint has the lowest. None: no validation is due.
      texts: name and text of each text to record after the row.
      pictures: name and file of each picture to record after the row.
    """

    step: int
    last: bool
    state: TrainState
    train_step: StepFn
    tokens: Tokens
    row: dict[str, float]
    run_dir: Path
    should_stop: Callable[[str], bool]
    save_with_loss: Callable[[float | None], None]
    log_event: Callable[[str], None]
    val_loss: float | None = None
    texts: list[tuple[str, str]] = field(default_factory=list)
    pictures: list[tuple[str, Path]] = field(default_factory=list)

    @property
    def params(self) -> Any:
        """Parameters of the model: nested dictionaries of arrays, or of
        `ScaledArray`s.
        """
        return self.state.params

    def raise_if_stopped(self, doing: str) -> None:
        """Raise Interrupted if a stop was requested; see `should_stop`. Call it between
        parts of a long callback.
        """
        if self.should_stop(doing):
            raise Interrupted

    def add_metrics(self, metrics: Mapping[str, float] | None) -> None:
        """Add a callback's metrics to the row. Raises ValueError for a name that the
        row has already, or that no row can have.
        """
        numbers = {}
        for name, value in (metrics or {}).items():
            # A row with such a name could not be read back from metrics.jsonl.
            if not is_metric(name):
                raise ValueError(
                    f"step {self.step}: a metric cannot be called {name}; give it"
                    " another name"
                )
            # A bool is an int, but no number of JSON. `float` takes scalars of JAX and
            # NumPy, for which JSON has no form.
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            numbers[name] = value if is_number else float(value)
        # Replaced in silence, a callback's metric could hide the loss of the step.
        if duplicates := sorted(numbers.keys() & self.row.keys()):
            raise ValueError(
                f"step {self.step}: {', '.join(duplicates)} would be in the row twice;"
                " give it another name"
            )
        self.row |= numbers

    def save(self) -> None:
        """Write a checkpoint of the run after this step; SAVE only."""
        self.save_with_loss(self.val_loss)

    def text(self, name: str, text: str) -> None:
        """Record a text, such as a sample of the model, after the row."""
        self.texts.append((name, text))

    def picture(self, name: str, path: Path) -> None:
        """Record a picture that exists as a file, after the row."""
        self.pictures.append((name, path))

    def set_state(self, state: TrainState, train_step: StepFn, why: str) -> None:
        """Continue from another form of the state, with its compiled step; UPDATE only.
        `why` is logged.
        """
        self.state, self.train_step = state, train_step
        self.log_event(why)


@dataclass(frozen=True)
class Callback:
    """A function that a run calls every so many steps.

    Attributes:
      name: used in messages; unique in a run.
      every: number of steps between two calls; 0: only after the last step.
      run: returns metrics for the row of the step, or None; only an EVALUATE callback
        may return metrics.
      kind: decides when it runs; see the module.
    """

    name: str
    every: int
    run: Callable[[StepContext], Mapping[str, float] | None]
    kind: CallbackKind = CallbackKind.EVALUATE

    def is_regular(self, step: int) -> bool:
        """Return whether `every` divides the step."""
        return self.every > 0 and step % self.every == 0

    def is_due(self, context: StepContext, *, stopping: bool, is_spiking: bool) -> bool:
        """Return whether it runs now.

        Args:
          context: the state of the run.
          stopping: whether a stop was requested, or the training phase ends.
          is_spiking: whether the last losses were spikes.
        """
        match self.kind:
            case CallbackKind.EVALUATE:
                # The last row has every metric: it is the result of the run.
                return context.last or self.is_regular(context.step)
            case CallbackKind.UPDATE:
                # No step would be taken with the new form of the state.
                return not context.last and self.is_regular(context.step)
            case CallbackKind.SAVE:
                # Only the newest checkpoints and the best are kept: those of a spike
                # would push out the ones that a rollback goes back to.
                return context.last or (
                    not is_spiking and (stopping or self.is_regular(context.step))
                )
