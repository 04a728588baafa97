"""Write report.html of a finished or running run: one file, readable without network.

scalify-trainer report run_dir=runs/mine
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.cli.arguments import argument, run_command
from trainer.text import show


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    run_dir: str = argument("the run's directory")


def main(args: Arguments) -> None:
    """Write the report, and print its path."""
    from trainer.report.page import write_report

    show(str(write_report(Path(args.run_dir))))


def command(argv: Sequence[str]) -> int:
    """Run with the arguments, and return the exit code."""
    return run_command(Arguments, "scalify-trainer report", __doc__ or "", main, argv)
