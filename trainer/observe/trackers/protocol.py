"""What a tracker is told of a run, and what it promises.

Every row, event, sample and picture is in a tracker's record exactly once, over any
number of kills and resumes. The loop and the tracker share the work:

- The loop calls `flush` before it saves checkpoint n; a tracker that returns from it
  has made all it was told of steps up to n survive a kill.
- A run that resumes after n steps gives `start` that n and then tells everything of
  later steps again, with the same values. A tracker drops what it holds of them, or,
  where it cannot take anything back, leaves out the steps it has.
- What a tracker lacks of steps up to n (a run that was tracked by another one before,
  or a block that a kill took) it gets from `Beginning.kept`, the run's own record, by
  `kept.replay(self, after=LAST_STEP_HELD)`.

A user's own tracker is a subclass of `Tracker` that overrides what it wants to be told
of.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, float | int | str]


class Kept(Protocol):
    """The run's own record, which has everything up to the step that the run goes on
    from.
    """

    def replay(self, tracker: "Tracker", *, after: int) -> None:
        """Tell a tracker the rows, events and samples of steps > `after`, in order of
        steps; pictures are not kept.
        """


@dataclass(frozen=True)
class Beginning:
    """Where a run, or the next part of one, begins.

    Attributes:
      run_dir: the run's directory; it exists.
      step: steps taken so far; 0: a new run. What a tracker holds of later steps will
          come again.
      again: whether the row of `step` itself comes again too, with its sample.
      config: nested plain values.
      id: what the tracker's attribute `id` was when the newest checkpoint was saved;
          None: it had none.
      kept: the run's own record; None: it keeps none.
      written: what `Tracker.written` said when the newest checkpoint was saved; None:
          nothing.
    """

    run_dir: Path
    step: int
    again: bool
    config: Mapping[str, Any]
    id: str | None
    kept: Kept | None
    written: Mapping[str, int] | None = None


class Tracker:
    """Takes everything and keeps nothing (tracker=none); the others override what they
    keep.

    `step` means: after that many steps. Steps of `row` grow; `event`, `sample` and
    `picture` belong to the row of their step, or to a row of their own where that step
    has none. `event` and `alert` may come from a thread of their own. Of several
    processes of a run only the first has a tracker that is told anything.

    Attributes:
      id: kept in checkpoints and given back to `start`; None: nothing needs to be.
    """

    id: str | None = None

    def start(self, beginning: Beginning) -> None:
        """Begin, or go on. Nothing else is called before. Raises UserError for what
        cannot be tracked.
        """

    def row(self, step: int, row: Row) -> None:
        """The scalars of a step, once a step."""

    def event(self, step: int, text: str) -> None:
        """Something worth a line: a skipped step, a damaged checkpoint."""

    def sample(self, step: int, name: str, text: str) -> None:
        """A text, such as one the model wrote."""

    def picture(self, step: int, name: str, path: Path) -> None:
        """A picture, such as a heat map of the numerics, that exists as a PNG file."""

    def summary(self, values: Row) -> None:
        """Figures of the run as a whole."""

    def alert(self, title: str, text: str) -> None:
        """Something that somebody should be told who does not look at the dashboard."""

    def flush(self) -> None:
        """Make everything so far survive a kill. Call before saving a checkpoint that
        covers it.
        """

    def written(self) -> Mapping[str, int] | None:
        """Describe what `flush` made safe, as JSON values for the checkpoint; None:
        nothing needs to be compared.
        """
        return None

    def finish(self, exit_code: int = 0) -> None:
        """Flush and end. Nothing may follow."""


class Several(Tracker):
    """Passes everything on to each of several trackers, in order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)

    @property
    def id(self) -> str | None:  # type: ignore[override]
        """Of the first that has one."""
        return next((tracker.id for tracker in self.trackers if tracker.id), None)

    def start(self, beginning: Beginning) -> None:
        for tracker in self.trackers:
            tracker.start(beginning)

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

    def written(self) -> Mapping[str, int] | None:
        return next(
            (
                found
                for tracker in self.trackers
                if (found := tracker.written()) is not None
            ),
            None,
        )

    def finish(self, exit_code: int = 0) -> None:
        with contextlib.ExitStack() as finishing:  # each, even if one before it fails
            for tracker in reversed(self.trackers):
                finishing.callback(tracker.finish, exit_code)
