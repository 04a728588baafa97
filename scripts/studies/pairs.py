"""Statistics of paired runs: the mean difference to a base at the same seed, its 95%
interval, and their table.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scripts.studies.rows import table
from trainer.tasks.intervals import half_width


class Outcome(NamedTuple):
    """The outcome of a run.

    Attributes:
      curve: validation loss (nats per token) after so many steps.
      skipped: steps that were not finite.
      diverged: whether the watchdog stopped it.
      elsewhere: validation loss (nats per token) of the final weights in another
          precision; None: not known.
    """

    curve: dict[int, float]
    skipped: int
    diverged: bool
    elsewhere: float | None = None

    def final(self, last: int) -> float:
        """Return the mean of the last validations, infinite where it diverged."""
        return (
            math.inf
            if self.diverged
            else statistics.fmean(
                [self.curve[step] for step in sorted(self.curve)[-last:]]
            )
        )


class PairedDifference(NamedTuple):
    """A row of the table.

    Attributes:
      lr: multiple of the model's learning rate.
      item: what was run.
      n: pairs in which neither run diverged: those that the figures are of.
      diverged: runs that diverged.
      skipped: steps that were not finite, over all runs.
      loss: mean final loss (nats) of the pairs.
      difference: mean of item minus base (nats); positive is worse.
      half_width: of the 95% interval of that mean; infinite for a single pair.
      base_loss: mean final loss of the base in these pairs.
      elsewhere_n: pairs in which both final weights were evaluated in the other
          precision as well.
      elsewhere: mean difference there (nats).
      elsewhere_half_width: of the 95% interval of that mean.
      elsewhere_percent: that difference in percent of the base's loss there.
    """

    lr: float
    item: str
    n: int
    diverged: int
    skipped: int
    loss: float
    difference: float
    half_width: float
    base_loss: float
    elsewhere_n: int
    elsewhere: float
    elsewhere_half_width: float
    elsewhere_percent: float

    @property
    def percent(self) -> float:
        """Return the difference in percent of the base's loss."""
        return 100 * self.difference / self.base_loss

    @property
    def upper_percent(self) -> float:
        """Return the upper end of the interval in percent of the base's loss."""
        return 100 * (self.difference + self.half_width) / self.base_loss


def compare(
    outcomes: Mapping[Any, Outcome], base: str, *, last: int
) -> list[PairedDifference]:
    """Return a row for each learning rate and item, in the order of first appearance.

    Args:
      outcomes: by a key with `lr`, `item` and `seed`.
      base: the item that the others are compared with.
      last: validations that a final loss is the mean of.
    """
    final = {
        (key.lr, key.item, key.seed): outcome.final(last)
        for key, outcome in outcomes.items()
    }
    elsewhere = {
        (key.lr, key.item, key.seed): outcome.elsewhere
        for key, outcome in outcomes.items()
        if outcome.elsewhere is not None
    }
    rows = []
    for lr, item in dict.fromkeys((key.lr, key.item) for key in outcomes):
        by_seed = {
            key.seed: outcome
            for key, outcome in outcomes.items()
            if (key.lr, key.item) == (lr, item)
        }
        pairs = [
            (final[lr, item, seed], final[lr, base, seed])
            for seed in by_seed
            if math.isfinite(final[lr, item, seed])
            and math.isfinite(final.get((lr, base, seed), math.inf))
        ]
        differences = [ours - theirs for ours, theirs in pairs]
        there = [
            (elsewhere[lr, item, seed], elsewhere[lr, base, seed])
            for seed in by_seed
            if (lr, item, seed) in elsewhere and (lr, base, seed) in elsewhere
        ]
        apart = [ours - theirs for ours, theirs in there]
        rows.append(
            PairedDifference(
                lr,
                item,
                n=len(pairs),
                diverged=sum(outcome.diverged for outcome in by_seed.values()),
                skipped=sum(outcome.skipped for outcome in by_seed.values()),
                loss=mean([ours for ours, _ in pairs]),
                difference=mean(differences),
                half_width=half_width(differences),
                base_loss=mean([theirs for _, theirs in pairs]),
                elsewhere_n=len(there),
                elsewhere=mean(apart),
                elsewhere_half_width=half_width(apart),
                elsewhere_percent=100
                * mean(apart)
                / mean([theirs for _, theirs in there]),
            )
        )
    return rows


def mean(values: Sequence[float]) -> float:
    """Return the mean, NaN of no values."""
    return statistics.fmean(values) if values else math.nan


def markdown(rows: Sequence[PairedDifference], base: str, elsewhere: str = "") -> str:
    """Format the table; a dash where there is no figure.

    `at most` is the upper end of the interval. `elsewhere` is the other precision; it
    adds two columns.
    """
    head = [
        "lr",
        "precision",
        "n",
        "diverged",
        "skipped steps",
        "final loss",
        "difference, nats",
        "in %",
        "at most, %",
    ]
    if elsewhere:
        head += [f"weights in {elsewhere}: n", "difference, nats", "in %"]
    body = []
    for row in rows:
        loss = f"{row.loss:.4f}" if row.n else "-"
        difference = (
            [f"{row.difference:+.4f}", f"{row.percent:+.2f}", "-"]
            if row.n and row.item != base
            else ["-"] * 3
        )
        if row.n > 1 and row.item != base:
            difference[0] += f" ± {row.half_width:.4f}"
            difference[2] = f"{row.upper_percent:+.2f}"
        cells = [
            f"{row.lr:g}x",
            row.item,
            str(row.n),
            str(row.diverged),
            str(row.skipped),
            loss,
            *difference,
        ]
        if elsewhere and row.elsewhere_n and row.item != base:
            interval = (
                f" ± {row.elsewhere_half_width:.4f}" if row.elsewhere_n > 1 else ""
            )
            cells += [
                str(row.elsewhere_n),
                f"{row.elsewhere:+.4f}{interval}",
                f"{row.elsewhere_percent:+.2f}",
            ]
        elif elsewhere:
            cells += ["-"] * 3
        body.append(cells)
    return table(head, body)
