"""The startup log: what a run prints before its first step, and records of its
origin.
"""

from pathlib import Path

import jax
import numpy as np

from trainer.assembly.build import affects_learning_rates, build_learning_rates
from trainer.config import schema
from trainer.config.fields import flatten, to_tree
from trainer.data.dataset import Dataset
from trainer.models.custom import CUSTOM
from trainer.models.flops import param_count
from trainer.parallel.replicas import DiLoCoStep
from trainer.report.history import FORKED, SCHEDULE_CHANGED, WEIGHTS
from trainer.report.messages import (
    describe,
    describe_mesh,
    rounding_of,
    schedule_change,
)
from trainer.run.checkpoint import Restored
from trainer.run.initial_weights import describe_init
from trainer.run.libraries import numeric_settings
from trainer.run.metadata import saved_config
from trainer.run.phases import Phases, TrainingPhase
from trainer.run.vocabulary import describe_embeddings
from trainer.version import __version__
from trainer.workload import Workload


def describe_run(
    c: schema.Config, w: Workload, step: jax.stages.Compiled | DiLoCoStep | None = None
) -> list[str]:
    """Return lines about what is trained, with the memory that a compiled step
    needs.
    """
    lines = describe(
        w,
        model="of your own" if w.model.family is CUSTOM else c.model.name,
        precision=c.precision.name,
        batch_tokens=c.train.batch_tokens,
        accum=c.train.grad_accum_steps,
        step=step,
    )
    return [f"scalify-trainer {__version__}", *lines, *describe_validation(c, w.data)]


def describe_validation(c: schema.Config, data: Dataset) -> list[str]:
    """Return a line where validations during the training may read only some of the
    files.
    """
    files = len(data.manifest.source.get("digests", ()))
    batches = c.train.eval_batches
    if files < 2 or not c.train.eval_every or data.val.steps_per_epoch <= batches:
        return []
    return [
        f"a validation reads the first {batches * c.train.batch_tokens:,} of"
        f" {data.manifest.tokens('val'):,} validation tokens, in the order of the"
        f" {files:,} files; train.eval_batches={data.val.steps_per_epoch} reads all"
    ]


def describe_phase(phases: Phases, stage: TrainingPhase) -> list[str]:
    """Return a line about a phase, if the run has several."""
    if len(phases.stages) == 1:
        return []
    task, config = stage.task, stage.config
    number = phases.stages.index(stage) + 1
    parameters = param_count(task.model.spec, task.trained)
    trained = f"{', '.join(task.trainable) or 'all'} ({parameters:,} parameters)"
    precision = config.precision
    rounding = rounding_of(precision.weights, precision.weights_rounding)
    return [
        f"phase {number} of {len(phases.stages)}, steps {stage.start + 1:,} to"
        f" {stage.until:,}: {trained}, {precision.name}{rounding},"
        f" {config.schedule.name} from {config.optimizer.lr:g}"
    ]


def describe_start(c: schema.Config, w: Workload, checkpoint: Restored) -> list[str]:
    """Return a line about the weights or the checkpoint that a run starts from."""
    if checkpoint.step:
        if checkpoint.is_fork:
            return [f"forked from {checkpoint.origin}: a run of its own from here on"]
        if checkpoint.step >= c.train.steps:
            return []
        return [f"resuming after step {checkpoint.step:,}"]
    if c.init_from is None:
        return []
    source, tokenizer = Path(c.init_from), w.data.tokenizer
    if c.init.embeddings is not None:
        return [describe_embeddings(source, tokenizer, c.init.embeddings)]
    params = checkpoint.state.params
    return [describe_init(source, tokenizer, w.model.spec, params)]


def recorded_origin(c: schema.Config, checkpoint: Restored) -> dict[str, str]:
    """Return the run or the weights that a run began with, and how its schedule
    changed, for its report.
    """
    facts = {}
    if checkpoint.origin:
        facts[FORKED] = checkpoint.origin
    elif c.init_from is not None:
        facts[WEIGHTS] = c.init_from
    if changes := schedule_changes(c, checkpoint):
        facts[SCHEDULE_CHANGED] = "; ".join(changes)
    return facts


def schedule_changes(c: schema.Config, checkpoint: Restored) -> list[str]:
    """Return when and how the learning rates of a resumed run became others than those
    that it had begun with, in words.
    """
    changes = list(checkpoint.meta.get("schedule_changes") or ())
    step = checkpoint.step
    if not step or checkpoint.is_fork:
        return changes
    saved = saved_config(checkpoint.meta)
    saved_rates, rates = (build_learning_rates(x)[:step] for x in (saved, c))
    if not np.array_equal(saved_rates, rates):
        changes.append(f"after step {step:,} ({changed_schedule(saved, c)})")
    return changes


def changed_schedule(saved: schema.Config, c: schema.Config) -> str:
    """Return the keys of the learning-rate schedule that changed, in words."""
    old, new = dict(flatten(to_tree(saved))), dict(flatten(to_tree(c)))
    return "; ".join(
        f"{key}={new[key]}, was {old.get(key)}"
        for key in new
        if old.get(key) != new[key] and affects_learning_rates(key)
    )


def describe_change(c: schema.Config, checkpoint: Restored) -> list[str]:
    """Return how batches and learning rates of a resumed run change from here on."""
    if not checkpoint.step:
        return []
    saved = saved_config(checkpoint.meta)
    lines = describe_batch_change(saved, c, checkpoint.step)
    return lines + schedule_change(
        checkpoint.step,
        build_learning_rates(saved),
        build_learning_rates(c),
        changed_schedule(saved, c),
    )


def describe_other_devices(
    c: schema.Config, mesh: jax.sharding.Mesh, checkpoint: Restored
) -> list[str]:
    """Return a line where a run resumes on other devices, or on another mesh of them.

    Checkpoints of older versions do not say their devices.
    """
    now, was = describe_mesh(mesh), checkpoint.meta.get("devices")
    if was in (None, now) or not 0 < checkpoint.step < c.train.steps:
        return []
    return [
        f"resumed after step {checkpoint.step:,} on other devices: {now} (was {was});"
        " sums are taken in another order, so losses can differ slightly from those of"
        " the same devices"
    ]


def describe_other_settings(c: schema.Config, checkpoint: Restored) -> list[str]:
    """Return a line where a run resumes with other versions or settings of JAX.

    Checkpoints of older versions do not say them.
    """
    was = checkpoint.meta.get("settings") or {}
    changed = [
        f"{name}={now} (was {was[name]})"
        for name, now in numeric_settings().items()
        if was.get(name, now) != now
    ]
    if not changed or not 0 < checkpoint.step < c.train.steps:
        return []
    return [
        f"resumed after step {checkpoint.step:,} with {', '.join(changed)}: losses can"
        " differ from those without this change"
    ]


def describe_batch_change(
    old: schema.Config, new: schema.Config, step: int
) -> list[str]:
    """Return what another batch size means for the data: steps count batches."""
    was, now = old.train.batch_tokens, new.train.batch_tokens
    if was == now:
        return []
    between = "are left out" if now > was else "are seen twice"
    return [
        f"train.batch_tokens={now:,} (was {was:,}): batches are counted in steps, so"
        f" after step {step:,} the data go on at token {step * now:,}, not"
        f" {step * was:,}; the {step * abs(now - was):,} tokens between {between}"
    ]
