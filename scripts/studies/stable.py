"""Figures of stability: of one run, and of a precision over its learning rates and
seeds.

References: Wortsman et al. 2023, arXiv 2309.14322 (learning-rate sensitivity); Lee et
al. 2024, arXiv 2405.18710 (divergence over seeds and rates); Wilson 1927 (the interval
of a share).
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scripts.studies.rows import table
from trainer.tasks.intervals import half_width


class Run(NamedTuple):
    """The figures of one run.

    Attributes:
      first: training loss (nats) of the first step, at the initial weights.
      final: mean of the last validations; infinite where it was stopped or not finite.
      diverged: see `has_diverged`.
      skipped: steps that were not finite.
    """

    first: float
    final: float
    diverged: bool
    skipped: int

    @property
    def clipped(self) -> float:
        """Return the final loss, but not more than the first one."""
        return min(self.final, self.first)


class StabilityRow(NamedTuple):
    """A precision's figures.

    Attributes:
      item: what was run.
      runs: how many have ended.
      diverged: of them.
      low, high: the 95% interval of their share, by Wilson.
      skipped: steps that were not finite, over all runs.
      largest: the largest learning rate up to which no run diverged, as a multiple;
          None: the least one does.
      seeds: with runs at every rate, of which the next ones are.
      sensitivity: mean over seeds, nats; see `sensitivity`.
      half_width: of its 95% interval.
      ratio: of the sensitivity to the base's, mean over seeds that both have; and
      ratio_half_width.
    """

    item: str
    runs: int
    diverged: int
    low: float
    high: float
    skipped: int
    largest: float | None
    seeds: int
    sensitivity: float
    half_width: float
    ratio: float
    ratio_half_width: float


def has_diverged(first: float, curve: Sequence[float], *, stopped: bool) -> bool:
    """Return whether a run was stopped, ended without a finite loss, learned nothing,
    or lost half of what it had learned.

    Args:
      first: loss at the initial weights.
      curve: validation losses, in their order.
    """
    if stopped or not curve or not math.isfinite(curve[-1]):
        return True
    best = min(loss for loss in curve if math.isfinite(loss))
    return best >= first or curve[-1] - best > (first - best) / 2


def run_of(
    rows: Sequence[Mapping[str, Any]], *, steps: int, last: int, stopped: bool
) -> Run | None:
    """Return the figures of metrics.jsonl's rows, or None for an unfinished run."""
    losses = {
        row["step"]: float(row["train/loss"]) for row in rows if "train/loss" in row
    }
    curve = {row["step"]: float(row["val/loss"]) for row in rows if "val/loss" in row}
    if not losses or (not stopped and steps not in curve):
        return None
    first, values = losses[min(losses)], [curve[step] for step in sorted(curve)]
    diverged = has_diverged(first, values, stopped=stopped)
    final = statistics.fmean(values[-last:]) if values and not stopped else math.inf
    return Run(
        first,
        final if math.isfinite(final) else math.inf,
        diverged,
        max(
            (int(row["watchdog/skipped"]) for row in rows if "watchdog/skipped" in row),
            default=0,
        ),
    )


def sensitivity(runs: Sequence[Run]) -> float:
    """Return one seed's mean of min(loss, first loss) over its learning rates, minus
    the lowest of them (nats).

    Wortsman et al. write it as an expectation over rates of [min(loss, loss at
    initialization) - best loss].
    """
    losses = [run.clipped for run in runs]
    return statistics.fmean(losses) - min(losses)


def figures(
    runs: Mapping[Any, Run], base: str, rates: Sequence[float]
) -> list[StabilityRow]:
    """Return a row for each item, in the order of first appearance.

    Args:
      runs: by a key with `lr`, `item` and `seed`.
      base: the item that sensitivities are compared with.
      rates: all of the study.
    """
    by_seed: dict[str, dict[int, float]] = {}
    for item in dict.fromkeys(key.item for key in runs):
        item_runs = {
            (key.seed, key.lr): run for key, run in runs.items() if key.item == item
        }
        complete = [
            s
            for s in dict.fromkeys(seed for seed, _ in item_runs)
            if all((s, lr) in item_runs for lr in rates)
        ]
        by_seed[item] = {
            seed: sensitivity([item_runs[seed, lr] for lr in rates])
            for seed in complete
        }
    return [row_of(item, runs, by_seed, base, rates) for item in by_seed]


def row_of(
    item: str,
    runs: Mapping[Any, Run],
    by_seed: Mapping[str, Mapping[int, float]],
    base: str,
    rates: Sequence[float],
) -> StabilityRow:
    """Return the figures of an item; see `figures`."""
    from scipy.stats import binomtest  # half a second to import

    item_runs = {key: run for key, run in runs.items() if key.item == item}
    lost = sum(run.diverged for run in item_runs.values())
    values, theirs = by_seed[item], by_seed.get(base, {})
    ratios = [values[seed] / theirs[seed] for seed in values if theirs.get(seed, 0) > 0]
    share = binomtest(lost, len(item_runs)).proportion_ci(method="wilson")
    return StabilityRow(
        item,
        len(item_runs),
        lost,
        share.low,
        share.high,
        sum(run.skipped for run in item_runs.values()),
        largest_stable(item_runs, rates),
        len(values),
        statistics.fmean(values.values()) if values else math.nan,
        half_width(list(values.values())),
        statistics.fmean(ratios) if ratios else math.nan,
        half_width(ratios),
    )


def largest_stable(runs: Mapping[Any, Run], rates: Sequence[float]) -> float | None:
    """Return the largest rate up to which all finished runs were stable.

    A rate without runs ends the search.
    """
    largest = None
    for lr in sorted(rates):
        at = [run for key, run in runs.items() if key.lr == lr]
        if not at or any(run.diverged for run in at):
            break
        largest = lr
    return largest


def markdown(
    rows: Sequence[StabilityRow],
    runs: Mapping[Any, Run],
    base: str,
    rates: Sequence[float],
) -> str:
    """Format two tables: a row for each item, and the final losses by item and rate.

    A dash stands where there is no figure.
    """
    head = [
        "precision",
        "runs",
        "diverged",
        "share, 95%",
        "skipped steps",
        "largest stable rate",
    ]
    head += ["sensitivity, nats", f"over that of {base}"]
    body = []
    for row in rows:
        sensitivity = (
            f"{row.sensitivity:.4f}{interval(row.half_width, 4)}" if row.seeds else "-"
        )
        ratio = (
            f"{row.ratio:.3f}{interval(row.ratio_half_width, 3)}"
            if math.isfinite(row.ratio)
            else "-"
        )
        cells = [
            row.item,
            str(row.runs),
            str(row.diverged),
            f"{row.low:.0%} to {row.high:.0%}",
        ]
        cells += [
            str(row.skipped),
            "none" if row.largest is None else f"{row.largest:g}x",
            sensitivity,
        ]
        cells.append("-" if row.item == base else ratio)
        body.append(cells)
    first = table(head, body)
    head = ["precision", *(f"{lr:g}x" for lr in rates)]
    body = [
        [
            row.item,
            *(
                at_rate(
                    [
                        run
                        for key, run in runs.items()
                        if (key.item, key.lr) == (row.item, lr)
                    ]
                )
                for lr in rates
            ),
        ]
        for row in rows
    ]
    return f"{first}\n{table(head, body)}"


def interval(width: float, digits: int) -> str:
    """Format a half width to be appended; empty where it is not finite."""
    return f" ± {width:.{digits}f}" if math.isfinite(width) else ""


def at_rate(runs: Sequence[Run]) -> str:
    """Format the mean final loss of the stable runs, their range, and the number of
    diverged ones.
    """
    finals = [run.final for run in runs if not run.diverged]
    lost = sum(run.diverged for run in runs)
    parts = [f"{statistics.fmean(finals):.4f}"] if finals else []
    parts += [f"({min(finals):.3f} to {max(finals):.3f})"] if len(finals) > 1 else []
    parts += [f"{lost} diverged"] if lost else []
    return " ".join(parts) or "-"
