"""Config.json and weights as people have them: read as transformers does, or refused.

The models are those of `tests/data/families`, whose logits are transformers'.
"""

import numpy as np
import pytest
from family_files import check_refused, check_same, config_of, copied, read

from trainer.errors import UserError
from trainer.models.llama.rope import rope_of
from trainer.models.mistral.spec import MistralSpec

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
ORIGINAL = "original_max_position_embeddings"
AGED = {"rope_parameters": "absent", "rope_theta": 1e4}


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
    check_same("llama", copied(tmp_path, "llama", tensors=table))


@pytest.mark.parametrize("name", ["llama", "mistral", "olmo2"])
def test_a_model_written_without_its_head_has_names_without_a_prefix(tmp_path, name):
    given = config_of(name)["architectures"][0]
    headless = {"architectures": [given.replace("ForCausalLM", "Model")]}
    check_same(name, copied(tmp_path, name, headless, without_prefix))


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


def test_layers_of_one_kind_have_all_a_window_or_none():
    """transformers and vLLM take the list of layers for a Mistral, too."""
    config = config_of("mistral_window")
    assert MistralSpec.from_config(config).window
    layers = ["full_attention"] * config["num_hidden_layers"]
    assert MistralSpec.from_config({**config, "layer_types": layers}).window is None
    layers = ["sliding_attention"] * config["num_hidden_layers"]
    spec = MistralSpec.from_config({**config, "layer_types": layers})
    assert spec == MistralSpec.from_config(config)
    layers[0] = "full_attention"
    with pytest.raises(UserError, match="whose layers are all 'sliding_attention'"):
        MistralSpec.from_config({**config, "layer_types": layers})


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (YARN | {"factor": "4.0"}, "factor='4.0': expected a number, which rope_type="),
        ({"rope_type": "linear"}, "factor=None: expected a number, which rope_type='l"),
        (LLAMA3 | {"low_freq_factor": None}, "low_freq_factor=None: expected a number"),
        (LLAMA3 | {"high_freq_factor": 1.0}, ".* low_freq_factor below high"),
        ({"rope_type": "longrope", "factor": 4.0}, "'longrope' is not .*; valid: 'def"),
        (YARN | {"truncate": False}, "truncate=False .* not supported"),
        ({"full_attention": YARN}, "of 'full_attention' alone are not supported"),
        # numbers that no function has
        (YARN | {"rope_theta": 1.0}, "rope_theta"),
        (YARN | {"beta_slow": 1e-320}, "beta_slow"),
        (YARN | {"mscale": 0.7}, "mscale=0.7 of rope_type='yarn' is not supported"),
    ],
)
def test_rotary_positions_that_are_not_told_or_not_known_are_named(
    tmp_path, rope, message, place
):
    config = {"rope_scaling": "absent", "rope_parameters": "absent", place: rope}
    check_refused(copied(tmp_path, "qwen2", config), message)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 10**400},
        YARN | {"original_max_position_embeddings": 1e400},
    ],
)
def test_numbers_of_rotary_positions_that_no_float_holds_are_a_line(tmp_path, rope):
    with pytest.raises(UserError, match=r"^.*$"):
        read(copied(tmp_path, "qwen2", {"rope_parameters": rope}))


def test_the_context_before_scaling_is_the_models_where_none_is_given():
    rope = LLAMA3 | {"original_max_position_embeddings": None}
    _, scaling = rope_of({"max_position_embeddings": 128, "rope_scaling": rope})
    assert scaling.original_context == 128


def test_two_bases_of_rotary_positions_are_refused(tmp_path):
    given = config_of("qwen2")["rope_parameters"]["rope_theta"]
    assert given != 5e5
    directory = copied(tmp_path, "qwen2", {"rope_theta": 5e5})
    check_refused(directory, "rope_theta=500000.0 and rope_theta=.* contradict")
    check_same("qwen2", copied(tmp_path, "qwen2", {"rope_theta": given}))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", {"hidden_act": "swish"}),
        ("llama", {"architectures": []}),
        ("llama", {"architectures": ["LLaMAForCausalLM"]}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0] * 2}),  # of a model cut shorter
        ("gpt2", {"activation_function": "gelu_fast"}),
        ("gpt2", {"n_embd": "absent", "hidden_size": 16, "n_ctx": 64}),
        ("gpt2", {"n_positions": "absent", "n_ctx": 32}),
        (
            "gpt2",
            {"n_positions": "absent", "max_position_embeddings": 32}
            | {"n_layer": "absent", "num_hidden_layers": 2}
            | {"n_head": "absent", "num_attention_heads": 4},
        ),
        ("smollm3", {"tie_word_embeddings": "absent"}),  # true
        ("qwen2", {"tie_word_embeddings": "absent"}),  # false
        ("llama", {"pretraining_tp": 2, "attention_dropout": 0.1}),
        ("qwen3", {"dtype": "absent", "torch_dtype": "bfloat16"}),
        ("qwen2_yarn", {"rope_parameters": YARN | {"truncate": True}}),
        # a factor that is null is the ratio of the contexts
        ("qwen2_yarn", {"rope_parameters": YARN | {"factor": None}}),
        # the context before scaling may stand at the top, and counts there
        ("qwen2_yarn", {ORIGINAL: 8, "rope_parameters": YARN | {ORIGINAL: 9}}),
        ("llama_llama3", {ORIGINAL: 16, "rope_parameters": LLAMA3 | {ORIGINAL: None}}),
        # the base of a family counts where no other is given
        ("smollm3", {"rope_parameters": "absent"}),
        ("smollm3", {"rope_parameters": "absent", "rope_theta": 2e6}),
        ("llama_llama3", {"rope_scaling": LLAMA3}),
        ("llama_llama3", AGED | {"rope_scaling": LLAMA3}),
        # as before transformers 4.43
        ("llama_llama3", AGED | {"rope_scaling": LLAMA3 | {"type": "llama3"}}),
        ("llama_llama3", {"rope_scaling": LLAMA3 | {"rope_theta": 1e4}}),
    ],
)
def test_other_words_for_the_same_model(tmp_path, name, config):
    check_same(name, copied(tmp_path, name, config))


GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
GPTQ_REFUSED = "'quant_method': 'gptq'.*give the weights before quantization"
LAYER = "model.layers.1"


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("gpt2", {"n_layer": 1}, r"unknown tensors transformer\.h\.1.* in all"),
        (
            "gpt2",
            {"n_positions": 16},
            r"wpe\.weight has .*\(32, 16\), expected \(16, 16",
        ),
        ("gpt2", {"n_head": "four"}, "n_head='four': expected a whole number"),
        ("gpt2", {"n_inner": "x"}, "n_inner='x': expected a whole number"),
        ("gpt2", {"n_embd": "absent"}, "2 layers of width 768 and .* take at least"),
        ("gpt2", {"n_head": "absent"}, "d_model=16 is not a multiple of .*n_head=12"),
        (
            "gpt2",
            {"num_attention_heads": 2},
            "n_head=4 and num_attention_heads=2 contr",
        ),
        (
            "gpt2",
            {"n_embd": "absent", "model_type": "absent"},
            "n_embd=None: expected a whole number",
        ),
        ("gpt2", {"is_causal": False}, "is_causal=False is not supported"),
        ("gpt2", GPTQ, GPTQ_REFUSED),
        ("gpt2", {"activation_function": "relu"}, "activation_function='relu'"),
        ("gpt2", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "_inverse_layer_idx=True"),
        ("llama", {"tie_word_embeddings": "false"}, "'false': expected true or false"),
        ("llama", {"tie_word_embeddings": "absent"}, "set tie_word_embeddings=true in"),
        ("llama", {"tie_word_embeddings": False}, r"lm_head\.weight .* is missing"),
        ("llama", {"model_type": "absent"}, "model_type=None is not supported; valid:"),
        ("llama", {"model_type": ["llama"]}, r"type=\['llama'\] is not supported"),
        ("llama", {"architectures": ["LlamaForX"]}, r"architectures=\['LlamaForX'\]"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not .*; valid: 'silu'"),
        ("llama", {"attention_bias": True}, "attention_bias=True is not .*; valid: F"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True is not supported; valid: False"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not s"),
        ("llama", {"num_key_value_heads": 3}, "n_head=4 is not a multiple of .*head=3"),
        (
            "llama",
            {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None},
            "d_model=16 is not a multiple of model.n_head=5",
        ),
        (
            "llama_llama3",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "contr",
        ),
        ("llama", {"head_dim": 7}, "head_dim=7: rotary positions turn pairs"),
        ("llama", {"num_hidden_layers": "two"}, "'two': expected a whole number"),
        ("llama", {"vocab_size": 60}, r"shape \(67, 16\), expected \(60, 16\)"),
        (
            "llama",
            {"num_hidden_layers": 1},
            r"unknown tensors model\.layers\.1.* in al",
        ),
        ("llama", {"is_causal": False}, "is_causal=False is not supported"),
        ("qwen2", {"is_causal": False}, "is_causal=False is not supported"),
        ("qwen2", GPTQ, GPTQ_REFUSED),
        ("qwen3", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("smollm3", {"no_rope_layers": [1, 0, 0, 1]}, "no_rope_layers=.*is not supp"),
        ("smollm3", {"no_rope_layers": "0"}, "is not a list of num_hidden_layers"),
        (
            "smollm3",
            {"no_rope_layers": [1, 1, 0], "num_hidden_layers": 10**12}
            | {"layer_types": "absent"},
            "is not a list of num_hidden_layers",
        ),
        # as the files cannot hold
        ("llama", {"num_hidden_layers": 900}, "take at least"),
        ("llama", {"intermediate_size": 1 << 40}, "take at least"),  # XLA would end
        ("llama", {"head_dim": 1 << 30}, "take at least"),
        ("llama", {"num_hidden_layers": 10**6}, "at most 1000"),
        ("llama", {"vocab_size": 10**8}, "take at least"),
        ("mistral_window", {"sliding_window": "7"}, "sliding_window='7': expected a"),
        # Layers with a window.
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
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "'sliding_attention'"),
        ("qwen2", {"layer_types": ["full_attention"]}, "a list of num_hidden_layers=2"),
        ("qwen2", {"layer_types": "full_attention"}, "a list of num_hidden_layers=2"),
    ],
)
def test_what_is_another_model_is_refused(tmp_path, name, config, message):
    check_refused(copied(tmp_path, name, config), message)


BLOCK, D = "transformer.h", 16


@pytest.mark.parametrize(
    ("name", "tensor", "value", "message"),
    [
        ("gpt2", f"{BLOCK}.1.ln_2.bias", None, r"h\.1\.ln_2\.bias \(16,\) is missing"),
        ("gpt2", "transformer.wpe.weight", None, r"wpe\.weight \(32, 16\) is missing"),
        ("gpt2", "adapter", np.zeros(3), "unknown tensors adapter"),
        (
            "gpt2",
            f"{BLOCK}.0.attn.c_proj.bias",
            np.zeros(5, np.float32),
            r"\(5,\), expected \(16,\)",
        ),
        ("gpt2", HEAD, np.zeros((67, D), np.float32), "tied head"),
        ("llama", HEAD, np.zeros((67, D), np.float32), "differs from model.embed"),
        (
            "llama",
            f"{LAYER}.mlp.up_proj.weight",
            None,
            r"up_proj\.weight \(24, 16\) is missing",
        ),
        (
            "llama",
            f"{LAYER}.self_attn.q_proj.bias",
            np.zeros(D),
            "unknown tensors .*q_proj.bi",
        ),
        # as it is written
        ("llama", "v_head.bias", np.zeros(1), "unknown tensors v_head.bias"),
        (
            "llama",
            "norm.weight",
            np.zeros(D, np.float32),
            r"norm\.weight with and without mod",
        ),
    ],
)
def test_other_tensors_are_refused(tmp_path, name, tensor, value, message):
    check_refused(copied(tmp_path, name, tensors={tensor: value}), message)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_names_of_other_programs_are_shown_beside_the_missing_one(tmp_path, name):
    def compiled(tensors):
        return {f"_orig_mod.{key}": tensor for key, tensor in tensors.items()}

    directory = copied(tmp_path, name, tensors=compiled)
    check_refused(directory, r"_orig_mod\.")


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_empty_tensors_are_refused_with_what_writes_whole_ones(tmp_path, name):
    def emptied(tensors):
        norm = max(key for key in tensors if tensors[key].ndim == 1)
        return {**tensors, norm: np.zeros(0, np.float32)}

    directory = copied(tmp_path, name, tensors=emptied)
    check_refused(directory, r"has shape \(0,\), expected .*zero_to_fp32\.py writes")
