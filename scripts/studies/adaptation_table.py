"""Figures of an adaptation study: final losses, and the share of its steps after
which an adaptation reached the final loss of random rows.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scripts.studies.pairs import mean
from scripts.studies.runs import Trial
from trainer.tasks.intervals import half_width

FOCUS, RANDOM, OLD = ARMS = ("focus", "random", "old")
NAMES = {FOCUS: "new, FOCUS", RANDOM: "new, random rows", OLD: "old"}
# a mean over seeds, and the half width of its 95% interval
Figure = tuple[float, float]


class Curve(NamedTuple):
    """The validation losses (bits per byte) of a finished adaptation, by step."""

    bits: dict[int, float]

    @property
    def final(self) -> float:
        """Return the last loss."""
        return self.bits[max(self.bits)]

    def first_at(self, level: float) -> float:
        """Return the steps after which the loss first reached a level.

        Interpolates between two validations; infinite where it never did.
        """
        previous: tuple[int, float] | None = None
        for step, bits in sorted(self.bits.items()):
            if bits <= level:
                if previous is None:
                    return float(step)
                return previous[0] + (step - previous[0]) * (previous[1] - level) / (
                    previous[1] - bits
                )
            previous = (step, bits)
        return math.inf


class Sizes(NamedTuple):
    """The new text's bytes and tokens, from which arms get steps of equal bytes."""

    bytes: int
    old_tokens: int
    new_tokens: int

    def steps(self, arm: str, steps: int, evaluations: int) -> int:
        """Return an arm's steps, a multiple of `evaluations`.

        The old tokenizer needs more of them to see the same bytes.
        """
        ratio = self.old_tokens / self.new_tokens if arm == OLD else 1.0
        return evaluations * round(steps * ratio / evaluations)


class AdaptationRow(NamedTuple):
    """A row of the table.

    Attributes:
      lr: the learning rate.
      arm: the kind of adaptation.
      seeds: runs that have ended.
      steps: steps of each run.
      final: final loss, bits per byte.
      difference: final loss minus that of random rows at the same seed and rate.
      reached: the share of its steps after which it reached the final loss of random
          rows at the same rate; infinite where it never did.
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
    """Return a row for each rate and kind of adaptation that has a run."""
    best = best_rate(curves)
    rows = []
    for lr in sorted({job.lr for job in curves}):
        for arm in ARMS:
            arm_curves = {
                job: curve
                for job, curve in curves.items()
                if (job.lr, job.item) == (lr, arm)
            }
            if not arm_curves:
                continue
            others = {job: curves.get(job._replace(item=RANDOM)) for job in arm_curves}
            differences = [
                arm_curves[job].final - other.final
                for job, other in others.items()
                if other
            ]
            at_best = (
                {
                    job: curves.get(job._replace(lr=best, item=RANDOM))
                    for job in arm_curves
                }
                if best
                else {}
            )
            finals = [curve.final for curve in arm_curves.values()]
            figures = (
                finals,
                differences,
                shares(arm_curves, others),
                shares(arm_curves, at_best),
            )
            steps = max(max(curve.bits) for curve in arm_curves.values())
            rows.append(
                AdaptationRow(
                    lr,
                    arm,
                    len(arm_curves),
                    steps,
                    *((mean(x), half_width(x)) for x in figures),
                )
            )
    return rows


def best_rate(curves: Mapping[Trial, Curve]) -> float | None:
    """Return the rate at which random rows end lowest, or None without such runs."""
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
    runs: Mapping[Trial, Curve], others: Mapping[Trial, Curve | None]
) -> list[float]:
    """Return, for each run with a counterpart, the share of its steps after which it
    reached the counterpart's final loss.
    """
    return [
        runs[job].first_at(other.final) / max(runs[job].bits)
        for job, other in others.items()
        if other
    ]


def shorter(curves: Mapping[Trial, Curve]) -> dict[float, dict[int, Figure]]:
    """Return `AdaptationRow.reached` of FOCUS's rows for shorter runs, by rate and
    steps: one curve at a constant rate.

    Steps below a third of the whole are left out.
    """
    reached: dict[float, dict[int, Figure]] = {}
    pairs = [
        (job.lr, curve, random)
        for job, curve in sorted(curves.items())
        if job.item == FOCUS and (random := curves.get(job._replace(item=RANDOM)))
    ]
    for lr, step in sorted(
        {
            (lr, step)
            for lr, _, random in pairs
            for step in random.bits
            if 3 * step >= max(random.bits)
        }
    ):
        some = [
            focus.first_at(random.bits[step]) / step
            for rate, focus, random in pairs
            if rate == lr
        ]
        reached.setdefault(lr, {})[step] = mean(some), half_width(some)
    return reached


def number(value: Figure, form: str) -> str:
    """Format a figure with its interval, if there is one."""
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
    """Format the study: settings, table, and the steps that FOCUS saves."""
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
    for lr, reached in sooner.items():
        shares = "; ".join(
            f"{steps}: {number(value, '.2f')}" for steps, value in reached.items()
        )
        lines.append(
            f"\nAt {lr:g} FOCUS is where random rows end, had both so many steps,"
            f" after: {shares}."
        )
    return "\n".join(lines) + "\n"
