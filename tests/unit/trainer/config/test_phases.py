"""A run in phases: what each is, and what are none."""

import re

import numpy as np
import pytest
from configurations import configured

from trainer.assembly.build import build_learning_rates
from trainer.config.composition import compose_config
from trainer.config.fields import from_saved, to_tree
from trainer.config.phases import phases_of
from trainer.config.schema import Config
from trainer.errors import UserError

EMBEDDINGS = (
    "{until:6,trainable:[embeddings],lr:1e-2,schedule:constant,warmup_fraction:0}"
)
ARGS = [
    "train.steps=12",
    "tracker=jsonl",
    "sample.max_new_tokens=0",
    "train.eval_every=4",
    "checkpoint.every=4",
]
ARGS += ["checkpoint.keep=9", "schedule=wsd"]


def test_each_phase_has_its_own_settings_and_rates():
    c = compose_config(
        [f"train.phases=[{EMBEDDINGS},{{lr:1e-3,precision:bf16_pure}}]", *ARGS]
    )
    first, second = phases_of(c)
    assert (first.start, first.until, second.start, second.until) == (0, 6, 6, 12)
    assert (first.config.train.trainable, second.config.train.trainable) == (
        ("embeddings",),
        None,
    )
    assert first.config.precision.name == "fp32"
    assert second.config.precision == compose_config(["precision=bf16_pure"]).precision
    rates = build_learning_rates(c)
    assert rates.shape == (12,)
    np.testing.assert_allclose(rates[:6], 1e-2)
    alone = compose_config(["train.steps=6", "optimizer.lr=1e-3", "schedule=wsd"])
    np.testing.assert_array_equal(rates[6:], build_learning_rates(alone))
    assert from_saved(Config, to_tree(c)) == c


def test_a_phase_may_change_keys_of_a_preset():
    c = compose_config(
        [
            "train.phases=[{until:6},{precision:{name:bf16_pure,weights_rounding:kahan}}]",
            *ARGS,
        ]
    )
    whole = compose_config(["precision=bf16_pure", "precision.weights_rounding=kahan"])
    assert phases_of(c)[1].config.precision == whole.precision
    assert from_saved(Config, to_tree(c)) == c


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ("[{until:13},{}]", "train.phases[0].until=13 is beyond train.steps=12"),
        (
            "[{until:6},{until:6},{}]",
            "train.phases[1].until=6, but the phase before it ends at step 6",
        ),
        ("[{},{until:12}]", "train.phases[0].until is missing"),
        ("[{until:6}]", "train.phases[0].until=6, but train.steps=12"),
        ("[]", "train.phases=[]: expected a phase or more"),
        (
            "[{until:6,trainble:[embeddings]},{}]",
            "unknown key train.phases[0].trainble; did you mean 'trainable'",
        ),
        (
            "[{until:6,precision:bf61},{}]",
            "train.phases: precision='bf61' is no preset; did you mean 'bf16'",
        ),
        (
            "[{until:6,precision:{name:bf16,weigts:bf16}},{}]",
            "unknown key train.phases[0].precision.weigts",
        ),
        ("[{until:0},{}]", "train.phases[0].until=0: expected at least 1"),
    ],
)
def test_what_are_no_phases_is_refused_in_a_line(phases, message):
    with pytest.raises(UserError, match=re.escape(message)):
        configured(f"train.phases={phases}", *ARGS)


def test_what_is_trained_is_said_once():
    with pytest.raises(UserError, match="in each phase"):
        compose_config(
            [f"train.phases=[{EMBEDDINGS},{{}}]", "train.trainable=[kernels]", *ARGS]
        )
