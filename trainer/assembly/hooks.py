"""What a program may replace in a run, or add to it."""

from collections.abc import Sequence
from typing import NamedTuple

from trainer.assembly.data import CustomData
from trainer.models.custom import MakeModel
from trainer.observe.trackers.protocol import Tracker
from trainer.run.callbacks import Callback


class Hooks(NamedTuple):
    """A program's own parts of a run; see `trainer.assembly.library.train`.

    Attributes:
      model: makes the model, in place of the configuration's.
      data: in place of the configuration's.
      tracker: beside the trackers of the configuration.
      callbacks: beside the callbacks of every run.
      own_process: whether the process is the run's alone, which may then be ended for
          it.
    """

    model: MakeModel | None = None
    data: CustomData | None = None
    tracker: Tracker | None = None
    callbacks: Sequence[Callback] = ()
    own_process: bool = True


NO_HOOKS = Hooks()
