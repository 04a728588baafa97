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


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_difference_that_is_not_finite_has_no_interval(bad):
    assert half_width([0.1, bad]) == half_width([bad, bad]) == math.inf


def test_the_final_loss_is_the_mean_of_the_last_validations_in_the_order_of_steps():
    shuffled = Outcome({30: 3.0, 10: 1.0, 20: 2.0}, 0, False)
    assert shuffled.final(2) == 2.5
    assert outcome(1.0, 2.0, diverged=True).final(1) == math.inf


def test_differences_are_of_the_same_seed_and_learning_rate():
    base = {
        Trial(lr, "fp32", seed): outcome(1.0 + seed + 10 * lr)
        for lr in (1, 3)
        for seed in (0, 1, 2)
    }
    other = {
        Trial(lr, "bf16", seed): outcome(1.0 + seed + 10 * lr + lr / 100)
        for lr in (1, 3)
        for seed in (1, 2)
    }
    rows = {(row.lr, row.item): row for row in compare(base | other, "fp32", last=1)}
    for lr in (1, 3):
        row = rows[lr, "bf16"]
        assert (row.n, row.diverged) == (2, 0)
        assert row.difference == pytest.approx(lr / 100)
        assert row.half_width == pytest.approx(0, abs=1e-12)
        # of seeds 1 and 2, with which it was paired
        assert row.base_loss == pytest.approx(2.5 + 10 * lr)
        assert (
            row.percent
            == pytest.approx(row.upper_percent)
            == pytest.approx(100 * lr / 100 / (2.5 + 10 * lr))
        )
    assert rows[1, "fp32"].n == 3


def test_the_other_precision_has_its_own_pairs_and_columns():
    outcomes = {
        Trial(1, "fp32", 0): outcome(2.0)._replace(elsewhere=2.0),
        Trial(1, "fp32", 1): outcome(2.0)._replace(elsewhere=2.0),
        Trial(1, "fp8", 0): outcome(2.5)._replace(elsewhere=2.1),
        Trial(1, "fp8", 1): outcome(2.5)._replace(elsewhere=2.3),
        Trial(1, "fp8", 2): outcome(2.5)._replace(elsewhere=9.0),  # without its pair
        Trial(1, "bf16", 0): outcome(2.0),
    }
    rows = compare(outcomes, "fp32", last=1)
    assert (rows[1].elsewhere_n, rows[1].elsewhere) == (2, pytest.approx(0.2))
    assert rows[1].elsewhere_percent == pytest.approx(10)
    assert rows[1].elsewhere_half_width == pytest.approx(half_width([0.1, 0.3]))
    table = markdown(rows, "fp32", "fp32").splitlines()
    assert table[0].endswith("| weights in fp32: n | difference, nats | in % |")
    assert [line.rsplit(" | ", 3)[1:] for line in table[2:]] == [
        ["-", "-", "- |"],
        ["2", "+0.2000 ± 1.2706", "+10.00 |"],
        ["-", "-", "- |"],
    ]


def test_a_diverged_run_is_reported_and_makes_no_pair():
    outcomes = {
        Trial(1, "fp32", 0): outcome(2.0),
        Trial(1, "fp32", 1): outcome(2.0),
        Trial(1, "fp16", 0): outcome(2.5),
        Trial(1, "fp16", 1): outcome(diverged=True, skipped=11),
    }
    base, row = compare(outcomes, "fp32", last=1)
    assert (row.n, row.diverged, row.skipped, row.difference) == (1, 1, 11, 0.5)
    assert markdown([base, row], "fp32").splitlines()[2:] == [
        "| 1x | fp32 | 2 | 0 | 0 | 2.0000 | - | - | - |",
        "| 1x | fp16 | 1 | 1 | 11 | 2.5000 | +0.5000 | +25.00 | - |",
    ]


def test_the_upper_end_is_of_the_interval_not_of_the_mean():
    outcomes = {Trial(1, "fp32", s): outcome(2.0) for s in range(2)}
    outcomes |= {Trial(1, "x", s): outcome(2.0 + 0.01 * s) for s in range(2)}
    row = compare(outcomes, "fp32", last=1)[1]
    assert row.half_width == pytest.approx(12.706 * 0.005, rel=1e-3)
    assert row.upper_percent == pytest.approx(100 * (0.005 + row.half_width) / 2)
