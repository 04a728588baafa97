"""Compare runs: a table with the best first, the keys that differ, and their curves.

scalify-trainer compare runs=runs/a,runs/b
scalify-trainer compare runs=runs/sweep     # all jobs of a sweep
"""

import glob
import os
from dataclasses import dataclass
from pathlib import Path

from trainer.cli.arguments import argument
from trainer.errors import UserError
from trainer.files import path_of
from trainer.text import note, show


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    runs: str = argument(
        "run directories separated by commas; or a directory of runs; or a pattern such"
        " as 'runs/*'"
    )
    out: str = argument(
        "the file for curves and table; empty: compare.html where the runs are, or"
        " compare-2.html if another comparison has that name; no: none",
        "",
    )


def run_directories(text: str) -> list[Path]:
    """Return the run directories that `text` lists.

    A pattern or a directory of runs stands for its runs with a metrics.jsonl.

    Raises:
      UserError: a directory that does not exist, or fewer than two runs.
    """
    runs: list[Path] = []
    unlogged: list[Path] = []
    # `a,b,` has an empty last item.
    for item in filter(None, text.split(",")):
        path = path_of(item)
        if path.is_dir():
            if (path / "metrics.jsonl").exists() or (path / "config.yaml").exists():
                runs.append(path)  # `write_comparison` reports a missing log.
                continue
            # A directory's name may hold * or [.
            pattern = os.path.join(glob.escape(str(path)), "*")
        elif glob.has_magic(item):
            pattern = str(path)
        else:
            raise UserError(
                f"runs={text}: there is no directory {path} (looked from {Path.cwd()})"
            )
        # A pattern also matches files and other directories, which are passed over.
        for match in map(Path, sorted(glob.glob(pattern), key=by_number)):
            if (match / "metrics.jsonl").exists():
                runs.append(match)
            elif (match / "config.yaml").exists():
                unlogged.append(match)
    if len(runs) < 2:
        others = ""
        if unlogged:
            others = (
                f", and {len(unlogged)} without one, which had tracker=none or took no"
                " step"
            )
        raise UserError(
            f"runs={text}: found {', '.join(map(str, runs)) or 'no run'} with a"
            f" metrics.jsonl{others}; valid: 2 or more runs of tracker=jsonl,"
            " tensorboard or wandb"
        )
    if unlogged:
        note(
            f"{', '.join(map(str, unlogged))}: left out, without a metrics.jsonl"
            " (tracker=none, or no step)"
        )
    return runs


def by_number(path: str) -> tuple[int, str]:
    """Return the sort key of a path: numbered directories are ordered by number."""
    name = os.path.basename(path)
    # By text, job 10 would stand before job 2.
    return (int(name) if name.isdecimal() else -1, path)


def main(args: Arguments) -> None:
    """Print the table, and write the page."""
    from trainer.report.comparison import free_page, write_comparison

    paths = run_directories(args.runs)
    out: Path | None = None
    if args.out and args.out != "no":
        out = path_of(args.out)
    elif not args.out:
        # `abspath` rather than `resolve`: the page lies where the runs are named, not
        # where a link among them leads.
        parent = Path(
            os.path.commonpath([Path(os.path.abspath(path)).parent for path in paths])
        )
        out = free_page(parent / "compare.html", paths)
    show("\n".join(write_comparison(paths, out)))
