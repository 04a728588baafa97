"""`python -m trainer [group=choice] [key=value] ...`: compose the configuration with
Hydra, check it, train.

Exit codes: 0 done; 2 bad configuration, data or disk; 3 diverged; 4 ended by the guard
because nothing moved any more; 130 stopped by Ctrl-C, 143 by SIGTERM, both after a
checkpoint.
"""

import contextlib
import dataclasses
import itertools
import os
import re
import sys
import threading
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from trainer.config.composition import (
    CONFIGS,
    Sweep,
    checked,
    expanded,
    explain,
    key_of,
    long_forms,
    resolved,
)
from trainer.config.continuing import CommandLine, lay_over
from trainer.config.schema import Config
from trainer.errors import UserError, complain, leave, to_readers
from trainer.run.allocator import keep_freed_memory
from trainer.run.shutdown import EARLY
from trainer.text import refuse_twice

STOPPED = (130, 143)  # by a signal
LOST = re.compile(
    r"Gloo .*(Connection (closed|reset) by peer|Timed out waiting)", re.DOTALL
)
CONTINUE = (
    "start all of them again with the same run_dir, which goes on from its newest"
    " checkpoint"
)
TOGETHER = 15  # seconds within which processes that end for one reason do so
NO_BEST = (
    "tracker=none: no metrics.jsonl and no report, so the sweep cannot name a best; add"
    " tracker=jsonl"
)


class SweepJob(NamedTuple):
    """A run of a sweep: its directory, its own settings, and its exit code; None: it
    has not ended.
    """

    run_dir: Path
    settings: list[str]
    code: int | None


def load(tree: DictConfig, line: CommandLine, own: Sequence[str]) -> Config:
    """The checked configuration. Under --multirun the run directory is the numbered one
    that Hydra made in it.

    There a run that has no name is called after the sweep, its number, and its own of
    the sweep's settings.
    """
    config = checked(
        tree,
        line.saved,
        **({"run_dir": HydraConfig.get().runtime.output_dir} if numbered() else {}),
    )
    if config.parallel.distributed and not any(
        o.startswith("run_dir=") for o in HydraConfig.get().overrides.task
    ):
        raise UserError(
            "parallel.distributed=true needs run_dir=DIRECTORY: every process writes to"
            " the same one"
        )
    for key, place in line.not_taken.items():
        if place not in (config.compile_cache, config.data.cache_dir):
            print(
                f"{key}={place} of that run is not used: a run directory is not trusted"
                " with it; give the key to use it"
            )
    if numbered() and config.tracker.name is None:
        name = " ".join(["/".join(Path(config.run_dir).parts[-2:]), *own])
        config = dataclasses.replace(
            config, tracker=dataclasses.replace(config.tracker, name=name)
        )
    return config


def numbered() -> bool:
    """Return whether this is one of several jobs."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def of_user(keys: Collection[str]) -> list[str]:
    """The job's overrides of these keys, which may not be all: a run that is continued
    has its settings there too.
    """
    return [
        override
        for override in HydraConfig.get().overrides.task
        if key_of(override) in keys
    ]


def run_job(
    tree: DictConfig, line: CommandLine, keys: Collection[str], swept: Collection[str]
) -> int:
    """One run, its exit code. Imports what takes time only once the configuration is
    known to be good.

    `line`: the command line. `keys`: those that the user set, of which `swept` have
    several values.
    """
    try:
        config = load(tree, line, of_user(swept))
        keep_freed_memory()
        from trainer.assembly.run import run

        return run(config, of_user(keys))
    except UserError as error:
        complain(error)
        return error.exit_code
    except OSError as error:
        if error.filename is None:
            raise
        complain(
            f"{describe_os_error(error)}; bring it back or choose another path, then"
            " run the same command again"
        )
        return 2
    finally:
        if numbered():
            # something was started here, or another process was faster
            with contextlib.suppress(OSError):
                os.rmdir(HydraConfig.get().runtime.output_dir)


def describe_os_error(error: OSError) -> str:
    """The file that the operating system refused, and why."""
    return f"{str(error.filename)[:300]}: {error.strerror}"


def report_sweep(jobs: Sequence[SweepJob]) -> None:
    """The jobs in a table, the best first, and in sweep.html; below it those that did
    not end well.
    """
    from trainer.report.comparing import write_comparison

    ended = [job.run_dir for job in jobs if (job.run_dir / "metrics.jsonl").exists()]
    if len(ended) > 1:
        lines = write_comparison(ended, ended[0].parent / "sweep.html")
        print("\n".join(["", *lines]))
    for job in jobs:
        if job.code:
            print(
                f"{job.run_dir} ({' '.join(job.settings)}) ended with exit code"
                f" {job.code}"
            )


def main(argv: list[str]) -> int:
    """Run the job, or several under --multirun; the exit code is the first that is not
    zero.
    """
    # exceptions reach us instead of being printed as tracebacks
    os.environ["HYDRA_FULL_ERROR"] = "1"
    EARLY.begun = False
    jobs: list[SweepJob] = []
    try:
        line = expanded(argv)
        sweep = Sweep.of(line.overrides)
        complaints = sweep.complaints(line.saved)
    except UserError as error:
        complain(error)
        return error.exit_code
    except OSError as error:
        complain(f"{describe_os_error(error)}; choose another path")
        return 2
    for complaint in complaints:
        complain(complaint)
    if complaints:
        return 2
    if line.saved and prints_configuration(argv):
        print(resolved(line), end="")  # Hydra would print it without the saved settings
        return 0
    sys.argv = ["trainer", *line.overrides]
    keys = {key_of(argument) for argument in long_forms(argv)}

    def job(tree: DictConfig) -> None:
        if jobs and jobs[-1].code in STOPPED:
            with contextlib.suppress(OSError):
                os.rmdir(HydraConfig.get().runtime.output_dir)
            return  # somebody stopped the sweep, not one job of it
        if (
            not jobs
            and numbered()
            and lay_over(tree, line.saved)["tracker"]["kind"] == "none"
        ):
            print(NO_BEST, flush=True)
        jobs.append(
            SweepJob(
                Path(HydraConfig.get().runtime.output_dir), of_user(sweep.keys), None
            )
        )
        if numbered() and jobs[-1].settings:
            # an interval's jobs cannot be listed
            count = f" of {len(sweep.jobs)}" if sweep.jobs else ""
            print(
                f"\njob {len(jobs)}{count}: {' '.join(jobs[-1].settings)}, in"
                f" {jobs[-1].run_dir}",
                flush=True,
            )
        jobs[-1] = jobs[-1]._replace(code=run_job(tree, line, keys, sweep.keys))

    try:
        hydra.main(config_path=CONFIGS, config_name="config", version_base=None)(job)()
    except KeyboardInterrupt:
        if EARLY.begun:
            moment = "while ending; the same command goes on from the newest checkpoint"
        else:
            moment = "before the first step; nothing was trained"
        complain(f"interrupted {moment}")
        return 130
    except (HydraException, OmegaConfBaseException) as error:
        complain(explain(error, sys.argv[1:]))
        return 2
    except OSError as error:
        if (jobs and jobs[-1].code is None) or isinstance(error, BrokenPipeError):
            # from inside the job, or from Hydra's printing: not what is expected here
            raise
        complain(
            f"cannot write to {error.filename}: {error.strerror}; choose another"
            " run_dir"
        )
        return 2
    if len(jobs) > 1:
        report_sweep(jobs)
    return next((job.code for job in jobs if job.code), 0)


def prints_configuration(argv: Sequence[str]) -> bool:
    """Return whether `--cfg job` is among the arguments, in any of the forms that Hydra
    takes.
    """
    pairs = itertools.pairwise([*argv, ""])
    return any(
        flag in ("--cfg=job", "-cjob") or (flag in ("--cfg", "-c") and part == "job")
        for flag, part in pairs
    )


def of_shell(argv: list[str]) -> int:
    """`main` of what a shell made of a line, which is looked through for what it took
    apart. The exit code.
    """
    try:
        refuse_twice(
            [re.sub(r"^resume=", "resume.source=", argument) for argument in argv]
        )
    except UserError as error:
        complain(error)
        return error.exit_code
    return main(argv)


def command() -> NoReturn:
    """The program: `python -m trainer`, or `scalify-trainer` where the package is
    installed.
    """
    EARLY.install()
    try:
        code = to_readers(lambda: of_shell(sys.argv[1:]))
    except Exception as error:
        if not joined():
            raise
        if LOST.search(str(error)):
            complain(
                "another process of this run is gone, and said why"
                f" ({str(error).splitlines()[0]}); {CONTINUE}"
            )
        else:
            with contextlib.suppress(OSError):
                traceback.print_exc()
        leave_alone(1)
    if code and joined():
        # All that end so leave together; who fails alone does not wait for the others,
        # which wait for it.
        together = threading.Thread(
            target=sys.modules["jax"].distributed.shutdown, daemon=True
        )
        together.start()
        together.join(TOGETHER)
        if together.is_alive():
            leave_alone(code)
    leave(code)


def joined() -> bool:
    """Return whether this is one of several processes of a run, for all of which JAX
    would wait minutes at its exit.
    """
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()


def leave_alone(code: int) -> NoReturn:
    """End at once: who watches all processes could not tell, while all wait, which of
    them failed.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads any more
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    command()
