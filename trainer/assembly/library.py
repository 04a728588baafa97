"""The trainer as a library, for programs and notebooks.

Nothing here ends the process. A fault of the configuration, the data or the disk
raises `UserError`; a run that diverges raises `Diverged`. Ctrl-C during training
saves a checkpoint and returns; the same call resumes.
"""

import base64
import html
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.assembly.data import CustomData
from trainer.assembly.hooks import Hooks
from trainer.assembly.training import run
from trainer.config.composition import compose_config
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.models.custom import MakeModel
from trainer.observe.records import read_rows
from trainer.observe.trackers.protocol import Tracker
from trainer.report.charts import COLORS, Chart
from trainer.report.run_records import RunRecords
from trainer.run.callbacks import Callback
from trainer.step.state import TrainState


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
      state: the training state; `state.params` are nested dictionaries of arrays, or of
        `ScaledArray`s where scales propagate (`scalify_core.asarray` gives their
        values).
      step: the number of steps taken in all.
      rows: the logged rows of metrics.jsonl, from the run directory's first step on;
        empty with tracker=none.
      run_dir: the directory of checkpoints, metrics, report and samples.
      stopped_by: the signal that stopped the run early, such as Ctrl-C's; None: the run
        is done.
    """

    state: TrainState
    step: int
    rows: list[dict[str, Any]]
    run_dir: Path
    stopped_by: signal.Signals | None

    def __repr__(self) -> str:
        """Return a line with the step, the last losses and the run directory."""
        losses = "".join(
            f", {key}={values[-1]:.4f}"
            for key in ("train/loss", "val/loss")
            if (values := [row[key] for row in self.rows if key in row])
        )
        stopped = f", stopped_by={self.stopped_by.name}" if self.stopped_by else ""
        return f"Result(step={self.step}{losses}, run_dir={self.run_dir}{stopped})"

    def _repr_html_(self) -> str:
        """Return the line and the loss curve, for notebooks."""
        # A run directory's name may hold < or &.
        text = html.escape(repr(self))
        if not self.rows:
            return f"<pre>{text}</pre>"
        # Matplotlib takes half a second to import.
        from trainer.report.curve import curve_picture

        records = RunRecords(self.run_dir.name, self.rows, [], "")
        lines = records.smooth("train/loss", "training")
        lines.append(records.line("val/loss", "validation", COLORS[1], dots=True))
        png = curve_picture(Chart("Loss", lines, "nats per token"))
        # A notebook has no path to a file, and is sent to others as one file.
        data = base64.b64encode(png).decode()
        return f'<pre>{text}</pre><img alt="Loss" src="data:image/png;base64,{data}">'


def compose(overrides: Sequence[str] = ()) -> Config:
    """Compose and check a configuration, as `python -m trainer OVERRIDES` would.

    Args:
      overrides: such as `["precision=bf16", "train.steps=100"]`.

    Returns:
      A frozen dataclass. `dataclasses.replace` changes a copy, which is not checked.

    Raises:
      UserError: a key, a value or a combination is not valid.
    """
    return compose_config(overrides)


def train(
    config: Config,
    *,
    model: MakeModel | None = None,
    data: CustomData | None = None,
    tracker: Tracker | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train in `config.run_dir`, or resume the run there, as `python -m trainer` does.

    Args:
      config: the configuration that `compose` returns.
      model: takes a `Build` and returns a `CausalModel`, a Flax NNX module, instead of
        the configuration's. The keys `vocab_size`, `context` and `keep_fp8_weights`
        still apply.
      data: texts, instead of the configuration's source and prepared like it; or
        `Batches` of token ids.
      tracker: gets everything, beside the trackers of the configuration.
      callbacks: run beside the built-in ones.

    Raises:
      UserError: something is wrong with the configuration, the data or the disk.
      Diverged: the watchdog gave up.
      KeyboardInterrupt: Ctrl-C before the first step, or twice.
    """
    # `run` returns no loop then, and a Result has a state.
    if config.dry_run:
        raise UserError(
            "dry_run=true trains nothing; leave it out, or use `python -m trainer"
            " dry_run=true`"
        )
    # Workers are other processes: they could not return a state, nor call the
    # callbacks.
    if config.launcher.kind is not None:
        raise UserError(
            f"launcher={config.launcher.kind} is for the command: `scalify-trainer"
            " train`; leave it out to train in this process"
        )
    # A program survives its run: no timeout and no second Ctrl-C may end its process.
    hooks = Hooks(model, data, tracker, callbacks, owns_process=False)
    code, loop = run(config, hooks=hooks)
    assert loop is not None  # only a dry run has none
    run_dir = loop.session.run_dir
    # The log is read, because a resumed run's earlier rows are nowhere else.
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if "event" not in row]
    # The exit code of a run that a signal stopped is 128 + the signal's number.
    stopped_by = signal.Signals(code - 128) if code else None
    return Result(loop.state, loop.step, rows, run_dir, stopped_by)
