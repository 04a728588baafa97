"""Compare the losses of precisions in paired runs: same seeds, so the same initial
weights and batches.

    python -m scripts.studies.parity presets=scalify_fp8_fp16 model=llama_nano \\
        steps=1000 trunk=300 last=1 evaluations=5 eval_batches=128 \\
        overrides="model.lr=1e-3 schedule.min_ratio=0"

An item of `presets=` is a precision with `+key=value` for each further override, such
as `scalify_fp8_fp16+precision.weights_rounding=nearest`, or overrides alone, such as
`experiment=fishman`. Each run is `python -m trainer` in OUT/LR/ITEM/SEED. Called again,
the study continues; finished runs stay as they are. After every run OUT/parity.json,
parity.md and parity.png are written anew. With `margin=` an item gets no further seeds
once it is clear on which side of the margin its difference is, by an interval that
holds however often it is looked at.

With `trunk=STEPS` the runs of a seed share their first steps: those of the base, from
whose checkpoint the others continue in their own precision. Two trainings that differ
from the first step on end in different minima, whose losses differ by chance. From a
common trunk they stay in one, and the differences of pairs are ten times smaller. The
effect of a precision on the first steps is then not measured.
"""

import json
import math
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.studies.pairs import (
    Outcome,
    compare,
    markdown,
    pairs_for,
    percents_of,
    scatter_of,
    seen_with,
    settled,
)
from scripts.studies.parity_picture import draw
from scripts.studies.runs import (
    Study,
    Trial,
    check_items,
    claim,
    code_of,
    command,
    folder,
    given,
    in_turn,
    jobs_of,
    keep_trunk,
    last_line,
    remove_checkpoints,
    remove_removed,
    trunk_of,
)
from trainer.cli.arguments import argument, run_script, split
from trainer.cli.evaluate import policy_of
from trainer.errors import UserError
from trainer.files import finite, write_atomically
from trainer.observe.records import read_rows
from trainer.report.history import read_evaluation
from trainer.run.rundir import is_held
from trainer.tasks.intervals import interval_of


@dataclass(frozen=True)
class Arguments(Study):
    """Settings of the study; see `--help`."""

    fixed = (*Study.fixed, "trunk")

    evaluate_in: str = argument(
        "a precision in which the final weights are evaluated too; empty: none", ""
    )
    interval: float = argument(
        "wanted half width of the 95% interval, in percent of the base; 0: no wish", 0.0
    )
    scatter: float = argument(
        "standard deviation of a pair, in percent, that is assumed until pairs tell it",
        0.2,
    )
    trunk: int = argument(
        "first steps that the runs of a seed share, trained as the base is; 0: none", 0
    )
    against: str = argument(
        "another of the items, with which all are compared in a second table; empty:"
        " none",
        "",
    )
    margin: float = argument(
        "stop an item when its difference is surely below or above so many percent; 0:"
        " never",
        0.0,
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
    """Run what is not finished, one seed after the other, so that pairs come early."""
    jobs = jobs_of(args)
    check_arguments(args)
    out = Path(args.out)
    claim(out, args)
    model_lr = check_items(args, list(dict.fromkeys(job.item for job in jobs)))
    folders = {job: folder(out, job) for job in jobs}
    finished = [job for job in jobs if has_ended(folders[job], args)]
    # such as one that was interrupted before it was evaluated
    for job in finished if args.jobs else ():
        # a run's last validation comes before its last checkpoint
        if not is_held(folders[job]):
            conclude(job, folders[job], args)
    outcomes = {
        job: outcome
        for job in finished
        if (outcome := read_outcome(folders[job], args.steps, args.evaluate_in))
    }
    report(out, args, outcomes)
    todo = [job for job in jobs if job not in outcomes]
    print(
        f"{len(outcomes)} of {len(jobs)} runs are finished;"
        f" {len(todo) if args.jobs else 0} to go",
        flush=True,
    )
    for line in power(args, outcomes):
        print(line, flush=True)
    missing = sum(
        outcome.elsewhere is None and not outcome.diverged
        for outcome in outcomes.values()
    )
    if args.evaluate_in and missing:
        print(f"{missing} of them were not evaluated in {args.evaluate_in}", flush=True)
    if not args.jobs:
        return
    told = set(verdicts(args, outcomes))
    commands = {job: command(args, job, folders[job], model_lr) for job in todo}
    for job in in_turn(
        commands, folders, args.jobs, lambda job: is_wanted(job, args, outcomes)
    ):
        conclude(job, folders[job], args)
        outcome = read_outcome(folders[job], args.steps, args.evaluate_in)
        assert outcome is not None  # its process ended well
        outcomes[job] = outcome
        report(out, args, outcomes)
        state = (
            "diverged" if outcome.diverged else f"{outcome.final(args.last):.4f} nats"
        )
        print(
            f"{len(outcomes)} of {len(jobs)}: {job.item}, lr {job.lr:g}x, seed"
            f" {job.seed}: {state}",
            flush=True,
        )
        for (lr, item), side in verdicts(args, outcomes).items():
            if (lr, item) not in told:
                print(
                    f"{item}, lr {lr:g}x: surely {side} {args.margin:g}%, no further"
                    " seeds",
                    flush=True,
                )
                told.add((lr, item))
    lost = [
        job
        for job in todo
        if args.trunk and job.item != args.base and not trunk_of(args, job).exists()
    ]
    if lost:
        print(
            f"{len(lost)} runs were not begun: the base's of their seed has no"
            f" checkpoint of step {args.trunk}"
        )


def verdicts(
    args: Arguments, outcomes: dict[Trial, Outcome]
) -> dict[tuple[float, str], str]:
    """Return the side of `margin` by learning rate and item, where that is clear."""
    percents = percents_of(outcomes, args.base, last=args.last) if args.margin else {}
    return {
        key: side
        for key, values in percents.items()
        if (side := settled(values, args.margin))
    }


def is_wanted(job: Trial, args: Arguments, outcomes: dict[Trial, Outcome]) -> bool:
    """Return whether a run can still change a verdict.

    One of the base can while any item of its learning rate is undecided. One without a
    trunk to start from, since the base's run diverged before it, cannot.
    """
    if args.trunk and job.item != args.base and not trunk_of(args, job).exists():
        return False
    if not args.margin:
        return True
    clear = verdicts(args, outcomes)
    items = [other.item for other in jobs_of(args) if other.item != args.base]
    undecided = items if job.item == args.base else [job.item]
    return any((job.lr, item) not in clear for item in undecided)


def power(args: Arguments, outcomes: dict[Trial, Outcome]) -> list[str]:
    """Describe the precision of the study: what the pairs will show, and how many a
    wanted interval needs.

    Of each item that has two pairs; without any, from the assumed scatter.
    """
    known = scatter_of(outcomes, args.base, last=args.last)
    scatters = {
        f"{item}, lr {lr:g}x, {n} pairs": scatter
        for (lr, item), (scatter, n) in known.items()
    }
    lines = []
    for name, scatter in (scatters or {"assumed": args.scatter}).items():
        text = f"scatter of a pair {scatter:.2f}% ({name})"
        if args.seeds > 1:
            half, seen = (
                interval_of(scatter, args.seeds),
                seen_with(scatter, args.seeds),
            )
            text += (
                f": {args.seeds} pairs give ± {half:.2f}%, and show {seen:.2f}% four"
                " times in five"
            )
        if args.interval:
            text += (
                f"; ± {args.interval:g}% needs {pairs_for(scatter, args.interval)}"
                " pairs"
            )
        lines.append(text)
    for (lr, item), side in verdicts(args, outcomes).items():
        lines.append(
            f"{item}, lr {lr:g}x: surely {side} {args.margin:g}%, no further seeds"
        )
    return lines


def check_arguments(args: Arguments) -> None:
    """Raise UserError for a precision that weights cannot be evaluated in, and for an
    interval out of range.
    """
    if args.interval < 0 or args.scatter <= 0 or args.margin < 0:
        raise UserError(
            f"interval={args.interval:g}, scatter={args.scatter:g},"
            f" margin={args.margin:g}: expected percentages above zero"
        )
    if len(split(args.evaluate_in)) > 1:
        raise UserError(f"evaluate_in={args.evaluate_in}: expected one precision")
    if args.evaluate_in:
        policy_of(args.evaluate_in)
    if not 0 <= args.trunk < args.steps:
        raise UserError(
            f"trunk={args.trunk}: expected fewer steps than steps={args.steps}; 0: none"
        )
    if args.against and args.against not in (
        items := list(dict.fromkeys(job.item for job in jobs_of(args)))
    ):
        raise UserError(
            f"against={args.against} is none of the items of this study:"
            f" {', '.join(items)}"
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
        or is_held(run_dir)
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


def report(out: Path, args: Arguments, outcomes: dict[Trial, Outcome]) -> None:
    """Write the table and what it was made from."""
    # in the order of the arguments
    outcomes = {job: outcomes[job] for job in jobs_of(args) if job in outcomes}
    rows = compare(outcomes, args.base, last=args.last)
    clear = verdicts(args, outcomes)
    words = [
        "python",
        "-m",
        "scripts.studies.parity",
        *(shlex.quote(f"{k}={v}") for k, v in given(args).items()),
    ]
    study: dict[str, Any] = {
        "command": " ".join(words),
        "code": code_of(folder(out, job) for job in outcomes),
        "tokens": args.steps * args.batch_tokens,
        "table": [
            finite(row._asdict())
            | ({"settled": clear.get((row.lr, row.item))} if args.margin else {})
            for row in rows
        ],
        "runs": [
            job._asdict() | outcome._asdict() | {"curve": finite(outcome.curve)}
            for job, outcome in sorted(outcomes.items())
        ],
    }
    write_atomically(
        out / "parity.json", json.dumps(study, indent=1, allow_nan=False) + "\n"
    )
    write_atomically(
        out / "parity.md",
        heading(args)
        + markdown(rows, args.base, args.evaluate_in)
        + second_table(args, outcomes)
        + sides(args, clear)
        + f"\n`{study['command']}`\n",
    )
    draw(out / "parity.png", rows, outcomes, args.base, last=args.last)


def second_table(args: Arguments, outcomes: dict[Trial, Outcome]) -> str:
    """Format the same runs compared with a second base, if one is given."""
    if not args.against:
        return ""
    table = markdown(
        compare(outcomes, args.against, last=args.last), args.against, args.evaluate_in
    )
    return f"\nThe same runs, differences to {args.against}:\n\n{table}"


def sides(args: Arguments, clear: dict[tuple[float, str], str]) -> str:
    """Format the verdicts so far, if a margin is given."""
    if not args.margin:
        return ""
    sentences = [
        f"{item}, lr {lr:g}x: {side} {args.margin:g}%"
        for (lr, item), side in clear.items()
    ] or ["nothing yet"]
    return (
        "\nClear, by intervals that hold whenever they are looked at (95%):"
        f" {'; '.join(sentences)}.\n"
    )


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
