"""From a checked configuration to a run: in its directory, from where that stands, to
its end.
"""

import contextlib
import dataclasses
import errno
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trainer.assembly.build import (
    build_batch,
    build_callbacks,
    build_learning_rates,
    build_phases,
    build_state,
    build_throughput,
    build_watchdog,
    build_workload,
    check_fp8,
    train_batches,
)
from trainer.assembly.hooks import NO_HOOKS, Hooks
from trainer.assembly.startup_log import (
    begun_from,
    describe_change,
    describe_phase,
    describe_run,
    describe_start,
)
from trainer.config import schema
from trainer.config.fields import to_tree
from trainer.errors import MAKE_ROOM, UserError
from trainer.observe.display import Display, Output
from trainer.observe.nan_diagnosis import make_diagnose
from trainer.observe.progress import log_duration
from trainer.observe.trackers.choose import check_kind, make_tracker
from trainer.observe.trackers.protocol import Tracker
from trainer.parallel.mesh import place_batch
from trainer.parallel.processes import Agreement, refused_together, start_processes
from trainer.report.messages import (
    describe_communication,
    describe_idle,
    facts_of,
    farewell,
)
from trainer.report.page import write_report
from trainer.run.checkpoint import Checkpointer, Restored
from trainer.run.libraries import hide_missing_gpu, use_compilation_cache
from trainer.run.loop import Run, train
from trainer.run.phases import Phases, Stage, enter_phase, task_of
from trainer.run.rundir import RunDir, write_environment
from trainer.run.shutdown import Timeouts, leave_within
from trainer.run.start import (
    architecture,
    check_same_run,
    check_start,
    describe_origin,
    is_fork,
    starting_point,
    with_origin,
)
from trainer.step.state import TrainState, from_stored, to_stored
from trainer.step.state_tree import parameter_names
from trainer.step.step import StepFn, Tokens
from trainer.workload import (
    TrainTask,
    Workload,
    abstract_state,
    compile_step,
)

COMPILING = "compiling the training step"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def make_restore(
    task: TrainTask, batch: Tokens, checkpointer: Checkpointer, seed: int
) -> Callable[[TrainState, list[int]], tuple[TrainState, int, StepFn | None]]:
    """`(state in use, steps) -> (state, step, compiled)`: see `Run.restore`."""

    def restore(
        state: TrainState, order: list[int]
    ) -> tuple[TrainState, int, StepFn | None]:
        structure: Any = jax.tree.structure(state)
        jax.tree.map(lambda x: x.delete(), state)  # two would need twice the memory
        found = checkpointer.restore(
            lambda meta: abstract_state(task_of(meta, task)), order=order
        )
        new = from_stored(
            enter_phase(task, found.state, task_of(found.meta, task), seed)
        )
        # The scales of weights are constants of the compiled step, and part of the
        # structure.
        same = jax.tree.structure(new) == structure
        return new, found.step, None if same else compile_step(task, batch, new)

    return restore


def report_on(run_dir: Path, display: Display) -> None:
    """Write report.html, where there is something to report. Of the processes of a run
    the first does it.
    """
    if jax.process_index() == 0 and (run_dir / "metrics.jsonl").exists():
        try:
            write_report(run_dir)
        # whatever is wrong with it, what counts is how the run ended
        except Exception as error:
            display.message(
                "no report.html:"
                f" {error if isinstance(error, UserError) else repr(error)}"
            )


def run(c: schema.Config, overrides: Sequence[str] = ()) -> int:
    """Train, or only describe what would be trained. The exit code. `overrides`: what
    the user set, as it is shown.
    """
    return start(c, overrides)[0]


def start(
    c: schema.Config, overrides: Sequence[str] = (), hooks: Hooks = NO_HOOKS
) -> tuple[int, Run | None]:
    """`run`, with what a program adds. The exit code, and the run as it ended; None: it
    was only described.
    """
    check_kind(c.tracker.kind)
    hide_missing_gpu()
    if c.parallel.distributed:
        start_processes(to_tree(c))
    console = Output(soft_wrap=True, quiet=jax.process_index() > 0)
    warning = use_compilation_cache(c.compile_cache)
    if warning is not None:
        console.print(warning, highlight=False)
    own = (
        () if hooks.model is None and hooks.data is None else (hooks.data, hooks.model)
    )
    if c.dry_run:
        w = build_workload(c, *own)
        phases = build_phases(c, w)
        for stage in phases.stages:
            part, of = w._replace(task=stage.task), stage.config
            with log_duration(
                COMPILING, lambda text: console.print(text, highlight=False)
            ):
                step = compile_step(part.task, build_batch(of, w.mesh))
            fp8 = check_fp8(of, part.task, step)
            lines = [
                *describe_phase(phases, stage),
                *describe_run(of, part, step),
                *(fp8.lines if fp8 else []),
            ]
            for line in lines:
                console.print(line, highlight=False)
        return 0, None
    with RunDir(Path(c.run_dir)) as directory, said_in_a_line(directory.path):
        directory.check(to_tree(c))
        check_start(directory.path, c.resume.source, c.resume.step, c.init_from)
        return train_in(
            directory,
            c,
            build_workload(c, *own),
            Display(c.train.steps, console=console),
            overrides,
            hooks,
        )


@contextlib.contextmanager
def said_in_a_line(run_dir: Path) -> Iterator[None]:
    """Turns the error of a full disk into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise UserError(
            f"cannot write {error.filename or run_dir}: {error.strerror}; {MAKE_ROOM}"
        ) from error


@contextlib.contextmanager
def not_for_ever(seconds: float) -> Iterator[None]:
    """After an error, ends a process of several in so many seconds: in opening and
    closing they wait for each other.
    """
    try:
        yield
    except BaseException as error:
        if jax.process_count() > 1:
            leave_within(seconds, error)
        raise


def train_in(
    directory: RunDir,
    c: schema.Config,
    w: Workload,
    display: Display,
    overrides: Sequence[str],
    hooks: Hooks,
) -> tuple[int, Run]:
    """Train in a run directory, from where it stands. The exit code, and the run as it
    ended.
    """
    tree = to_tree(c)
    with display:
        with not_for_ever(c.watchdog.stop_seconds):
            checkpointer = Checkpointer(
                directory.path / "checkpoints",
                keep=c.checkpoint.keep,
                keep_best=c.checkpoint.keep_best,
            )
            phases = build_phases(c, w)
            first = lambda: build_state(c, w._replace(task=phases.stages[0].task))
            with log_duration("making or restoring the state", display.message):
                found = starting_point(
                    c.resume.source,
                    directory.path,
                    checkpointer,
                    phases,
                    first,
                    step=c.resume.step,
                    convert=c.resume.convert,
                )
        fork = found.step not in [0, *checkpointer.steps()]
        found = with_origin(found, c.resume.source) if fork else found
        unfinished = None if fork else found.meta.get("unfinished")
        check_same_run(found, c.train.steps, w.data.manifest.fingerprint, fork=fork)
        with refused_together(), said_in_a_line(directory.path):
            directory.adopt(tree)
            write_environment(
                directory.path, facts_of(w) | begun_from(c, found), overrides
            )
            if jax.process_index() == 0:
                # what `restore_run` needs besides the checkpoint
                w.data.tokenizer.save(directory.path)
        # What a signal broke off after the last step of a phase is taken up in that
        # phase.
        stage = (
            phases.after(found.step)
            if unfinished is None
            else phases.before(found.step)
        )
        for line in [
            *describe_run(stage.config, w._replace(task=stage.task)),
            *describe_idle(stage.task.model.policy, overrides),
            *describe_start(c, w, found),
            *describe_change(c, found),
        ]:
            display.message(line)
        tracker = make_tracker(
            c.tracker.kind,
            directory.path,
            start=found.step,
            redo_row=unfinished is not None,
            config=tree,
            run_id=found.meta.get("tracker_id"),
            written=found.meta.get("log"),
            init={
                k: v
                for k, v in dataclasses.asdict(c.tracker).items()
                if k != "kind" and v is not None
            }
            | {"name": c.tracker.name or directory.path.name},
            custom=hooks.tracker,
        )
        code = 1
        with contextlib.ExitStack() as closing:  # each, even if the one before it fails
            closing.callback(checkpointer.close)
            closing.callback(report_on, directory.path, display)
            closing.callback(lambda: tracker.finish(code))
            closing.enter_context(not_for_ever(c.watchdog.stop_seconds))
            try:
                while True:
                    part = functools.partial(build_run, c, w, phases, stage)
                    training = part(
                        found,
                        checkpointer,
                        tracker,
                        display,
                        directory.path,
                        unfinished,
                        hooks,
                    )
                    code = train(training)
                    if code or training.step >= c.train.steps:
                        break
                    found, unfinished = at_border(training), None
                    stage = phases.after(found.step)
            except UserError as error:
                code = error.exit_code
                raise
            except OSError:
                code = UserError.exit_code
                raise
        farewell(training, code)
        return code, training


def at_border(training: Run) -> Restored:
    """What the next phase starts from: the state as a checkpoint has it."""
    meta = training.meta | {"watchdog": training.watchdog.state()}
    return Restored(training.step, to_stored(training.state), meta)


def build_run(
    whole: schema.Config,
    w: Workload,
    phases: Phases,
    stage: Stage,
    found: Restored,
    checkpointer: Checkpointer,
    tracker: Tracker,
    display: Display,
    run_dir: Path,
    unfinished: str | None,
    hooks: Hooks,
) -> Run:
    """Compile a phase's step for what was found, say what became of it, and put
    everything together.
    """
    c, w = stage.config, w._replace(task=stage.task)
    for line in describe_phase(phases, stage):
        display.message(line)
    # said of the first step, which comes again as often as the run starts: so it is
    # said once
    if is_fork(found):
        tracker.event(found.step + 1, f"forked from {describe_origin(found.meta)}")
    # Before the compilation, which processes may end minutes apart: its first question
    # joins their devices.
    agree = Agreement(w.mesh)
    before = task_of(found.meta, w.task) if found.step else w.task
    state, batch = (
        from_stored(enter_phase(w.task, found.state, before, w.seed)),
        build_batch(c, w.mesh),
    )
    with log_duration(COMPILING, display.message):
        step = compile_step(w.task, batch, state)
    for line in describe_communication(w.task, step, c.diloco.bandwidth_gbps):
        display.message(line)
    fp8 = check_fp8(c, w.task, step)
    for line in fp8.lines if fp8 else []:
        display.message(line)
        tracker.event(found.step, line)
    if fp8:
        tracker.summary({"fp8_flop_share": fp8.share})
    tracked = c.tracker.kind != "none" or hooks.tracker is not None
    names, watched = (
        parameter_names(w.task.trained(state.params)),
        found.meta.get("watchdog"),
    )
    return Run(
        state=state,
        step=found.step,
        steps=c.train.steps,
        until=stage.until,
        seed=np.uint32(c.seed),
        batch_tokens=c.train.batch_tokens,
        learning_rates=build_learning_rates(whole),
        train_step=step,
        batches=train_batches(c, w, stage.until),
        place=functools.partial(
            place_batch, accum=c.train.grad_accum_steps, mesh=w.mesh
        ),
        agree=agree,
        callbacks=build_callbacks(
            c, w, batch, display.message, hooks.callbacks, tracked=tracked
        ),
        log_every=c.train.log_every,
        restore=make_restore(w.task, batch, checkpointer, w.seed),
        diagnose=make_diagnose(w.task),
        checkpointer=checkpointer,
        meta={
            "config": to_tree(whole),
            "trainable": list(w.task.trainable),
            "model": architecture(w.model.spec),
            "precision": dataclasses.asdict(w.model.policy),
            "rows": w.model.rows,
            "data": w.data.manifest.fingerprint,
            "tokenizer": w.data.tokenizer.name,
            "tokenizer_fingerprint": w.data.tokenizer.fingerprint,
            "tracker_id": tracker.id,
            "forked": found.meta.get("forked"),
        },
        tracker=tracker,
        display=display,
        watchdog=build_watchdog(c.watchdog, c.precision.scaling, names, watched),
        throughput=build_throughput(c, w),
        run_dir=run_dir,
        profile=(c.profile.steps[0], c.profile.steps[1]) if c.profile.steps else None,
        timeouts=Timeouts(
            c.watchdog.stop_seconds, c.watchdog.stall_seconds, c.watchdog.hang_seconds
        ),
        unfinished=unfinished,
        recorded=found.step,
        own_process=hooks.own_process,
    )
