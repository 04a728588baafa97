"""Measure how stable precisions are: presets x learning rates x seeds, up to rates at
which FP32 itself diverges.

The runs are like those of `scripts.studies.parity`: items of `presets=` are named
alike, each is `python -m trainer` in OUT/LR/ITEM/SEED, a study that is called again
continues, and jobs run beside each other. After every run OUT/stability.json and
stability.md are written anew. They have the final loss against the learning rate with
all seeds, the share of diverged runs with its interval, the largest stable rate, and
the learning-rate sensitivity of arXiv 2309.14322. The module `stable` defines these
figures.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.studies.runs import (
    Study,
    Trial,
    carry_out,
    parse,
    remove_checkpoints,
    write_study,
)
from scripts.studies.stable import Run, figures, markdown, run_of
from trainer.cli.arguments import argument, run_script
from trainer.files import finite
from trainer.observe.records import read_rows


@dataclass(frozen=True)
class Arguments(Study):
    """Settings of the study; see `--help`."""

    seeds: int = argument("runs at each learning rate", 4)
    lr: str = argument(
        "learning rates, as multiples of model.lr, separated by commas", "0.3,1,3,10,30"
    )
    steps: int = argument("steps of each run", 400)
    out: str = argument("where the runs and the tables go", "runs/stability")

    @property
    def logged(self) -> list[str]:
        """Return arguments that log every step's loss: the first one counts."""
        return ["train.log_every=1", "metrics.numerics_every=0"]


def main(args: Arguments) -> None:
    """Run what is not finished."""
    rates = sorted(parse(args)[1])

    def read(run_dir: Path) -> Run | None:
        rows = read_rows(run_dir / "metrics.jsonl")
        stopped = (run_dir / "divergence.txt").exists()
        return run_of(rows, steps=args.steps, last=args.last, stopped=stopped)

    def report(runs: dict[Trial, Run]) -> None:
        rows = figures(runs, args.base, rates)
        results = {job: finite(run._asdict()) for job, run in runs.items()}
        table = markdown(rows, runs, args.base, rates)
        write_study(args, "stability", rows, results, heading(args) + table)

    carry_out(
        args,
        read=read,
        conclude=lambda job, run_dir: remove_checkpoints(run_dir),
        report=report,
        describe=lambda run: "diverged" if run.diverged else f"{run.final:.4f} nats",
    )


def heading(args: Arguments) -> str:
    """Format the settings that the tables' figures are of."""
    return (
        f"{args.model}, {args.steps} steps of {args.batch_tokens} tokens; final loss:"
        f" validation, nats per token, mean of the last {args.last} of"
        f" {args.evaluations}. Diverged: stopped, not finite, nothing learned, or half"
        " of it lost.\n\n"
    )


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "studies.stability", __doc__ or "", main))
