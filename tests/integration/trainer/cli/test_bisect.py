"""Bisection: the layer that was hurt is the one that it names."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from precisions import policy

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
    with_fp32_compute,
    without_low_precision,
)
from trainer.precision.arrays import store_weights

SPEC = GPT2Spec(vocab_size=64, context=16, n_layer=2, n_head=2, d_model=32)
SHORT = dataclasses.replace(SPEC, n_layer=1)  # for what takes long to compile


@functools.cache
def model_and_batch(hurt=None, preset="fp32", spec=SPEC, **changes):
    """A fresh model, the attention of layer `hurt` with values times 2^12 and its
    projection times 2^-12."""
    model = Model.make(spec, policy(preset, **changes))
    params = jax.jit(model.training.init)(jax.random.key(0))
    if hurt is not None:
        attn = params["h"][hurt]["attn"]
        attn["c_attn"]["kernel"] = (
            attn["c_attn"]["kernel"].at[:, 2 * spec.d_model :].multiply(2.0**12)
        )
        attn["c_proj"]["kernel"] = attn["c_proj"]["kernel"] * 2.0**-12
    tokens = np.random.default_rng(0).integers(
        0, 64, (16, spec.context + 1), dtype=np.int32
    )
    return (
        model,
        store_weights(params, model.policy),
        model.differentiate().init(),
        tokens,
        None,
    )


@functools.cache
def findings(hurt=None, preset="fp32", spec=SPEC, **changes):
    return bisect(*model_and_batch(hurt, preset, spec, **changes))


def layers(actual, tensor=ALL):
    return [f.layer for f in actual if f.layer != ALL and f.tensor == tensor]


PLAIN = {"forward": "e4m3", "backward": "e5m2"}  # FP8 without any scales


def test_the_layer_that_was_hurt_is_ranked_first():
    hurt = 1
    actual = findings(hurt, **PLAIN)
    trained = next(f for f in actual if f.tensor == "none")
    assert layers(actual)[0] == f"h.{hurt}.attn.c_proj"
    best = next(f for f in actual if f.layer != ALL and f.tensor == ALL)
    assert best.error < trained.error
    assert best.cosine > trained.cosine
    assert f"h.{hurt}.attn.c_proj" in report(actual, 12)


def test_without_any_cast_nothing_is_left_of_the_error_and_each_cast_has_its_place():
    actual = {(f.layer, f.tensor): f for f in findings(1, **PLAIN)}
    assert set(actual) == set(
        switches([f"h.{i}.{n}" for i in range(2) for n in LINEAR])
    )
    assert actual[ALL, ALL].error < 1e-5
    assert actual[ALL, ALL].cosine == pytest.approx(1, abs=1e-5)
    assert abs(actual[ALL, ALL].loss_difference) < 1e-5
    # The loss knows nothing of gradients.
    assert (
        actual[ALL, "gradients"].loss
        == actual[ALL, "none"].loss
        != actual[ALL, "weights"].loss
    )


LINEAR = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


@pytest.mark.slow  # a program of its own; the same arithmetic: test_precision.py
def test_the_simulated_program_is_the_one_that_was_trained():
    model, params, scaling, tokens, _ = model_and_batch(0, "scalify_fp8_fp16", SHORT)
    loss, _, _ = jax.jit(model.differentiate().value_and_grad)(
        params, scaling, tokens, None, None
    )
    actual = findings(0, "scalify_fp8_fp16", SHORT)
    assert {f.tensor for f in actual} == {*CASTS, ALL, "none", "compute"}
    trained = next(f for f in actual if f.tensor == "none")
    # Both round the same operands; sums in another order, results in FP16.
    assert trained.loss == pytest.approx(float(loss), rel=2**-10)


@pytest.mark.parametrize(
    "preset",
    ["bf16", "bf16_pure", "fp16_loss_scaled", "scalify_fp16", "scalify_fp8_fp16"],
)
def test_every_policy_can_compute_in_fp32(preset):
    assert with_fp32_compute(policy(preset)).compute == "fp32"


@pytest.mark.parametrize(
    ("preset", "named"), [("fp8_delayed", "scaling=delayed"), ("fp32", "FP32 already")]
)
def test_what_cannot_be_bisected_is_said(preset, named):
    model = Model.make(SPEC, policy(preset))
    params = jax.jit(model.training.init)(jax.random.key(0))
    with pytest.raises(UserError, match=named):
        bisect(model, params, (), np.zeros((2, 17), np.int32), None)


def test_the_layers_that_stand_out_are_suggested_as_the_key_to_set():
    def found(layers, trained=0.1):
        some = [
            Finding(layer, "all", 1.0, 0.0, 1.0, error)
            for layer, error in layers.items()
        ]
        return [
            Finding("all", "none", 1.0, 0.0, 1.0, trained),
            Finding("all", "all", 1.0, 0.0, 1.0, 0.0),
            *some,
        ]

    layers = {"h.0.mlp.c_proj": 0.05, "h.0.attn.c_attn": 0.07} | {
        f"h.{i}.mlp.c_fc": 0.099 for i in range(10)
    }
    assert (
        "precision.exclude=[h.0.mlp.c_proj,h.0.attn.c_attn]   (removes: h.0.mlp.c_proj"
        " 50.0%, h" in advice(found(layers))
    )
    assert advice(found({f"h.{i}.mlp.c_fc": 0.09 for i in range(10)})).startswith(
        "no layer stands out"
    )
    # all worse
    assert advice(found({"h.0.mlp.c_fc": 0.2, "h.1.mlp.c_fc": 0.11})).startswith(
        "no layer stands out"
    )
    assert advice(found({}, trained=0.0)).startswith("no layer stands out")


@pytest.mark.parametrize(
    "key", ["backward_e4m3=[h.*]", "clip_outliers=6", "hadamard=16"]
)
def test_what_a_policy_does_to_operands_ends_with_its_products(key):
    """As a whole it would contradict itself: there is nothing to be cast."""
    policy = compose_config(
        ["precision=scalify_fp8_fp16", f"precision.{key}"]
    ).precision.policy
    wide = without_low_precision(policy)
    assert (wide.compute, wide.forward) == ("fp32", None)
