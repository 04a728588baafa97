"""The figures of an adaptation study: what each way came to, and after which share of
its steps it was where random rows end.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scripts.studies.pairs import half_width, mean
from scripts.studies.runs import Trial

FOCUS, RANDOM, OLD = ARMS = ("focus", "random", "old")
NAMES = {FOCUS: "new, FOCUS", RANDOM: "new, random rows", OLD: "old"}
# a mean over seeds, and the half width of its 95% interval
Figure = tuple[float, float]


class Curve(NamedTuple):
    """An adaptation that has ended: bits per byte after so many steps."""

    bits: dict[int, float]

    @property
    def final(self) -> float:
        """Its last."""
        return self.bits[max(self.bits)]

    def first_at(self, level: float) -> float:
        """The steps after which it first was at a level, between two validations on a
        line; infinite: never.
        """
        before: tuple[int, float] | None = None
        for step, bits in sorted(self.bits.items()):
            if bits <= level:
                if before is None:
                    return float(step)
                return before[0] + (step - before[0]) * (before[1] - level) / (
                    before[1] - bits
                )
            before = (step, bits)
        return math.inf


class Sizes(NamedTuple):
    """What both tokenizers make of the new text, and the steps that give each the same
    bytes.
    """

    bytes: int
    old_tokens: int
    new_tokens: int

    def steps(self, arm: str, steps: int, evaluations: int) -> int:
        """Of an adaptation, a multiple of the validations: with the old tokenizer more,
        for the same bytes.
        """
        ratio = self.old_tokens / self.new_tokens if arm == OLD else 1.0
        return evaluations * round(steps * ratio / evaluations)


class AdaptationRow(NamedTuple):
    """A line of the table.

    Attributes:
      lr: the learning rate.
      arm: what was adapted how.
      seeds: runs that have ended.
      steps: of each.
      final: bits per byte at its end.
      difference: of it to that of random rows at the same seed and rate.
      reached: the share of its steps after which it was where those end; infinite where
          it never was.
      best: likewise, of random rows at the rate that is best for them.
    """

    lr: float
    arm: str
    seeds: int
    steps: int
    final: Figure
    difference: Figure
    reached: Figure
    best: Figure


def table(curves: Mapping[Trial, Curve]) -> list[AdaptationRow]:
    """A line for each rate and kind of adaptation that has a run."""
    best = best_rate(curves)
    rows = []
    for lr in sorted({job.lr for job in curves}):
        for arm in ARMS:
            own = {
                job: curve
                for job, curve in curves.items()
                if (job.lr, job.item) == (lr, arm)
            }
            if not own:
                continue
            others = {job: curves.get(job._replace(item=RANDOM)) for job in own}
            differences = [
                own[job].final - other.final for job, other in others.items() if other
            ]
            at_best = (
                {job: curves.get(job._replace(lr=best, item=RANDOM)) for job in own}
                if best
                else {}
            )
            finals = [curve.final for curve in own.values()]
            figures = (finals, differences, shares(own, others), shares(own, at_best))
            steps = max(max(curve.bits) for curve in own.values())
            rows.append(
                AdaptationRow(
                    lr,
                    arm,
                    len(own),
                    steps,
                    *((mean(x), half_width(x)) for x in figures),
                )
            )
    return rows


def best_rate(curves: Mapping[Trial, Curve]) -> float | None:
    """The rate at which random rows end lowest in the mean; None: none has run."""
    rates = {job.lr for job in curves if job.item == RANDOM}
    finals = {
        lr: [
            curve.final
            for job, curve in curves.items()
            if (job.lr, job.item) == (lr, RANDOM)
        ]
        for lr in rates
    }
    return min(sorted(finals), key=lambda lr: mean(finals[lr]), default=None)


def shares(
    own: Mapping[Trial, Curve], others: Mapping[Trial, Curve | None]
) -> list[float]:
    """Of each run that has another to compare with, the share of its steps after which
    it was where that one ends.
    """
    return [
        own[job].first_at(other.final) / max(own[job].bits)
        for job, other in others.items()
        if other
    ]


def shorter(curves: Mapping[Trial, Curve]) -> dict[float, dict[int, Figure]]:
    """Return `AdaptationRow.reached` of FOCUS's rows for shorter runs, by rate and
    steps: one curve at a constant rate.

    Steps below a third of the whole are left out.
    """
    found: dict[float, dict[int, Figure]] = {}
    pairs = [
        (job.lr, curve, other)
        for job, curve in sorted(curves.items())
        if job.item == FOCUS and (other := curves.get(job._replace(item=RANDOM)))
    ]
    for lr, step in sorted(
        {
            (lr, step)
            for lr, _, other in pairs
            for step in other.bits
            if 3 * step >= max(other.bits)
        }
    ):
        some = [
            own.first_at(other.bits[step]) / step
            for rate, own, other in pairs
            if rate == lr
        ]
        found.setdefault(lr, {})[step] = mean(some), half_width(some)
    return found


def number(value: Figure, form: str) -> str:
    """A figure with its interval, if there is one."""
    if not math.isfinite(value[0]):
        return "never" if value[0] == math.inf else "-"
    return f"{value[0]:{form}}" + (
        f" ± {value[1]:{form.lstrip('+')}}" if math.isfinite(value[1]) else ""
    )


def markdown(
    about: str,
    sizes: Sizes,
    rows: Sequence[AdaptationRow],
    sooner: Mapping[float, Mapping[int, Figure]],
) -> str:
    """What was adapted, the table, and how much of shorter runs FOCUS needs."""
    lines = [
        (
            f"{about} Bits per byte of the validation part at constant rates, means"
            " over seeds with 95% intervals.\n"
        ),
        (
            f"Tokens per byte: {sizes.old_tokens / sizes.bytes:.3f} with the old"
            f" tokenizer, {sizes.new_tokens / sizes.bytes:.3f} with the new one.\n"
        ),
        (
            "There after: the share of its steps after which a run was where random"
            " rows end, at the same rate, and at the rate of the table that is best for"
            " them.\n"
        ),
        (
            "| rate | tokenizer | seeds | steps | bits per byte | difference to random"
            " rows | there after | of the best |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        compared = (
            ["-", "-"]
            if row.arm == RANDOM
            else [number(row.difference, "+.4f"), number(row.reached, ".2f")]
        )
        figures = [number(row.final, ".4f"), *compared, number(row.best, ".2f")]
        cells = [
            f"{row.lr:g}",
            NAMES[row.arm],
            str(row.seeds),
            str(row.steps),
            *figures,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    for lr, found in sooner.items():
        shares = "; ".join(
            f"{steps}: {number(value, '.2f')}" for steps, value in found.items()
        )
        lines.append(
            f"\nAt {lr:g} FOCUS is where random rows end, had both so many steps,"
            f" after: {shares}."
        )
    return "\n".join(lines) + "\n"
