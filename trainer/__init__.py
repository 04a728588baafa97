"""Train GPT-2 and Llama models in JAX with FP8 matmuls and FP16 or FP8 optimizer state.

As a library: `from trainer import compose, train`; see the README. A public name is
imported when it is first used, so that `import trainer` loads neither jax nor a
tracker.
"""

import importlib
from typing import TYPE_CHECKING, Any

from trainer.version import __version__

# `X as X` tells type checkers that the name is public; they do not run `__getattr__`.
if TYPE_CHECKING:
    from trainer.assembly.library import Result as Result
    from trainer.assembly.library import compose as compose
    from trainer.assembly.library import train as train
    from trainer.config.schema import Config as Config
    from trainer.data.custom import Batches as Batches
    from trainer.errors import Diverged as Diverged
    from trainer.errors import UserError as UserError
    from trainer.models.custom import Build as Build
    from trainer.models.custom import CausalModel as CausalModel
    from trainer.models.roles import Role as Role
    from trainer.observe.trackers.protocol import Tracker as Tracker
    from trainer.observe.trackers.protocol import TrackerStart as TrackerStart
    from trainer.run.callbacks import Callback as Callback
    from trainer.run.callbacks import CallbackKind as CallbackKind
    from trainer.run.callbacks import StepContext as StepContext

HOMES = {
    "Batches": "trainer.data.custom",
    "Build": "trainer.models.custom",
    "Callback": "trainer.run.callbacks",
    "CausalModel": "trainer.models.custom",
    "compose": "trainer.assembly.library",
    "Config": "trainer.config.schema",
    "Diverged": "trainer.errors",
    "CallbackKind": "trainer.run.callbacks",
    "Result": "trainer.assembly.library",
    "Role": "trainer.models.roles",
    "StepContext": "trainer.run.callbacks",
    "Tracker": "trainer.observe.trackers.protocol",
    "TrackerStart": "trainer.observe.trackers.protocol",
    "train": "trainer.assembly.library",
    "UserError": "trainer.errors",
}
# A program of an earlier version gets the new name, not only an AttributeError.
RENAMED = {
    "Beginning": "TrackerStart",
    "Moment": "StepContext",
    "Periodic": "Callback",
}
__all__ = ["__version__", *HOMES]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        advice = f"; it was renamed: {RENAMED[name]}" if name in RENAMED else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")
    return getattr(importlib.import_module(HOMES[name]), name)


# Completion in a notebook lists names that are not imported yet.
def __dir__() -> list[str]:
    return sorted(__all__)
