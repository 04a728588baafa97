"""Bisection: the layer that was hurt is the one that it names."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from precisions import policy
from small_models import initial

from trainer.config.composition import compose_config
from trainer.errors import UserError
from trainer.model import Model
from trainer.models.gpt2.spec import GPT2Spec
from trainer.observe.precision_bisect import (
    ALL,
    CASTS,
    Finding,
    advice,
    bisect,
    report,
    switches,
    without_low_precision,
)
from trainer.precision.arrays import store_weights

SPEC = GPT2Spec(vocab_size=64, context=16, n_layer=2, n_head=2, d_model=32)
SHORT = dataclasses.replace(SPEC, n_layer=1)  # for what takes long to compile
# FP8 without any scales, and gradients of the weights that are rounded
PLAIN = {"forward": "e4m3", "backward": "e5m2", "weight_grad": "bf16"}
LINEAR = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


@functools.cache
def model_and_batch(preset, spec=SPEC, **changes):
    """A fresh model, the attention of the last layer with values times 2^12 and its
    projection times 2^-12."""
    model = Model.make(spec, policy(preset, **changes))
    params = initial(model.training)
    attn = params["h"][spec.n_layer - 1]["attn"]
    values = attn["c_attn"]["kernel"].at[:, 2 * spec.d_model :]
    attn["c_attn"]["kernel"] = values.multiply(2.0**12)
    attn["c_proj"]["kernel"] = attn["c_proj"]["kernel"] * 2.0**-12
    shape = (16, spec.context + 1)
    tokens = np.random.default_rng(0).integers(0, 64, shape, dtype=np.int32)
    weights = store_weights(params, model.policy)
    return model, weights, model.differentiate().init(), tokens, None


def test_the_layer_that_was_hurt_is_ranked_first_and_each_cast_has_its_place():
    findings = bisect(*model_and_batch("fp32", **PLAIN))
    layers = [f for f in findings if f.layer != ALL and f.left_out == ALL]
    by_cast = {(f.layer, f.left_out): f for f in findings}
    trained = by_cast[ALL, "none"]
    assert layers[0].layer == "h.1.attn.c_proj"
    assert list(layers[0].as_json())[:2] == ["layer", "tensor"]  # files of earlier runs
    assert layers[0].error < trained.error
    assert layers[0].cosine > trained.cosine
    assert "h.1.attn.c_proj" in report(findings, 12)
    paths = [f"h.{i}.{name}" for i in range(2) for name in LINEAR]
    assert set(by_cast) == set(switches(paths))
    # without any cast nothing is left of the error
    exact = by_cast[ALL, ALL]
    assert exact.error < 1e-5
    assert exact.cosine == pytest.approx(1, abs=1e-5)
    assert abs(exact.loss_difference) < 1e-5
    # The loss knows nothing of gradients.
    losses = [by_cast[ALL, name].loss for name in ("gradients", "none", "weights")]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.slow  # a program of its own; the same arithmetic: test_precision.py
def test_the_simulated_program_is_the_one_that_was_trained():
    given = model_and_batch("scalify_fp8_fp16", SHORT)
    model, params, scaling, tokens, _ = given
    step = jax.jit(model.differentiate().value_and_grad)
    loss = float(step(params, scaling, tokens, None, None)[0])
    findings = bisect(*given)
    assert {f.left_out for f in findings} == {*CASTS, ALL, "none", "compute"}
    trained = next(f for f in findings if f.left_out == "none")
    # Both round the same operands; sums in another order, results in FP16.
    assert trained.loss == pytest.approx(loss, rel=2**-10)


@pytest.mark.parametrize(
    ("preset", "named"), [("fp8_delayed", "scaling=delayed"), ("fp32", "FP32 already")]
)
def test_what_cannot_be_bisected_is_said(preset, named):
    model = Model.make(SPEC, policy(preset))
    params = initial(model.training)
    with pytest.raises(UserError, match=named):
        bisect(model, params, (), np.zeros((2, 17), np.int32), None)


def test_the_layers_that_stand_out_are_suggested_as_the_key_to_set():
    def advised(layers, trained=0.1):
        findings = [Finding("all", "none", 1.0, 0.0, 1.0, trained)]
        findings.append(Finding("all", "all", 1.0, 0.0, 1.0, 0.0))
        return advice(
            findings + [Finding(x, "all", 1.0, 0.0, 1.0, e) for x, e in layers.items()]
        )

    others = {f"h.{i}.mlp.c_fc": 0.099 for i in range(10)}
    layers = {"h.0.mlp.c_proj": 0.05, "h.0.attn.c_attn": 0.07} | others
    key = "precision.exclude=[h.0.mlp.c_proj,h.0.attn.c_attn]"
    assert f"{key}   (removes: h.0.mlp.c_proj 50.0%, h" in advised(layers)
    worse = {"h.0.mlp.c_fc": 0.2, "h.1.mlp.c_fc": 0.11}
    for text in (advised(others), advised(worse), advised({}, trained=0.0)):
        assert text.startswith("no layer stands out")


@pytest.mark.parametrize(
    "key", ["backward_e4m3=[h.*]", "clip_outliers=6", "hadamard=16"]
)
def test_what_a_policy_does_to_operands_ends_with_its_products(key):
    """As a whole it would contradict itself: there is nothing to be cast."""
    keys = ["precision=scalify_fp8_fp16", f"precision.{key}"]
    fp32 = without_low_precision(compose_config(keys).precision.policy)
    assert (fp32.compute, fp32.forward) == ("fp32", None)
