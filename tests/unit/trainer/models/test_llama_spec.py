"""Sizes of Llamas: the presets', those that are published, and what cannot be."""

import dataclasses

import numpy as np
import pytest
from family_files import preset

from trainer.errors import UserError
from trainer.models.flops import param_count
from trainer.models.llama.rope import frequencies
from trainer.models.llama.spec import LlamaSpec, RopeScaling


def test_frequencies_of_llama_3_keep_the_fast_and_stretch_the_slow():
    plain, scaled = (
        frequencies(128, 5e5, s) for s in (None, RopeScaling(8.0, 1.0, 4.0, 8192))
    )
    np.testing.assert_allclose(
        plain, [5e5 ** (-2 * i / 128) for i in range(64)], rtol=2.0**-23
    )
    ratio, wavelength = plain / scaled, 2 * np.pi / plain.astype(np.float64)
    np.testing.assert_array_equal(ratio[wavelength < 8192 / 4], 1)
    np.testing.assert_array_equal(ratio[wavelength > 8192], 8)
    between = ratio[(wavelength > 8192 / 4) & (wavelength < 8192)]
    assert between.size > 2
    assert (np.diff(between) > 0).all()
    assert 1 < between.min() < between.max() < 8


SPEC = LlamaSpec(
    vocab_size=100, context=16, n_layer=3, n_head=4, n_kv_head=2, d_model=16, tied=True
)


def test_the_smallest_preset_has_room_for_an_effect():
    spec = preset("llama_nano", vocab_size=256)
    assert param_count(spec) - spec.vocab_size * spec.d_model >= 750_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"n_head": 3, "n_kv_head": 1},
            "model.d_model=16 is not a multiple of model.n_head=3",
        ),
        (
            {"n_kv_head": 3},
            "model.n_head=4 is not a multiple of model.n_kv_head=3; change one of them",
        ),
        ({"head_dim": 5}, "head_dim=5: rotary positions turn pairs of channels"),
        ({"mlp": "gelu"}, "model.mlp='gelu' is not a choice; did you mean 'swiglu'"),
        (
            {"remat": "dots"},
            "model.remat='dots' is not a choice; Valid: block, checkpoint_dots",
        ),
        ({"align_channels": 65}, "align_channels=65: expected at most the MLP's 64"),
    ],
)
def test_impossible_specs_say_what_is_valid(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(SPEC, **change)


@pytest.mark.parametrize(
    "change", [{"factor": 0.0}, {"low_freq_factor": 4.0}, {"original_context": 0}]
)
def test_an_impossible_scaling_of_positions_says_what_is_valid(change):
    with pytest.raises(
        UserError,
        match="expected numbers above 0, and low_freq_factor below high_freq_factor",
    ):
        dataclasses.replace(RopeScaling(8.0, 1.0, 4.0, 8192), **change)
