"""Construction of the tracker that the configuration names."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax

from trainer.observe.trackers.jsonl import JsonlTracker, cut_logs, set_logs_aside
from trainer.observe.trackers.protocol import Tracker, TrackerGroup, TrackerStart
from trainer.observe.trackers.tensorboard import TensorboardTracker
from trainer.observe.trackers.wandb import WandbTracker


def make_tracker(
    kind: str,
    start: TrackerStart,
    *,
    init: Mapping[str, Any] | None = None,
    custom: Tracker | None = None,
) -> Tracker:
    """Make and start the tracker of a run.

    Args:
      kind: wandb, tensorboard (both with metrics.jsonl), jsonl, or none.
      start: the start, without its log.
      init: further arguments of `wandb.init`: project, entity, group, name, tags.
      custom: the user's tracker, which records everything too.
    """
    # The first process records for all: they have the same rows and one run directory.
    if jax.process_index() > 0:
        return Tracker()
    trackers: list[Tracker] = []
    if kind != "none":
        # First of all trackers: it must be cut before another one replays it.
        log = JsonlTracker()
        trackers.append(log)
        start = dataclasses.replace(start, log=log)
    # W&B's own switch; its package is not even imported then.
    if kind == "wandb" and os.environ.get("WANDB_MODE") != "disabled":
        trackers.append(WandbTracker(init or {}))
    if kind == "tensorboard":
        trackers.append(TensorboardTracker())
    if custom is not None:
        trackers.append(custom)
    tracker = TrackerGroup(trackers)
    if start.is_new:
        # Also with tracker=none: else old logs would become the history of this run.
        set_logs_aside(start.run_dir, start.step)
    elif kind == "none":
        cut_logs(start)
    tracker.start(start)
    return tracker
