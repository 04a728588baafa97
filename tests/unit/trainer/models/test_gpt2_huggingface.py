"""GPT-2's files, there and back. `test_transformers_families.py` has its logits."""

import dataclasses
import json
import resource

import numpy as np
import pytest
from corpora import write
from family_files import DATA, WEIGHTS, check_same, copied

from trainer.errors import UserError
from trainer.models import huggingface
from trainer.models.gpt2.huggingface import load_gpt2, save_gpt2
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.weight_files import write_file

V = 67


def test_export_is_the_same_file_again(tmp_path):
    """A value gain is no part of parameters."""
    spec, params = load_gpt2(DATA / "gpt2")
    ours = dataclasses.replace(spec, value_gain=4096.0)
    (out,) = huggingface.save(tmp_path / "out", ours, params, eot=7)
    assert out.read_bytes() == copied(tmp_path, "gpt2").joinpath(WEIGHTS).read_bytes()
    config = tmp_path / "out" / "config.json"
    # as readable as the files beside it
    assert out.stat().st_mode == config.stat().st_mode
    assert json.loads(config.read_text())["eos_token_id"] == 7


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
