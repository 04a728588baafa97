"""What a run does every so many steps, as a list of entries, and when each of its effects happens exactly once.

The loop knows no other periodic work than `Run.jobs`; `trainer.run.builtin_callbacks` makes those that every run has,
and a user appends more. After step n, the jobs that are due run in the order of the list, one phase after another:

1. LOOK jobs find something out, without changing anything: figures for the row of step n, texts, pictures. A stop
   request may come before or inside one (`Moment.pause`). Then nothing of what this step's jobs found is recorded, the
   checkpoint of step n keeps the bare row as `unfinished`, and the run that resumes takes it from phase 1 on.
2. CHANGE jobs give the state another form. None runs after the last step.
3. The row of step n goes out, whole and once; the texts and pictures that the jobs found follow it.
4. KEEP jobs write down what a resumed run starts from; the checkpoint is the last of them. They also run at a stop
   request, and not while the watchdog doubts the state, except after the last step.

All phases but 2 run after the last step too. An `every` of 0 means: only then (and at a stop request, for KEEP).

What a job must keep to, and what it gets for it:

- It is a function of the moment: step, state and batch. A run that is killed goes on from its newest checkpoint, takes
  the steps after it again and runs their jobs again; trackers cut what they hold of those steps first. So whatever a
  job returns or says through its `Moment` is in the record exactly once, with the value an undisturbed run has.
- What it does to the world by itself (a file, a message) happens at least once. Write files under the step's name.
- After a rollback the state is an older one, but steps go on counting: no step's jobs run twice because of it.
- Where a run has several processes, each of them runs every job, and all must call `pause` equally often.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.step.state import TrainState
from trainer.step.step import StepFn, Tokens


class Phase(enum.Enum):
    """When in the pause between two steps a job runs; see the module."""

    LOOK = 1
    CHANGE = 2
    KEEP = 3


class BrokenOff(Exception):
    """A stop request came before everything that was due after a step was found out."""


@dataclass
class Moment:
    """The pause after a step, as a job sees it.

    Attributes:
      step: steps taken.
      last: whether it was the last one.
      state: of the training, on the devices. Do not donate it to a compiled function.
      train_step: compiled for that state.
      tokens: the batch of the step, on the devices.
      row: the figures of the step so far, with what the jobs before this one found.
      run_dir: a directory of the run's own files.
      ask: whether a stop was requested, the same answer in every process, given words for what is done next.
      save: writes a checkpoint of this moment.
      val_loss: nats; what the best checkpoint is chosen by. None: the validation is not due.
      texts: name and text of what will be recorded after the row.
      pictures: name and file, likewise.
    """

    step: int
    last: bool
    state: TrainState
    train_step: StepFn
    tokens: Tokens
    row: dict[str, float]
    run_dir: Path
    ask: Callable[[str], bool]
    save: Callable[[], None]
    say: Callable[[str], None]
    val_loss: float | None = None
    texts: list[tuple[str, str]] = field(default_factory=list)
    pictures: list[tuple[str, Path]] = field(default_factory=list)

    @property
    def params(self) -> Any:
        """Parameters of the model: nested dictionaries of arrays, or of `ScaledArray`s."""
        return self.state.params

    def pause(self, doing: str) -> None:
        """Break off, by raising BrokenOff, when a stop was requested. Call it between parts of what takes long."""
        if self.ask(doing):
            raise BrokenOff

    def take(self, figures: Mapping[str, float] | None) -> None:
        """Add what a job found to the row. ValueError where another has found it, or the step itself."""
        found = {
            name: value if isinstance(value, int | float) else float(value) for name, value in (figures or {}).items()
        }
        if twice := sorted(found.keys() & self.row.keys()):
            raise ValueError(f"step {self.step}: {', '.join(twice)} would be in the row twice; give it another name")
        self.row |= found

    def text(self, name: str, text: str) -> None:
        """Record a text, such as one the model wrote, after the row."""
        self.texts.append((name, text))

    def picture(self, name: str, path: Path) -> None:
        """Record a picture that exists as a file, after the row."""
        self.pictures.append((name, path))

    def replace(self, state: TrainState, train_step: StepFn, why: str) -> None:
        """Go on from another form of the state, with the step compiled for it; `why` becomes an event. CHANGE only."""
        self.state, self.train_step = state, train_step
        self.say(why)


@dataclass(frozen=True)
class Periodic:
    """Something that a run does every so many steps.

    Attributes:
      name: of this entry, in messages; each name once in a run.
      every: steps; 0: after the last one only.
      run: does it. What it returns are figures for the row of the step, None: none.
      phase: when it does.
    """

    name: str
    every: int
    run: Callable[[Moment], Mapping[str, float] | None]
    phase: Phase = Phase.LOOK

    def regular(self, step: int) -> bool:
        """Whether it happens after this step, whatever else does."""
        return self.every > 0 and step % self.every == 0

    def happens(self, moment: Moment, *, stopping: bool, in_doubt: bool) -> bool:
        """Whether it happens now. `in_doubt`: the watchdog suspects the state."""
        match self.phase:
            case Phase.LOOK:
                return moment.last or self.regular(moment.step)
            case Phase.CHANGE:
                return not moment.last and self.regular(moment.step)
            case Phase.KEEP:
                return moment.last or (not in_doubt and (stopping or self.regular(moment.step)))
