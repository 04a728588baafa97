"""The startup log: lines that a run prints before its first step, and its origin."""

from typing import NamedTuple

import jax

from trainer.assembly.build import build_learning_rates
from trainer.config import schema
from trainer.config.fields import flatten, in_groups, to_tree
from trainer.data.dataset import Dataset
from trainer.models.custom import CUSTOM
from trainer.models.flops import param_count
from trainer.parallel.replicas import DiLoCoStep
from trainer.report.messages import (
    describe,
    describe_mesh,
    rounding_of,
)
from trainer.report.run_records import FORKED, SCHEDULE_CHANGED, WEIGHTS
from trainer.run.checkpoint import Restored
from trainer.run.libraries import numeric_settings
from trainer.run.metadata import saved_config
from trainer.run.phases import Phases, TrainingPhase
from trainer.step.schedule import LearningRates
from trainer.text import as_typed
from trainer.version import __version__
from trainer.workload import Workload

# What `build_learning_rates` reads.
SCHEDULE_KEYS = ("train.steps", "train.phases", "optimizer.lr", "schedule")


def describe_run(
    c: schema.Config, w: Workload, step: jax.stages.Compiled | DiLoCoStep | None = None
) -> list[str]:
    """Return lines about model, data and precision, and a compiled step's memory."""
    lines = describe(
        w,
        # A program's model has no preset; the configuration's would be a wrong name.
        model="of your own" if w.model.family is CUSTOM else c.model.name,
        precision=c.precision.name,
        batch_tokens=c.train.batch_tokens,
        accum=c.train.grad_accum_steps,
        step=step,
        gbps=c.diloco.bandwidth_gbps,
    )
    return [f"scalify-trainer {__version__}", *lines, *describe_validation(c, w.data)]


def describe_validation(c: schema.Config, data: Dataset) -> list[str]:
    """Return a line if validations during training may read only some of the files."""
    files = len(data.manifest.source.get("digests", ()))
    batches = c.train.eval_batches
    # One file is mostly of one kind; the first of many may differ from the rest.
    if files < 2 or not c.train.eval_every or data.val.steps_per_epoch <= batches:
        return []
    return [
        f"a validation reads the first {batches * c.train.batch_tokens:,} of"
        f" {data.manifest.token_count('val'):,} validation tokens, in the order of the"
        f" {files:,} files; train.eval_batches={data.val.steps_per_epoch} reads all"
    ]


def describe_phase(phases: Phases, phase: TrainingPhase) -> list[str]:
    """Return a line about a phase, if the run has several."""
    if len(phases.all) == 1:
        return []
    task, config = phase.task, phase.config
    number = phases.all.index(phase) + 1
    parameters = param_count(task.model.spec, task.select_trained)
    trained = f"{', '.join(task.trainable) or 'all'} ({parameters:,} parameters)"
    precision = config.precision
    rounding = rounding_of(precision.weights, precision.weights_rounding)
    return [
        f"phase {number} of {len(phases.all)}, steps {phase.start + 1:,} to"
        f" {phase.until:,}: {trained}, {precision.name}{rounding},"
        f" {config.schedule.name} from {config.optimizer.lr:g}"
    ]


def describe_start(c: schema.Config, checkpoint: Restored) -> list[str]:
    """Return a line about the checkpoint that a run starts from."""
    if checkpoint.is_fork:
        return [f"forked from {checkpoint.origin}: a run of its own from here on"]
    # A run that is over takes no step.
    if not 0 < checkpoint.step < c.train.steps:
        return []
    return [f"resuming after step {checkpoint.step:,}"]


def recorded_origin(c: schema.Config, checkpoint: Restored) -> dict[str, str]:
    """Return a run's origin and the changes of its schedule, for its report."""
    facts = {}
    # A fork's weights are those of its checkpoint, whatever init_from says.
    if checkpoint.origin:
        facts[FORKED] = checkpoint.origin
    elif c.init_from is not None:
        facts[WEIGHTS] = c.init_from
    if changes := checkpoint.meta.get("schedule_changes"):
        facts[SCHEDULE_CHANGED] = "; ".join(changes)
    return facts


class ScheduleChange(NamedTuple):
    """The learning rates of a resumed run, beside those that were saved.

    Attributes:
      step: steps taken, at least 1.
      keys: the keys that changed, in words.
      old_rates: the saved learning rate of every step.
      new_rates: that of every step of the run from here on.
      is_past: whether the steps taken have other rates now.
    """

    step: int
    keys: str
    old_rates: LearningRates
    new_rates: LearningRates
    is_past: bool

    def __str__(self) -> str:
        return f"after step {self.step:,} ({self.keys})"

    def describe(self) -> list[str]:
        """Return a line if the learning rate of the last step taken has changed."""
        step, old, new = self.step, self.old_rates, self.new_rates
        # A change of later steps bends no curve here.
        if old[step - 1] == new[step - 1] or step == new.steps:
            return []
        return [
            f"the learning-rate schedule changed ({self.keys}): the learning rate goes"
            f" from {old[step - 1]:.2e} in step {step} to {new[step]:.2e} in step"
            f" {step + 1}"
        ]


def with_schedule_change(
    c: schema.Config, checkpoint: Restored
) -> tuple[Restored, ScheduleChange | None]:
    """Return a checkpoint with the changes of the schedule, and the newest change.

    The checkpoint's meta has all changes since the run began. The newest change is None
    if the run starts here.
    """
    step = checkpoint.step
    if not step:
        return checkpoint, None
    saved = saved_config(checkpoint.meta)
    keys = changed_schedule_keys(saved, c)
    old_rates, new_rates = build_learning_rates(saved), build_learning_rates(c)
    is_past = bool(keys) and not new_rates.begins_like(old_rates, step)
    change = ScheduleChange(step, keys, old_rates, new_rates, is_past)
    changes = list(checkpoint.meta.get("schedule_changes") or ())
    # A fork's steps so far are those of another run.
    if change.is_past and not checkpoint.is_fork:
        changes.append(str(change))
    meta = checkpoint.meta | {"schedule_changes": changes}
    return checkpoint._replace(meta=meta), change


def changed_schedule_keys(saved: schema.Config, c: schema.Config) -> str:
    """Return the keys of the learning-rate schedule that changed, in words."""
    old, new = dict(flatten(to_tree(saved))), dict(flatten(to_tree(c)))
    return "; ".join(
        f"{key}={as_typed(new[key])}, was {as_typed(old.get(key))}"
        for key in new
        if old.get(key) != new[key] and in_groups(key, SCHEDULE_KEYS)
    )


def describe_change(
    c: schema.Config, checkpoint: Restored, change: ScheduleChange | None
) -> list[str]:
    """Return lines about changes of batch size and schedule in a resumed run."""
    if change is None:
        return []
    lines = describe_batch_change(saved_config(checkpoint.meta), c, checkpoint.step)
    return lines + change.describe()


def describe_other_machine(
    c: schema.Config, w: Workload, checkpoint: Restored
) -> list[str]:
    """Return lines if a run resumes on other devices, or with another JAX.

    The mesh, and versions and settings of JAX, are compared too. Checkpoints of older
    versions do not say these.
    """
    if not 0 < checkpoint.step < c.train.steps:
        return []
    start = f"resumed after step {checkpoint.step:,}"
    lines = []
    devices, saved_devices = describe_mesh(w.mesh), checkpoint.meta.get("devices")
    if saved_devices not in (None, devices):
        lines.append(
            f"{start} on other devices: {devices} (was {saved_devices}); sums are taken"
            " in another order, so losses can differ slightly from those of the same"
            " devices"
        )
    # A validation text shorter than a batch is cut into rows by the number of devices.
    rows, saved_rows = w.data.val.batch_size, checkpoint.meta.get("validation_rows")
    if saved_rows not in (None, rows) and not checkpoint.is_fork:
        lines.append(
            f"{start} on other devices, where a batch of the validation has {rows}"
            f" sequences of its text (was {saved_rows}): validation losses are not"
            " comparable with earlier ones, and step=best compares those from here on"
        )
    saved = checkpoint.meta.get("settings") or {}
    changed = [
        f"{name}={value} (was {saved[name]})"
        # From the settings of now: what an older version did not save counts as equal.
        for name, value in numeric_settings().items()
        if saved.get(name, value) != value
    ]
    if changed:
        lines.append(
            f"{start} with {', '.join(changed)}: losses can differ from those without"
            " this change"
        )
    return lines


def describe_batch_change(
    old: schema.Config, new: schema.Config, step: int
) -> list[str]:
    """Return a line about the tokens that a changed batch size skips or repeats."""
    was, now = old.train.batch_tokens, new.train.batch_tokens
    if was == now:
        return []
    # A batch is a function of the step, so positions count steps, not tokens.
    effect = "are left out" if now > was else "are seen twice"
    return [
        f"train.batch_tokens={now:,} (was {was:,}): batches are counted in steps, so"
        f" after step {step:,} the data continue at token {step * now:,}, not"
        f" {step * was:,}; the {step * abs(now - was):,} tokens between {effect}"
    ]
