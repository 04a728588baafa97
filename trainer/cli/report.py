"""Write report.html of a finished or running run: one file, readable without network.

scalify-trainer report run_dir=runs/mine
"""

from dataclasses import dataclass
from pathlib import Path

from trainer.cli.arguments import argument
from trainer.text import show


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    run_dir: str = argument("the run's directory")


def main(args: Arguments) -> None:
    """Write the report, and print its path."""
    # It imports JAX, which takes longer than the help.
    from trainer.report.page import write_report

    show(str(write_report(Path(args.run_dir))))
