"""Train as a checked configuration says, or only describe what would be trained."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from scalify_core.array.scaled_array import is_scaled_array
from trainer.assembly.build import (
    build_batch,
    build_learning_rates,
    build_phases,
    build_state,
    build_throughput,
    build_totals,
    build_watchdog,
    build_workload,
    check_fp8,
    train_batches,
)
from trainer.assembly.callbacks import build_callbacks, tokens_read
from trainer.assembly.hooks import NO_HOOKS, Hooks
from trainer.assembly.startup_log import (
    describe_change,
    describe_other_devices,
    describe_other_settings,
    describe_phase,
    describe_run,
    describe_start,
    recorded_origin,
    schedule_history,
)
from trainer.config import schema
from trainer.config.fields import to_tree
from trainer.errors import DISK_FULL, MAKE_ROOM, UserError
from trainer.files import path_of
from trainer.observe.display import Display, Output
from trainer.observe.nan_diagnosis import make_diagnose
from trainer.observe.progress import log_duration
from trainer.observe.trackers.choose import check_kind, make_tracker
from trainer.observe.trackers.protocol import Tracker
from trainer.parallel.mesh import place_batch
from trainer.parallel.processes import AsyncMax, raise_together, start_processes
from trainer.report.messages import (
    describe_communication,
    describe_idle,
    describe_mesh,
    facts_of,
    farewell,
)
from trainer.report.page import write_report
from trainer.report.run_records import FINAL_VALIDATION
from trainer.run.checkpoint import Checkpointer, Restored
from trainer.run.compatibility import architecture, check_same_run
from trainer.run.environment import add_facts, write_environment
from trainer.run.initial_weights import keep_tokenizer
from trainer.run.inputs import check_same_inputs
from trainer.run.libraries import (
    numeric_settings,
    prepare_jax,
    use_compilation_cache,
)
from trainer.run.loop import train
from trainer.run.phases import Phases, enter_phase, saved_task
from trainer.run.rundir import RunDir, RunDirLost
from trainer.run.session import Recovery, Session, StepPlan, TrainData, TrainLoop
from trainer.run.shutdown import Timeouts, leave_within
from trainer.run.start import check_start, restore_replicas, starting_point
from trainer.run.totals import continued_totals
from trainer.step.state import TrainState, from_checkpoint_form, to_checkpoint_form
from trainer.step.state_tree import leaf_names
from trainer.step.step import StepFn, Tokens
from trainer.workload import TrainTask, Workload, abstract_state, compile_step

COMPILING = "compiling the training step"


class Experiment(NamedTuple):
    """The configuration, the workload and its phases, and the program's parts."""

    config: schema.Config
    workload: Workload
    phases: Phases
    hooks: Hooks


def run(
    config: schema.Config,
    overrides: Sequence[str] = (),
    hooks: Hooks = NO_HOOKS,
    fixed: Collection[str] = (),
) -> tuple[int, TrainLoop | None]:
    """Train; with `dry_run` only describe what would be trained.

    Args:
      config: the checked configuration.
      overrides: the user's overrides, for the report.
      hooks: the program's parts of the run.
      fixed: keys and groups that may not differ from the run in this directory; see
        `RunDir.check`.

    Returns:
      The exit code, and the loop as it ended; None after a dry run.
    """
    console = set_up_process(config)
    if config.dry_run:
        describe_only(build_experiment(config, hooks), console)
        return 0, None
    with RunDir(Path(config.run_dir)) as directory, explain_full_disk(directory.path):
        directory.check(to_tree(config), fixed=fixed)
        resume = config.resume
        check_start(directory.path, resume.source, resume.step, config.init_from)
        experiment = build_experiment(config, hooks)
        check_same_inputs(config, experiment.workload.data)
        with Display(config.train.steps, console=console) as display:
            session, checkpoint = open_session(
                experiment, directory, display, overrides
            )
            with closing(session) as ending:
                while True:  # one iteration for each training phase
                    loop = build_loop(experiment, session, checkpoint)
                    ending.exit_code = train(loop)
                    if ending.exit_code or loop.step >= config.train.steps:
                        break
                    checkpoint = end_of_phase(loop)
            farewell(
                loop,
                ending.exit_code,
                has_report=ending.has_report,
                has_launcher=config.launcher.kind is not None,
            )
            return ending.exit_code, loop


def set_up_process(config: schema.Config) -> Output:
    """Prepare JAX, and join the other processes of the run; return the console."""
    check_kind(config.tracker.kind)
    prepare_jax()
    if config.has_processes:
        start_processes(to_tree(config) | {"environment": numeric_settings()})
    console = Output(soft_wrap=True, quiet=jax.process_index() > 0)
    warning = use_compilation_cache(config.compile_cache)
    if warning is not None:
        console.print(warning)
    return console


def build_experiment(config: schema.Config, hooks: Hooks) -> Experiment:
    """Prepare the data, and build the model, the optimizer and the mesh."""
    workload = build_workload(config, hooks.data, hooks.make_model)
    return Experiment(config, workload, build_phases(config, workload), hooks)


def describe_only(experiment: Experiment, console: Output) -> None:
    """Compile the step of every phase, and print what would be trained."""
    for phase in experiment.phases.items:
        workload = experiment.workload._replace(task=phase.task)
        with log_duration(COMPILING, console.print):
            step = compile_step(phase.task, build_batch(phase.config, workload.mesh))
        fp8 = check_fp8(phase.config, phase.task, step)
        for line in describe_phase(experiment.phases, phase):
            console.print(line)
        for line in describe_run(phase.config, workload, step):
            console.print(line)
        for line in fp8.lines if fp8 else []:
            console.print(line)


@contextlib.contextmanager
def explain_full_disk(run_dir: Path) -> Iterator[None]:
    """Turn the error of a full disk into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise UserError(
            f"cannot write {error.filename or run_dir}: {error.strerror}; {MAKE_ROOM}"
        ) from error


@contextlib.contextmanager
def leave_after_error(seconds: float) -> Iterator[None]:
    """End a process of several within `seconds` seconds after an error.

    Opening and closing are collective: other processes would wait for this one.
    """
    try:
        yield
    except BaseException as error:
        if jax.process_count() > 1:
            leave_within(seconds, error)
        raise


def open_session(
    experiment: Experiment,
    directory: RunDir,
    display: Display,
    overrides: Sequence[str],
) -> tuple[Session, Restored]:
    """Find the state to start from, record the configuration, and start the tracker."""
    config, workload, phases, hooks = experiment
    watchdog = config.watchdog
    with leave_after_error(watchdog.stop_seconds):
        checkpointer = Checkpointer(
            directory.path / "checkpoints",
            keep=config.checkpoint.keep,
            keep_best=config.checkpoint.keep_best,
        )

        def first_state() -> TrainState:
            return build_state(config, workload._replace(task=phases.items[0].task))

        with log_duration("making or restoring the state", display.message):
            checkpoint = starting_point(
                config.resume, directory.path, checkpointer, phases, first_state
            )
    check_same_run(checkpoint, config.train.steps, workload.data.manifest)
    if checkpoint.step and not checkpoint.is_fork:
        directory.check_trained_with(checkpoint.meta["config"], to_tree(config))
        is_over = checkpoint.step >= config.train.steps
        if is_over and checkpoint.meta.get("unfinished") is None:
            directory.check_no_effect_after_end(checkpoint.step, to_tree(config))
    with raise_together(), explain_full_disk(directory.path):
        directory.write_config(to_tree(config))
        final = tokens_read(workload.data.val, config.train.final_eval_batches)
        facts = facts_of(workload) | recorded_origin(config, checkpoint)
        facts[FINAL_VALIDATION] = f"{final:,}"
        write_environment(directory.path, facts, overrides)
        if jax.process_index() == 0:
            # `restore_run` needs the tokenizer beside the checkpoint.
            workload.data.tokenizer.save(directory.path)
            sources = [] if config.init_from is None else [config.init_from]
            if checkpoint.is_fork:
                sources.append(config.resume.source)
            keep_tokenizer(
                [path_of(source) for source in sources],
                directory.path,
                workload.data.tokenizer,
            )
    phase = phases.phase_after(checkpoint)
    for line in [
        *describe_run(phase.config, workload._replace(task=phase.task)),
        *describe_idle(phase.task.model.policy, overrides),
        *describe_start(config, workload, checkpoint),
        *describe_change(config, checkpoint),
    ]:
        display.message(line)
    session = Session(
        run_dir=directory.path,
        verify_run_dir=directory.verify_ownership,
        restore_config=directory.restore_config,
        checkpointer=checkpointer,
        tracker=start_tracker(config, directory.path, checkpoint, hooks.tracker),
        display=display,
        # Made before the step is compiled: its first call connects the processes, which
        # may finish compiling minutes apart.
        max_over_processes=AsyncMax(workload.mesh),
        timeouts=Timeouts(
            watchdog.stop_seconds, watchdog.stall_seconds, watchdog.hang_seconds
        ),
        owns_process=hooks.owns_process,
        remote_signal=hooks.remote_signal,
    )
    return session, checkpoint


def start_tracker(
    config: schema.Config, run_dir: Path, checkpoint: Restored, custom: Tracker | None
) -> Tracker:
    """Start the trackers of a run, which drop rows from after the checkpoint."""
    settings = dataclasses.asdict(config.tracker)
    settings = {k: v for k, v in settings.items() if k != "kind" and v is not None}
    return make_tracker(
        config.tracker.kind,
        run_dir,
        start=checkpoint.step,
        redo_row=checkpoint.meta.get("unfinished") is not None,
        config=to_tree(config),
        run_id=checkpoint.meta.get("tracker_id"),
        checkpoint_state=checkpoint.meta.get("log"),
        is_fork=checkpoint.is_fork,
        init=settings | {"name": config.tracker.name or run_dir.name},
        custom=custom,
    )


@dataclasses.dataclass
class Ending:
    """The end of a run; its exit code is 1 until it is known."""

    exit_code: int = 1
    has_report: bool = False


@contextlib.contextmanager
def closing(session: Session) -> Iterator[Ending]:
    """Finish the tracker with the exit code, write the report, close the checkpoints.

    Each is done even if the one before it fails. A run that lost its directory writes
    neither log nor report.
    """
    ending = Ending()
    with contextlib.ExitStack() as stack:
        # Last in, first out: the report is written when the tracker has finished.
        stack.callback(session.checkpointer.close)
        stack.callback(report_on, session.run_dir, session.display, ending)
        stack.callback(lambda: session.tracker.finish(ending.exit_code))
        try:
            with (
                leave_after_error(session.timeouts.stop),
                explain_lost_directory(session),
            ):
                yield ending
        except RunDirLost:
            stack.pop_all()
            # An unfinished save fails too.
            with contextlib.suppress(UserError, OSError):
                session.checkpointer.close()
            raise
        except UserError as error:
            ending.exit_code = error.exit_code
            raise
        except OSError:
            ending.exit_code = UserError.exit_code
            raise


@contextlib.contextmanager
def explain_lost_directory(session: Session) -> Iterator[None]:
    """Replace the error of a file by `RunDirLost`, if the run lost its directory."""
    try:
        yield
    except (UserError, OSError):
        session.verify_run_dir()
        raise


def report_on(run_dir: Path, display: Display, ending: Ending) -> None:
    """Write report.html, in the first process and where there are rows."""
    if jax.process_index() == 0 and (run_dir / "metrics.jsonl").exists():
        try:
            write_report(run_dir)
            ending.has_report = True
        # A report that fails must not hide how the run ended.
        except Exception as error:
            reason = str(error) if isinstance(error, UserError) else repr(error)
            display.message(f"no report.html: {reason}")


def end_of_phase(loop: TrainLoop) -> Restored:
    """Return the state at the end of a phase, as a checkpoint would have it."""
    recovery = loop.recovery
    meta = recovery.meta | {
        "watchdog": recovery.watchdog.state(),
        "totals": dataclasses.asdict(loop.totals(loop.step)),
    }
    return Restored(loop.step, to_checkpoint_form(loop.state), meta)


def build_loop(
    experiment: Experiment, session: Session, checkpoint: Restored
) -> TrainLoop:
    """Compile the step of the phase that continues a checkpoint, and build its loop."""
    whole_config, workload, phases, hooks = experiment
    phase = phases.phase_after(checkpoint)
    config, task, mesh = phase.config, phase.task, workload.mesh
    workload = workload._replace(task=task)
    if phase is not phases.items[0]:
        add_facts(session.run_dir, facts_of(workload))
    display, tracker = session.display, session.tracker
    for line in describe_phase(phases, phase):
        display.message(line)
    # A restart from this checkpoint drops later rows: each event is logged once.
    event_step = checkpoint.step + 1
    if checkpoint.is_fork:
        tracker.event(event_step, f"forked from {checkpoint.origin}")
    for line in [
        *describe_other_devices(config, mesh, checkpoint),
        *describe_other_settings(config, checkpoint),
    ]:
        display.message(line)
        tracker.event(event_step, line)
    changes = schedule_history(whole_config, checkpoint)
    if checkpoint.step < whole_config.train.steps:
        for change in changes[len(checkpoint.meta.get("schedule_changes") or ()) :]:
            tracker.event(event_step, f"the learning-rate schedule changed {change}")
    task_of_checkpoint = saved_task(checkpoint.meta, task) if checkpoint.step else task
    state = from_checkpoint_form(
        enter_phase(task, checkpoint.state, task_of_checkpoint, workload.seed)
    )
    batch = build_batch(config, mesh)
    with log_duration(COMPILING, display.message):
        step = compile_step(task, batch, state)
    for line in describe_communication(task, step, config.diloco.bandwidth_gbps):
        display.message(line)
    fp8 = check_fp8(config, task, step)
    if fp8:
        for line in fp8.lines:
            display.message(line)
            tracker.event(event_step, line)
        tracker.summary({"fp8_flop_share": fp8.share})
    watchdog = build_watchdog(
        config.watchdog,
        config.precision.scaling,
        leaf_names(task.select_trained(state.params), is_scaled_array),
        checkpoint.meta.get("watchdog"),
    )
    totals = continued_totals(
        checkpoint.meta, checkpoint.step, build_totals(config, workload)
    )
    profile = config.profile.steps
    return TrainLoop(
        session=session,
        plan=StepPlan(
            steps=config.train.steps,
            phase_end=phase.until,
            learning_rates=build_learning_rates(whole_config),
            seed=np.uint32(config.seed),
            log_every=config.train.log_every,
            profile=(profile[0], profile[1]) if profile else None,
        ),
        data=TrainData(
            batches=train_batches(config, workload, phase.until),
            place=functools.partial(
                place_batch, accum=config.train.grad_accum_steps, mesh=mesh
            ),
        ),
        callbacks=build_callbacks(
            config,
            workload,
            batch,
            display.message,
            hooks.callbacks,
            totals=totals,
            tracked=config.tracker.kind != "none" or hooks.tracker is not None,
        ),
        recovery=Recovery(
            watchdog=watchdog,
            restore=make_restore(task, batch, session.checkpointer, workload.seed),
            diagnose=make_diagnose(task),
            meta=checkpoint_meta(whole_config, workload)
            | {
                "tracker_id": tracker.id,
                "forked": checkpoint.meta.get("forked"),
                "schedule_changes": changes,
            },
        ),
        throughput=build_throughput(config, workload),
        totals=totals,
        state=state,
        train_step=step,
        step=checkpoint.step,
        last_logged_step=checkpoint.step,
        unfinished=checkpoint.meta.get("unfinished"),
    )


def checkpoint_meta(config: schema.Config, workload: Workload) -> dict[str, Any]:
    """Return the description of a phase for its checkpoints, as JSON values."""
    model, tokenizer = workload.model, workload.data.tokenizer
    return {
        "config": to_tree(config),
        "trainable": list(workload.task.trainable),
        "model": architecture(model.spec),
        "precision": dataclasses.asdict(model.policy),
        "rows": model.rows,
        "data": workload.data.manifest.fingerprint,
        "data_content": workload.data.manifest.content,
        "tokenizer": tokenizer.name,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "devices": describe_mesh(workload.mesh),
        "settings": numeric_settings(),
    }


def make_restore(
    task: TrainTask, batch: Tokens, checkpointer: Checkpointer, seed: int
) -> Callable[[TrainState, list[int]], tuple[TrainState, int, StepFn | None]]:
    """Return `Recovery.restore` for a phase."""

    def restore(
        state: TrainState, candidates: list[int]
    ) -> tuple[TrainState, int, StepFn | None]:
        structure: Any = jax.tree.structure(state)
        # Two states would need twice the memory.
        jax.tree.map(lambda x: x.delete(), state)
        if task.diloco is not None:
            checkpoint = restore_replicas(checkpointer, task, candidates=candidates)
        else:
            checkpoint = checkpointer.restore(
                lambda meta: abstract_state(saved_task(meta, task)),
                candidates=candidates,
            )
        task_of_checkpoint = saved_task(checkpoint.meta, task)
        restored = from_checkpoint_form(
            enter_phase(task, checkpoint.state, task_of_checkpoint, seed)
        )
        # A weight's scale is static: part of the tree's structure, and a constant of
        # the compiled step.
        if jax.tree.structure(restored) == structure:
            return restored, checkpoint.step, None
        return restored, checkpoint.step, compile_step(task, batch, restored)

    return restore
