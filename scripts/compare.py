"""Several runs beside each other, the best first: a table, the keys in which they
differ, and their curves in one file.

python -m scripts.compare runs=runs/a,runs/b
python -m scripts.compare runs=runs/sweep                   # all jobs of a sweep, and
the loss by each swept key
"""

import glob
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.arguments import argument, run
from trainer.errors import UserError
from trainer.report.comparing import free_page, short_names, write_comparison

__all__ = ["Arguments", "main", "short_names"]


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    runs: str = argument(
        "run directories, separated by commas, a directory of runs, or a pattern such"
        " as 'runs/*'"
    )
    out: str = argument(
        "the file for curves and table (default: compare.html where the runs are,"
        " numbered beside others); no: none",
        "",
    )


def directories(text: str) -> list[Path]:
    """The runs of the list; of a pattern, and of a directory of runs, those in it that
    have a log. Raises UserError.
    """
    found: list[Path] = []
    mute = 0
    for item in filter(None, text.split(",")):
        path = Path(os.path.expanduser(item))
        if not glob.has_magic(item):
            if not path.is_dir():
                raise UserError(
                    f"runs={text}: there is no directory {path} (looked from"
                    f" {Path.cwd()})"
                )
            if (path / "metrics.jsonl").exists() or (path / "config.yaml").exists():
                found.append(path)  # what is wrong with it is said when it is read
                continue
        pattern = (
            str(path)
            if glob.has_magic(item)
            else os.path.join(glob.escape(str(path)), "*")
        )
        matches = list(map(Path, sorted(glob.glob(pattern), key=natural)))
        found += [match for match in matches if (match / "metrics.jsonl").exists()]
        mute += sum(
            (m / "config.yaml").exists() and not (m / "metrics.jsonl").exists()
            for m in matches
        )
    if len(found) < 2:
        without = (
            f", and {mute} without one, which had tracker=none or took no step"
            if mute
            else ""
        )
        raise UserError(
            f"runs={text}: found {len(found)} runs with a metrics.jsonl{without};"
            " valid: 2 or more, of tracker=jsonl, tensorboard or wandb"
        )
    return found


def natural(path: str) -> tuple[int, str]:
    """Numbered directories in the order of their numbers."""
    name = os.path.basename(path)
    return (int(name) if name.isdecimal() else -1, path)


def main(args: Arguments) -> None:
    """Print the table, write the file."""
    paths = directories(args.runs)
    where = Path(os.path.commonpath([path.resolve().parent for path in paths]))
    free = free_page(where / "compare.html", paths)
    out = (
        None
        if args.out == "no"
        else Path(os.path.expanduser(args.out))
        if args.out
        else free
    )
    print("\n".join(write_comparison(paths, out)))


if __name__ == "__main__":
    sys.exit(run(Arguments, "compare", __doc__ or "", main))
