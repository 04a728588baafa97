"""The parts of a run that a program may replace or add."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from trainer.assembly.data import CustomData
from trainer.models.custom import MakeModel
from trainer.observe.trackers.protocol import Tracker
from trainer.run.callbacks import Callback


class Hooks(NamedTuple):
    """A program's own parts of a run; see `trainer.assembly.library.train`.

    Attributes:
      make_model: makes the model, instead of the configuration's.
      data: instead of the configuration's.
      tracker: beside the trackers of the configuration.
      callbacks: beside the built-in ones.
      owns_process: see `Session`.
      remote_signal: see `Session`.
    """

    make_model: MakeModel | None = None
    data: CustomData | None = None
    tracker: Tracker | None = None
    callbacks: Sequence[Callback] = ()
    # A command's process is the run's; a program's is not.
    owns_process: bool = True
    remote_signal: Callable[[], int] = int  # returns 0: no signal


NO_HOOKS = Hooks()
