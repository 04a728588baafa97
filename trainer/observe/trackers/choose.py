"""Construction of the tracker that the configuration names."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from trainer.observe.trackers.jsonl import JsonlTracker, set_logs_aside
from trainer.observe.trackers.protocol import Tracker, TrackerGroup, TrackerStart
from trainer.observe.trackers.tensorboard import TensorboardTracker, check_installed
from trainer.observe.trackers.wandb import WandbTracker


def check_kind(kind: str) -> None:
    """Raise UserError if the package of a kind of tracker is not installed."""
    if kind == "tensorboard":
        check_installed()


def make_tracker(
    kind: str,
    run_dir: Path,
    *,
    start: int,
    redo_row: bool = False,
    config: Mapping[str, Any],
    run_id: str | None = None,
    checkpoint_state: Mapping[str, Any] | None = None,
    is_fork: bool = False,
    init: Mapping[str, Any] | None = None,
    custom: Tracker | None = None,
) -> Tracker:
    """Make and start the tracker of a run that has taken `start` steps.

    Args:
      kind: wandb, tensorboard (both with metrics.jsonl), jsonl, or none.
      run_dir: an existing directory.
      start: steps taken, 0 for a new run; rows of later steps are cut, because they
          will be recorded again.
      redo_row: whether the row of step `start` will be recorded again too.
      config: the configuration as nested plain values.
      run_id: W&B's id from the checkpoint; None: the run directory's, or a new one.
      checkpoint_state: `Tracker.checkpoint_state` at the checkpoint that the run
        resumes from, or None.
      is_fork: whether `start` is a step of another run, of which this is a fork.
      init: further arguments of `wandb.init`: project, entity, group, name, tags.
      custom: the user's tracker, which records everything too.
    """
    if jax.process_index() > 0:
        return Tracker()
    log = None if kind == "none" else JsonlTracker()
    trackers: list[Tracker] = [] if log is None else [log]
    if kind == "wandb" and os.environ.get("WANDB_MODE") != "disabled":
        trackers.append(WandbTracker(init or {}))
    if kind == "tensorboard":
        trackers.append(TensorboardTracker())
    if custom is not None:
        trackers.append(custom)
    tracker = TrackerGroup(trackers)
    tracker_start = TrackerStart(
        run_dir, start, redo_row, config, run_id, log, checkpoint_state, is_fork
    )
    if tracker_start.is_new:
        # Also with tracker=none: else old logs would become the history of this run.
        set_logs_aside(run_dir, start)
    tracker.start(tracker_start)
    return tracker
