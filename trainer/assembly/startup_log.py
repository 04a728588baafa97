"""What a run says of itself before its first step, and what it records of where it
begins.
"""

from pathlib import Path

import jax

from trainer import __version__
from trainer.assembly.build import build_learning_rates, decides_rates
from trainer.config import schema
from trainer.config.fields import from_saved, to_tree
from trainer.models.custom import CUSTOM
from trainer.models.family import param_count
from trainer.parallel.replicas import DiLoCoStep
from trainer.report.history import FORKED, WEIGHTS
from trainer.report.messages import describe, rounding_of, schedule_change
from trainer.run.checkpoint import Restored
from trainer.run.phases import Phases, Stage
from trainer.run.rundir import flatten
from trainer.run.start import describe_init, describe_origin, is_fork
from trainer.run.vocabulary import describe_embeddings
from trainer.workload import Workload


def describe_run(
    c: schema.Config, w: Workload, step: jax.stages.Compiled | DiLoCoStep | None = None
) -> list[str]:
    """What is about to be trained, a line each; with the memory that a compiled step
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
    return [f"scalify-trainer {__version__}", *lines]


def describe_phase(phases: Phases, stage: Stage) -> list[str]:
    """A line about a phase, where a run has several."""
    if len(phases.stages) == 1:
        return []
    task, of = stage.task, stage.config
    part = (
        f"{', '.join(task.trainable) or 'all'}"
        f" ({param_count(task.model.spec, task.trained):,} parameters)"
    )
    number = f"{phases.stages.index(stage) + 1} of {len(phases.stages)}"
    steps = f"steps {stage.start + 1:,} to {stage.until:,}"
    rounding = rounding_of(of.precision.weights, of.precision.weights_rounding)
    precision = f"{of.precision.name}{rounding}"
    return [
        f"phase {number}, {steps}: {part}, {precision}, {of.schedule.name} from"
        f" {of.optimizer.lr:g}"
    ]


def describe_start(c: schema.Config, w: Workload, found: Restored) -> list[str]:
    """A line about what a run begins with, where that is not nothing."""
    if not found.step:
        if c.init_from is None:
            return []
        source, method = Path(c.init_from), c.init.embeddings
        if method is not None:
            return [describe_embeddings(source, w.data.tokenizer, method)]
        return [
            describe_init(source, w.data.tokenizer, w.model.spec, found.state.params)
        ]
    if is_fork(found):
        return [
            f"forked from {describe_origin(found.meta)}: what follows is a run of"
            " its own"
        ]
    return [f"resuming after step {found.step:,}"] if found.step < c.train.steps else []


def begun_from(c: schema.Config, found: Restored) -> dict[str, str]:
    """What a run began with, for its report; empty where that was nothing."""
    if origin := describe_origin(found.meta):
        return {FORKED: origin}
    return {} if c.init_from is None else {WEIGHTS: c.init_from}


def describe_change(c: schema.Config, found: Restored) -> list[str]:
    """What a resumed run does otherwise from here on."""
    if not found.step:
        return []
    before = from_saved(schema.Config, found.meta["config"])
    old, new = dict(flatten(to_tree(before))), dict(flatten(to_tree(c)))
    changed = {
        key: (old.get(key), new[key])
        for key in new
        if old.get(key) != new[key] and decides_rates(key)
    }
    return schedule_change(
        found.step, build_learning_rates(before), build_learning_rates(c), changed
    )
