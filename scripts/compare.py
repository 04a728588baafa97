"""Several runs beside each other: a table, the keys in which their configurations differ, and their curves in one file.

python -m scripts.compare runs=runs/a,runs/b out=compare.html
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scripts.arguments import argument, run
from trainer.charts import COLOURS
from trainer.errors import UserError
from trainer.history import History
from trainer.report import comparison
from trainer.rundir import flatten, write_atomically

ALWAYS_OTHERS = ("run_dir", "tracker.name")


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    runs: str = argument("run directories, separated by commas, or a pattern such as 'runs/*'")
    out: str = argument("the file for curves and table; empty: none", "compare.html")


def directories(text: str) -> list[Path]:
    """Those of the list that hold a log."""
    found: list[Path] = []
    for item in text.split(","):
        matches = sorted(Path().glob(item)) if "*" in item else [Path(item)]
        found += [path for path in matches if "*" not in item or (path / "metrics.jsonl").exists()]
    if not 2 <= len(found) <= len(COLOURS):
        raise UserError(f"runs={text}: found {len(found)} runs; valid: 2 to {len(COLOURS)}")
    return found


def names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        found = ["/".join(p[-count:]) for p in parts]
        if len(set(found)) == len(found):
            return found
    raise UserError("one run directory is given twice; give different ones")


def differences(histories: Sequence[History]) -> dict[str, list[str]]:
    """The values of each key of the configuration that is not the same in all runs."""
    trees = [dict(flatten(yaml.safe_load(h.config) or {})) for h in histories]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    different: dict[str, list[Any]] = {key: [tree.get(key, "-") for tree in trees] for key in keys}
    return {
        key: [str(value) for value in values]
        for key, values in different.items()
        if key not in ALWAYS_OTHERS and any(value != values[0] for value in values)
    }


def main(args: Arguments) -> None:
    """Print the table, write the file."""
    paths = directories(args.runs)
    histories = [History.read(path, name) for path, name in zip(paths, names(paths), strict=True)]
    table = {
        "steps": [f"{h.rows[-1]['step']:,}" for h in histories],
        "validation loss": [h.last("val/loss") for h in histories],
        "best validation loss": [h.best("val/loss") for h in histories],
        "tokens/s, median": [h.median("perf/tokens_per_s") for h in histories],
        "host memory, GiB": [h.last("memory/host_peak_gib") for h in histories],
        "skipped": [h.last("watchdog/skipped") for h in histories],
        "rolled back": [h.last("watchdog/rollbacks") for h in histories],
        **differences(histories),
    }
    lines = [["", *(h.name for h in histories)], *([key, *values] for key, values in table.items())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    if args.out:
        write_atomically(Path(args.out), comparison(histories, table))
        print(args.out)


if __name__ == "__main__":
    sys.exit(run(Arguments, "compare", __doc__ or "", main))
