"""Comparison of runs: a table with the best first, and a page with their curves."""

import hashlib
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.files import well_formed, write_text
from trainer.report.charts import Choice, by_choice
from trainer.report.history import FORKED, History, finite
from trainer.report.page import comparison
from trainer.run.rundir import MAY_CHANGE

IGNORED = ("run_dir", "tracker.name", "resume", "resume.*")
# The value of a configuration group is that of the first of these fields that it has.
CHOICES = ("source", "kind", "name")
SEED = "seed"
MOST_COLUMNS = 2  # of runs; with more of them, runs are the rows

Table = Mapping[str, Sequence[str]]  # a value for each run


def write_comparison(paths: Sequence[Path], out: Path | None) -> list[str]:
    """Compare runs: return the lines of a table, of verdicts, and the page's path.

    Args:
      paths: run directories with logs.
      out: the page; None: none.

    Raises:
      UserError: a directory without a log, or given twice, or a page that cannot be
          written.
    """
    run_dirs = dict(zip(short_names(paths), paths, strict=True))
    histories = sorted(
        (History.read(path, name) for name, path in run_dirs.items()), key=final_loss
    )
    with well_formed(
        "the records of the runs", "repair their files, or leave a run out"
    ):
        varied = overridden(histories)
        others = {
            k: v for k, v in differences(histories).items() if not in_groups(k, varied)
        }
        table = varied | figures(histories) | others
        rows = [["", *(h.name for h in histories)]]
        rows += [[key, *values] for key, values in table.items()]
        if len(histories) > MOST_COLUMNS:
            rows = [list(row) for row in zip(*rows, strict=True)]
        best_run = best(histories, varied or others, run_dirs)
        means = over_seeds(histories, varied | others)
        hints = [
            *best_by_mean(histories, varied | others, means),
            *best_at_end(histories, varied, means),
        ]
        verdicts = [*best_run, *aligned(means), *hints]
        lines = aligned(rows)
        if verdicts:
            lines += ["", *verdicts]
        if out is None:
            return lines
        pictures = [picture(histories, key, values) for key, values in varied.items()]
        page = comparison(histories, rows, pictures, [*best_run, *hints], means)
        page = page.replace("<head>", f"<head>{runs_tag(paths)}", 1)
        replaced = out.is_file() and not compares(out, paths)
    write_text(out, page)
    return [*lines, f"{out}, in place of another comparison" if replaced else str(out)]


def runs_tag(paths: Sequence[Path]) -> str:
    """Return a meta tag that identifies the runs of a page."""
    digest = hashlib.blake2b(
        "\n".join(sorted(str(path.resolve()) for path in paths)).encode(),
        digest_size=16,
    )
    return f'<meta name="runs" content="{digest.hexdigest()}">'


def compares(page: Path, paths: Sequence[Path]) -> bool:
    """Return whether a page is a comparison of these runs."""
    return page.is_file() and runs_tag(paths) in page.read_text(
        encoding="utf-8", errors="replace"
    )


def free_page(page: Path, paths: Sequence[Path]) -> Path:
    """Return the first path of `page`, `page-2`, ... without another comparison."""
    for n in itertools.count(1):
        path = page if n == 1 else page.with_name(f"{page.stem}-{n}{page.suffix}")
        if not path.exists() or compares(path, paths):
            return path
    raise AssertionError("unreachable: the count is infinite")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def best(
    histories: Sequence[History], settings: Table, run_dirs: Mapping[str, Path]
) -> list[str]:
    """Return a line that names the best run, the first; none without validation."""
    first, loss = histories[0], final_loss(histories[0])
    if not math.isfinite(loss):
        return []
    values = "".join(f"; {key}={values[0]}" for key, values in settings.items())
    return [f"best: {run_dirs[first.name]} (validation loss {loss:.4f}{values})"]


def best_by_mean(
    histories: Sequence[History], settings: Table, means: Sequence[Sequence[str]]
) -> list[str]:
    """Return a line where the best mean over seeds is not of the best run's settings.

    The loss of one seed may be chance.
    """
    if not means:
        return []
    first = dict(zip(means[0], means[1], strict=True))
    best_settings = {key: first[key] for key in settings if key != SEED}
    if all(settings[key][0] == value for key, value in best_settings.items()):
        return []
    named = ", ".join(f"{key}={value}" for key, value in best_settings.items())
    return [
        f"by the mean over seeds, {named} is the best; the best single run may be"
        " chance"
    ]


def best_at_end(
    histories: Sequence[History], varied: Table, means: Sequence[Sequence[str]]
) -> list[str]:
    """Return a line for each number whose best value is the largest or smallest tried.

    A better value may lie beyond. The best is by the means over seeds where there are
    any. Keys that only decide how long and where a run trains are left out. Forks start
    from different weights than other runs, so with a fork nothing is compared.
    """
    if not math.isfinite(final_loss(histories[0])):
        return []
    if any(FORKED in h.facts for h in histories):
        return []
    if means:
        best_values = dict(zip(means[0], means[1], strict=True))
    else:
        best_values = {key: values[0] for key, values in varied.items()}
    lines = []
    for key, values in varied.items():
        tried = sorted({number(value) for value in values})
        is_numeric = len(tried) > 1 and math.isfinite(tried[-1])
        if key == SEED or not is_numeric or matches_any(key, MAY_CHANGE):
            continue
        for value, end, further in (
            (tried[-1], "largest", "larger"),
            (tried[0], "smallest", "smaller"),
        ):
            if number(best_values[key]) == value:
                lines.append(
                    f"the best {key} is the {end} tried, {best_values[key]}; try"
                    f" {further}"
                )
    return lines


def over_seeds(histories: Sequence[History], settings: Table) -> list[list[str]]:
    """Return a table of mean losses by settings without the seed, the best first.

    It is empty where no two runs differ in the seed alone. Settings with a run without
    validation loss come last, because the mean of the rest would flatter them.
    """
    keys = [key for key in settings if key != SEED]
    groups: dict[tuple[str, ...], list[float]] = {}
    for i, h in enumerate(histories):
        group = tuple(settings[key][i] for key in keys)
        groups.setdefault(group, []).append(final_loss(h))
    if SEED not in settings or all(len(losses) == 1 for losses in groups.values()):
        return []
    rows = []
    for values, losses in groups.items():
        finite_losses = [loss for loss in losses if math.isfinite(loss)]
        mean = statistics.fmean(finite_losses) if finite_losses else math.inf
        shown_mean = f"{mean:.4f}" if finite_losses else "-"
        spread = "-"
        if len(finite_losses) > 1:
            spread = f"{statistics.stdev(finite_losses):.4f}"
        count = str(len(losses))
        is_partial = len(finite_losses) < len(losses)
        if is_partial:
            count = f"{len(finite_losses)} of {count}"
        rows.append((is_partial, mean, [*values, shown_mean, spread, count]))
    rows.sort(key=lambda row: row[:2])
    return [
        [*keys, "mean validation loss over seeds", "standard deviation", "runs"],
        *(row for _, _, row in rows),
    ]


def final_loss(h: History) -> float:
    """Return the last validation loss; infinite where there is none."""
    return (finite(h.line("val/loss"))[1] or [float("inf")])[-1]


def figures(histories: Sequence[History]) -> dict[str, list[str]]:
    """Return the final figures of the runs, by name."""
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
    """Return a chart of the last validation losses over the values of a key."""
    order = sorted(set(values), key=lambda value: (number(value), value))
    points = [
        Choice(order.index(value), final_loss(h), f"{h.name}: {final_loss(h):.6g}")
        for h, value in zip(histories, values, strict=True)
    ]
    return by_choice(
        f"Validation loss by {key}",
        order,
        points,
        unit="nats per token; the line joins the best",
    )


def number(text: str) -> float:
    """Return the number in `text`; infinity, which sorts last, where it is none."""
    try:
        return float(text)
    except ValueError:
        return float("inf")


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the last parts of the paths, as many as tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-count:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError("one run directory is given twice; give different ones")


def overridden(histories: Sequence[History]) -> dict[str, list[str]]:
    """Return the values of the keys and groups that users set, where they differ.

    Values come from the resolved configurations: a run's last start need not repeat the
    overrides of the first one.
    """
    overrides = [
        dict(o.partition("=")[::2] for o in h.facts.get("overrides", "").split())
        for h in histories
    ]
    resolved = [h.settings for h in histories]
    keys = dict.fromkeys(key for given in overrides for key in given)

    def value(key: str, given: Mapping[str, str], settings: Mapping[str, Any]) -> str:
        choices = (f"{key}.{end}" for end in CHOICES)
        choice = next((name for name in choices if name in settings), "")
        setting = settings.get(key, settings.get(choice))
        return given.get(key, "-") if setting is None else str(setting)

    def is_same(key: str) -> bool:
        """Return whether a key or group has one value in all resolved configurations.

        It is false for a key that none of them has.
        """
        parts = [
            {k: v for k, v in settings.items() if in_groups(k, [key])}
            for settings in resolved
        ]
        return any(parts) and all(part == parts[0] for part in parts)

    varied = {}
    for key in keys:
        values = [value(key, *pair) for pair in zip(overrides, resolved, strict=True)]
        if len(set(values)) > 1 and not matches_any(key, IGNORED) and not is_same(key):
            varied[key] = values
    return varied


def differences(histories: Sequence[History]) -> dict[str, list[str]]:
    """Return the values of each configuration key that is not the same in all runs."""
    trees = [h.settings for h in histories]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    different: dict[str, list[Any]] = {
        key: [tree.get(key, "-") for tree in trees] for key in keys
    }
    return {
        key: [str(value) for value in values]
        for key, values in different.items()
        if not matches_any(key, IGNORED) and any(value != values[0] for value in values)
    }


def matches_any(key: str, patterns: Sequence[str]) -> bool:
    """Return whether a key matches one of these patterns."""
    return any(fnmatch(key, pattern) for pattern in patterns)


def in_groups(key: str, groups: Iterable[str]) -> bool:
    """Return whether a key is one of `groups`, or inside one of them."""
    return any(key == group or key.startswith(f"{group}.") for group in groups)
