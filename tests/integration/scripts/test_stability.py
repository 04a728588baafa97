"""The stability study: each figure by hand on made-up runs, and a short study of real
ones that can fail."""

import math
from typing import NamedTuple

import pytest

from scripts.studies import stable
from scripts.studies.stable import Run


def ended(first=5.0, final=2.0, *, diverged=False):
    return Run(first, final, diverged, 0)


@pytest.mark.parametrize(
    ("curve", "stopped", "right"),
    [
        ([4.0, 3.0, 2.0], False, False),
        ([4.0, 2.0, 3.4], False, False),
        ([4.0, 2.0, 3.6], False, True),
        ([4.0, 2.0, math.nan], False, True),
        ([4.0, 2.0], True, True),
        ([5.1, 5.2, 5.1], False, True),
        ([], False, True),
    ],
)
def test_a_run_has_diverged_that_was_stopped_learnt_nothing_or_lost_half_of_it(
    curve, stopped, right
):
    assert stable.has_diverged(5.0, curve, stopped=stopped) == right


def test_sensitivity_is_the_mean_over_rates_of_the_clipped_loss_above_the_best():
    runs = [ended(final=2.5), ended(final=2.0), ended(final=math.inf, diverged=True)]
    assert stable.sensitivity(runs) == pytest.approx((0.5 + 0 + 3.0) / 3)


def test_the_table_has_the_largest_rate_below_all_divergences_and_pairs_sensitivities_by_seed():
    class Key(NamedTuple):
        lr: float
        item: str
        seed: int

    runs = {}
    for seed in (0, 1):
        for lr, base, other in (
            (1.0, 2.0, 2.1),
            (3.0, 1.9, 1.9),
            (10.0, 2.2, math.inf),
        ):
            runs[Key(lr, "fp32", seed)] = ended(final=base)
            runs[Key(lr, "sim", seed)] = ended(final=other, diverged=math.isinf(other))
    runs[Key(1.0, "sim", 2)] = ended()  # a seed that is not slow
    base, other = stable.figures(runs, "fp32", [1.0, 3.0, 10.0])
    assert (base.largest, other.largest) == (10.0, 3.0)
    assert (base.runs, base.diverged, other.runs, other.diverged) == (6, 0, 7, 2)
    assert base.sensitivity == pytest.approx(0.4 / 3)
    assert (other.seeds, other.sensitivity) == (2, pytest.approx((0.2 + 0 + 3.1) / 3))
    assert other.ratio == pytest.approx(3.3 / 0.4)
    assert stable.largest_stable({Key(3.0, "x", 0): ended()}, [1.0, 3.0]) is None
    text = stable.markdown([base, other], runs, "fp32", [1.0, 3.0, 10.0])
    assert "| sim | 7 | 2 | 8% to 64% |" in text
    assert (
        "| fp32 | 2.0000 (2.000 to 2.000) | 1.9000 (1.900 to 1.900) | 2.2000 (2.200 to"
        " 2.200) |" in text
    )
    assert text.rstrip().endswith("| 2 diverged |")


def test_a_run_has_figures_when_it_has_ended():
    rows = [{"step": s, "train/loss": 5.0 - 0.1 * s} for s in range(1, 11)] + [
        {"step": 10, "val/loss": 4.0}
    ]
    actual = stable.run_of(rows, steps=10, last=1, stopped=False)
    assert actual == Run(first=4.9, final=4.0, diverged=False, skipped=0)
    assert stable.run_of(rows[:-1], steps=10, last=1, stopped=False) is None
    assert stable.run_of(rows[:-1], steps=10, last=1, stopped=True).diverged
