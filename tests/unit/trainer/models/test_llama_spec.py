"""Sizes of models that cannot be."""

import dataclasses

import pytest
from small_models import GPT2
from small_models import LLAMA as SPEC

from trainer.errors import UserError
from trainer.models.llama.spec import RopeScaling


@pytest.mark.parametrize(
    ("spec", "change", "message"),
    [
        (SPEC, {"mlp": "gelu"}, "model.mlp=gelu is not a choice; did you mean 'swig"),
        (SPEC, {"remat": "dots"}, "remat=dots is not a choice; valid: block, checkp"),
        (SPEC, {"align_channels": 65}, "=65: expected at most the MLP's 64"),
        (GPT2, {"n_head": 3}, "model.d_model=16 is not a multiple of model.n_head=3"),
        (GPT2, {"n_layer": 0}, "model.n_layer=0: expected at least 1"),
        (GPT2, {"align_channels": 2}, "=2, but model.mlp=gelu has one branch"),
        (
            GPT2,
            {"mlp": "swiglu", "align_channels": 65},
            "=65: expected at most the MLP",
        ),
    ],
)
def test_impossible_specs_say_what_is_valid(spec, change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(spec, **change)


@pytest.mark.parametrize(
    "change", [{"factor": 0.0}, {"low_freq_factor": 4.0}, {"original_context": 0}]
)
def test_an_impossible_scaling_of_positions_says_what_is_valid(change):
    message = "expected numbers above 0, and low_freq_factor below high_freq_factor"
    with pytest.raises(UserError, match=message):
        dataclasses.replace(RopeScaling(8.0, 1.0, 4.0, 8192), **change)
