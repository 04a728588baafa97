"""Statistics of paired runs: the mean difference to a base at the same seed, its 95%
interval, and their table.

An ordinary 95% interval holds for a number of pairs that was fixed in advance. Who
looks after each pair, and stops when the answer is clear, is wrong more often than one
time in twenty. For that there are wider intervals that hold at every look.

References:
    [1] Lai 1976, "On confidence sequences", Annals of Statistics 4.
    [2] Wang and Ramdas 2023, "Anytime-valid t-tests and confidence sequences for
        Gaussian means with unknown variance", https://arxiv.org/abs/2310.03722.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scipy.special import stdtrit

from trainer.tasks.intervals import half_width, interval_of

EFFECTS = (
    # variance of a true difference over that of a pair, of those that `always` is
    # narrowest for: 4 to 30 pairs
    4.0
)


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


def always(scatter: float, pairs: int) -> float:
    """Return half the 95% interval that holds at every look, after any number of pairs.

    The chance that the true mean ever leaves it is at most 5%. `scatter` is the
    standard deviation of the pairs. Infinite for few pairs.

    For a mean m and n pairs with t = (mean - m) / (s / sqrt(n)), the likelihood of a
    difference drawn from N(0, g s^2) over that of none is sqrt(1/(1 + n g)) ((1 +
    t^2/(n-1)) / (1 + t^2/((1 + n g)(n-1))))^(n/2): a martingale, so that the chance
    that it ever comes to 20 is at most 1/20 [1, 2]. The interval has those m for which
    it is below 20.
    """
    if pairs < 2:
        return math.inf
    spread = 1 + pairs * EFFECTS
    ratio = (math.sqrt(spread) / 0.05) ** (2 / pairs)
    if ratio >= spread:
        return math.inf
    return scatter * math.sqrt((pairs - 1) * (ratio - 1) / (1 - ratio / spread) / pairs)


def settled(differences: Sequence[float], margin: float) -> str:
    """Return the side of the margin on which the true mean is: below, above, or "".

    `differences` are in the order in which they came. It may be asked after each of
    them: its answer is wrong one time in twenty at most, however often it is asked.
    """
    for n in range(2, len(differences) + 1):
        seen = differences[:n]
        middle, half = statistics.fmean(seen), always(statistics.stdev(seen), n)
        if abs(middle - margin) > half:
            return "below" if middle < margin else "above"
    return ""


def pairs_for(scatter: float, half: float) -> int:
    """Return the fewest pairs of this standard deviation whose 95% interval is at most
    `half` to either side.
    """
    few, many = 1, 2
    while interval_of(scatter, many) > half:
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (
            (few, middle) if interval_of(scatter, middle) <= half else (middle, many)
        )
    return many


def seen_with(scatter: float, pairs: int, power: float = 0.8) -> float:
    """Return the true difference that `pairs` pairs detect with probability `power`.

    The test is the 95% interval; infinite for a single pair.
    The sum of both quantiles of Student's t, as is usual; the chance that follows from
    the noncentral t is 78 to 80% from five pairs on.
    """
    if pairs < 2:
        return math.inf
    return interval_of(scatter, pairs) + float(
        stdtrit(pairs - 1, power)
    ) * scatter / math.sqrt(pairs)


def percents_of(
    outcomes: Mapping[Any, Outcome], base: str, *, last: int
) -> dict[tuple[float, str], list[float]]:
    """Return the pairs' differences in percent of the base, by learning rate and item.

    They are in the order of the seeds, of pairs in which neither run diverged. The
    arguments are those of `compare`.
    """
    final = {
        (key.lr, key.item, key.seed): outcome.final(last)
        for key, outcome in outcomes.items()
    }
    percent: dict[tuple[float, str], list[float]] = {}
    for (lr, item, seed), loss in sorted(final.items(), key=lambda run: run[0][2]):
        theirs = final.get((lr, base, seed), math.inf)
        if item != base and math.isfinite(loss) and math.isfinite(theirs):
            percent.setdefault((lr, item), []).append(100 * (loss - theirs) / theirs)
    return percent


def scatter_of(
    outcomes: Mapping[Any, Outcome], base: str, *, last: int
) -> dict[tuple[float, str], tuple[float, int]]:
    """Return the standard deviation and the number of pairs' differences in percent, by
    learning rate and item, where there are two or more.
    """
    percent = percents_of(outcomes, base, last=last)
    return {
        key: (statistics.stdev(values), len(values))
        for key, values in percent.items()
        if len(values) > 1
    }


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
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
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
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
