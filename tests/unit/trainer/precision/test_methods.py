"""A scaling method is one entry: the configuration takes it, the policy asks it, and
its facts are true."""

import dataclasses
import itertools
import math

import jax.numpy as jnp
import pytest

from scalify_core.numerics.formats import FloatFormat
from trainer.config.composition import compose_config
from trainer.errors import UserError
from trainer.precision.fields import is_format
from trainer.precision.gradients import (
    FIRST_LOSS_SCALE,
    first_loss_scale,
    loss_scaled,
    next_loss_scale,
)
from trainer.precision.methods import METHODS, Method
from trainer.precision.policy import without_effect


class Rounded(Method):
    """A method that nobody else knows."""

    name = "rounded"
    loss_scale_skips = 3
    settings = ("clip_outliers",)

    def gradient_formats(self, policy):
        return ("fp16",), "rounded gradients are FP16"


@pytest.fixture
def rounded(monkeypatch):
    monkeypatch.setitem(METHODS, "rounded", Rounded())


def test_a_method_is_added_by_its_entry_alone(rounded):
    message = r"fp32, but rounded gradients are FP16; set .*weight_grad=fp16$"
    with pytest.raises(UserError, match=message):
        compose_config(["precision.scaling=rounded"])
    overrides = ["precision.scaling=rounded", "precision.weight_grad=fp16"]
    policy = compose_config(overrides).precision.policy
    assert isinstance(policy.method, Rounded)
    unused = without_effect(policy)
    assert unused["amax_history"] == "precision.scaling=rounded, not delayed"
    assert "clip_outliers" not in unused
    plain = dataclasses.replace(policy, scaling="none", weight_grad="fp32")
    reason = "precision.scaling=none, not rounded"
    assert without_effect(plain)["clip_outliers"] == reason


def test_the_skips_of_a_loss_scale_are_its_halvings_to_the_least():
    scale, steps = first_loss_scale(), 0
    while (smaller := next_loss_scale(scale, (), False)).value < scale.value:
        scale, steps = smaller, steps + 1
    assert (
        METHODS["loss_scale"].loss_scale_skips == steps == math.log2(FIRST_LOSS_SCALE)
    )


def test_the_formats_of_a_configuration_are_those_that_the_library_has():
    names = ["fp32", "FP16", "bf16", "float32", "fp8", "", "e4", "m3", "e4m3fn"]
    sizes = itertools.product((0, 1, 2, 4, 8, 9), (0, 1, 3, 23, 24))
    for name in [*names, *(f"e{e}m{m}" for e, m in sizes)]:
        try:
            is_parsed = bool(FloatFormat.parse(name))
        except ValueError:
            is_parsed = False
        assert is_format(name) == is_parsed, name


def test_a_loss_scale_keeps_gradients_that_half_precision_does_not_hold():
    gradient = loss_scaled(lambda w, x: (w * x).astype(jnp.float32))
    half = jnp.float16(1)
    loss, grads, _ = gradient(half, first_loss_scale(), jnp.float32(2.0**-26))
    assert (loss, grads, grads.dtype) == (2.0**-26, 2.0**-26, jnp.float32)
