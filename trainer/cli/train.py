"""Train a model.

    scalify-trainer train.steps=200 optimizer.lr=1e-3
    scalify-trainer model=gpt2_124m precision=scalify_fp8_fp16
    scalify-trainer config=my.yaml train.steps=500

A group=choice sets the keys of a group, a key=value sets one. config=FILE is a YAML
file of keys and choices: it overrides the defaults, and the command line overrides it.

    --cfg job        print the resolved configuration
    --multirun       train with each of the values in key=a,b,c
    --help           explain every key, with its value here

Exit codes: 0 done; 2 bad configuration, data or disk; 3 diverged; 4 ended by the
watchdog because there was no progress; 130 stopped by Ctrl-C, 143 by SIGTERM, both
after a checkpoint; 141 broken pipe.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import re
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from trainer.cli.arguments import asks_for_help, run_main, without_dashes
from trainer.cli.training_keys import show_training_help, training_keys
from trainer.config.composition import (
    CONFIGS,
    Sweep,
    build_config,
    expand_arguments,
    explain_hydra_errors,
    is_override,
    long_forms,
    resolved_yaml,
)
from trainer.config.fields import flatten, to_tree
from trainer.config.resume import CommandLine, with_settings
from trainer.config.schema import Config
from trainer.errors import (
    UserError,
    complain,
    exit_at_once,
    explain_file_errors,
    leave,
    run_and_flush,
)
from trainer.run.allocator import keep_freed_memory
from trainer.run.shutdown import EARLY_INTERRUPT, NOTHING_TRAINED
from trainer.text import check_unique_keys, key_of, show

# Hydra's flags, which are passed on unchanged.
FLAGS = (
    "--cfg",
    "--config-dir",
    "--config-name",
    "--config-path",
    "--experimental-rerun",
    "--hydra-help",
    "--info",
    "--multirun",
    "--package",
    "--resolve",
    "--run",
    "--shell-completion",
)
DROPS_DEFAULTS = ("--config-name", "-cn", "--config-path", "-cp")
# By these Hydra reads a pickle, or settings with `_target_` and `${oc.env:NAME}`.
READS_PROGRAMS = ("--config-dir", "-cd", "--experimental-rerun")
SIGNAL_EXIT_CODES = (130, 143)  # Ctrl-C, SIGTERM
# JAX raises no exception of its own for a lost process: Gloo, which joins CPUs, tells
# it in the text.
LOST_PROCESS = re.compile(
    r"Gloo .*(Connection (closed|reset) by peer|Timed out waiting)", re.DOTALL
)
RESUME_ALL = "start all processes again with the same run_dir to resume"
LEAVE_SECONDS = 15  # to wait for the other processes
NO_BEST = (
    "tracker=none writes no metrics.jsonl, so this sweep cannot rank its jobs; set"
    " tracker=jsonl"
)


@dataclass
class HydraJob:
    """A training that Hydra starts: the only one, or one of a sweep.

    Attributes:
      run_dir: its directory.
      sweep_overrides: the overrides of the keys that the sweep varies.
      exit_code: its exit code; None until it has ended.
      error: the exception that ended it: a bug, or another process was lost.
    """

    run_dir: Path
    sweep_overrides: list[str]
    exit_code: int | None = None
    error: Exception | None = None

    @property
    def label(self) -> str:
        """The overrides of the sweep, as they are typed."""
        return " ".join(self.sweep_overrides)


def job_config(
    tree: DictConfig, command_line: CommandLine, sweep_overrides: Sequence[str]
) -> Config:
    """Return the checked configuration of a job.

    In a sweep the run directory is the numbered one that Hydra made. A run without a
    name gets the name of the sweep, its number, and its `sweep_overrides`.
    """
    changes = {}
    if in_sweep():
        changes["run_dir"] = HydraConfig.get().runtime.output_dir
    config = build_config(tree, command_line, **changes)
    # The default has the time of the start, which differs between processes.
    if config.has_processes and not overrides_of(["run_dir"]):
        raise UserError(
            "a run of several processes needs run_dir=DIRECTORY: every process writes"
            " to the same one"
        )
    # Resolved, so that a value which the defaults have anyway is not reported.
    used = dict(flatten(to_tree(config)))
    for key, value in command_line.ignored.items():
        if value != used.get(key):
            show(
                f"{key}={value} of the resumed run's config.yaml is ignored, because"
                f" somebody else may have written that file; give {key}={value} to use"
                " it"
            )
    if in_sweep() and config.tracker.name is None:
        folder = "/".join(Path(config.run_dir).parts[-2:])
        name = " ".join([folder, *sweep_overrides])
        config = dataclasses.replace(
            config, tracker=dataclasses.replace(config.tracker, name=name)
        )
    return config


def in_sweep() -> bool:
    """Return whether Hydra runs a sweep (--multirun)."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def is_search() -> bool:
    """Return whether a sweeper chooses values by the losses of earlier jobs."""
    # The basic sweeper takes its values from the command line, and compares nothing.
    sweeper: str = HydraConfig.get().sweeper["_target_"]
    return in_sweep() and not sweeper.endswith("BasicSweeper")


def overrides_of(keys: Collection[str]) -> list[str]:
    """Return the job's overrides of these keys; in a sweep, with the job's values."""
    overrides = HydraConfig.get().overrides.task
    return [override for override in overrides if key_of(override) in keys]


def remove_empty_output_dir() -> None:
    """Remove the directory that Hydra made for a job, unless the job has used it."""
    # rmdir fails if training began here, or if another process removed it before.
    with contextlib.suppress(OSError):
        os.rmdir(HydraConfig.get().runtime.output_dir)


@contextlib.contextmanager
def report_errors(job: HydraJob) -> Iterator[None]:
    """Print a UserError or a file's OSError in a line, and set the job's exit code."""
    advice = "restore it or choose another path, then re-run the same command"
    try:
        with explain_file_errors(advice), explain_hydra_errors(sys.argv[1:]):
            yield
    except UserError as error:
        complain(error)
        job.exit_code = error.exit_code
    finally:
        # Hydra makes a job's directory before the job is checked.
        if in_sweep():
            remove_empty_output_dir()


def announce(job: HydraJob, number: int, sweep: Sweep) -> None:
    """Print which job of a sweep starts."""
    # The jobs of a sweep over an interval cannot be counted in advance.
    count = f" of {len(sweep.jobs)}" if sweep.jobs else ""
    show(
        f"\nrun {job.run_dir.name} (job {number}{count}): {job.label}, in"
        f" {job.run_dir}",
    )


def report_sweep(jobs: Sequence[HydraJob]) -> None:
    """Print a table of the jobs, the best first, and write it to sweep.html.

    Then print the jobs that failed.
    """
    from trainer.report.comparison import write_comparison

    # A refused job may name the directory of a run that is not of this sweep.
    run_dirs = [
        job.run_dir
        for job in jobs
        if job.exit_code != UserError.exit_code
        and (job.run_dir / "metrics.jsonl").exists()
    ]
    if len(run_dirs) > 1:
        lines = write_comparison(run_dirs, run_dirs[0].parent / "sweep.html")
        show("\n".join(["", *lines]))
    for job in jobs:
        # The table has no row for a job that was refused.
        if job.exit_code:
            show(f"{job.run_dir} ({job.label}) ended with exit code {job.exit_code}")


@dataclass
class TrainingJobs:
    """The jobs of a command line, which Hydra starts one after the other.

    Attributes:
      command_line: the overrides and settings of all jobs.
      sweep: the jobs as far as they are known in advance.
      arguments: what the user typed. `command_line` also has what a resumed run or a
        file chooses.
      started: the jobs that have been started.
    """

    command_line: CommandLine
    sweep: Sweep
    arguments: Sequence[str]
    started: list[HydraJob] = dataclasses.field(default_factory=list)

    def start_next(self, tree: DictConfig) -> float | None:
        """Train the next job; return the loss that Hydra's sweepers minimize.

        It is infinite after a refusal or a failure. None: there was no validation, or
        the sweep has ended.
        """
        last = self.started[-1] if self.started else None
        # Hydra starts the next job whatever the last one returned.
        if last and (last.exit_code in SIGNAL_EXIT_CODES or last.error):
            remove_empty_output_dir()
            return None  # The signal or the error ends the whole sweep.
        if in_sweep() and last is None:
            tracker = with_settings(tree, self.command_line.settings)["tracker"]
            if tracker["kind"] == "none":
                show(NO_BEST)
        run_dir = Path(HydraConfig.get().runtime.output_dir)
        job = HydraJob(run_dir, overrides_of(self.sweep.keys))
        self.started.append(job)
        if in_sweep() and job.sweep_overrides:
            announce(job, len(self.started), self.sweep)
        try:
            with report_errors(job):
                return self.train(job, tree)
        except Exception as error:
            # `run_command_line` raises it: here Hydra would print one more line.
            job.error = error
            return None
        # `report_errors` has printed why the job was refused. A search continues.
        return math.inf

    def train(self, job: HydraJob, tree: DictConfig) -> float | None:
        """Train a job, and return its validation loss.

        Raises:
          UserError: the configuration is not valid, or a search cannot use the loss.
        """
        config = job_config(tree, self.command_line, job.sweep_overrides)
        # Hydra knows no `config=`; the report shows it among the user's overrides.
        files = [text for text in self.arguments if text.startswith("config=")]
        user_keys = {key_of(argument) for argument in long_forms(self.arguments)}
        # A sweep must not resume a run of an earlier sweep with other values.
        fixed = ["train.steps", *self.sweep.keys] if in_sweep() else []
        job.exit_code = start(config, [*files, *overrides_of(user_keys)], fixed)
        loss = validation_loss(job)
        if loss is not None and math.isfinite(loss) and is_search():
            completed = [each for each in self.started if each.exit_code == 0]
            # A search would choose by the text, not by the key.
            check_same_text(job, completed[0])
        return loss


def main(argv: list[str]) -> int:
    """Train once, or each job of a sweep.

    Returns:
      The first exit code that is not zero, or zero.
    """
    # Let Hydra raise exceptions instead of printing tracebacks.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # It becomes True when training begins; a Ctrl-C before is reported differently.
    EARLY_INTERRUPT.guard_entered = False
    try:
        return run_command_line(argv)
    except UserError as error:
        complain(error)
        return error.exit_code


def run_command_line(argv: list[str]) -> int:
    """Do what the arguments say, and return the exit code; see `main`.

    Raises:
      UserError: an argument is not valid.
    """
    with explain_file_errors(), explain_hydra_errors(argv):
        # W&B's agents write --key=value; Hydra's options must stay as they are.
        argv = without_dashes(argv, training_keys, FLAGS)
        check_flags(argv)
        command_line = expand_arguments(argv)
        sweep = Sweep.parse(command_line.overrides)
        problems = sweep.problems(command_line)
        if command_line.settings and not problems and prints_configuration(argv):
            # Hydra would print the configuration without the settings.
            show(resolved_yaml(command_line), end="")
            return 0
    # All at once, before the first job: a sweep runs for days.
    for problem in problems:
        complain(problem)
    if problems:
        return UserError.exit_code
    jobs = TrainingJobs(command_line, sweep, argv)
    # hydra.main reads the arguments from there.
    sys.argv = [sys.argv[0], *with_seed(command_line.overrides)]
    decorate = hydra.main(config_path=CONFIGS, config_name="config", version_base=None)
    advice = "choose another run_dir"
    try:
        with explain_file_errors(advice), explain_hydra_errors(sys.argv[1:]):
            decorate(jobs.start_next)()
    except KeyboardInterrupt:
        if EARLY_INTERRUPT.guard_entered:
            complain("interrupted while ending; re-run the same command to resume")
        else:
            complain(NOTHING_TRAINED)
        return 130
    # Raised outside of Hydra, so that a bug has its plain traceback.
    if jobs.started and jobs.started[-1].error:
        raise jobs.started[-1].error
    if len(jobs.started) > 1:
        report_sweep(jobs.started)
    return next((job.exit_code for job in jobs.started if job.exit_code), 0)


def start(config: Config, overrides: Sequence[str], fixed: Collection[str]) -> int:
    """Train here or by a launcher, and return the exit code.

    JAX and the launcher are imported only here, after the configuration was checked.

    Args:
      config: the checked configuration.
      overrides: the user's overrides, for the report.
      fixed: keys and groups that must equal those of the run to resume, see
        RunDir.check.
    """
    if config.launcher.kind is not None:
        from trainer.cli.ray_launcher import launch

        return launch(config, overrides, fixed)
    # Before JAX starts: glibc's settings hold for later allocations alone.
    keep_freed_memory()
    from trainer.assembly.training import run

    EARLY_INTERRUPT.imported = True
    code, _ = run(config, overrides, fixed=fixed)
    return code


def with_seed(overrides: Sequence[str]) -> list[str]:
    """Return the overrides, with a seed for Optuna's default sampler.

    With a seed the same command draws the same values, and resumes the search.
    """
    keys = {key_of(override) for override in overrides}
    # Another sampler may have no key `seed`.
    is_default = "hydra/sweeper=optuna" in overrides and keys.isdisjoint(
        ("hydra/sweeper/sampler", "hydra.sweeper.sampler.seed")
    )
    if is_default:
        return [*overrides, "hydra.sweeper.sampler.seed=0"]
    return list(overrides)


def validation_loss(job: HydraJob) -> float | None:
    """Return the last validation loss of a job, which Hydra's sweepers minimize.

    It is infinite if the job failed, and None without a log.
    """
    if job.exit_code:
        # Worse than any loss, so that a sampler avoids these values.
        return math.inf
    from trainer.observe.records import read_rows

    rows = read_rows(job.run_dir / "metrics.jsonl")
    losses = (float(row["val/loss"]) for row in rows[::-1] if "val/loss" in row)
    return next(losses, None)


def check_same_text(job: HydraJob, first_job: HydraJob) -> None:
    """Raise UserError if the losses of two jobs of a search cannot be compared.

    They validated on different texts, or amounts of text.
    """
    from trainer.report.comparison import last_validated
    from trainer.report.run_records import RunRecords

    texts = {last_validated(RunRecords.read(run.run_dir)) for run in (first_job, job)}
    if len(texts) > 1:
        raise UserError(
            f"{job.run_dir} ({job.label}) validated on another text than"
            f" {first_job.run_dir}, or on more or less of it, so its loss counts as"
            " infinite in this search; search over keys that do not change the"
            " validation data"
        )


def check_flags(argv: Sequence[str]) -> None:
    """Raise UserError for what has Hydra drop all defaults, or read a stranger's files
    as a program.
    """
    for argument in argv:
        flag, effect = argument.partition("=")[0], ""
        if flag in DROPS_DEFAULTS:
            effect = "would drop all defaults"
        elif flag in READS_PROGRAMS:
            effect = "reads files that may run a program"
        if effect:
            raise UserError(
                f"{flag} {effect}; config=FILE overrides the defaults with your file"
            )


def show_help(argv: Sequence[str]) -> None:
    """Explain every key, with the values that the arguments give it."""
    usage = "scalify-trainer [train] [group=choice ...] [key=value ...]"
    overrides = [text for text in argv if is_override(text)]
    show_training_help(usage, __doc__ or "", overrides)


def prints_configuration(argv: Sequence[str]) -> bool:
    """Return whether the arguments have `--cfg job` or `--cfg all`, in any form."""
    # Hydra takes `--cfg job`, `--cfg=job` and `-cjob`.
    flags = [f"{flag} {value}" for flag, value in itertools.pairwise([*argv, ""])]
    return any(re.match(r"(--cfg[= ]|-c ?)(job|all)\b", flag) for flag in flags)


def command(arguments: list[str]) -> NoReturn:
    """Train, and exit."""
    if asks_for_help(arguments):
        leave(run_main(lambda: show_help(arguments)))
    EARLY_INTERRUPT.install()
    # resume= is short for resume.source=.
    full_keys = [re.sub("^resume=", "resume.source=", text) for text in arguments]

    def call() -> int:
        check_unique_keys(full_keys)
        return main(arguments)

    try:
        code = run_and_flush(call)
    except Exception as error:
        if not is_distributed():
            raise
        if LOST_PROCESS.search(str(error)):
            complain(
                f"another process of this run ended ({str(error).splitlines()[0]});"
                f" {RESUME_ALL}"
            )
        else:
            # Standard error may be a file on a full disk.
            with contextlib.suppress(OSError):
                traceback.print_exc()
        # If all processes waited for each other, a launcher that watches them could not
        # see which one failed.
        exit_at_once(1)
    if code and is_distributed():
        wait_for_others(code)
    leave(code)


def wait_for_others(code: int) -> None:
    """Wait for the other processes of a run after a failure.

    They usually end for the same reason. If they do not, this process failed alone and
    they wait for it, so it exits.
    """
    # `shutdown` waits for all processes, for the 300 s that JAX has by default.
    shutdown = threading.Thread(
        target=sys.modules["jax"].distributed.shutdown, daemon=True
    )
    shutdown.start()
    shutdown.join(LEAVE_SECONDS)
    if shutdown.is_alive():
        exit_at_once(code)


def is_distributed() -> bool:
    """Return whether this is one of several processes, which JAX awaits at exit."""
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()
