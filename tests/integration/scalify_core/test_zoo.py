"""The models of the zoo: under scalify each leaf of their gradient is as right as in
plain code of the same format.

Here at depths that compile in seconds; `python -m scripts.studies.zoo` measures them
all, as deep as they are, in all formats.
"""

import functools

import jax
import pytest
from families import quick
from zoo.measure import Subject, measure
from zoo.sizes import inputs_moved, loss_scaled

# At these depths; None: as deep as the model is by itself. Left out: those that differ
# from others here in a number or in the library that builds them.
DEPTHS = {
    "llama_scan": None,
    "vit": 3,
    "resnet": 8,
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


@pytest.mark.parametrize("name", quick(DEPTHS, "post_norm"))
def test_fp16_gradients_are_right_in_every_leaf(name):
    assert_fits(name, "fp16")


@pytest.mark.parametrize("name", quick(("contrastive", "post_norm"), "post_norm"))
def test_gradients_are_right_in_fp32_and_with_dynamic_scales(name):
    assert_fits(name, "fp32")
    assert_fits(name, "fp16", "dynamic")


@pytest.mark.slow  # of another format: above
@pytest.mark.parametrize(
    ("name", "format"),
    [("stochastic_chain", "bf16"), ("llama_scan", "fp8"), ("vit", "fp8")],
)
def test_gradients_in_other_formats_cost_no_more_than_their_rounding(name, format):
    assert_fits(name, format)


@pytest.mark.slow  # of one size: above
@pytest.mark.parametrize("name", ["contrastive", "stochastic_chain"])
def test_fp32_gradients_follow_inputs_of_any_size(name):
    assert max(inputs_moved(subject(name)).values()) <= 1


@pytest.mark.slow  # of one size: above
def test_fp32_gradients_follow_a_loss_of_any_size():
    assert max(loss_scaled(subject("contrastive")).values()) <= 1
