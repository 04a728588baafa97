"""Studies of many short runs: their settings, jobs, and trainer processes.

An item is a precision with `+key=value` for each further override, or overrides alone.
Each run is `python -m trainer` in OUT/LR/ITEM/SEED, and stays there: the next call of
the study continues.
"""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import yaml

from trainer.cli.arguments import argument, split
from trainer.errors import Diverged, UserError
from trainer.files import finite, write_atomically
from trainer.run.rundir import is_in_use
from trainer.text import merge_overrides

# What the study sets itself, from its own arguments or to read a run's outcome: no
# override takes their place.
OWN_KEYS = (
    "tracker",
    "seed",
    "run_dir",
    "resume",
    "model",
    "train.steps",
    "train.batch_tokens",
    "optimizer.lr",
)
# what checkpoints are called from when they are given up to when they are gone
REMOVED = "removed"
# in a run of the base, what the other runs of its seed go on from: a run directory
# itself
TRUNK = "trunk"


@dataclass(frozen=True)
class Study:
    """Settings that all studies share; see `--help`.

    Attributes:
      fixed: the settings that all runs of a directory share; presets, seeds and
          learning rates may be added later.
    """

    fixed: ClassVar[tuple[str, ...]] = (
        "steps",
        "batch_tokens",
        "model",
        "overrides",
        "evaluations",
        "eval_batches",
    )

    presets: str = argument("what is compared, separated by commas")
    base: str = argument("what they are compared with; always run", "fp32")
    seeds: int = argument("pairs", 8)
    first_seed: int = argument("the first of the seeds, which follow one another", 0)
    lr: str = argument(
        "learning rates, as multiples of model.lr, separated by commas", "1"
    )
    model: str = argument("the model", "gpt2_nano")
    steps: int = argument("steps of each run", 1000)
    batch_tokens: int = argument("tokens per step", 1024)
    overrides: str = argument(
        "further arguments of the trainer for all runs, separated by spaces", ""
    )
    evaluations: int = argument(
        "validations during a run, evenly spaced, all on the same batches", 20
    )
    eval_batches: int = argument("batches of a validation", 32)
    last: int = argument("last validations of a run that are averaged", 5)
    jobs: int = argument(
        "runs at a time; 0: only write the table of those that are finished", 1
    )
    out: str = argument("where the runs and the table go", "runs/study")

    @property
    def logged(self) -> list[str]:
        """Return the trainer's arguments for how often it logs and validates."""
        return ["train.log_every=10", "metrics.numerics_every=0"]

    def checkpoints(self, job: "Trial") -> list[str]:
        """Return the trainer's arguments for when a run saves: at its end, or when it
        is interrupted.
        """
        return ["checkpoint.every=0"]


class Trial(NamedTuple):
    """One run: learning rate as a multiple, item of `presets`, seed."""

    lr: float
    item: str
    seed: int


def jobs_of(args: Study) -> list[Trial]:
    """Return every run of the study, seeds outermost, the base first."""
    items, multiples = parse(args)
    return [
        Trial(m, item, args.first_seed + seed)
        for seed in range(args.seeds)
        for m in multiples
        for item in items
    ]


def parse(args: Study) -> tuple[list[str], list[float]]:
    """Return the items, the base first, and learning rates; UserError if invalid."""
    for name, least in (
        ("seeds", 1),
        ("steps", 1),
        ("last", 1),
        ("eval_batches", 1),
        ("evaluations", 1),
        ("jobs", 0),
    ):
        if getattr(args, name) < least:
            raise UserError(f"{name}={getattr(args, name)}: expected at least {least}")
    if args.steps % args.evaluations or args.last > args.evaluations:
        raise UserError(
            f"evaluations={args.evaluations}: expected a divisor of steps={args.steps},"
            f" not below last={args.last}"
        )
    items = [args.base, *(item for item in split(args.presets) if item != args.base)]
    names = [safe(item) for item in items]
    for item, name in zip(items, names, strict=True):
        if names.count(name) > 1:
            raise UserError(
                f"presets={args.presets}: {item} stands there twice; give each once"
            )
    for word in (
        *shlex.split(args.overrides),
        *(part for item in items for part in overrides(item)),
    ):
        key = word.partition("=")[0].lstrip("+~")
        if key in OWN_KEYS:
            raise UserError(
                f"{word}: the study sets {key} itself; leave it out, or see its own"
                " arguments (--help)"
            )
    try:
        multiples = [float(text) for text in args.lr.split(",")]
    except ValueError:
        raise UserError(
            f"lr={args.lr}: expected multiples of model.lr, such as lr=1,3,10"
        ) from None
    if len(set(multiples)) < len(multiples) or min(multiples) <= 0:
        raise UserError(
            f"lr={args.lr}: expected positive multiples of model.lr, each once"
        )
    return items, multiples


def safe(item: str) -> str:
    """Return the item as the name of a directory."""
    return re.sub(r"[^\w.=+-]", "_", item)


def folder(out: Path, job: Trial) -> Path:
    """Return the run's directory."""
    return out / f"{job.lr:g}x" / safe(job.item) / str(job.seed)


def overrides(item: str) -> list[str]:
    """Return an item's arguments for the trainer."""
    return [part if "=" in part else f"precision={part}" for part in item.split("+")]


def claim(out: Path, args: Any) -> None:
    """Check that a directory's runs share this study's settings, else UserError."""
    fixed = {name: getattr(args, name) for name in args.fixed}
    path, saved = out / "study.json", dict[str, Any]()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write to out={out}: {error.strerror}; choose another"
        ) from error
    if path.exists():
        saved = json.loads(path.read_text(encoding="utf-8"))
        # of a key that came after the directory
        usual = {field.name: field.default for field in fields(args)}
        was = {name: saved.get(name, usual[name]) for name in fixed}
        different = [f"{k}={v} (was {was[k]})" for k, v in fixed.items() if v != was[k]]
        if different:
            raise UserError(
                f"out={out} holds runs with other {', '.join(different)}; take it back,"
                " or choose another out"
            )
    write_atomically(path, json.dumps(saved | fixed, indent=2) + "\n")


def trunk_of(args: Study, job: Trial) -> Path:
    """Return the checkpoint from which the runs of a seed start."""
    return folder(Path(args.out), job._replace(item=args.base)) / TRUNK


def keep_trunk(run_dir: Path, step: int) -> None:
    """Copy a run's checkpoint of `step` and its configuration to the trunk's place, all
    or nothing.
    """
    trunk, half = run_dir / TRUNK, run_dir / f"{TRUNK}.part"
    if not trunk.exists():
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(
            run_dir / "checkpoints" / str(step), half / "checkpoints" / str(step)
        )
        shutil.copy2(run_dir / "config.yaml", half)
        half.rename(trunk)


def check_items(args: Study, items: Sequence[str]) -> float:
    """Let the trainer compose every item's configuration; return `model.lr`.

    Raises:
      UserError: an item is invalid; the message is the trainer's.
    """
    lr = 0.0
    for item in reversed(items):  # the base last: the learning rate is its own
        settings = merge_overrides(
            [f"model={args.model}"], shlex.split(args.overrides), overrides(item)
        )
        arguments = [*settings, "--cfg", "job", "--resolve"]
        done = subprocess.run(
            [sys.executable, "-m", "trainer", *arguments],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise UserError(f"{item}: {last_line(done.stderr)}")
        lr = yaml.safe_load(done.stdout)["model"]["lr"]
    return lr


def last_line(text: str) -> str:
    """Return the last line of a failed process, without `error: `."""
    lines = text.strip().splitlines()
    return (
        lines[-1].removeprefix("error: ")
        if lines
        else "the trainer failed without a word"
    )


def command(args: Study, job: Trial, run_dir: Path, model_lr: float) -> list[str]:
    """Return the command of a run."""
    settings = [
        f"model={args.model}",
        f"train.steps={args.steps}",
        f"train.batch_tokens={args.batch_tokens}",
        f"train.eval_every={args.steps // args.evaluations}",
        f"train.eval_batches={args.eval_batches}",
        f"train.final_eval_batches={args.eval_batches}",
        *args.checkpoints(job),
        "sample.max_new_tokens=0",
        *args.logged,
        "tracker=jsonl",
        *shlex.split(args.overrides),
        *overrides(job.item),
        f"optimizer.lr={job.lr * model_lr:.9g}",
        f"seed={job.seed}",
        f"run_dir='{run_dir}'",
    ]
    return [sys.executable, "-m", "trainer", *merge_overrides(settings)]


def in_turn(
    commands: dict[Trial, list[str]],
    folders: dict[Trial, Path],
    count: int,
    wanted: Callable[[Trial], bool] = lambda job: True,
) -> Iterator[Trial]:
    """Run `count` jobs at a time, and yield each as it ends.

    When this process is stopped, it stops the jobs, and they save. `wanted` is asked
    when a job's turn has come; an unwanted job is left out.

    Raises:
      UserError: a run failed; the message has the trainer's last line. A run that
        diverged has not failed: that is a result.
    """
    waiting, running = list(commands), dict[Trial, subprocess.Popen[bytes]]()
    stops = (signal.SIGTERM, signal.SIGHUP)
    handlers = [
        signal.signal(number, lambda number, _: sys.exit(128 + number))
        for number in stops
    ]
    try:
        while waiting or running:
            while waiting and len(running) < count:
                job = waiting.pop(0)
                if not wanted(job):
                    continue
                folders[job].mkdir(parents=True, exist_ok=True)
                with (folders[job] / "output.txt").open("wb") as file:
                    # In a group of its own: a terminal's Ctrl-C would reach it too, and
                    # ours be the second signal.
                    running[job] = subprocess.Popen(
                        commands[job],
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        process_group=0,
                    )
            time.sleep(0.2)
            for job in [
                job for job, process in running.items() if process.poll() is not None
            ]:
                code = running.pop(job).returncode
                if code not in (0, Diverged.exit_code):
                    output = (folders[job] / "output.txt").read_text(
                        encoding="utf-8", errors="replace"
                    )
                    raise UserError(
                        f"{folders[job]} ended with exit code {code}:"
                        f" {last_line(output)}"
                    )
                yield job
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
        for number, handler in zip(stops, handlers, strict=True):
            signal.signal(number, handler)


def carry_out[R](
    args: Study,
    *,
    read: Callable[[Path], R | None],
    conclude: Callable[[Trial, Path], None],
    report: Callable[[dict[Trial, R]], None],
    describe: Callable[[R], str],
    wanted: Callable[[Trial], bool] = lambda job: True,
) -> dict[Trial, R]:
    """Run the jobs of a study that have no result yet, one seed after the other so that
    pairs come early; return the results of all.

    Args:
      args: of the study.
      read: returns the result of a run directory, or None while it has none.
      conclude: is called when a job has ended, and for those that ended before.
      report: is called with all results, first and after each job.
      describe: returns a result as words.
      wanted: see `in_turn`.

    Raises:
      UserError: invalid settings, or a job failed.
    """
    jobs, out = jobs_of(args), Path(args.out)
    claim(out, args)
    model_lr = check_items(args, list(dict.fromkeys(job.item for job in jobs)))
    folders = {job: folder(out, job) for job in jobs}
    results = {job: r for job in jobs if (r := read(folders[job])) is not None}
    for job in list(results) if args.jobs else ():
        # A run's last validation comes before its last checkpoint.
        if not is_in_use(folders[job]):
            conclude(job, folders[job])
            results[job] = read(folders[job]) or results[job]

    def show() -> None:
        """Report the results in the order of the arguments."""
        report({job: results[job] for job in jobs if job in results})

    show()
    todo = [job for job in jobs if job not in results] if args.jobs else []
    print(
        f"{len(results)} of {len(jobs)} runs are finished; {len(todo)} to go",
        flush=True,
    )
    started = time.monotonic()
    commands = {job: command(args, job, folders[job], model_lr) for job in todo}
    ended = in_turn(commands, folders, args.jobs, wanted) if todo else ()
    for left, job in zip(range(len(todo) - 1, -1, -1), ended, strict=False):
        conclude(job, folders[job])
        result = read(folders[job])
        if result is None:
            raise UserError(f"{folders[job]} ended without a result; see its log")
        results[job] = result
        show()
        minutes = (time.monotonic() - started) / (len(todo) - left) * left / 60
        print(
            f"{len(results)} of {len(jobs)}: {job.item}, lr {job.lr:g}, seed"
            f" {job.seed}: {describe(result)}; {left} to go, about {minutes:.0f} min",
            flush=True,
        )
    return results


def write_study(
    args: Study,
    name: str,
    rows: Iterable[Any],
    results: Mapping[Trial, Mapping[str, Any]],
    text: str,
) -> None:
    """Write OUT/NAME.json and OUT/NAME.md, both with the command that made them.

    Args:
      args: of the study.
      name: of the study.
      rows: of its table, named tuples.
      results: figures of each run.
      text: its heading and tables.
    """
    out = Path(args.out)
    words = [shlex.quote(f"{k}={v}") for k, v in given(args).items()]
    command = " ".join(["python", "-m", f"scripts.studies.{name}", *words])
    figures = {
        "command": command,
        "code": code_of(folder(out, job) for job in results),
        "tokens": args.steps * args.batch_tokens,
        "table": [finite(row._asdict()) for row in rows],
        "runs": [job._asdict() | dict(results[job]) for job in sorted(results)],
    }
    document = json.dumps(figures, indent=1, allow_nan=False)
    write_atomically(out / f"{name}.json", document + "\n")
    write_atomically(out / f"{name}.md", f"{text}\n`{command}`\n")


def remove_checkpoints(run_dir: Path) -> None:
    """Remove the checkpoints of a finished run, most of its size, all or none."""
    remove_removed(run_dir)
    if (run_dir / "checkpoints").exists():
        (run_dir / "checkpoints").rename(run_dir / REMOVED)
        remove_removed(run_dir)


def remove_removed(run_dir: Path) -> None:
    """Remove what an interrupted removal of checkpoints has left."""
    shutil.rmtree(run_dir / REMOVED, ignore_errors=True)


def code_of(run_dirs: Iterable[Path]) -> str:
    """Return the code versions that trained the runs, separated by commas.

    The version that writes their table may be another one.
    """
    versions: dict[str, None] = {}
    for run_dir in run_dirs:
        environment = run_dir / "environment.txt"
        lines = (
            environment.read_text(encoding="utf-8").splitlines()
            if environment.exists()
            else []
        )
        versions |= dict.fromkeys(
            line.removeprefix("code: ") for line in lines if line.startswith("code: ")
        )
    return ", ".join(versions)


def given(args: Any) -> dict[str, Any]:
    """Return the arguments that are not at their defaults."""
    return {
        f.name: getattr(args, f.name)
        for f in fields(args)
        if getattr(args, f.name) != f.default
    }
