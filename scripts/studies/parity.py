"""Compare the losses of precisions in paired runs: same seeds, so the same initial
weights and batches.

    python -m scripts.studies.parity presets=scalify_fp8_fp16 model=llama_nano \\
        steps=1000 trunk=300 last=1 evaluations=5 eval_batches=128 \\
        overrides="model.lr=1e-3 schedule.min_ratio=0"

An item of `presets=` is a precision with `+key=value` for each further override, such
as `scalify_fp8_fp16+precision.weights_rounding=nearest`, or overrides alone, such as
`experiment=fishman`. Each run is `python -m trainer` in OUT/LR/ITEM/SEED. Called again,
the study continues; finished runs stay as they are. After every run OUT/parity.json and
parity.md are written anew. With `base=ITEM jobs=0` finished runs are compared with
another of the items.

With `trunk=STEPS` the runs of a seed share their first steps: those of the base, from
whose checkpoint the others continue in their own precision. Two trainings that differ
from the first step on end in different minima, whose losses differ by chance. From a
common trunk they stay in one, and the differences of pairs are ten times smaller. The
effect of a precision on the first steps is then not measured.
"""

import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.studies.pairs import Outcome, compare, markdown
from scripts.studies.runs import (
    Study,
    Trial,
    carry_out,
    jobs_of,
    keep_trunk,
    last_line,
    remove_checkpoints,
    remove_removed,
    trunk_of,
    write_study,
)
from trainer.cli.arguments import argument, run_script, split
from trainer.cli.evaluate import policy_of
from trainer.errors import UserError
from trainer.files import finite
from trainer.observe.records import read_rows
from trainer.report.run_records import read_evaluation
from trainer.run.rundir import is_in_use


@dataclass(frozen=True)
class Arguments(Study):
    """Settings of the study; see `--help`."""

    fixed = (*Study.fixed, "trunk")

    evaluate_in: str = argument(
        "a precision in which the final weights are evaluated too; empty: none", ""
    )
    trunk: int = argument(
        "first steps that the runs of a seed share, trained as the base is; 0: none", 0
    )
    out: str = argument("where the runs and the table go", "runs/parity")

    def checkpoints(self, job: Trial) -> list[str]:
        """Return the trainer's arguments for when a run saves.

        With a trunk the base saves there too, and all others start from it.
        """
        if not self.trunk:
            return super().checkpoints(job)
        if job.item == self.base:
            return [
                f"checkpoint.every={self.trunk}",
                f"checkpoint.keep={self.steps // self.trunk + 1}",
            ]
        start = [
            f"resume='{trunk_of(self, job)}'",
            f"resume.step={self.trunk}",
            "resume.convert=true",
        ]
        return [*super().checkpoints(job), *start]


def main(args: Arguments) -> None:
    """Run what is not finished."""
    jobs = jobs_of(args)
    check_arguments(args)

    def read(run_dir: Path) -> Outcome | None:
        if not has_ended(run_dir, args):
            return None
        return read_outcome(run_dir, args.steps, args.evaluate_in)

    def has_start(job: Trial) -> bool:
        """Return whether a run has its trunk: the base's may diverge before it."""
        if not args.trunk or job.item == args.base:
            return True
        return trunk_of(args, job).exists()

    def describe(outcome: Outcome) -> str:
        if outcome.diverged:
            return "diverged"
        return f"{outcome.final(args.last):.4f} nats"

    outcomes = carry_out(
        args,
        read=read,
        conclude=lambda job, run_dir: conclude(job, run_dir, args),
        report=lambda outcomes: report(args, outcomes),
        describe=describe,
        wanted=has_start,
    )
    missing = sum(
        outcome.elsewhere is None and not outcome.diverged
        for outcome in outcomes.values()
    )
    if args.evaluate_in and missing:
        print(f"{missing} of them were not evaluated in {args.evaluate_in}", flush=True)
    lost = sum(job not in outcomes and not has_start(job) for job in jobs)
    if lost and args.jobs:
        print(
            f"{lost} runs were not begun: the base's of their seed has no"
            f" checkpoint of step {args.trunk}"
        )


def check_arguments(args: Arguments) -> None:
    """Raise UserError for a trunk, an item or a precision that no study has."""
    if len(split(args.evaluate_in)) > 1:
        raise UserError(f"evaluate_in={args.evaluate_in}: expected one precision")
    if args.evaluate_in:
        policy_of(args.evaluate_in)
    if not 0 <= args.trunk < args.steps:
        raise UserError(
            f"trunk={args.trunk}: expected fewer steps than steps={args.steps}; 0: none"
        )
    if args.trunk and args.jobs > 1:
        raise UserError(
            f"trunk={args.trunk} and jobs={args.jobs}: runs of a seed wait for the"
            " base's; give jobs=1"
        )


def has_ended(run_dir: Path, args: Arguments) -> bool:
    """Return whether a run has its outcome, and its last weights if they are to be
    evaluated.

    It has not if it was killed between its last validation and its last checkpoint: the
    trainer continues it.
    """
    outcome, checkpoints = read_outcome(run_dir, args.steps), run_dir / "checkpoints"
    if outcome is None or outcome.diverged or not args.evaluate_in:
        return outcome is not None
    return (
        not checkpoints.exists()
        or (checkpoints / str(args.steps)).exists()
        or is_in_use(run_dir)
    )


def conclude(job: Trial, run_dir: Path, args: Arguments) -> None:
    """Evaluate a finished run, if asked, and remove its checkpoints but the trunk.

    Where the evaluation fails a line says so and the checkpoints stay; the next call
    tries again.
    """
    outcome, checkpoints = read_outcome(run_dir, args.steps), run_dir / "checkpoints"
    remove_removed(run_dir)
    if outcome is None or not checkpoints.exists():
        return
    if job.item == args.base and (checkpoints / str(args.trunk)).exists():
        keep_trunk(run_dir, args.trunk)
    if args.evaluate_in and not outcome.diverged:
        words = [
            f"run_dir={run_dir}",
            f"precisions={args.evaluate_in}",
            f"batches={args.eval_batches}",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "trainer", "evaluate", *words],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            print(f"{run_dir} is not evaluated: {last_line(done.stderr)}", flush=True)
            return
        evaluation = read_evaluation(run_dir)
        if evaluation is None or evaluation.step != args.steps:
            print(
                f"{run_dir} is not evaluated: its checkpoint of step {args.steps}"
                " cannot be read",
                flush=True,
            )
            return
    remove_checkpoints(run_dir)


def read_outcome(run_dir: Path, steps: int, evaluated_in: str = "") -> Outcome | None:
    """Return the outcome of a run, or None where it is not finished.

    While there are checkpoints an evaluation may be anyone's, of other weights or
    batches: it does not count.
    """
    rows = read_rows(run_dir / "metrics.jsonl")
    curve = {row["step"]: float(row["val/loss"]) for row in rows if "val/loss" in row}
    stopped = (run_dir / "divergence.txt").exists()
    if not stopped and steps not in curve:
        return None
    diverged = stopped or not math.isfinite(curve[steps])
    skipped = max(
        (row["watchdog/skipped"] for row in rows if "watchdog/skipped" in row),
        default=0,
    )
    concluded = evaluated_in and not (run_dir / "checkpoints").exists()
    evaluation = read_evaluation(run_dir) if concluded else None
    losses = (
        evaluation.losses if evaluation is not None and evaluation.step == steps else {}
    )
    elsewhere = losses.get(evaluated_in, math.nan)
    return Outcome(
        curve, int(skipped), diverged, elsewhere if math.isfinite(elsewhere) else None
    )


def report(args: Arguments, outcomes: dict[Trial, Outcome]) -> None:
    """Write the table and what it was made from."""
    rows = compare(outcomes, args.base, last=args.last)
    results = {
        job: outcome._asdict() | {"curve": finite(outcome.curve)}
        for job, outcome in outcomes.items()
    }
    table = markdown(rows, args.base, args.evaluate_in)
    write_study(args, "parity", rows, results, heading(args) + table)


def heading(args: Arguments) -> str:
    """Format the settings that the table's figures are of."""
    return (
        f"{args.model}, {args.steps} steps of {args.batch_tokens} tokens"
        f" ({args.steps * args.batch_tokens:,} in all); validation loss in nats per"
        f" token, mean of the last {args.last} of {args.evaluations} validations;"
        f" differences to {args.base} of the same seed, with 95% intervals of their"
        " mean"
        + f"; the runs of a seed share its first {args.trunk} steps" * bool(args.trunk)
        + ".\n\n"
    )


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "studies.parity", __doc__ or "", main))
