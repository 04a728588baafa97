"""The learning rates that a run has, step by step."""

import numpy as np
import pytest

from trainer.errors import UserError
from trainer.step.schedule import learning_rates

EPS = float(np.finfo(np.float32).eps)


def rates_of(name, steps, **shape):
    usual = {"peak": 1.0, "warmup_fraction": 0.1, "min_ratio": 0.1}
    return learning_rates(name, steps=steps, **usual | {"decay_fraction": 0.2} | shape)


@pytest.mark.parametrize(
    ("name", "last"),
    [("cosine", 0.1), ("linear", 0.1), ("wsd", 0.1), ("constant", 1.0)],
)
def test_schedules_warm_up_reach_the_peak_and_end_near_the_ratio(name, last):
    rates = rates_of(name, 1000, peak=2.0)
    assert rates.shape == (1000,)
    assert rates.dtype == np.float32
    np.testing.assert_allclose(rates[[0, 49, 99]], [0.02, 1.0, 2.0], rtol=4 * EPS)
    np.testing.assert_allclose(rates.max(), 2.0, rtol=4 * EPS)
    one_step = 2.0 * 0.9 / 200  # of the fastest decay
    np.testing.assert_allclose(rates[-1], 2.0 * last, atol=one_step)
    assert np.all(np.diff(rates[100:]) <= 0)


@pytest.mark.parametrize(("name", "decay"), [("linear", 90), ("wsd", 20)])
def test_the_last_rate_is_one_step_of_the_decay_above_the_ratio(name, decay):
    last = rates_of(name, 100)[-1]
    np.testing.assert_allclose(last, 0.1 + 0.9 / decay, rtol=4 * EPS)


def test_wsd_is_stable_until_its_decay():
    rates = rates_of("wsd", 1000, warmup_fraction=0.0, min_ratio=0.0)
    np.testing.assert_array_equal(rates[:800], 1.0)
    np.testing.assert_allclose(rates[900], 0.5, rtol=1e-5)


def test_an_unknown_schedule_lists_the_valid_ones():
    with pytest.raises(UserError, match="wsd"):
        rates_of("x", 1)
