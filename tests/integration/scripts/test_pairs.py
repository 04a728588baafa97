import math

import pytest

from scripts.studies.pairs import Outcome, compare, markdown
from scripts.studies.runs import Trial
from trainer.tasks.intervals import half_width


def outcome(*losses, diverged=False, skipped=0):
    return Outcome(
        {10 * (i + 1): loss for i, loss in enumerate(losses)}, skipped, diverged
    )


# any table of Student's t
@pytest.mark.parametrize(("n", "t"), [(2, 12.706), (4, 3.182), (8, 2.365), (30, 2.045)])
def test_half_width_is_students(n, t):
    values = [1.0, -1.0] * (n // 2)  # of sample variance n / (n - 1)
    assert half_width(values) == pytest.approx(t * math.sqrt(n / (n - 1) / n), rel=1e-3)
    assert half_width([*values, math.nan]) == math.inf


def test_differences_are_of_the_same_seed_and_learning_rate():
    outcomes = {}
    for lr in (1, 3):
        for seed in (0, 1, 2):
            outcomes[Trial(lr, "fp32", seed)] = outcome(1.0 + seed + 10 * lr)
        for seed in (1, 2):
            loss = 1.0 + seed + 10 * lr + lr / 100
            outcomes[Trial(lr, "bf16", seed)] = outcome(loss)
    rows = {(row.lr, row.item): row for row in compare(outcomes, "fp32", last=1)}
    for lr in (1, 3):
        row, base = rows[lr, "bf16"], 2.5 + 10 * lr  # the mean of seeds 1 and 2
        assert (row.n, row.diverged) == (2, 0)
        assert row.difference == pytest.approx(lr / 100)
        assert row.base_loss == pytest.approx(base)
        assert row.percent == pytest.approx(lr / base)
    assert rows[1, "fp32"].n == 3


def test_a_diverged_run_is_reported_and_makes_no_pair():
    outcomes = {
        Trial(1, "fp32", 0): outcome(2.0),
        Trial(1, "fp32", 1): outcome(2.0),
        Trial(1, "fp16", 0): outcome(2.5),
        Trial(1, "fp16", 1): outcome(diverged=True, skipped=11),
    }
    rows = compare(outcomes, "fp32", last=1)
    assert markdown(rows, "fp32").splitlines()[2:] == [
        "| 1x | fp32 | 2 | 0 | 0 | 2.0000 | - | - | - |",
        "| 1x | fp16 | 1 | 1 | 11 | 2.5000 | +0.5000 | +25.00 | - |",
    ]


def test_the_upper_end_is_of_the_interval_not_of_the_mean():
    outcomes = {Trial(1, "fp32", s): outcome(2.0) for s in range(2)}
    outcomes |= {Trial(1, "x", s): outcome(2.0 + 0.01 * s) for s in range(2)}
    row = compare(outcomes, "fp32", last=1)[1]
    assert row.half_width == pytest.approx(12.706 * 0.005, rel=1e-3)
    assert row.upper_percent == pytest.approx(100 * (0.005 + row.half_width) / 2)
