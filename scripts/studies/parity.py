"""Do precisions train equally well? Paired runs: the same seeds, so the same initial weights and batches.

An item of `presets=` is a precision with `+key=value` for each further override, such as
`scalify_fp8_fp16+precision.weights_rounding=nearest`, or overrides alone, such as `experiment=fishman`. Each run is
`python -m trainer` in OUT/LR/ITEM/SEED. Called again, the study continues; finished runs stay as they are. After every
run OUT/parity.json, parity.md and parity.png are written anew.
"""

import json
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from scripts.arguments import argument, run, split
from scripts.evaluate import policy_of
from scripts.studies.pairs import Outcome, compare, finite, markdown
from scripts.studies.parity_picture import draw
from trainer.errors import Diverged, UserError
from trainer.observe.records import read_rows
from trainer.report.history import read_evaluation
from trainer.run.rundir import code_version, is_held, write_atomically

# What all runs of a directory have in common; presets, seeds and learning rates may be added later.
FIXED = ("steps", "batch_tokens", "model", "overrides", "evaluations", "eval_batches")
# What the study sets itself, from its own arguments or to read a run's outcome: no override takes their place.
OWN_KEYS = ("tracker", "seed", "run_dir", "resume", "model", "train.steps", "train.batch_tokens", "optimizer.lr")


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    presets: str = argument("what is compared, separated by commas")
    base: str = argument("what they are compared with; always run", "fp32")
    seeds: int = argument("pairs", 8)
    first_seed: int = argument("the first of the seeds, which follow one another", 0)
    lr: str = argument("learning rates, as multiples of model.lr, separated by commas", "1")
    model: str = argument("the model", "gpt2_nano")
    steps: int = argument("steps of each run", 1000)
    batch_tokens: int = argument("tokens per step", 1024)
    overrides: str = argument("further arguments of the trainer for all runs, separated by spaces", "")
    evaluations: int = argument("validations during a run, evenly spaced, all on the same batches", 20)
    eval_batches: int = argument("batches of a validation", 32)
    last: int = argument("last validations of a run that are averaged", 5)
    evaluate_in: str = argument("a precision in which the final weights are evaluated too; empty: none", "")
    jobs: int = argument("runs at a time; 0: only write the table of those that are finished", 1)
    out: str = argument("where the runs and the table go", "runs/parity")


class Job(NamedTuple):
    """One run: learning rate as a multiple, item of `presets`, seed."""

    lr: float
    item: str
    seed: int


def main(args: Arguments) -> None:
    """Run what is not finished, one seed after the other, so that pairs come early."""
    jobs = jobs_of(args)
    out = Path(args.out)
    claim(out, args)
    model_lr = check_items(args, list(dict.fromkeys(job.item for job in jobs)))
    if args.evaluate_in:
        policy_of(args.evaluate_in)
    folders = {job: folder(out, job) for job in jobs}
    finished = [job for job in jobs if has_ended(folders[job], args)]
    for job in finished if args.jobs else ():  # such as one that was interrupted before it was evaluated
        if not is_held(folders[job]):  # a run's last validation comes before its last checkpoint
            conclude(folders[job], args)
    outcomes = {job: found for job in finished if (found := read_outcome(folders[job], args.steps, args.evaluate_in))}
    report(out, args, outcomes)
    todo = [job for job in jobs if job not in outcomes]
    print(f"{len(outcomes)} of {len(jobs)} runs are finished; {len(todo) if args.jobs else 0} to go", flush=True)
    gone = sum(found.elsewhere is None and not found.diverged for found in outcomes.values())
    if args.evaluate_in and gone:
        print(f"{gone} of them were not evaluated in {args.evaluate_in}", flush=True)
    if not args.jobs:
        return
    commands = {job: command(args, job, folders[job], model_lr) for job in todo}
    for job in in_turn(commands, folders, args.jobs):
        conclude(folders[job], args)
        found = read_outcome(folders[job], args.steps, args.evaluate_in)
        assert found is not None  # its process ended well
        outcomes[job] = found
        report(out, args, outcomes)
        state = "diverged" if found.diverged else f"{found.final(args.last):.4f} nats"
        print(f"{len(outcomes)} of {len(jobs)}: {job.item}, lr {job.lr:g}x, seed {job.seed}: {state}", flush=True)


def jobs_of(args: Arguments) -> list[Job]:
    """Every run of the study, seeds outermost, the base first."""
    items, multiples = parse(args)
    return [Job(m, item, args.first_seed + seed) for seed in range(args.seeds) for m in multiples for item in items]


def parse(args: Arguments) -> tuple[list[str], list[float]]:
    """Items, the base first, and learning rates; UserError for what cannot be meant."""
    for name, least in (("seeds", 1), ("steps", 1), ("last", 1), ("eval_batches", 1), ("evaluations", 1), ("jobs", 0)):
        if getattr(args, name) < least:
            raise UserError(f"{name}={getattr(args, name)}: expected at least {least}")
    if args.steps % args.evaluations or args.last > args.evaluations:
        raise UserError(
            f"evaluations={args.evaluations}: expected a divisor of steps={args.steps}, not below last={args.last}"
        )
    if len(split(args.evaluate_in)) > 1:
        raise UserError(f"evaluate_in={args.evaluate_in}: expected one precision")
    items = [args.base, *(item for item in split(args.presets) if item != args.base)]
    names = [safe(item) for item in items]
    for item, name in zip(items, names, strict=True):
        if names.count(name) > 1:
            raise UserError(f"presets={args.presets}: {item} stands there twice; give each once")
    for word in (*shlex.split(args.overrides), *(part for item in items for part in overrides(item))):
        key = word.partition("=")[0].lstrip("+~")
        if key in OWN_KEYS:
            raise UserError(f"{word}: the study sets {key} itself; leave it out, or see its own arguments (--help)")
    try:
        multiples = [float(text) for text in args.lr.split(",")]
    except ValueError:
        raise UserError(f"lr={args.lr}: expected multiples of model.lr, such as lr=1,3,10") from None
    if len(set(multiples)) < len(multiples) or min(multiples) <= 0:
        raise UserError(f"lr={args.lr}: expected positive multiples of model.lr, each once")
    return items, multiples


def safe(item: str) -> str:
    """The item as the name of a directory."""
    return re.sub(r"[^\w.=+-]", "_", item)


def folder(out: Path, job: Job) -> Path:
    """The run's directory."""
    return out / f"{job.lr:g}x" / safe(job.item) / str(job.seed)


def overrides(item: str) -> list[str]:
    """The trainer's arguments that an item stands for."""
    return [part if "=" in part else f"precision={part}" for part in item.split("+")]


def claim(out: Path, args: Arguments) -> None:
    """A directory holds runs of one kind. UserError if these would be of another."""
    fixed = {name: getattr(args, name) for name in FIXED}
    path = out / "study.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to out={out}: {error.strerror}; choose another") from error
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        different = [f"{name}={fixed[name]} (was {before[name]})" for name in FIXED if fixed[name] != before[name]]
        if different:
            raise UserError(
                f"out={out} holds runs with other {', '.join(different)}; take it back, or choose another out"
            )
    write_atomically(path, json.dumps(fixed, indent=2) + "\n")


def check_items(args: Arguments, items: Sequence[str]) -> float:
    """`model.lr`, once the trainer has composed every item's configuration. UserError in its words otherwise."""
    lr = 0.0
    for item in reversed(items):  # the base last: the learning rate is its own
        arguments = [f"model={args.model}", *shlex.split(args.overrides), *overrides(item), "--cfg", "job", "--resolve"]
        done = subprocess.run([sys.executable, "-m", "trainer", *arguments], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{item}: {last_line(done.stderr)}")
        lr = yaml.safe_load(done.stdout)["model"]["lr"]
    return lr


def last_line(text: str) -> str:
    """What a failed process said at last, without `error: `."""
    lines = text.strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "the trainer failed without a word"


def command(args: Arguments, job: Job, run_dir: Path, model_lr: float) -> list[str]:
    """The run as a command. Checkpoints come only at the end or when it is interrupted."""
    settings = [
        f"model={args.model}",
        f"train.steps={args.steps}",
        f"train.batch_tokens={args.batch_tokens}",
        "train.log_every=10",
        f"train.eval_every={args.steps // args.evaluations}",
        f"train.eval_batches={args.eval_batches}",
        f"train.final_eval_batches={args.eval_batches}",
        "checkpoint.every=0",
        "sample.max_new=0",
        "metrics.numerics_every=0",
        "tracker=jsonl",
        *shlex.split(args.overrides),
        *overrides(job.item),
        f"optimizer.lr={job.lr * model_lr:.9g}",
        f"seed={job.seed}",
        f"run_dir='{run_dir}'",
    ]
    return [sys.executable, "-m", "trainer", *settings]


def in_turn(commands: dict[Job, list[str]], folders: dict[Job, Path], count: int) -> Iterator[Job]:
    """Each job as it ends, `count` of them running at a time; when we are stopped, they are stopped, and save.

    Raises UserError, with the trainer's last line, for a run that failed; that it diverged is a result.
    """
    waiting, running = list(commands), dict[Job, subprocess.Popen[bytes]]()
    stops = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in stops]
    try:
        while waiting or running:
            while waiting and len(running) < count:
                job = waiting.pop(0)
                folders[job].mkdir(parents=True, exist_ok=True)
                with (folders[job] / "output.txt").open("wb") as file:
                    # In a group of its own: a terminal's Ctrl-C would reach it too, and ours be the second signal.
                    running[job] = subprocess.Popen(
                        commands[job], stdout=file, stderr=subprocess.STDOUT, process_group=0
                    )
            time.sleep(0.2)
            for job in [job for job, process in running.items() if process.poll() is not None]:
                code = running.pop(job).returncode
                if code not in (0, Diverged.exit_code):
                    output = (folders[job] / "output.txt").read_text(encoding="utf-8", errors="replace")
                    raise UserError(f"{folders[job]} ended with exit code {code}: {last_line(output)}")
                yield job
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
        for number, handler in zip(stops, before, strict=True):
            signal.signal(number, handler)


def has_ended(run_dir: Path, args: Arguments) -> bool:
    """Whether a run has its outcome, and its last weights if they are to be evaluated.

    It has not if it was killed between its last validation and its last checkpoint: the trainer continues it.
    """
    found, checkpoints = read_outcome(run_dir, args.steps), run_dir / "checkpoints"
    if found is None or found.diverged or not args.evaluate_in:
        return found is not None
    return not checkpoints.exists() or (checkpoints / str(args.steps)).exists() or is_held(run_dir)


def conclude(run_dir: Path, args: Arguments) -> None:
    """Evaluate the weights of a run that has ended, where that is asked, and remove its checkpoints.

    They stay where they could not be evaluated, which is said; the next call tries again.
    """
    found, checkpoints, gone = read_outcome(run_dir, args.steps), run_dir / "checkpoints", run_dir / "removed"
    shutil.rmtree(gone, ignore_errors=True)
    if found is None or not checkpoints.exists():
        return
    if args.evaluate_in and not found.diverged:
        words = [f"run_dir={run_dir}", f"precisions={args.evaluate_in}", f"batches={args.eval_batches}"]
        done = subprocess.run([sys.executable, "-m", "scripts.evaluate", *words], capture_output=True, text=True)
        if done.returncode:
            print(f"{run_dir} is not evaluated: {last_line(done.stderr)}", flush=True)
            return
        evaluation = read_evaluation(run_dir)
        if evaluation is None or evaluation.step != args.steps:
            print(f"{run_dir} is not evaluated: its checkpoint of step {args.steps} cannot be read", flush=True)
            return
    checkpoints.rename(gone)  # whoever kills this now leaves all of them or none: see `read_outcome`
    shutil.rmtree(gone, ignore_errors=True)  # most of the run's size


def read_outcome(run_dir: Path, steps: int, evaluated_in: str = "") -> Outcome | None:
    """What a run came to; None: it is not finished.

    While there are checkpoints an evaluation may be anyone's, of other weights or batches: it does not count.
    """
    rows = read_rows(run_dir / "metrics.jsonl")
    curve = {row["step"]: float(row["val/loss"]) for row in rows if "val/loss" in row}
    stopped = (run_dir / "divergence.txt").exists()
    if not stopped and steps not in curve:
        return None
    diverged = stopped or not math.isfinite(curve[steps])
    skipped = max((row["watchdog/skipped"] for row in rows if "watchdog/skipped" in row), default=0)
    concluded = evaluated_in and not (run_dir / "checkpoints").exists()
    evaluation = read_evaluation(run_dir) if concluded else None
    losses = evaluation.losses if evaluation is not None and evaluation.step == steps else {}
    elsewhere = losses.get(evaluated_in, math.nan)
    return Outcome(curve, int(skipped), diverged, elsewhere if math.isfinite(elsewhere) else None)


def report(out: Path, args: Arguments, outcomes: dict[Job, Outcome]) -> None:
    """Write the table and what it was made from."""
    outcomes = {job: outcomes[job] for job in jobs_of(args) if job in outcomes}  # in the order of the arguments
    rows = compare(outcomes, args.base, last=args.last)
    words = ["python", "-m", "scripts.studies.parity", *(shlex.quote(f"{k}={v}") for k, v in given(args).items())]
    study: dict[str, Any] = {
        "command": " ".join(words),
        "code": code_version(),
        "tokens": args.steps * args.batch_tokens,
        "table": [finite(row._asdict()) for row in rows],
        "runs": [
            job._asdict() | found._asdict() | {"curve": finite(found.curve)} for job, found in sorted(outcomes.items())
        ],
    }
    write_atomically(out / "parity.json", json.dumps(study, indent=1, allow_nan=False) + "\n")
    write_atomically(
        out / "parity.md", heading(args) + markdown(rows, args.base, args.evaluate_in) + f"\n`{study['command']}`\n"
    )
    draw(out / "parity.png", rows, outcomes, args.base, last=args.last)


def given(args: Arguments) -> dict[str, Any]:
    """The arguments that are not at their defaults."""
    return {f.name: getattr(args, f.name) for f in fields(args) if getattr(args, f.name) != f.default}


def heading(args: Arguments) -> str:
    """What the table's figures are of."""
    return (
        f"{args.model}, {args.steps} steps of {args.batch_tokens} tokens ({args.steps * args.batch_tokens:,} in all); "
        f"validation loss in nats per token, mean of the last {args.last} of {args.evaluations} validations; "
        f"differences to {args.base} of the same seed, with 95% intervals of their mean.\n\n"
    )


if __name__ == "__main__":
    sys.exit(run(Arguments, "studies.parity", __doc__ or "", main))
