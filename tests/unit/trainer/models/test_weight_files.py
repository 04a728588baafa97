"""Files of weights, and what is particular to GPT-2's and Llama's.

`test_transformers_families.py` has the logits and exports of all variants.
"""

import dataclasses
import json
import resource
import shutil

import numpy as np
import pytest
from corpora import write
from family_files import DATA, WEIGHTS, check_same, config_of, copied, tensors_of
from safetensors.numpy import load_file, save_file

from trainer.errors import UserError
from trainer.models import huggingface
from trainer.models.gpt2.huggingface import load_gpt2, save_gpt2
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.llama.huggingface import load_llama, save_llama
from trainer.models.weight_files import read_tensors, write_file

V = 67
INDEX = "model.safetensors.index.json"


def same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        np.testing.assert_array_equal(actual[name], tensor, err_msg=name)


@pytest.fixture
def shards(tmp_path):
    """A Qwen3 in two files with an index."""
    return shutil.copytree(DATA / "qwen3_sharded_bf16", tmp_path / "shards")


def test_an_export_of_several_files_has_an_index(tmp_path):
    weights, out = tensors_of("llama"), tmp_path / "out"
    files = save_llama(out, *load_llama(DATA / "llama"), shard_bytes=5_000)
    # A table has 4,288 bytes, so that more than one file is needed, and none has more
    # than asked for.
    names = [f"model-{i + 1:05}-of-{len(files):05}" for i in range(len(files))]
    assert [file.stem for file in files] == names
    assert len(files) > 3
    sizes = [sum(x.nbytes for x in load_file(file).values()) for file in files]
    assert max(sizes) <= 5_000
    same(read_tensors(out), weights)
    # as readable as the files beside them
    assert files[0].stat().st_mode == (out / "config.json").stat().st_mode
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    for name, file in index["weight_map"].items():
        assert name in load_file(out / file)


@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_a_link_that_leads_nowhere_is_no_file_less(shards, name):
    """Files of an earlier download would be read instead."""
    (shards / name).unlink()
    (shards / name).symlink_to("../../blobs/0123")
    with pytest.raises(UserError, match=rf"{name} is a link to .*0123, where no file"):
        huggingface.load(shards, GPT2Spec(V))


def test_files_beside_those_of_the_index_are_not_read(shards):
    norm = {"model.norm.weight": np.zeros(16, np.float32)}
    save_file(norm, shards / "consolidated.safetensors")
    check_same("qwen3_sharded_bf16", shards)


def test_one_file_is_read_with_the_config_beside_it():
    file = DATA / "llama" / WEIGHTS
    assert load_llama(file)[0] == load_llama(DATA / "llama")[0]


def test_what_a_configuration_leaves_out_is_what_transformers_takes(tmp_path):
    left_out = ("num_key_value_heads", "head_dim", "rope_parameters", "mlp_bias")
    left_out += ("rms_norm_eps", "tie_word_embeddings")
    tensors = tensors_of("llama")
    for name, tensor in tensors.items():
        if ".k_proj" in name or ".v_proj" in name:
            tensors[name] = np.repeat(tensor, 2, axis=0)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    config = dict.fromkeys(left_out, "absent")
    spec, _ = load_llama(copied(tmp_path, "llama", config, tensors))
    assert (spec.n_kv_head, spec.head_width, spec.tied) == (4, 4, False)
    assert (spec.rope_theta, spec.norm_eps) == (1e4, 1e-6)


def test_absent_and_damaged_files_are_named(tmp_path, shards):
    def refused(message):
        with pytest.raises(UserError, match=message):
            huggingface.load(shards, None)

    message = r"config\.json does not exist, and no tensor tells the number of"
    with pytest.raises(UserError, match=message):
        load_llama(tmp_path)
    second = shards / "model-00002-of-00002.safetensors"
    second.unlink()
    refused(r"00002-of-00002\.safetensors is missing \(1 in all\)")
    save_file({"x": np.zeros(1)}, second)
    refused(r"index\.json names tensors that its files do not hold: model.*in all")
    (shards / INDEX).write_text("{}")
    refused(r"index\.json has no weight_map")
    for name in (
        f"../{second.name}",
        "/etc/passwd",
        f"a/{second.name}",
        3,
        "config.json",
    ):
        (shards / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
        refused("weight_map names .*; expected safetensors files of the same directory")


def test_weights_in_two_files_are_refused_unless_one_has_transformers_name(tmp_path):
    weights, directory = tensors_of("llama"), copied(tmp_path, "llama")
    zeros = {name: np.zeros_like(tensor) for name, tensor in weights.items()}
    save_file(zeros, directory / "model_old.safetensors")
    # model.safetensors, as in transformers; an index beside it does not count either
    index = {"weight_map": {"lost.weight": "lost.safetensors"}}
    (directory / INDEX).write_text(json.dumps(index))
    same(read_tensors(directory), weights)
    (directory / INDEX).unlink()
    (directory / WEIGHTS).rename(directory / "model_new.safetensors")
    with pytest.raises(UserError, match=r"model_old.safetensors and model_new.* both"):
        load_llama(directory)


def with_index(directory, tensors, **others):
    """Split `tensors` into a file and `others`; the index has each tensor once."""
    (directory / WEIGHTS).rename(directory / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    for name, part in others.items():
        save_file(part, directory / f"{name}.safetensors")
        weight_map |= dict.fromkeys(part, f"{name}.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("overlay", ["an_overlay", "overlay"])
def test_the_index_decides_between_two_files_with_one_tensor(tmp_path, overlay):
    name = "model.layers.0.mlp.up_proj.weight"
    old = tensors_of("llama") | {name: np.zeros_like(tensors_of("llama")[name])}
    directory = copied(tmp_path, "llama", tensors=old)
    with_index(directory, old, **{overlay: {name: tensors_of("llama")[name]}})
    same(read_tensors(directory), tensors_of("llama"))
    (directory / INDEX).unlink()
    with pytest.raises(UserError, match=r"both hold .*up_proj"):
        read_tensors(directory)


def test_only_the_head_of_a_tied_model_may_be_in_the_index_alone(tmp_path):
    head = {"lm_head.weight": None}
    config = {"tie_word_embeddings": True}
    whole = copied(tmp_path / "whole", "llama", config, head)
    directory = copied(tmp_path / "shards", "llama", config, head)
    with_index(directory, [*tensors_of("llama"), "lm_head.weight"])
    same(read_tensors(directory), read_tensors(whole))
    assert load_llama(directory)[0].tied
    untied = json.dumps(config_of("llama", tie_word_embeddings=False))
    (directory / "config.json").write_text(untied)
    with pytest.raises(UserError, match=r"lm_head\.weight .* is missing"):
        load_llama(directory)


def test_mask_buffers_a_tied_head_and_a_missing_prefix_are_ignored(tmp_path):
    def old(tensors):
        bare = {key.removeprefix("transformer."): x for key, x in tensors.items()}
        return bare | {
            "h.0.attn.bias": np.tri(32, dtype=np.float32)[None, None],
            "h.1.attn.masked_bias": np.float32([-1e4]),
            "lm_head.weight": bare["wte.weight"],
        }

    check_same("gpt2", copied(tmp_path, "gpt2", tensors=old))


def test_the_number_of_heads_is_that_of_the_config_or_is_given(tmp_path):
    directory = copied(tmp_path, "gpt2")
    spec, _ = load_gpt2(directory)
    other = dataclasses.replace(spec, n_head=8, mlp="swiglu", scan_layers=True)
    assert load_gpt2(directory, other)[0] == spec
    (directory / "config.json").unlink()
    assert load_gpt2(directory / WEIGHTS, other)[0].n_head == 8
    with pytest.raises(UserError, match=r"no config\.json tells the number of heads"):
        load_gpt2(directory / WEIGHTS)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {WEIGHTS: (DATA / "gpt2" / WEIGHTS).read_bytes()[:-100]},
            "not a complete saf",
        ),
        ({}, r"no \*\.safetensors"),
        ({"config.json": "{"}, r"config\.json is not .*; download or copy"),
        ({"config.json": "[1]"}, r"config\.json is not .*; download or copy"),
        ({"config.json": b"\xff"}, r"config\.json is not .*; download or copy"),
    ],
)
def test_damaged_or_absent_files_are_named(tmp_path, files, message):
    folder = write(tmp_path, files)
    with pytest.raises(UserError, match=message):
        load_gpt2(folder, GPT2Spec(vocab_size=V))
    with pytest.raises(UserError, match="does not exist"):
        load_gpt2(tmp_path.with_name("nowhere"), GPT2Spec(vocab_size=V))


def test_export_refuses_swiglu_and_an_occupied_directory(tmp_path):
    spec, params = load_gpt2(copied(tmp_path / "gpt2", "gpt2"))
    with pytest.raises(UserError, match="only gelu"):
        save_gpt2(tmp_path / "out", GPT2Spec(vocab_size=V, mlp="swiglu"), params)
    with pytest.raises(UserError, match="exists"):
        save_gpt2(tmp_path / "gpt2", spec, params)


def test_weights_that_a_full_disk_refuses_leave_no_part_of_a_file(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    path = tmp_path / "model.safetensors"
    try:
        with pytest.raises(UserError, match=rf"cannot write {path}: .*; make room"):
            write_file({"x": np.zeros(1000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
