"""The models of the zoo: under scalify each leaf of their gradient is as right as in
plain code of the same format.

Here at depths that compile in seconds; `python -m scripts.studies.zoo` measures them
all, as deep as they are, in all formats.
"""

import functools

import jax
import numpy as np
import pytest
from families import quick
from zoo.measure import Subject, error, measure, share_of_zeros
from zoo.sizes import inputs_moved, loss_scaled

# At these depths; None: as deep as the model is by itself. Left out: those that are
# like others here but for a number.
DEPTHS = {
    "llama_fan_in": 4,
    "llama_scan": None,
    "llama_scan_remat": None,
    "nnx_decoder": 4,
    "vit": 3,
    "resnet": 8,
    "diffusion": 2,
    "moe": 4,
    "mamba": 2,
    "contrastive": None,
    "ctc": 6,
    "ode_rk4": None,
    "flash_scan": 3,
    "post_norm": None,
    "cross_entropy_1m": None,
    "stochastic_chain": None,
}
CHEAP = ("llama_scan", "contrastive", "post_norm")


@functools.cache
def subject(name):
    return Subject(name, DEPTHS[name])


@pytest.fixture(autouse=True)
def _as_users_have_it():
    with jax.numpy_rank_promotion("allow"):
        yield


def assert_fits(name, format, scales="static"):
    actual = measure(subject(name), format, scales)
    assert actual.fits, "\n".join(actual.lines())


@pytest.mark.parametrize("name", quick(DEPTHS, "llama_scan"))
def test_fp16_gradients_are_right_in_every_leaf(name):
    assert_fits(name, "fp16")


@pytest.mark.parametrize("name", quick(CHEAP, "post_norm"))
def test_fp16_gradients_are_right_with_dynamic_scales(name):
    assert_fits(name, "fp16", "dynamic")


@pytest.mark.parametrize("name", quick(CHEAP, "post_norm"))
def test_fp32_gradients_are_those_of_plain_code(name):
    assert_fits(name, "fp32")


@pytest.mark.slow  # of two models: above
@pytest.mark.parametrize("name", ["post_norm", "stochastic_chain"])
def test_bf16_gradients_are_right_in_every_leaf(name):
    assert_fits(name, "bf16")


@pytest.mark.slow  # of two models: above
@pytest.mark.parametrize("name", ["llama_scan", "vit"])
def test_fp8_products_cost_no_more_than_their_rounding(name):
    assert_fits(name, "fp8")


@pytest.mark.slow  # of two models: above
@pytest.mark.parametrize("name", ["contrastive", "post_norm"])
def test_fp32_gradients_follow_a_loss_of_any_size(name):
    assert max(loss_scaled(subject(name)).values()) <= 1


@pytest.mark.slow  # of two models: above
@pytest.mark.parametrize(
    "name", ["contrastive", "cross_entropy_1m", "stochastic_chain"]
)
def test_fp32_gradients_follow_inputs_of_any_size(name):
    assert max(inputs_moved(subject(name)).values()) <= 1


def test_errors_that_are_not_numbers_are_infinite():
    ones = np.ones(3)
    assert (
        error(np.array([1, 1, np.nan]), ones)
        == error(np.array([1, 1, np.inf]), ones)
        == np.inf
    )
    assert error(ones, np.zeros(3)) == np.inf
    assert error(np.zeros(3), np.zeros(3)) == 0
    assert error(ones * 1.5, ones) == 0.5


def test_a_zero_counts_unless_its_row_and_column_are_larger():
    reference = np.array([[1.0, 1.0], [1e-4, 1e-4]])
    actual = np.array([[1.0, 1.0], [0.0, 1e-4]])
    # a row of its own size, as of a rare token
    assert share_of_zeros(actual, reference, 0.01) == 0.25
    assert share_of_zeros(np.array([1.0, 0.0]), np.array([1.0, 1e-4]), 0.01) == 0
    assert share_of_zeros(np.zeros(2), np.zeros(2), 0.01) == 0
