"""Find the state that a run starts from: its own newest checkpoint, another run's, or a
new one.
"""

import dataclasses
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from trainer.config.resume import read_saved
from trainer.config.schema import Resume
from trainer.errors import UserError
from trainer.files import check_no_links, saved_steps
from trainer.models.other_formats import check_format
from trainer.models.weight_files import weight_files
from trainer.parallel.diloco import DiLoCoSettings
from trainer.parallel.mesh import replicated
from trainer.run.checkpoint import DAMAGED, Checkpointer, Restored
from trainer.run.compatibility import (
    check_no_replicas,
    check_same_model,
    check_same_precision,
    check_same_trainable,
)
from trainer.run.converting import convert_state
from trainer.run.metadata import Metadata, saved_config, saved_policy
from trainer.run.phases import Phases, saved_task
from trainer.run.rundir import check_trained_with, is_in_use
from trainer.step.state import TrainState, first_nonfinite_array
from trainer.text import override
from trainer.workload import TrainTask, abstract_state

# Keys of meta that describe the log of the run that saved it. A fork drops them.
OWN_META = ("tracker_id", "log", "unfinished")


def check_start(
    run_dir: Path, source: str, step: int | None, init_from: str | None
) -> None:
    """Raise UserError before data are prepared if there is nothing to start from.

    Args:
      run_dir: the run directory.
      source: `resume.source`: `auto`, `none`, or another run's directory.
      step: that of the other run's checkpoint; None: the newest.
      init_from: the weights to start from; None: the run initializes its own.

    Raises:
      UserError: `source` is `none`, but there are checkpoints; or there is no such run,
        checkpoint or weights.
    """
    # By the names of folders: opening the checkpoints reads the metadata of all.
    own_steps = saved_steps(run_dir)
    # A new run among old checkpoints would be taken for a continuation of the old run.
    if own_steps and source == "none":
        raise UserError(
            f"run_dir={run_dir} holds checkpoints of steps {own_steps} and resume=none;"
            " choose another run_dir, or resume=auto to continue"
        )
    # `resume` and `init_from` say where the run began. It goes on from its own
    # checkpoint.
    if own_steps:
        return
    check_undamaged(run_dir)
    if source in ("auto", "none"):
        # Ignored, `resume.step` would look as if the run went back.
        if step is not None:
            raise UserError(
                f"resume.step={step} is a step of another run's checkpoints; add"
                " resume=RUN, or leave it out"
            )
        if init_from is not None:
            check_weights(Path(init_from))
        return
    other_steps = saved_steps(Path(source))
    if not other_steps:
        raise UserError(
            f"resume={source} has no checkpoints; {runs_below(Path(source))}"
        )
    if step is not None and step not in other_steps:
        raise UserError(
            f"resume.step={step}, but resume={source} has checkpoints of steps"
            f" {', '.join(map(str, other_steps))}; a run saves one every"
            " checkpoint.every steps and at its end, and keeps the newest"
            " checkpoint.keep and the best: set these in a run that is to be forked"
        )


def check_undamaged(run_dir: Path) -> None:
    """Raise UserError if all checkpoints of a run are damaged.

    The run would otherwise start again at step 0, and overwrite its log.
    """
    folder = run_dir / "checkpoints" / DAMAGED
    if any(folder.glob("*")):
        raise UserError(
            f"no usable checkpoint in run_dir={run_dir}: all are damaged, and in"
            f" {folder}; restore an intact one from a backup, or choose another"
            f" run_dir, or remove {folder} to start this run anew"
        )


def check_weights(init_from: Path) -> None:
    """Raise UserError if the weights of `init_from` are missing or cannot be read.

    Also raise it if they are of a run that is still training: its newest checkpoint
    would depend on how long this start takes.
    """
    if not init_from.exists():
        raise UserError(
            f"init_from={init_from} does not exist; valid: a run directory, a Hugging"
            " Face directory, or a .safetensors file"
        )
    if (init_from / "checkpoints").is_dir():
        # Somebody else may have made the run.
        check_no_links(init_from)
        if is_in_use(init_from):
            raise UserError(
                f"init_from={init_from} is still training, so its newest checkpoint"
                " changes; wait until it ends, or take an export of it: scalify-trainer"
                f" export {override('run_dir', init_from)} step=N out=DIRECTORY"
            )
        return
    check_format(init_from)
    if init_from.is_dir():
        weight_files(init_from)


def runs_below(directory: Path) -> str:
    """Return advice about a directory that is no run; it names the runs in it."""
    runs = sorted(
        (path.parent for path in directory.glob("*/checkpoints")),
        # Jobs of a sweep are numbered: 10 comes behind 9.
        key=lambda path: (len(path.name), path.name),
    )
    # Settings without a checkpoint may be a stranger's, and name any data to train on.
    if (directory / "config.yaml").is_file():
        return (
            "nothing was trained, and its saved settings are not trusted; re-run the"
            " command that started it, or choose another run"
        )
    if not runs:
        return "valid: auto, none, or a run directory"
    paths = ", ".join(str(path) for path in runs[:8])
    if len(runs) > 8:
        paths += ", ..."
    return (
        f"name one of the runs in it: {paths}; `scalify-trainer compare"
        f" {shlex.quote(f'runs={directory}')}` says which is the best"
    )


def starting_point(
    resume: Resume,
    run_dir: Path,
    checkpointer: Checkpointer,
    phases: Phases,
    first_state: Callable[[], TrainState],
) -> Restored:
    """Return the state to start from, with its step and meta.

    It waits until the state is computed, and checks that its weights and moments are
    finite.

    Args:
      resume: where to start; `check_start` has accepted it. If `run_dir` has
        checkpoints, the newest one is continued. Otherwise `auto` and `none` start from
        `first_state`. Any other `source` is a run, which is forked after its step
        `step`, and converted to this precision if `convert` is true.
      run_dir: the run directory.
      checkpointer: that of `run_dir`.
      phases: the phases of the run.
      first_state: makes the state before the first step.

    Raises:
      UserError: the state has another model or precision, or is not finite.
    """
    if not checkpointer.steps():
        # `checkpointer` may have moved the damaged ones away when it was made.
        check_undamaged(run_dir)
    # The run's own checkpoints come first, so that the command that started a fork also
    # resumes it.
    if checkpointer.steps():
        step, meta, _ = checkpointer.manifest()
        check_fork(resume, run_dir, meta.get("forked"))
        task = phases.containing(step).task
        check_same_precision(
            f"run_dir={run_dir}",
            saved_policy(meta),
            task.model.policy,
            f"choose another run_dir with {override('resume', run_dir)}"
            " resume.convert=true, which converts the state",
        )
        checkpoint = restore_state(checkpointer, task)
        where = f"checkpoint {checkpoint.step} of run_dir={run_dir}"
        advice = (
            "start another run from an earlier checkpoint:"
            f" {override('resume', run_dir)} resume.step=STEP run_dir=NEW"
        )
    elif resume.source in ("auto", "none"):
        checkpoint = Restored(0, first_state(), {})
        where, advice = "the initial state", "choose other weights in init_from"
    else:
        checkpoint = restore_other(resume, phases)
        where = f"checkpoint {checkpoint.step} of resume={resume.source}"
        advice = "choose an earlier one: resume.step=STEP"
    # Later states would be no better, and the run would end as diverged.
    check_state_finite(checkpoint, where, advice)
    return checkpoint


def check_fork(resume: Resume, run_dir: Path, forked: Mapping[str, Any] | None) -> None:
    """Check that a run is a fork of the run that `resume` names.

    Args:
      resume: the command's.
      run_dir: a run with checkpoints of its own.
      forked: the run and the step from which it was forked; None: it is no fork.
    """
    source, step = resume.source, resume.step
    # Paths may be relative, or lead through links.
    is_same_run = os.path.realpath(source) == os.path.realpath(run_dir)
    if source in ("auto", "none") or is_same_run:
        return
    is_of_source = forked is not None and (
        os.path.realpath(forked["run"]) == os.path.realpath(source)
        and step in (None, forked["step"])
    )
    if not is_of_source:
        origin = "it is not a fork"
        if forked is not None:
            origin = f"it is a fork of {forked['run']} after step {forked['step']}"
        wanted = source if step is None else f"{source} after step {step}"
        raise UserError(
            f"run_dir={run_dir} holds another run ({origin}), which this command would"
            f" resume; to fork {wanted}, choose another run_dir; to resume the run,"
            " leave resume out"
        )


def check_state_finite(checkpoint: Restored, where: str, advice: str) -> None:
    """Raise UserError for a state with weights or moments that are not finite.

    The message names the state as `where`, and ends with `advice`.
    """
    name = first_nonfinite_array(checkpoint.state)
    if name is not None:
        raise UserError(f"{where}: {name} is not finite; {advice}")


def restore_other(resume: Resume, phases: Phases) -> Restored:
    """Restore another run's state for this run's task, as the start of a fork.

    Arguments and errors are those of `starting_point`.
    """
    source, step = resume.source, resume.step
    with Checkpointer.reading(Path(source) / "checkpoints") as checkpointer:
        manifest = checkpointer.manifest(step)
        step, meta = manifest.step, manifest.meta
        # The fork's settings are those of the file, unless its command changes them.
        file = Path(source) / "config.yaml"
        if file.is_file():
            check_trained_with(Path(source), meta["config"], read_saved(file))
        # The form of the saved state is that of the phase of its last step.
        task = phases.containing(step).task
        check_same_model(f"resume={source}", meta["model"], task.model.spec)
        optimizer = saved_config(meta).optimizer.name
        wanted = task.optimizer_settings.name
        if optimizer != wanted:
            raise UserError(
                f"resume={source} was trained with optimizer={optimizer}, whose state"
                f" is not that of {wanted}; set optimizer={optimizer}, or"
                f" take its weights alone: init_from={source}"
            )
        check_same_trainable(source, meta, task)
        policy = saved_policy(meta)
        if not resume.convert:
            check_same_precision(
                f"resume={source}",
                policy,
                task.model.policy,
                "set resume.convert=true, which converts the state",
            )
        # The step by number: a run at work may save a newer one meanwhile.
        checkpoint = restore_state(checkpointer, task, step)
    state = checkpoint.state
    # Converted here: what follows takes the state for one of this run's precision.
    if policy != task.model.policy:
        state = convert_state(task, state, policy, phases.first.workload.seed)
    meta = Metadata({k: v for k, v in checkpoint.meta.items() if k not in OWN_META})
    meta |= {
        "precision": dataclasses.asdict(task.model.policy),
        "trainable": list(task.trainable),
        "forked": {"run": source, "step": checkpoint.step},
    }
    # The step is that of the source: the fork reads the batches that come next.
    return Restored(checkpoint.step, state, meta)


def restore_state(
    checkpointer: Checkpointer,
    task: TrainTask,
    step: int | None = None,
    *,
    candidates: Sequence[int] | None = None,
) -> Restored:
    """Restore a state on the mesh of a task, in the precision in which it was saved.

    A run with DiLoCo replicas may have had another number of them. If it had none, all
    replicas start from its weights, moments and steps.

    Args:
      checkpointer: that of the saved run.
      task: the task that continues the state.
      step: that of the checkpoint; None: the newest.
      candidates: steps to try instead of `step`, as in `Checkpointer.restore`.

    Raises:
      UserError: the state is of replicas and the task has none, or as for
        `Checkpointer.restore`.
    """

    def abstract_saved_state(meta: Mapping[str, Any]) -> TrainState:
        if task.diloco is None:
            check_no_replicas(str(checkpointer.directory.parent), meta)
        saved = with_saved_arrays(task, meta)
        if saved.diloco is None or saved.diloco == task.diloco:
            return abstract_state(saved)
        # Shapes are traced on one device, because the number of devices need not divide
        # the saved number of replicas.
        first_device = Mesh(
            task.mesh.devices[:1, :1, :1, :1],
            task.mesh.axis_names,
            axis_types=task.mesh.axis_types,
        )
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=replicated(task.mesh)
            ),
            abstract_state(saved._replace(mesh=first_device)),
        )

    checkpoint = checkpointer.restore(abstract_saved_state, step, candidates=candidates)
    # If the newest checkpoint is damaged, this is the meta of an older one.
    saved = with_saved_arrays(task, checkpoint.meta)
    if saved.diloco == task.diloco:
        return checkpoint
    target = saved._replace(diloco=task.diloco)
    convert = target.with_replicas if saved.diloco is None else target.convert_replicas
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(target))
    # Shardings are given, or the compiler would choose where the replicas lie.
    state = jax.jit(convert, out_shardings=shardings)(checkpoint.state)
    return checkpoint._replace(state=state)


def with_saved_arrays(task: TrainTask, meta: Mapping[str, Any]) -> TrainTask:
    """Return a task whose state has the arrays of a checkpoint, in the precision in
    which they were saved.

    Its `diloco` is the task's own if that gives the same arrays, else the saved one.
    """
    saved = saved_task(meta, task)
    diloco = saved_diloco(meta, task.diloco)
    if has_same_form(diloco, task.diloco):
        return saved
    return saved._replace(diloco=diloco)


def saved_diloco(
    meta: Mapping[str, Any], diloco: DiLoCoSettings | None
) -> DiLoCoSettings | None:
    """Return `diloco` with the saved settings that decide which arrays a state has.

    Returns None if the checkpoint was trained without replicas, or `diloco` is None.
    """
    saved = saved_config(meta).diloco
    if saved.replicas is None or diloco is None:
        return None
    return diloco._replace(
        num_replicas=saved.replicas,
        participants=saved.replicas,  # any valid value: it decides no array
        momentum=saved.outer_momentum or 0.0,
        feedback=bool(saved.error_feedback) and saved.outer_grad != "fp32",
    )


def has_same_form(saved: DiLoCoSettings | None, diloco: DiLoCoSettings | None) -> bool:
    """Return whether states of both settings have the same arrays."""
    if saved is None or diloco is None:
        return saved is diloco
    # Without momentum there is no array for it; its size changes none.
    return (saved.num_replicas, saved.feedback, saved.momentum > 0) == (
        diloco.num_replicas,
        diloco.feedback,
        diloco.momentum > 0,
    )
