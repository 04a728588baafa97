"""A trainer of language models in JAX whose low precision can be trusted.

As a library: `from trainer import compose, train`; README shows it. Names are loaded when they are used, so that
importing the package alone imports neither jax nor a tracker.
"""

import importlib
from typing import TYPE_CHECKING, Any

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
    from trainer.observe.trackers.protocol import Beginning as Beginning
    from trainer.observe.trackers.protocol import Tracker as Tracker
    from trainer.run.callbacks import Moment as Moment
    from trainer.run.callbacks import Periodic as Periodic
    from trainer.run.callbacks import Phase as Phase

__version__ = "0.1.0"  # also in pyproject.toml and CITATION.cff

HOMES = {
    "Batches": "trainer.data.custom",
    "Beginning": "trainer.observe.trackers.protocol",
    "Build": "trainer.models.custom",
    "CausalModel": "trainer.models.custom",
    "Config": "trainer.config.schema",
    "Diverged": "trainer.errors",
    "Moment": "trainer.run.callbacks",
    "Periodic": "trainer.run.callbacks",
    "Phase": "trainer.run.callbacks",
    "Result": "trainer.assembly.library",
    "Role": "trainer.models.roles",
    "Tracker": "trainer.observe.trackers.protocol",
    "UserError": "trainer.errors",
    "compose": "trainer.assembly.library",
    "train": "trainer.assembly.library",
}
__all__ = ["__version__", *HOMES]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
