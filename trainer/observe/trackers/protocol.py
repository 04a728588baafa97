"""The interface of trackers.

A tracker records every row, event, sample and picture exactly once, over any number of
kills and resumes. The loop and the tracker share the work:

- The loop calls `flush` before it saves checkpoint n. When a tracker's `flush` returns,
  its records of steps up to n survive a kill.
- A run that resumes after n steps passes n to `start`, and then records all later steps
  again, with the same values. A tracker drops the records that it has of those steps.
  If it cannot, it ignores the new records of the steps that it has.
- Records of steps up to n can be missing: another tracker recorded them, or a kill lost
  a block. The tracker gets them by `start.log.replay(self, after=LAST_STEP_HELD)`.

A custom tracker is a subclass of `Tracker` that overrides the methods that it needs.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, float | int]


class RunLog(Protocol):
    """The log of the run, complete up to the step that the run resumes from."""

    def replay(self, tracker: "Tracker", *, after: int) -> None:
        """Send a tracker the rows, events and samples of steps > `after`.

        They are sent in order of steps, without pictures.
        """


@dataclass(frozen=True)
class TrackerStart:
    """The start of a run, or of a resumed part of it.

    Attributes:
      run_dir: the run's directory; it exists.
      step: steps taken so far; 0: a new run. Records of later steps are sent again.
      config: the configuration as nested plain values.
      redo_row: whether the row of `step` itself is sent again too, with its sample.
      id: `Tracker.id` at the newest checkpoint, or None. Of several trackers, it is
        that of the first that has one: with tracker=wandb, W&B's.
      log: the log of the run; None: tracker=none.
      checkpoint_state: `Tracker.checkpoint_state` at the newest checkpoint, or None. It
        is that of metrics.jsonl, unless tracker=none.
      is_fork: whether the run starts here from another run's checkpoint.
    """

    run_dir: Path
    step: int
    config: Mapping[str, Any]
    redo_row: bool = False
    id: str | None = None
    log: RunLog | None = None
    checkpoint_state: Mapping[str, Any] | None = None
    is_fork: bool = False

    @property
    def is_new(self) -> bool:
        """Return whether the run starts here without a checkpoint in its directory.

        Older records in `run_dir` then belong to an earlier attempt.
        """
        # A fork has taken steps, but in the directory of another run.
        return self.step == 0 or self.is_fork

    @property
    def last_valid_step(self) -> int:
        """The last step whose row and samples are not sent again; -1: none."""
        if self.is_new:
            return -1
        # The row of `step` is written again by callbacks that were interrupted.
        return self.step - 1 if self.redo_row else self.step


class Tracker:
    """A tracker that discards everything (tracker=none), and the base of the others.

    `step` is the number of steps taken. Calls of `row` have increasing steps. `event`,
    `sample` and `picture` belong to the row of their step, or to a new row if that step
    has none. Other threads may call `event` and `alert`. Only the first process of a
    run calls its tracker.

    Attributes:
      id: an id that checkpoints store, and that `start` gets on resume; None: not
        needed.
    """

    id: str | None = None

    def start(self, start: TrackerStart) -> None:
        """Start or resume; called before all other methods.

        Raises:
          UserError: the run cannot be tracked.
        """

    def row(self, step: int, row: Row) -> None:
        """Record the scalars of a step, once per step."""

    def event(self, step: int, text: str) -> None:
        """Record a message, such as a skipped step or a damaged checkpoint."""

    def sample(self, step: int, name: str, text: str) -> None:
        """Record a text, such as one that the model wrote."""

    def picture(self, step: int, name: str, path: Path) -> None:
        """Record a picture, such as a heat map of the numerics, from a PNG file."""

    def summary(self, values: Row) -> None:
        """Record figures of the whole run."""

    def alert(self, title: str, text: str) -> None:
        """Notify a person who does not look at the dashboard."""

    def flush(self) -> None:
        """Make all records survive a kill; called before each checkpoint."""

    def checkpoint_state(self) -> Mapping[str, Any] | None:
        """Return JSON values that describe the flushed records, for the checkpoint.

        On resume `start` compares the records with them. None: it does not.
        """
        return None

    def finish(self, exit_code: int = 0) -> None:
        """Flush and close. No other call may follow."""


class TrackerGroup(Tracker):
    """A tracker that passes every call on to several trackers, in order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)

    @property
    def id(self) -> str | None:  # type: ignore[override]
        """The id of the first tracker that has one."""
        # Checkpoints store one id, so only one of the trackers may need it.
        return next((tracker.id for tracker in self.trackers if tracker.id), None)

    def start(self, start: TrackerStart) -> None:
        for tracker in self.trackers:
            tracker.start(start)

    def row(self, step: int, row: Row) -> None:
        for tracker in self.trackers:
            tracker.row(step, row)

    def event(self, step: int, text: str) -> None:
        for tracker in self.trackers:
            tracker.event(step, text)

    def sample(self, step: int, name: str, text: str) -> None:
        for tracker in self.trackers:
            tracker.sample(step, name, text)

    def picture(self, step: int, name: str, path: Path) -> None:
        for tracker in self.trackers:
            tracker.picture(step, name, path)

    def summary(self, values: Row) -> None:
        for tracker in self.trackers:
            tracker.summary(values)

    def alert(self, title: str, text: str) -> None:
        for tracker in self.trackers:
            tracker.alert(title, text)

    def flush(self) -> None:
        for tracker in self.trackers:
            tracker.flush()

    def checkpoint_state(self) -> Mapping[str, Any] | None:
        """Return the state of the first tracker that has one."""
        states = (tracker.checkpoint_state() for tracker in self.trackers)
        return next((state for state in states if state is not None), None)

    def finish(self, exit_code: int = 0) -> None:
        with contextlib.ExitStack() as finishing:  # finish each, even if one fails
            # A stack runs its callbacks in reverse, so the trackers finish in their
            # order.
            for tracker in reversed(self.trackers):
                finishing.callback(tracker.finish, exit_code)
