"""Rotary settings of a config.json that readers take for others."""

import numpy as np
import pytest

from trainer.models.llama.config_json import SIZES
from trainer.models.llama.rope import frequencies, rope_of, rope_to_config
from trainer.models.registry import SPECS

YARN = {"rope_type": "yarn", "factor": 4.0}


def test_the_context_before_scaling_may_stand_at_the_top():
    config = {"max_position_embeddings": 131072, "rope_theta": 1e6}
    top = {**config, "original_max_position_embeddings": 32768}
    for original in ({}, {"original_max_position_embeddings": 8}):
        _, scaling = rope_of({**top, "rope_scaling": YARN | original})
        assert scaling.original_context == 32768
    llama3 = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }  # fmt: skip
    assert rope_of({**top, "rope_scaling": llama3})[1].original_context == 32768
    assert rope_of({**config, "rope_scaling": llama3})[1].original_context == 131072
    assert rope_of({**config, "rope_scaling": {**YARN, "truncate": True}})[1]


@pytest.mark.parametrize("original", [{}, {"original_max_position_embeddings": 32}])
def test_the_factor_of_yarn_is_the_ratio_of_the_contexts(original):
    rope = {"rope_type": "yarn", "factor": None, **original}
    _, scaling = rope_of({"max_position_embeddings": 128, "rope_parameters": rope})
    assert scaling.factor == (4.0 if original else 1.0)


def test_dynamic_scaling_changes_nothing_and_is_exported():
    rope = {"rope_type": "dynamic", "factor": 2.0}
    theta, scaling = rope_of({"max_position_embeddings": 128, "rope_scaling": rope})
    assert rope_to_config(scaling) == rope
    actual, plain = frequencies(8, theta, scaling), frequencies(8, theta, None)
    np.testing.assert_array_equal(actual, plain)


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}, 5e6),
        ({"rope_theta": 5e6}, 5e6),
        ({}, 2e6),
    ],
)
def test_the_base_of_a_family_counts_where_no_other_is_given(rope, theta):
    """transformers 5 writes the base of SmolLM3 in `rope_parameters` alone."""
    config = {"model_type": "smollm3", **dict.fromkeys(SIZES, 8), **rope}
    config["num_attention_heads"] = config["num_key_value_heads"] = 4
    config["hidden_size"] = 32
    assert SPECS["smollm3"].of_config(config).rope_theta == theta
