"""The learning rates that a run has, step by step."""

import numpy as np
import pytest

from trainer.config.composition import compose_config
from trainer.errors import UserError
from trainer.step.schedule import learning_rates

EPS = float(np.finfo(np.float32).eps)


def rates_of(name, steps, **shape):
    usual = {"peak": 1.0, "warmup_fraction": 0.1, "min_ratio": 0.1}
    usual |= {"steps": steps, "decay_fraction": 0.2}
    return learning_rates(name, np.arange(steps), **usual | shape)


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("cosine", 0.1 + 0.9 * (1 + np.cos(np.pi * 89 / 90)) / 2),
        ("linear", 0.1 + 0.9 / 90),  # one step of the decay above the ratio
        ("wsd", 0.1 + 0.9 / 20),
        ("constant", 1.0),
    ],
)
def test_schedules_warm_up_reach_the_peak_and_end_a_step_above_the_ratio(name, last):
    rates = rates_of(name, 100, peak=2.0)
    assert (rates.shape, rates.dtype) == ((100,), np.float32)
    first = [0.2, 1.0, 2.0, 2.0]
    np.testing.assert_allclose(rates[[0, 4, 9, 10]], first, rtol=4 * EPS)
    assert np.all(np.diff(rates[10:]) <= 0)
    np.testing.assert_allclose(rates[-1], 2.0 * last, rtol=4 * EPS)


def test_wsd_is_stable_until_its_decay():
    rates = rates_of("wsd", 1000, warmup_fraction=0.0, min_ratio=0.0)
    np.testing.assert_array_equal(rates[:800], 1.0)
    np.testing.assert_allclose(rates[900], 0.5, rtol=1e-5)


def test_wsd_that_decays_from_its_start_is_linear():
    whole = rates_of("wsd", 50, warmup_fraction=0.0, decay_fraction=1.0)
    linear = rates_of("linear", 50, warmup_fraction=0.0)
    np.testing.assert_array_equal(whole, linear)


def test_an_unknown_schedule_lists_the_valid_ones():
    with pytest.raises(UserError, match=r"schedule\.name=x is not .* wsd"):
        compose_config(["schedule.name=x"])
