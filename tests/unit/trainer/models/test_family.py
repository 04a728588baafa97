"""Every family gives the other rooms what they need, and one that is not there is
refused."""

import dataclasses

import jax
import numpy as np
import pytest
from small_models import initial

from trainer.config.inherited import inherit
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import UserError
from trainer.models import huggingface
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.llama.rope import RopeScaling
from trainer.models.registry import SPECS, family_of
from trainer.run.compatibility import architecture, check_same_model
from trainer.run.initial_weights import (
    context_difference,
    initial_weights,
    with_context_of,
)

SIZES = {"vocab_size": 61, "context": 8, "n_layer": 2, "n_head": 2, "d_model": 16}
FAMILIES = {
    name: spec(**SIZES) if spec is GPT2Spec else spec(**SIZES, n_kv_head=1, tied=False)
    for name, spec in SPECS.items()
}


@pytest.fixture(params=SPECS)
def spec(request):
    return FAMILIES[request.param]


def test_weights_of_another_family_are_refused_in_a_line(spec):
    name = family_of(spec).name
    other = "llama" if name == "gpt2" else "gpt2"
    check_same_model("init_from=A", architecture(spec), spec)
    message = f"^.*has a {name}, the model is a {other}.*$"
    with pytest.raises(UserError, match=message):
        check_same_model("init_from=A", architecture(spec), FAMILIES[other])


def test_an_unknown_family_is_refused_with_the_known_ones(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    for refused in (
        lambda: huggingface.load(tmp_path, FAMILIES["gpt2"]),
        lambda: inherit({"name": "from_init"}, str(tmp_path)),
    ):
        with pytest.raises(
            UserError, match=r"model_type='bert' is not supported; valid: gpt2, llama"
        ):
            refused()


def test_weights_of_either_kind_of_gated_mlp_are_those_of_the_other(spec):
    gated = dataclasses.replace(spec, mlp="swiglu", d_mlp=64)
    smooth = dataclasses.replace(gated, mlp="smooth_swiglu")
    check_same_model("init_from=A", architecture(smooth), gated)
    check_same_model("init_from=A", architecture(gated), smooth)
    wider = dataclasses.replace(smooth, d_mlp=128)
    message = r"has d_mlp=64 \(the model 128\); set model.d_mlp=64"
    with pytest.raises(UserError, match=message) as error:
        check_same_model("init_from=A", architecture(gated), wider)
    assert "mlp=swiglu" not in str(error.value)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_weights_are_taken_into_a_shorter_context(family, tmp_path):
    spec = dataclasses.replace(FAMILIES[family], vocab_size=256)
    shorter = dataclasses.replace(spec, context=5)
    model, short = (family_of(spec).build(s) for s in (spec, shorter))
    params = initial(model)
    huggingface.save(tmp_path, spec, params)
    like, tokenizer = initial(short, seed=1), ByteTokenizer()
    taken, line = initial_weights(tmp_path, shorter, tokenizer, like)
    tokens = np.arange(5)[None]
    logits = jax.jit(lambda p: short.bind(p)(tokens))(taken)
    expected = jax.jit(lambda p: model.bind(p)(tokens))(params)
    np.testing.assert_array_equal(logits, expected)
    assert line.startswith(f"weights from {tmp_path} (Hugging Face, {family}): ")
    assert "model.context=5 of the weights' 8" in line
    assert inherit({"name": "from_init", "context": 5}, str(tmp_path))["context"] == 5


def test_a_longer_context_is_refused_where_positions_are_learned(tmp_path):
    longer = {name: dataclasses.replace(s, context=16) for name, s in FAMILIES.items()}
    with pytest.raises(UserError, match="learned positions for 8 tokens, model"):
        with_context_of(longer["gpt2"], "init_from=A", architecture(FAMILIES["gpt2"]))
    saved = with_context_of(
        longer["llama"], "init_from=A", architecture(FAMILIES["llama"])
    )
    check_same_model("init_from=A", saved, longer["llama"])
    line = context_difference(8, longer["llama"])
    assert "not trained on rotary positions beyond 8; linear, yarn or llama3" in line
    assert "dynamic" not in line


def test_dynamic_scaling_that_a_longer_context_leaves_out_is_named():
    scaling = RopeScaling(factor=2.0, kind="dynamic")
    spec = dataclasses.replace(FAMILIES["llama"], rope_scaling=scaling, context=16)
    line = "the dynamic rope_scaling of their config.json changes nothing"
    assert line in context_difference(8, spec)
    assert line not in context_difference(32, spec)


def test_integers_are_no_weights(tmp_path):
    spec = FAMILIES["llama"]
    zeros = lambda like: np.zeros(like.shape, np.int8)
    params = jax.tree.map(zeros, family_of(spec).build(spec).shapes)
    huggingface.save(tmp_path, spec, params)
    with pytest.raises(UserError, match=r"is int8; give weights in float32"):
        huggingface.load(tmp_path, spec)
