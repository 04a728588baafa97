import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from llama_reference import logits, random_tensors
from safetensors.numpy import load_file, save_file

from trainer.errors import UserError
from trainer.models import huggingface
from trainer.models.gpt2.huggingface import load_gpt2
from trainer.models.llama.huggingface import load_llama, save_llama
from trainer.models.llama.model import functional
from trainer.models.llama.spec import LlamaSpec, RopeScaling
from trainer.models.registry import family_of
from trainer.models.weight_files import carry_tokenizer, read_tensors, tokenizer_files

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
VARIANTS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "grouped": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "rope_theta": 1e5,
    },
    "one_group": {"num_key_value_heads": 1},
    "llama3": {"num_key_value_heads": 2, "rope_theta": 5e5, "rope_scaling": LLAMA3},
}


def write(directory, weights, config=CONFIG, shards=1):
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    files = {name: f"part{i % shards}.safetensors" for i, name in enumerate(weights)}
    for file in set(files.values()):
        save_file(
            {name: weights[name] for name in weights if files[name] == file},
            directory / file,
        )
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": files})
    )
    return directory


def same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (
            tensor.dtype,
            tensor.shape,
        ), name
        assert actual[name].tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_another_llama_to_1e_5(tmp_path, variant):
    config = CONFIG | VARIANTS[variant]
    weights = random_tensors(config)
    spec, params = load_llama(write(tmp_path / "llama", weights, config))
    tokens = np.random.default_rng(1).integers(0, 100, (2, 64))
    bind = functional(spec).bind
    actual = jax.jit(lambda p, t: bind(p)(t))(params, tokens)
    expected = logits(weights, config, tokens)
    np.testing.assert_allclose(
        actual, expected, atol=1e-5 * np.abs(expected).max(), rtol=0
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_export_of_an_import_is_equal_byte_by_byte(tmp_path, variant, dtype):
    config = CONFIG | VARIANTS[variant]
    weights = random_tensors(config, dtype)
    spec, params = load_llama(write(tmp_path / "llama", weights, config))
    (file,) = save_llama(tmp_path / "out", spec, params, eot=7)
    same(load_file(file), weights)
    loaded, _ = load_llama(tmp_path / "out")
    assert loaded == spec
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: written[key] for key in config} == config
    assert written["eos_token_id"] == 7
    assert written["torch_dtype"] == np.dtype(dtype).name


def test_scanned_layers_export_the_same_tensors(tmp_path):
    weights = random_tensors(CONFIG)
    spec, params = load_llama(write(tmp_path / "llama", weights))
    scanned = LlamaSpec(**{**vars(spec), "scan_layers": True, "mlp": "smooth_swiglu"})
    (file,) = huggingface.save(
        tmp_path / "out", scanned, family_of(spec).stack_layers(params)
    )
    same(load_file(file), weights)


def test_several_files_with_an_index_in_and_out(tmp_path):
    weights = random_tensors(CONFIG)
    spec, params = load_llama(write(tmp_path / "llama", weights, shards=3))
    files = save_llama(tmp_path / "out", spec, params, shard_bytes=20_000)
    # A kernel of the MLP has 10,240 bytes, so that more than one file is needed, and
    # none has more than asked for.
    assert [file.name for file in files] == [
        f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))
    ]
    assert len(files) > 3
    assert all(
        sum(x.nbytes for x in load_file(file).values()) <= 20_000 for file in files
    )
    same(read_tensors(tmp_path / "out"), weights)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in weights.values())
    assert all(
        name in load_file(tmp_path / "out" / file)
        for name, file in index["weight_map"].items()
    )


def test_files_beside_those_of_the_index_are_not_read(tmp_path):
    directory = write(tmp_path / "llama", random_tensors(CONFIG), shards=2)
    save_file(
        {"model.norm.weight": np.zeros(32, np.float32)},
        directory / "consolidated.safetensors",
    )
    assert load_llama(directory)[1]["norm"]["scale"].all()


def test_one_file_is_read_with_the_config_beside_it(tmp_path):
    directory = write(tmp_path / "llama", random_tensors(CONFIG))
    assert load_llama(directory / "model.safetensors")[0] == load_llama(directory)[0]


def test_configurations_of_any_age_say_the_same(tmp_path):
    """`rope_parameters` is what transformers 5 writes, `type` what files before version
    4.43 have."""
    config = CONFIG | VARIANTS["llama3"]
    weights = random_tensors(config)
    spec, _ = load_llama(write(tmp_path / "4", weights, config))
    assert spec.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 24)
    assert spec.rope_theta == 5e5
    old = {key: value for key, value in LLAMA3.items() if key != "rope_type"} | {
        "type": "llama3"
    }
    new = {
        key: value
        for key, value in config.items()
        if key not in ("rope_theta", "rope_scaling")
    }
    new |= {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}
    assert (
        load_llama(write(tmp_path / "old", weights, config | {"rope_scaling": old}))[0]
        == spec
    )
    assert load_llama(write(tmp_path / "5", weights, new))[0] == spec


def test_what_a_configuration_leaves_out_is_what_transformers_takes(tmp_path):
    left_out = (
        "num_key_value_heads",
        "head_dim",
        "rope_theta",
        "rms_norm_eps",
        "tie_word_embeddings",
        "mlp_bias",
    )
    config = {key: value for key, value in CONFIG.items() if key not in left_out}
    spec, _ = load_llama(
        write(
            tmp_path / "llama",
            random_tensors(CONFIG | {"tie_word_embeddings": False}),
            config,
        )
    )
    assert (
        spec.n_kv_head,
        spec.head_width,
        spec.rope_theta,
        spec.norm_eps,
        spec.tied,
    ) == (4, 8, 1e4, 1e-6, False)


def test_frequencies_that_old_files_carry_along_and_a_tied_head_are_no_weights(
    tmp_path,
):
    weights = random_tensors(CONFIG)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    extra["lm_head.weight"] = weights["model.embed_tokens.weight"]
    spec, params = load_llama(write(tmp_path / "llama", weights | extra))
    same(load_file(save_llama(tmp_path / "out", spec, params)[0]), weights)


def test_loaded_vocabulary_padding_is_zero_and_stays_out_of_the_logits(tmp_path):
    config = CONFIG | VARIANTS["untied"]
    spec, params = load_llama(write(tmp_path / "llama", random_tensors(config), config))
    for table in ("wte", "lm_head"):
        assert params[table]["embedding"].shape == (128, 32)
        assert not params[table]["embedding"][100:].any()
    assert functional(spec).bind(params)(jnp.zeros((1, 8), jnp.int32)).shape == (
        1,
        8,
        100,
    )


def changed(**tensors):
    return {
        name: tensor
        for name, tensor in (random_tensors(CONFIG) | tensors).items()
        if tensor is not None
    }


@pytest.mark.parametrize(
    ("weights", "config", "message"),
    [
        (
            {},
            {"model_type": "mistral"},
            "model_type='mistral' is not supported; valid: 'llama'",
        ),
        (
            {},
            {"architectures": ["LlamaForSequenceClassification"]},
            r"architectures=\['LlamaForSequenceClassifica",
        ),
        (
            {},
            {"hidden_act": "gelu"},
            "hidden_act='gelu' is not supported; valid: 'silu'",
        ),
        (
            {},
            {"attention_bias": True},
            "attention_bias=True is not supported; valid: False",
        ),
        ({}, {"mlp_bias": True}, "mlp_bias=True is not supported; valid: False"),
        (
            {},
            {"quantization_config": {"bits": 4}},
            "quantization_config=.* is not supported",
        ),
        (
            {},
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "rope_type='longrope' is not supported; valid: 'def",
        ),
        (
            {},
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7}},
            "mscale=0.7 of rope_type='yarn' is not supported",
        ),
        (
            {},
            {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}},
            "low_freq_factor=None: expected a number",
        ),
        (
            {},
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
            r"config\.json: rope_scaling: .* low_freq_factor below high",
        ),
        (
            {},
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5 is not supported",
        ),
        (
            {},
            {"num_key_value_heads": 3},
            "model.n_head=4 is not a multiple of model.n_kv_head=3",
        ),
        (
            {},
            {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None},
            "model.d_model=32 is not a multiple of model.n_",
        ),
        ({}, {"head_dim": 7}, "head_dim=7: rotary positions turn pairs"),
        (
            {},
            {"num_hidden_layers": "three"},
            "num_hidden_layers='three': expected a whole number",
        ),
        (
            {},
            {"vocab_size": 90},
            r"model\.embed_tokens\.weight has shape \(100, 32\), expected \(90, 32\)",
        ),
        (
            {},
            {"num_hidden_layers": 2},
            r"unknown tensors model\.layers\.2\.input_layernorm\.weight.*9 in all",
        ),
        (
            {},
            {"tie_word_embeddings": False},
            r"tensor lm_head\.weight \(100, 32\) is missing",
        ),
        (
            {"lm_head.weight": np.zeros((100, 32), np.float32)},
            {},
            "lm_head.weight differs from model.embed_tokens",
        ),
        (
            {"model.layers.1.mlp.up_proj.weight": None},
            {},
            r"model\.layers\.1\.mlp\.up_proj\.weight \(80, 32\) is missing",
        ),
        (
            {"model.layers.1.self_attn.q_proj.bias": np.zeros(32, np.float32)},
            {},
            "unknown tensors .*q_proj.bias",
        ),
    ],
)
def test_what_is_not_this_llama_is_refused_in_one_line(
    tmp_path, weights, config, message
):
    with pytest.raises(UserError, match=message) as refused:
        load_llama(write(tmp_path / "llama", changed(**weights), CONFIG | config))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("load", [load_llama, load_gpt2])
def test_pickled_weights_are_refused_with_the_line_that_converts_them(tmp_path, load):
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIG if load is load_llama else {"model_type": "gpt2"})
    )
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    convert = (
        r"convert it: python -c 'from transformers"
        r" .*from_pretrained\(\".*\"\)\.save_pretrained\(\".*\"\)'$"
    )
    with pytest.raises(UserError, match=convert):
        load(tmp_path)


def test_absent_and_damaged_files_are_named(tmp_path):
    with pytest.raises(
        UserError,
        match=r"config\.json does not exist, and no tensor tells the number of heads",
    ):
        load_llama(tmp_path)
    directory = write(tmp_path / "llama", random_tensors(CONFIG), shards=2)
    (directory / "part1.safetensors").unlink()
    with pytest.raises(UserError, match=r"part1\.safetensors is missing \(1 in all\)"):
        load_llama(directory)
    save_file({"x": np.zeros(1)}, directory / "part1.safetensors")
    with pytest.raises(
        UserError,
        match=r"index\.json names tensors that its files do not hold: model.*in all",
    ):
        load_llama(directory)
    (directory / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match=r"index\.json has no weight_map"):
        load_llama(directory)
    for name in (
        "../part1.safetensors",
        "/etc/passwd",
        "sub/part1.safetensors",
        3,
        "config.json",
    ):
        (directory / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"x": name}})
        )
        with pytest.raises(
            UserError,
            match=(
                r"weight_map names .*; expected safetensors files of the same directory"
            ),
        ):
            load_llama(directory)
    (directory / "config.json").write_text("[]")
    with pytest.raises(
        UserError, match=r"config\.json is not the configuration of a model"
    ):
        load_llama(directory)


def test_export_keeps_what_is_there(tmp_path):
    spec, params = load_llama(write(tmp_path / "llama", random_tensors(CONFIG)))
    with pytest.raises(
        UserError, match=r"model\.safetensors exists; choose another directory"
    ):
        save_llama(tmp_path / "llama", spec, params)


def test_a_tokenizer_is_carried_along_as_it_is(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (source / name).write_bytes(b'{"\xc3\xa9": 1}\r\n' + name.encode())
    assert [file.name for file in carry_tokenizer(tokenizer_files(source), target)] == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert {file.name for file in target.iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (target / "tokenizer.json").read_bytes() == (
        source / "tokenizer.json"
    ).read_bytes()


def test_weights_in_two_files_are_refused_unless_one_has_transformers_name(tmp_path):
    weights = random_tensors(CONFIG)
    directory = write(tmp_path / "a", weights)
    zeros = {name: np.zeros_like(tensor) for name, tensor in weights.items()}
    save_file(zeros, directory / "model_old.safetensors")
    same(read_tensors(directory), weights)  # model.safetensors, as in transformers
    (directory / "model.safetensors").rename(directory / "model_new.safetensors")
    with pytest.raises(UserError, match=r"model_old.safetensors and model_new.* both"):
        load_llama(directory)


def test_an_index_beside_model_safetensors_does_not_count(tmp_path):
    weights = random_tensors(CONFIG)
    directory = write(tmp_path / "a", weights)
    index = {"weight_map": {"lost.weight": "lost.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    same(read_tensors(directory), weights)


def test_tensors_in_fp8_are_refused_in_a_line(tmp_path):
    file = tmp_path / "model.safetensors"
    header = json.dumps(
        {"a": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}
    ).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(UserError, match="a format that NumPy has not"):
        read_tensors(file)
