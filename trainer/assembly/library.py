"""The trainer for programs and notebooks: a configuration, and what a program adds to
it, to a trained state.

Nothing here ends the process. What is wrong with the configuration, the data or the
disk is a `UserError`, a run that diverges a `Diverged`. Ctrl-C while steps are taken
saves a checkpoint and returns; the same call goes on from there.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.assembly.data import CustomData
from trainer.assembly.hooks import Hooks
from trainer.assembly.run import start
from trainer.config.composition import compose_or_explain
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.models.custom import MakeModel
from trainer.observe.records import read_rows
from trainer.observe.trackers.protocol import Tracker
from trainer.run.callbacks import Callback
from trainer.step.state import TrainState


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
      state: of the training; `state.params` are nested dictionaries of arrays, or of
        `ScaledArray`s where scales propagate (`scalify_core.asarray` gives their
        values).
      step: steps taken in all.
      rows: of metrics.jsonl, one a step that was logged, in order, from the first step
        of the run directory; none with tracker=none.
      run_dir: holds checkpoints, metrics, report and samples.
      stopped_by: the signal that stopped it before its last step, as Ctrl-C does; None:
          it is done.
    """

    state: TrainState
    step: int
    rows: list[dict[str, Any]]
    run_dir: Path
    stopped_by: signal.Signals | None


def compose(overrides: Sequence[str] = ()) -> Config:
    """The checked configuration of `python -m trainer OVERRIDES`, such as
    `["precision=bf16", "train.steps=100"]`.

    It is a frozen dataclass: `dataclasses.replace` changes a copy, which nothing
    checks. Raises UserError.
    """
    return compose_or_explain(overrides)


def train(
    config: Config,
    *,
    model: MakeModel | None = None,
    data: CustomData | None = None,
    tracker: Tracker | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train in `config.run_dir`, from where that stands, as `python -m trainer` does.

    Args:
      config: of `compose`.
      model: takes a `Build`, gives a `CausalModel`, a Flax NNX module, in place of the
        configuration's, of which `vocab_size`, `context` and `keep_fp8_weights` still
        count.
      data: texts, in place of the configuration's source and prepared as that is; or
          `Batches` of token ids.
      tracker: is told everything, beside the trackers of the configuration.
      callbacks: called every so many steps, beside those of every run.

    Raises:
      UserError: something is wrong with the configuration, the data or the disk;
          Diverged: the watchdog gave up.
      KeyboardInterrupt: Ctrl-C before the first step, or twice.
    """
    if config.dry_run:
        raise UserError(
            "dry_run=true trains nothing; leave it out, or use `python -m trainer"
            " dry_run=true`"
        )
    code, run = start(
        config, hooks=Hooks(model, data, tracker, callbacks, own_process=False)
    )
    assert run is not None  # only a dry run has none
    rows = [
        row for row in read_rows(run.run_dir / "metrics.jsonl") if "event" not in row
    ]
    return Result(
        run.state,
        run.step,
        rows,
        run.run_dir,
        signal.Signals(code - 128) if code else None,
    )
