"""Several runs beside each other: a table, the best first, and a page with their curves
and with what was varied.
"""

import hashlib
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.files import well_formed, write_text
from trainer.report.charts import Choice, by_choice
from trainer.report.history import History, finite
from trainer.report.page import comparison
from trainer.run.rundir import MAY_CHANGE

ALWAYS_OTHERS = ("run_dir", "tracker.name", "resume", "resume.*")
# what the choice of a group sets, the first that the group has
CHOICES = ("source", "kind", "name")
SEED = "seed"
MOST_COLUMNS = 2  # of runs; more of them are rows

Table = Mapping[str, Sequence[str]]  # a value for each run


def write_comparison(paths: Sequence[Path], out: Path | None) -> list[str]:
    """Compare runs; the lines of a table, of what is best and of where the page is.

    Args:
      paths: run directories with logs.
      out: the page; None: none.

    Raises:
      UserError: a directory without a log, or given twice, or a page that cannot be
          written.
    """
    where = dict(zip(names(paths), paths, strict=True))
    histories = sorted(
        (History.read(path, name) for name, path in where.items()), key=final_loss
    )
    with well_formed(
        "what the runs hold of themselves", "mend their files, or leave a run out"
    ):
        varied = overridden(histories)
        others = {
            k: v for k, v in differences(histories).items() if not of_any(k, varied)
        }
        table = varied | figures(histories) | others
        rows = [
            ["", *(h.name for h in histories)],
            *([key, *values] for key, values in table.items()),
        ]
        if len(histories) > MOST_COLUMNS:
            rows = [list(row) for row in zip(*rows, strict=True)]
        verdict = best(histories, varied or others, where)
        means = over_seeds(histories, varied | others)
        hints = [
            *by_mean(histories, varied | others, means),
            *at_an_end(histories, varied, means),
        ]
        told = [*verdict, *aligned(means), *hints]
        lines = [*aligned(rows), *([""] if told else []), *told]
        if out is None:
            return lines
        pictures = [picture(histories, key, values) for key, values in varied.items()]
        page = marked(
            comparison(histories, rows, pictures, [*verdict, *hints], means), paths
        )
        other = out.is_file() and not is_of(out, paths)
    write_text(out, page)
    return [*lines, f"{out}, in place of another comparison" if other else str(out)]


def marked(page: str, paths: Sequence[Path]) -> str:
    """The page, which says of which runs it is where only a program reads it."""
    return page.replace("<head>", f"<head>{mark(paths)}", 1)


def mark(paths: Sequence[Path]) -> str:
    """What a page says of which runs it is."""
    digest = hashlib.blake2b(
        "\n".join(sorted(str(path.resolve()) for path in paths)).encode(),
        digest_size=16,
    )
    return f'<meta name="runs" content="{digest.hexdigest()}">'


def is_of(page: Path, paths: Sequence[Path]) -> bool:
    """Return whether a page is a comparison of these runs."""
    return page.is_file() and mark(paths) in page.read_text(
        encoding="utf-8", errors="replace"
    )


def free_page(page: Path, paths: Sequence[Path]) -> Path:
    """The page, or one with a number behind its name, the first that is not another
    comparison's.
    """
    numbers = (
        page if n == 1 else page.with_name(f"{page.stem}-{n}{page.suffix}")
        for n in itertools.count(1)
    )
    return next(path for path in numbers if not path.exists() or is_of(path, paths))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table's rows as lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def best(
    histories: Sequence[History], settings: Table, where: Mapping[str, Path]
) -> list[str]:
    """A line that names the first of the runs, which is the best, by its directory;
    none without a validation loss.
    """
    first, loss = histories[0], final_loss(histories[0])
    if not math.isfinite(loss):
        return []
    own = "".join(f"; {key}={values[0]}" for key, values in settings.items())
    return [f"best: {where[first.name]} (validation loss {loss:.4f}{own})"]


def by_mean(
    histories: Sequence[History], settings: Table, means: Sequence[Sequence[str]]
) -> list[str]:
    """A line where the means over seeds have another best than the runs: one seed's
    loss may be chance.
    """
    if not means:
        return []
    first = dict(zip(means[0], means[1], strict=True))
    own = {key: first[key] for key in settings if key != SEED}
    if all(settings[key][0] == value for key, value in own.items()):
        return []
    named = ", ".join(f"{key}={value}" for key, value in own.items())
    return [
        f"by the mean over seeds {named} is the best; that one run of other settings is"
        " better may be chance"
    ]


def at_an_end(
    histories: Sequence[History], varied: Table, means: Sequence[Sequence[str]]
) -> list[str]:
    """A line for each varied number whose best value is the largest or smallest tried:
    a better one may lie beyond.

    What is best is the first of the means over seeds, where there are any. Keys that
    only say how long and where a run trains have no best. A fork has another start than
    the rest, so nothing was tried that compares.
    """
    if not math.isfinite(final_loss(histories[0])) or any(
        "forked from" in h.facts for h in histories
    ):
        return []
    first = (
        dict(zip(means[0], means[1], strict=True))
        if means
        else {key: of[0] for key, of in varied.items()}
    )
    lines = []
    for key, values in varied.items():
        tried = sorted({number(value) for value in values})
        if (
            key == SEED
            or len(tried) == 1
            or math.isinf(tried[-1])
            or is_any(key, MAY_CHANGE)
        ):
            continue
        for value, end, further in (
            (tried[-1], "largest", "larger"),
            (tried[0], "smallest", "smaller"),
        ):
            if number(first[key]) == value:
                lines.append(
                    f"the best {key} is the {end} tried, {first[key]}; try {further}"
                )
    return lines


def over_seeds(histories: Sequence[History], settings: Table) -> list[list[str]]:
    """A table of what the settings come to, seeds aside, the best first; empty where no
    two runs differ in seed alone.

    A setting of which a run has no validation loss comes last: what is left of it would
    look better than it is.
    """
    keys = [key for key in settings if key != SEED]
    groups: dict[tuple[str, ...], list[float]] = {}
    for i, h in enumerate(histories):
        groups.setdefault(tuple(settings[key][i] for key in keys), []).append(
            final_loss(h)
        )
    if SEED not in settings or all(len(losses) == 1 for losses in groups.values()):
        return []
    rows = []
    for values, losses in groups.items():
        found = [loss for loss in losses if math.isfinite(loss)]
        missing = len(losses) - len(found)
        mean = statistics.fmean(found) if found else math.inf
        spread = f"{statistics.stdev(found):.4f}" if len(found) > 1 else "-"
        count = f"{len(found)} of {len(losses)}" if missing else str(len(losses))
        rows.append(
            (
                missing > 0,
                mean,
                [*values, f"{mean:.4f}" if found else "-", spread, count],
            )
        )
    rows.sort(key=lambda row: row[:2])
    return [
        [*keys, "mean validation loss over seeds", "standard deviation", "runs"],
        *(row for _, _, row in rows),
    ]


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
    return by_choice(
        f"Validation loss by {key}",
        order,
        points,
        unit="nats per token; the line joins the best",
    )


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
    """Of what their users set, the keys and groups that are not the same in all runs,
    and their values.

    The values are those of the resolved configuration: the overrides are those of a
    run's last start, which need not repeat what the first one set.
    """
    given = [
        dict(o.partition("=")[::2] for o in h.facts.get("overrides", "").split())
        for h in histories
    ]
    resolved = [h.settings for h in histories]
    keys = dict.fromkeys(key for settings in given for key in settings)

    def value(key: str, settings: Mapping[str, str], tree: Mapping[str, Any]) -> str:
        choice = next((name for end in CHOICES if (name := f"{key}.{end}") in tree), "")
        found = tree.get(key, tree.get(choice))
        return settings.get(key, "-") if found is None else str(found)

    def same(key: str) -> bool:
        """Whether a key or group has the same values in all configurations; not known
        of one that they do not have.
        """
        parts = [
            {k: v for k, v in tree.items() if of_any(k, {key: None})}
            for tree in resolved
        ]
        return any(parts) and all(part == parts[0] for part in parts)

    different = {
        key: [value(key, *of) for of in zip(given, resolved, strict=True)]
        for key in keys
    }
    return {
        k: v
        for k, v in different.items()
        if not is_any(k, ALWAYS_OTHERS) and len(set(v)) > 1 and not same(k)
    }


def differences(histories: Sequence[History]) -> dict[str, list[str]]:
    """The values of each key of the configuration that is not the same in all runs."""
    trees = [h.settings for h in histories]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    different: dict[str, list[Any]] = {
        key: [tree.get(key, "-") for tree in trees] for key in keys
    }
    return {
        key: [str(value) for value in values]
        for key, values in different.items()
        if not is_any(key, ALWAYS_OTHERS)
        and any(value != values[0] for value in values)
    }


def is_any(key: str, patterns: Sequence[str]) -> bool:
    """Return whether it matches one of these patterns."""
    return any(fnmatch(key, pattern) for pattern in patterns)


def of_any(key: str, groups: Mapping[str, Any]) -> bool:
    """Return whether it is one of these keys, or in one of these groups."""
    return any(key == group or key.startswith(f"{group}.") for group in groups)
