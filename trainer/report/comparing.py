"""Several runs beside each other: a table, the best first, and a page with their curves and with what was varied."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.errors import UserError
from trainer.report.charts import Choice, by_choice
from trainer.report.history import History, finite
from trainer.report.page import comparison
from trainer.run.rundir import flatten, write_atomically

ALWAYS_OTHERS = ("run_dir", "tracker.name")
MOST_COLUMNS = 2  # of runs; more of them are rows

Table = Mapping[str, Sequence[str]]  # a value for each run


def write_comparison(paths: Sequence[Path], out: Path | None) -> list[str]:
    """Compare runs; the lines of a table and of where the page is.

    Args:
      paths: run directories with logs.
      out: the page; None: none.

    Raises:
      UserError: a directory without a log, or given twice, or a page that cannot be written.
    """
    histories = [History.read(path, name) for path, name in zip(paths, names(paths), strict=True)]
    histories.sort(key=final_loss)
    varied = overridden(histories)
    table = varied | figures(histories) | {k: v for k, v in differences(histories).items() if not of_any(k, varied)}
    rows = [["", *(h.name for h in histories)], *([key, *values] for key, values in table.items())]
    if len(histories) > MOST_COLUMNS:
        rows = [list(row) for row in zip(*rows, strict=True)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if out is None:
        return lines
    pictures = [picture(histories, key, values) for key, values in varied.items()]
    write_atomically(out, comparison(histories, rows, pictures))
    return [*lines, str(out)]


def final_loss(h: History) -> float:
    """The last validation loss; infinite where there is none."""
    return (finite(h.line("val/loss"))[1] or [float("inf")])[-1]


def figures(histories: Sequence[History]) -> dict[str, list[str]]:
    """What the runs came to."""
    return {
        "validation loss": [h.last("val/loss") for h in histories],
        "best validation loss": [h.best("val/loss") for h in histories],
        "steps": [f"{h.rows[-1]['step']:,}" for h in histories],
        "tokens/s, median": [h.median("perf/tokens_per_s") for h in histories],
        "host memory, GiB": [h.last("memory/host_peak_gib") for h in histories],
        "skipped": [h.last("watchdog/skipped") for h in histories],
        "rolled back": [h.last("watchdog/rollbacks") for h in histories],
    }


def picture(histories: Sequence[History], key: str, values: Sequence[str]) -> str:
    """The last validation losses against the values of a key, the smallest first."""
    order = sorted(set(values), key=lambda value: (number(value), value))
    points = [
        Choice(order.index(value), final_loss(h), f"{h.name}: {final_loss(h):.6g}")
        for h, value in zip(histories, values, strict=True)
    ]
    return by_choice(f"Validation loss by {key}", order, points, unit="nats per token; the line joins the best")


def number(text: str) -> float:
    """For the order; what is no number comes last."""
    try:
        return float(text)
    except ValueError:
        return float("inf")


def names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        found = ["/".join(p[-count:]) for p in parts]
        if len(set(found)) == len(found):
            return found
    raise UserError("one run directory is given twice; give different ones")


def overridden(histories: Sequence[History]) -> dict[str, list[str]]:
    """Of what their users set, the keys and groups that are not the same in all runs, and their values.

    The values are those of the resolved configuration: the overrides are those of a run's last start, which need not
    repeat what the first one set.
    """
    given = [dict(o.partition("=")[::2] for o in h.facts.get("overrides", "").split()) for h in histories]
    resolved = [dict(flatten(yaml.safe_load(h.config) or {})) for h in histories]
    keys = dict.fromkeys(key for settings in given for key in settings)

    def value(key: str, settings: Mapping[str, str], tree: Mapping[str, Any]) -> str:
        choice = f"{key}.kind" if f"{key}.kind" in tree else f"{key}.name"  # a tracker's name is that of its run
        found = tree.get(key, tree.get(choice))
        return settings.get(key, "-") if found is None else str(found)

    different = {key: [value(key, *of) for of in zip(given, resolved, strict=True)] for key in keys}
    return {k: v for k, v in different.items() if k not in ALWAYS_OTHERS and len(set(v)) > 1}


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


def of_any(key: str, groups: Mapping[str, Any]) -> bool:
    """Whether it is one of these keys, or in one of these groups."""
    return any(key == group or key.startswith(f"{group}.") for group in groups)
