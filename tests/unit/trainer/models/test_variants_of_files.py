"""Config.json and weights as people have them: read as transformers does, or refused.

The models are those of `tests/data/families`, whose logits are transformers'.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trainer.config.inherited import inherit
from trainer.errors import UserError
from trainer.models import huggingface
from trainer.models.mistral.spec import MistralSpec
from trainer.models.weight_files import read_object

DATA = Path(__file__).parents[3] / "data" / "families"
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def copied(directory, name, config=(), tensors=lambda tensors: tensors):
    """Write a model of the families with another config.json or tensors."""
    weights = tensors(load_file(DATA / name / "model.safetensors"))
    save_file(weights, directory / "model.safetensors")
    whole = {**read_object(DATA / name / "config.json"), **dict(config)}
    whole = {key: value for key, value in whole.items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(whole))
    return directory


def read(directory):
    """Return spec and parameters, after `model=from_init` has read the config.json."""
    inherit({"name": "from_init"}, str(directory))
    return huggingface.load(directory, None)


def check_same(name, directory):
    """Assert that a directory is read as the model that it was made of."""
    (spec, params), (expected_spec, expected) = map(read, (directory, DATA / name))
    assert spec == expected_spec
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def check_refused(directory, message):
    """Assert that a directory is refused in one line by both readers."""
    with pytest.raises(UserError, match=message) as error:
        read(directory)
    assert "\n" not in str(error.value)
    assert "damaged" not in str(error.value)


def only_head(tensors):
    table = next(
        name for name in tensors if name.endswith(("tokens.weight", "wte.weight"))
    )
    return {HEAD if name == table else name: x for name, x in tensors.items()}


def without_prefix(tensors):
    return {name.removeprefix("model."): x for name, x in tensors.items()}


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2_tied", "qwen3"])
def test_a_tied_table_may_have_the_name_of_the_head(tmp_path, name):
    check_same(name, copied(tmp_path, name, tensors=only_head))


@pytest.mark.parametrize(
    "buffer",
    [
        "model.layers.0.self_attn.rotary_emb.cos_cached",
        "model.layers.1.self_attn.rotary_emb.sin_cached",
        "model.layers.1.self_attn.rotary_emb.inv_freq",
        "model.layers.1.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "model.rotary_emb.original_inv_freq",
    ],
)
def test_rotary_tables_are_no_weights(tmp_path, buffer):
    table = {buffer: np.ones(2, np.float32)}
    check_same("llama", copied(tmp_path, "llama", tensors=lambda x: {**x, **table}))


@pytest.mark.parametrize("name", ["llama", "mistral", "olmo2"])
def test_a_model_written_without_its_head_has_names_without_a_prefix(tmp_path, name):
    given = read_object(DATA / name / "config.json")["architectures"][0]
    headless = {"architectures": [given.replace("ForCausalLM", "Model")]}
    check_same(name, copied(tmp_path, name, headless, without_prefix))


def test_a_tensor_with_and_without_the_prefix_is_refused(tmp_path):
    norm = {"norm.weight": np.zeros(16, np.float32)}
    directory = copied(tmp_path, "llama", tensors=lambda x: {**x, **norm})
    check_refused(directory, r"model\.norm\.weight with and without model\.")


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "config",
    [
        {**SLIDING, "max_window_layers": 2},
        {**SLIDING, "max_window_layers": "absent"},  # 28
        {**SLIDING, "sliding_window": None, "max_window_layers": 0},
        {**SLIDING, "max_window_layers": 1, "layer_types": ["full_attention"] * 2},
    ],
)
def test_a_window_in_no_layer_is_none(tmp_path, name, config):
    check_same(name, copied(tmp_path, name, config))


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2"])
def test_a_model_that_attends_both_ways_is_refused(tmp_path, name):
    directory = copied(tmp_path, name, {"is_causal": False})
    check_refused(directory, r"is_causal=False is not supported")


def test_layers_of_full_attention_have_no_window():
    """Also of a Mistral, for which transformers and vLLM take the list of layers."""
    config = read_object(DATA / "mistral_window" / "config.json")
    assert MistralSpec.of_config(config).window
    layers = ["full_attention"] * config["num_hidden_layers"]
    assert MistralSpec.of_config({**config, "layer_types": layers}).window is None


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        (
            "qwen2",
            {**SLIDING, "max_window_layers": 1},
            "sliding_window=8 in 1 of 2 layers; for contexts of at most 8 tokens set",
        ),
        ("qwen3", {**SLIDING, "max_window_layers": 0}, "in 2 of 2 layers"),
        (
            "qwen3",
            {**SLIDING, "max_window_layers": 0, "sliding_window": "absent"},
            "sliding_window=4096 in 2 of 2 layers",
        ),
        ("smollm3", {**SLIDING, "max_window_layers": 28}, "in 4 of 4 layers"),
        ("qwen2", {"layer_types": ["full_attention"]}, "a list of num_hidden_layers=2"),
        ("qwen2", {"layer_types": "full_attention"}, "a list of num_hidden_layers=2"),
    ],
)
def test_layers_with_a_window_are_refused(tmp_path, name, config, message):
    check_refused(copied(tmp_path, name, config), message)


@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        *(({**YARN, "factor": value}, "factor") for value in ("absent", "4.0")),
        ({"rope_type": "linear"}, "factor"),
        *((LLAMA3 | {key: None}, key) for key in list(LLAMA3)[1:]),
    ],
)
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_a_key_that_rotary_positions_lack_is_named(tmp_path, scaling, key, place):
    rope = {name: value for name, value in scaling.items() if value != "absent"}
    config = {"rope_scaling": "absent", "rope_parameters": "absent", place: rope}
    kind = scaling["rope_type"]
    message = f"{key}=.*: expected a number, which rope_type='{kind}' needs"
    check_refused(copied(tmp_path, "qwen2", config), message)


def test_two_bases_of_rotary_positions_are_refused(tmp_path):
    given = read_object(DATA / "qwen2" / "config.json")["rope_parameters"]["rope_theta"]
    assert given != 5e5
    directory = copied(tmp_path, "qwen2", {"rope_theta": 5e5})
    check_refused(directory, "rope_theta=500000.0 and rope_theta=.* contradict")
    check_same("qwen2", copied(tmp_path, "qwen2", {"rope_theta": given}))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", {"hidden_act": "swish"}),
        ("llama", {"architectures": []}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0] * 2}),  # of a model cut shorter
        ("gpt2", {"activation_function": "gelu_fast"}),
        ("smollm3", {"tie_word_embeddings": "absent"}),  # true
        ("qwen2", {"tie_word_embeddings": "absent"}),  # false
        ("llama", {"pretraining_tp": 2, "attention_dropout": 0.1}),
        ("qwen3", {"dtype": "absent", "torch_dtype": "bfloat16"}),
    ],
)
def test_other_words_for_the_same_model(tmp_path, name, config):
    check_same(name, copied(tmp_path, name, config))


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("gpt2", {"n_layer": 1}, "n_layer=1, but the weights beside it have 2"),
        ("gpt2", {"n_positions": 16}, "n_positions=16, but the weights .* have 32"),
        ("gpt2", {"n_embd": "absent"}, "n_embd=None: expected a whole number"),
        ("llama", {"tie_word_embeddings": "false"}, "'false': expected true or false"),
        ("llama", {"tie_word_embeddings": "absent"}, "set tie_word_embeddings=true in"),
        ("llama", {"model_type": "absent"}, "model_type=None is not supported; valid:"),
        (
            "llama",
            {"model_type": ["llama"]},
            r"model_type=\['llama'\] is not supported",
        ),
        *(
            (
                name,
                {"quantization_config": {"quant_method": "gptq", "bits": 4}},
                "'quant_method': 'gptq'.*give the weights before quantization",
            )
            for name in ("gpt2", "qwen2")
        ),
    ],
)
def test_what_is_another_model_is_refused(tmp_path, name, config, message):
    check_refused(copied(tmp_path, name, config), message)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_names_of_other_programs_are_shown_beside_the_missing_one(tmp_path, name):
    def compiled(tensors):
        return {f"_orig_mod.{key}": tensor for key, tensor in tensors.items()}

    directory = copied(tmp_path, name, tensors=compiled)
    check_refused(directory, r"_orig_mod\.")


def test_names_stay_as_they_are_in_a_message(tmp_path):
    bias = {"v_head.bias": np.zeros(1, np.float32)}
    directory = copied(tmp_path, "llama", tensors=lambda x: {**x, **bias})
    check_refused(directory, "unknown tensors v_head.bias")


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_empty_tensors_are_refused_with_what_writes_whole_ones(tmp_path, name):
    def emptied(tensors):
        norm = max(key for key in tensors if tensors[key].ndim == 1)
        return {**tensors, norm: np.zeros(0, np.float32)}

    directory = copied(tmp_path, name, tensors=emptied)
    check_refused(directory, r"has shape \(0,\), expected .*zero_to_fp32\.py writes")
