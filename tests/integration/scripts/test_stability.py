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


class Key(NamedTuple):
    lr: float
    item: str
    seed: int


def test_the_largest_stable_rate_and_the_sensitivity_are_paired_by_seed():
    runs = {}
    for seed in (0, 1):
        for lr, base, other in ((1.0, 2.0, 2.1), (3.0, 1.9, 1.9)):
            runs[Key(lr, "fp32", seed)] = ended(final=base)
            runs[Key(lr, "sim", seed)] = ended(final=other)
        runs[Key(10.0, "fp32", seed)] = ended(final=2.2)
        runs[Key(10.0, "sim", seed)] = ended(final=math.inf, diverged=True)
    runs[Key(1.0, "sim", 2)] = ended()  # a seed without its pair
    base, other = stable.figures(runs, "fp32", [1.0, 3.0, 10.0])
    assert (base.largest, other.largest) == (10.0, 3.0)
    assert (base.runs, base.diverged, other.runs, other.diverged) == (6, 0, 7, 2)
    assert base.sensitivity == pytest.approx(0.4 / 3)
    assert (other.seeds, other.sensitivity) == (2, pytest.approx((0.2 + 0 + 3.1) / 3))
    assert other.ratio == pytest.approx(3.3 / 0.4)
