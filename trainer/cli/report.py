"""Write report.html of a finished or running run: one file, readable without network.

python -m scripts.report run_dir=runs/mine
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from trainer.cli.arguments import argument, run
from trainer.report.page import write_report


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    run_dir: str = argument("the run's directory")


def main(args: Arguments) -> None:
    """Write the report, and print its path."""
    print(write_report(Path(args.run_dir)))


if __name__ == "__main__":
    sys.exit(run(Arguments, "report", __doc__ or "", main))
