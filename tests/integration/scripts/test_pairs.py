import math
import statistics
import struct

import numpy as np
import pytest

from scripts.studies.pairs import (
    EFFECTS,
    Outcome,
    always,
    compare,
    markdown,
    pairs_for,
    scatter_of,
    seen_with,
    settled,
)
from scripts.studies.parity_picture import draw
from scripts.studies.runs import Trial
from trainer.tasks.intervals import half_width, interval_of


def outcome(*losses, diverged=False, skipped=0):
    return Outcome(
        {10 * (i + 1): loss for i, loss in enumerate(losses)}, skipped, diverged
    )


# any table of Student's t
@pytest.mark.parametrize(("n", "t"), [(2, 12.706), (4, 3.182), (8, 2.365), (30, 2.045)])
def test_half_width_is_students(n, t):
    values = [1.0, -1.0] * (n // 2)  # of sample variance n / (n - 1)
    assert half_width(values) == pytest.approx(t * math.sqrt(n / (n - 1) / n), rel=1e-3)


def test_a_single_pair_has_no_interval():
    assert half_width([0.1]) == math.inf


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


def test_what_only_diverged_has_a_row_without_figures():
    outcomes = {
        Trial(1, "fp32", 0): outcome(2.0),
        Trial(1, "fp16", 0): outcome(diverged=True),
    }
    rows = compare(outcomes, "fp32", last=1)
    assert (
        markdown(rows, "fp32").splitlines()[-1]
        == "| 1x | fp16 | 0 | 1 | 0 | - | - | - | - |"
    )


def test_the_upper_end_is_of_the_interval_not_of_the_mean():
    outcomes = {Trial(1, "fp32", s): outcome(2.0) for s in range(2)}
    outcomes |= {Trial(1, "x", s): outcome(2.0 + 0.01 * s) for s in range(2)}
    row = compare(outcomes, "fp32", last=1)[1]
    assert row.half_width == pytest.approx(12.706 * 0.005, rel=1e-3)
    assert row.upper_percent == pytest.approx(100 * (0.005 + row.half_width) / 2)


def test_the_picture_shows_every_learning_rate_whatever_diverged(tmp_path):
    def size_of(outcomes):
        path = tmp_path / "parity.png"
        draw(path, compare(outcomes, "fp32", last=1), outcomes, "fp32", last=1)
        return struct.unpack(">8s8xII", path.read_bytes()[:24])

    assert size_of({})[0] == b"\x89PNG\r\n\x1a\n"
    one = {Trial(1, "fp32", 0): outcome(3.0, diverged=True)}
    _, width, height = size_of(one)
    two = {
        Trial(lr, item, s): outcome(3.0, 2.0 + s)
        for lr in (1, 3)
        for item in ("fp32", "bf16")
        for s in (0, 1)
    }
    two |= {Trial(3, "bf16", s): outcome(3.0, diverged=True) for s in (0, 1)}
    assert size_of(two)[1:] == (width, 2 * height)
    assert [path.name for path in tmp_path.iterdir()] == ["parity.png"]


@pytest.mark.parametrize(
    ("scatter", "half"), [(0.2, 0.15), (0.2, 0.05), (0.05, 0.12), (1.0, 0.01)]
)
def test_the_pairs_for_an_interval_are_the_fewest_that_have_it(scatter, half):
    n = pairs_for(scatter, half)
    assert interval_of(scatter, n) <= half < interval_of(scatter, n - 1)


def test_an_interval_by_scatter_is_that_of_values_with_it():
    values = [0.1, -0.3, 0.2, 0.4, -0.1]
    assert interval_of(statistics.stdev(values), 5) == pytest.approx(half_width(values))


def test_a_difference_that_is_seen_four_times_in_five_is():
    """By trial: 20,000 studies of eight pairs; the share has a standard deviation of
    0.3%."""
    difference, random = seen_with(0.2, 8), np.random.default_rng(0)
    actual = random.normal(difference, 0.2, (20_000, 8))
    reach = np.std(actual, axis=1, ddof=1) * interval_of(1.0, 8)
    assert np.mean(actual.mean(axis=1) > reach) == pytest.approx(0.79, abs=0.02)
    assert seen_with(0.2, 1) == math.inf


def test_scatter_is_of_finished_pairs_in_percent_of_the_base():
    runs = {
        Trial(1.0, "fp32", 0): outcome(2.0), Trial(1.0, "x", 0): outcome(2.02),
        Trial(1.0, "fp32", 1): outcome(4.0), Trial(1.0, "x", 1): outcome(3.96),
        Trial(1.0, "fp32", 2): outcome(2.0), Trial(1.0, "x", 2): outcome(math.nan, diverged=True),
        Trial(1.0, "y", 0): outcome(2.0), Trial(3.0, "x", 0): outcome(1.0),
    }  # fmt: skip
    assert scatter_of(runs, "fp32", last=1) == {
        (1.0, "x"): (pytest.approx(math.sqrt(2)), 2)
    }


LOOKS = 40


def ever_left(half, trials=4000):
    """The share of studies of up to 40 pairs whose interval the true mean ever leaves,
    looked at after each pair."""
    actual = np.random.default_rng(1).normal(0.1, 0.2, (trials, LOOKS))
    left = np.zeros(trials, bool)
    for n in range(2, LOOKS + 1):
        scatter = np.std(actual[:, :n], axis=1, ddof=1)
        left |= abs(actual[:, :n].mean(axis=1) - 0.1) > scatter * half(1.0, n)
    return left.mean()


def test_an_interval_that_may_always_be_looked_at_is_hardly_ever_left():
    """A share has a standard deviation of 0.35%. What is decided on before is left four
    times as often."""
    assert ever_left(always) <= 0.05 + 3 * 0.0035
    assert ever_left(interval_of) > 0.15


def test_an_interval_that_may_always_be_looked_at_is_that_of_the_martingale():
    """At its ends the likelihood ratio is 20: integrated over the effects, not by the
    formula."""
    n, effects = 9, np.linspace(-60, 60, 1001)
    values = np.random.default_rng(2).normal(0, 1, n)
    mean = values.mean() - always(
        np.std(values, ddof=1), n
    )  # of the values' differences to it: effects are of the scatter
    shifted, sizes = values - mean, np.geomspace(3e-2, 3e1, 601)
    prior = np.exp(-(effects**2) / (2 * EFFECTS)) / math.sqrt(2 * math.pi * EFFECTS)

    # over all sizes of the scatter alike on a logarithmic scale
    def likelihood(effect):
        z = (shifted[None, :, None] - effect[:, None, None] * sizes) / sizes
        return np.trapezoid(
            np.exp(-0.5 * np.sum(z**2, axis=1)) / sizes**n, np.log(sizes), axis=-1
        )

    averaged = np.trapezoid(likelihood(effects) * prior, effects)
    assert averaged / likelihood(np.zeros(1))[0] == pytest.approx(20, rel=1e-3)


def test_what_is_clear_stays_clear_and_what_is_not_is_not_said():
    random = np.random.default_rng(3)
    assert settled([0.1], 0.25) == settled([0.1, 0.1001], 5.0) == ""
    below, above = (
        random.normal(0.05, 0.05, 12).tolist(),
        random.normal(0.5, 0.05, 12).tolist(),
    )
    assert settled(below, 0.25) == "below"
    assert settled(above, 0.25) == "above"
    assert settled([*below, 3.0, 3.0], 0.25) == "below"
    assert settled(random.normal(0.25, 0.2, 12).tolist(), 0.25) == ""
