"""A run in phases: the settings of each, and those that are refused."""

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
ARGS = ["train.steps=12", "train.eval_every=4", "checkpoint.every=4", "schedule=wsd"]


def test_each_phase_has_its_own_settings_and_rates():
    second_phase = "{lr:1e-3,precision:{name:bf16_pure,weights_rounding:kahan}}"
    c = compose_config([f"train.phases=[{EMBEDDINGS},{second_phase}]", *ARGS])
    first, second = phases_of(c)
    assert (first.start, first.until, second.start, second.until) == (0, 6, 6, 12)
    assert first.config.train.trainable == ("embeddings",)
    assert second.config.train.trainable is None
    assert first.config.precision.name == "fp32"
    shares = [x.config.schedule.warmup_fraction for x in (first, second)]
    assert shares == [0, c.schedule.warmup_fraction] != [0, 0]
    kahan = compose_config(["precision=bf16_pure", "precision.weights_rounding=kahan"])
    assert second.config.precision == kahan.precision
    rates = build_learning_rates(c)
    np.testing.assert_allclose([rates[step] for step in range(6)], 1e-2)
    alone = compose_config(["train.steps=6", "optimizer.lr=1e-3", "schedule=wsd"])
    rates_alone = build_learning_rates(alone)
    assert [rates[6 + step] for step in range(6)] == [rates_alone[i] for i in range(6)]
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
        ("[]", "train.phases=[]: expected a phase or more"),
        (
            "[{until:6,trainble:[embeddings]},{}]",
            "unknown key train.phases[0].trainble; did you mean 'trainable'",
        ),
        (
            "[{until:6,precision:bf61},{}]",
            "train.phases: precision=bf61 is not a preset; did you mean 'bf16'",
        ),
    ],
)
def test_phases_that_cannot_be_are_refused_in_a_line(phases, message):
    with pytest.raises(UserError, match=re.escape(message)):
        configured(f"train.phases={phases}", *ARGS)


def test_trained_parts_are_named_in_each_phase_or_once():
    phases = f"train.phases=[{EMBEDDINGS},{{}}]"
    with pytest.raises(UserError, match="in each phase"):
        compose_config([phases, "train.trainable=[kernels]", *ARGS])
