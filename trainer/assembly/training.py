"""Train as a checked configuration says, or only describe what would be trained."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

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
    check_fp8,
    train_batches,
)
from trainer.assembly.callbacks import build_callbacks, tokens_read
from trainer.assembly.hooks import NO_HOOKS, Hooks
from trainer.assembly.startup_log import (
    describe_change,
    describe_other_machine,
    describe_phase,
    describe_run,
    describe_start,
    recorded_origin,
    with_schedule_change,
)
from trainer.config import schema
from trainer.config.fields import to_tree
from trainer.errors import DISK_FULL, MAKE_ROOM, UserError
from trainer.files import path_of
from trainer.observe.display import Display, Output
from trainer.observe.nan_diagnosis import make_diagnose
from trainer.observe.progress import log_duration
from trainer.observe.trackers.choose import make_tracker
from trainer.observe.trackers.protocol import Tracker, TrackerStart
from trainer.observe.trackers.tensorboard import check_installed
from trainer.parallel.mesh import place_batch
from trainer.parallel.processes import AsyncMax, raise_together, start_processes
from trainer.parallel.replicas import DiLoCoStep
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
from trainer.run.loop import meta_of, train
from trainer.run.phases import Phases, TrainingPhase, training_state
from trainer.run.rundir import RunDir, RunDirLost, check_trained_with
from trainer.run.session import PhasePlan, Recovery, Session, TrainData, TrainLoop
from trainer.run.shutdown import Timeouts, leave_within
from trainer.run.start import check_start, restore_state, starting_point
from trainer.run.totals import continued_totals
from trainer.step.state import TrainState, to_checkpoint_form
from trainer.step.state_tree import leaf_names
from trainer.step.step import StepFn, Tokens
from trainer.workload import TrainTask, Workload, compile_step

COMPILING = "compiling the training step"


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
    # Before RunDir: a dry run neither makes nor locks a directory.
    if config.dry_run:
        describe_only(build_phases(config, hooks.data, hooks.make_model), console)
        return 0, None
    with RunDir(Path(config.run_dir)) as directory, explain_full_disk(directory.path):
        directory.check(to_tree(config), fixed=fixed)
        resume = config.resume
        check_start(directory.path, resume.source, resume.step, config.init_from)
        phases = build_phases(config, hooks.data, hooks.make_model)
        check_same_inputs(config, phases.first.workload.data)
        # Entered before the session, whose messages would break the live line.
        with Display(config.train.steps, console=console) as display:
            session, checkpoint, events = open_session(
                config, phases, hooks, directory, display, overrides
            )
            with finish_session(session) as ending:
                # Inside of `finish_session`, so that a tracker that fails here is
                # finished, too.
                for event in events:
                    session.tracker.event(event_step(checkpoint), event)
                while True:  # one iteration for each training phase
                    loop = build_loop(config, phases, hooks, session, checkpoint)
                    ending.exit_code = train(loop)
                    # A signal or a divergence ends the run in the middle of a phase.
                    if ending.exit_code or loop.step >= config.train.steps:
                        break
                    # The end of a phase is saved, but nothing is read back.
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
    # The tracker itself starts only after the data are prepared.
    if config.tracker.kind == "tensorboard":
        check_installed()
    prepare_jax()
    if config.has_processes:
        # JAX's settings come from each host's environment, so equal arguments do not
        # make them equal.
        start_processes(to_tree(config) | {"environment": numeric_settings()})
    # Every process runs this; one of them speaks.
    console = Output(soft_wrap=True, quiet=jax.process_index() > 0)
    warning = use_compilation_cache(config.compile_cache)
    if warning is not None:
        console.print(warning)
    return console


def describe_only(phases: Phases, console: Output) -> None:
    """Compile the step of every phase, and print what would be trained."""
    for phase in phases.all:
        # Every phase is compiled, because a later one may need more memory.
        batch = build_batch(phase.config, phase.task.mesh)
        with log_duration(COMPILING, console.print):
            step = compile_step(phase.task, batch)
        fp8 = check_fp8(phase.config, phase.task, step)
        for line in describe_phase(phases, phase):
            console.print(line)
        for line in describe_run(phase.config, phase.workload, step):
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
    # Also for a Ctrl-C: the others wait for this process whatever ended it.
    except BaseException as error:
        if jax.process_count() > 1:
            leave_within(seconds, error)
        raise


def open_session(
    config: schema.Config,
    phases: Phases,
    hooks: Hooks,
    directory: RunDir,
    display: Display,
    overrides: Sequence[str],
) -> tuple[Session, Restored, list[str]]:
    """Find the state to start from, record the configuration, and start the tracker.

    Returns:
      The session, the state to start from, and the events of the start.
    """
    workload, watchdog = phases.first.workload, config.watchdog
    weights_lines: list[str] = []
    # The session's own guard does not exist yet.
    with leave_after_error(watchdog.stop_seconds):
        checkpointer = Checkpointer(
            directory.path / "checkpoints",
            keep=config.checkpoint.keep,
            keep_best=config.checkpoint.keep_best,
        )
        with log_duration("making or restoring the state", display.message):
            checkpoint = starting_point(
                config.resume,
                directory.path,
                checkpointer,
                phases,
                functools.partial(build_state, config, workload, weights_lines.append),
            )
    check_same_run(checkpoint, config.train.steps, workload.data.manifest)
    # A fork is compared with its source's settings where it is restored.
    if checkpoint.step and not checkpoint.is_fork:
        check_trained_with(directory.path, checkpoint.meta["config"], to_tree(config))
        is_over = checkpoint.step >= config.train.steps
        # An unfinished end runs its callbacks again, with the settings of now.
        if is_over and checkpoint.meta.get("unfinished") is None:
            directory.check_no_effect_after_end(checkpoint.step, to_tree(config))
    # Before `record_start`, whose facts include the changes of the schedule.
    checkpoint, change = with_schedule_change(config, checkpoint)
    record_start(config, workload, directory, checkpoint, overrides)
    # The lines describe what is trained next, which may be a later phase than the
    # first.
    phase = phases.phase_after(checkpoint)
    other_machine = describe_other_machine(config, workload, checkpoint)
    for line in [
        *describe_run(phase.config, phase.workload),
        *describe_idle(phase.task.model.policy, overrides),
        *describe_start(config, checkpoint),
        *weights_lines,
        *describe_change(config, checkpoint, change),
        *other_machine,
    ]:
        display.message(line)
    # The display is lost with the terminal; trackers keep events beside the curves.
    events = [f"forked from {checkpoint.origin}"] if checkpoint.is_fork else []
    events += other_machine
    is_over = checkpoint.step >= config.train.steps
    if change is not None and change.is_past and not (checkpoint.is_fork or is_over):
        events.append(f"the learning-rate schedule changed {change}")
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
    return session, checkpoint, events


def record_start(
    config: schema.Config,
    workload: Workload,
    directory: RunDir,
    checkpoint: Restored,
    overrides: Sequence[str],
) -> None:
    """Write config.yaml, environment.txt and the tokenizer into the run directory."""
    run_dir, data = directory.path, workload.data
    # In this order: `raise_together` sends UserErrors alone to the other processes, and
    # a full disk is one only after `explain_full_disk`.
    with raise_together(), explain_full_disk(run_dir):
        # First: config.yaml binds the directory to the configuration, also if the rest
        # fails.
        directory.write_config(to_tree(config))
        directory.set_results_aside(
            # The step is of a checkpoint in this directory, and a fork's is in another.
            0 if checkpoint.is_fork else checkpoint.step,
            draws_pictures=bool(config.metrics.numerics_every)
            and config.tracker.kind != "none",
        )
        final = tokens_read(data.val, config.train.final_eval_batches)
        facts = facts_of(workload) | recorded_origin(config, checkpoint)
        # Comparisons of runs take it for validations whose rows lack val/tokens.
        facts[FINAL_VALIDATION] = f"{final:,}"
        write_environment(run_dir, facts, overrides)
        if jax.process_index() == 0:
            # `restore_run` needs the tokenizer beside the checkpoint.
            data.tokenizer.save(run_dir)
            source = source_of_tokenizer(config, checkpoint)
            if source is not None:
                keep_tokenizer(path_of(source), run_dir, data.tokenizer)


def source_of_tokenizer(config: schema.Config, checkpoint: Restored) -> str | None:
    """Return the weights or the run whose tokenizer files are copied at this start.

    Not the `init_from` of a run that is continued or forked: somebody else may have
    written it, and an export of the run would publish a private directory's files.
    """
    # The user typed this path; no saved configuration can name it.
    if checkpoint.is_fork:
        return config.resume.source
    return None if checkpoint.meta else config.init_from


def start_tracker(
    config: schema.Config, run_dir: Path, checkpoint: Restored, custom: Tracker | None
) -> Tracker:
    """Start the trackers of a run, which drop rows from after the checkpoint."""
    settings = config.tracker
    start = TrackerStart(
        run_dir,
        checkpoint.step,
        to_tree(config),
        redo_row=checkpoint.meta.get("unfinished") is not None,
        id=checkpoint.meta.get("tracker_id"),
        checkpoint_state=checkpoint.meta.get("log"),
        is_fork=checkpoint.is_fork,
    )
    return make_tracker(
        settings.kind,
        start,
        init={
            "project": settings.project,
            "entity": settings.entity,
            "group": settings.group,
            # Otherwise W&B draws a name, which no directory has.
            "name": settings.name or run_dir.name,
            "tags": settings.tags,
        },
        custom=custom,
    )


@dataclasses.dataclass
class Ending:
    """The end of a run; its exit code is 1 until it is known."""

    # A bug leaves this value.
    exit_code: int = 1
    has_report: bool = False


@contextlib.contextmanager
def finish_session(session: Session) -> Iterator[Ending]:
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
            # A tracker records it before the error is printed.
            ending.exit_code = error.exit_code
            raise
        # A file's error becomes a UserError further out, after the tracker has finished
        # with this code.
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
    return Restored(loop.step, to_checkpoint_form(loop.state), meta_of(loop))


def event_step(checkpoint: Restored) -> int:
    """Return the step of events that a start from a checkpoint logs.

    It is the next one: a restart from the checkpoint drops rows of later steps, so that
    each event is logged once.
    """
    return checkpoint.step + 1


def build_loop(
    run_config: schema.Config,
    phases: Phases,
    hooks: Hooks,
    session: Session,
    checkpoint: Restored,
) -> TrainLoop:
    """Compile the step of the phase that continues a checkpoint, and build its loop."""
    phase = phases.phase_after(checkpoint)
    phase_config, workload, task = phase.config, phase.workload, phase.task
    start_phase(phases, phase, session)
    state = training_state(checkpoint, task, workload.seed)
    batch = build_batch(phase_config, task.mesh)
    step = compile_and_check(phase, batch, state, session, checkpoint)
    totals = continued_totals(
        checkpoint.meta, checkpoint.step, build_totals(phase_config, workload)
    )
    profile = run_config.profile.steps
    return TrainLoop(
        session=session,
        plan=PhasePlan(
            steps=run_config.train.steps,
            phase_end=phase.until,
            # Not of `phase_config`: it has no phases, so its rates would span the whole
            # run.
            learning_rates=build_learning_rates(run_config),
            # The compiled step takes this dtype and no other.
            seed=np.uint32(workload.seed),
            log_every=run_config.train.log_every,
            profile=(profile[0], profile[1]) if profile else None,
        ),
        data=TrainData(
            batches=train_batches(phase_config, workload, phase.until),
            place=functools.partial(
                place_batch, accum=phase_config.train.grad_accum_steps, mesh=task.mesh
            ),
        ),
        callbacks=build_callbacks(
            phase_config,
            workload,
            batch,
            session.display.message,
            hooks.callbacks,
            totals=totals,
            # A program's tracker gets rows with tracker=none, too.
            tracked=run_config.tracker.kind != "none" or hooks.tracker is not None,
        ),
        recovery=Recovery(
            watchdog=build_watchdog(
                phase_config.watchdog,
                phase_config.precision.scaling,
                # The data and the scale of a ScaledArray are one weight, with one name.
                leaf_names(task.select_trained(state.params), is_scaled_array),
                checkpoint.meta.get("watchdog"),
            ),
            restore=make_restore(task, batch, session.checkpointer, workload.seed),
            diagnose=make_diagnose(task),
        ),
        throughput=build_throughput(phase_config, workload),
        totals=totals,
        meta=phase_meta(run_config, workload)
        | {
            "tracker_id": session.tracker.id,
            # Each checkpoint repeats it, so that a resumed fork still names its origin.
            "forked": checkpoint.meta.get("forked"),
            "schedule_changes": checkpoint.meta.get("schedule_changes") or [],
        },
        state=state,
        train_step=step,
        step=checkpoint.step,
        last_logged_step=checkpoint.step,
        # Its callbacks run before the next step, and complete this row.
        unfinished=checkpoint.meta.get("unfinished"),
    )


def start_phase(phases: Phases, phase: TrainingPhase, session: Session) -> None:
    """Record a phase in environment.txt, and print a line about it."""
    # `record_start` has written the facts of the first.
    if phase is not phases.first:
        add_facts(session.run_dir, facts_of(phase.workload))
    for line in describe_phase(phases, phase):
        session.display.message(line)


def compile_and_check(
    phase: TrainingPhase,
    batch: Tokens,
    state: TrainState,
    session: Session,
    checkpoint: Restored,
) -> jax.stages.Compiled | DiLoCoStep:
    """Return the compiled step of a phase; log its communication and FP8 matmuls."""
    config, task, display = phase.config, phase.task, session.display
    with log_duration(COMPILING, display.message):
        step = compile_step(task, batch, state)
    for line in describe_communication(task, step, config.diloco.bandwidth_gbps):
        display.message(line)
    fp8 = check_fp8(config, task, step)
    if fp8 is not None:
        # Also events, so that the page of the run tells what was compiled in FP8.
        for line in fp8.lines:
            display.message(line)
            session.tracker.event(event_step(checkpoint), line)
        # A single figure of the run, for tables over runs.
        session.tracker.summary({"fp8_flop_share": fp8.share})
    return step


def phase_meta(config: schema.Config, workload: Workload) -> dict[str, Any]:
    """Return the description of a phase for its checkpoints, as JSON values."""
    model, tokenizer = workload.model, workload.data.tokenizer
    return {
        "config": to_tree(config),
        "trainable": list(workload.task.trainable),
        "model": architecture(model.spec),
        "precision": dataclasses.asdict(model.policy),
        # They decide which matmuls are in FP8, also when one device evaluates the run.
        "rows": model.rows,
        # Losses of other rows are of another text, and are not compared for step=best.
        "validation_rows": workload.data.val.batch_size,
        "data": workload.data.manifest.fingerprint,
        "data_content": workload.data.manifest.content,
        "tokenizer": tokenizer.name,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        # A resume may differ in these two; `describe_other_machine` says so.
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
        checkpoint = restore_state(checkpointer, task, candidates=candidates)
        restored = training_state(checkpoint, task, seed)
        # A weight's scale is static: part of the tree's structure, and a constant of
        # the compiled step.
        if jax.tree.structure(restored) == structure:
            return restored, checkpoint.step, None
        return restored, checkpoint.step, compile_step(task, batch, restored)

    return restore
