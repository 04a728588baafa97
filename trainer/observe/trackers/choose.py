"""The tracker that a configuration names."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from trainer.observe.trackers.jsonl import JsonlTracker
from trainer.observe.trackers.protocol import Beginning, Several, Tracker
from trainer.observe.trackers.tensorboard import TensorboardTracker, check_installed
from trainer.observe.trackers.wandb import WandbTracker


def check_kind(kind: str) -> None:
    """Raise UserError where what a kind of tracker needs is not installed."""
    if kind == "tensorboard":
        check_installed()


def make_tracker(
    kind: str,
    run_dir: Path,
    *,
    start: int,
    again: bool = False,
    config: Mapping[str, Any],
    run_id: str | None = None,
    written: Mapping[str, int] | None = None,
    init: Mapping[str, Any] | None = None,
    own: Tracker | None = None,
) -> Tracker:
    """The tracker of a run that has taken `start` steps (0: a new run), begun.

    Args:
      kind: wandb, tensorboard (both with metrics.jsonl), jsonl, or none.
      run_dir: exists.
      start: steps of later rows are cut: they will come again.
      again: whether that of step `start` will come again, too.
      config: nested plain values.
      run_id: of W&B, from the checkpoint; None: the one this run directory began with,
          or a new one.
      written: what the tracker had written when the checkpoint was saved that the run
          goes on from; None: not known.
      init: further arguments of `wandb.init`: project, entity, group, name, tags.
      own: a tracker of the user's, which is told everything too.
    """
    if jax.process_index() > 0:
        return Tracker()
    kept = None if kind == "none" else JsonlTracker()
    trackers: list[Tracker] = [] if kept is None else [kept]
    if kind == "wandb" and os.environ.get("WANDB_MODE") != "disabled":
        trackers.append(WandbTracker(init or {}))
    if kind == "tensorboard":
        trackers.append(TensorboardTracker())
    tracker = Several([*trackers, own] if own is not None else trackers)
    tracker.start(Beginning(run_dir, start, again, config, run_id, kept, written))
    return tracker
