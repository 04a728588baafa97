import ast
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from trainer.config.inherited import inherit
from trainer.errors import UserError
from trainer.models.other_formats import convert_command, merge_command
from trainer.models.weight_files import read_tensors
from trainer.run.start import check_start

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def written(directory, *names, config=LLAMA):
    directory.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    for name in names:
        (directory / name).write_bytes(b"\0")
    return directory


def check_refused(source, message):
    """Assert that all readers refuse weights, two of them before data are read."""
    for read in (
        lambda: inherit({"name": "from_init"}, str(source)),
        lambda: check_start(source / "no_run", "auto", None, str(source)),
        lambda: read_tensors(source),
    ):
        with pytest.raises(UserError, match=message) as error:
            read()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", r"convert it: python .*from_pretrained\(\".*\"\)\.save_"),
        ("pytorch_model-00001-of-00002.bin", "convert it: python"),
        ("model.gguf", r"convert it: .*_pretrained\(\".*\", gguf_file=\"model.gguf\""),
        ("flax_model.msgpack", "convert it by transformers 4: .*, from_flax=True"),
        ("tf_model.h5", "convert it by transformers 4: .*, from_tf=True"),
        ("consolidated.00.pth", "as a Hugging Face directory .*for Meta's"),
        ("ckpt.pt", "as a Hugging Face directory"),
        ("__0_0.distcp", "as a Hugging Face directory"),
        ("model.ckpt.index", "as a Hugging Face directory"),
    ],
)
@pytest.mark.parametrize("as_file", [False, True])
def test_other_formats_are_refused_with_what_converts_them(
    tmp_path, name, message, as_file
):
    directory = written(tmp_path / "a", name)
    check_refused(directory / name if as_file else directory, message)
    (directory / "config.json").unlink()
    check_refused(directory, f"{name} is no safeten")


@pytest.mark.parametrize("name", ["mine", "mine (1)", 'it\'s "mine"'])
def test_the_commands_are_those_of_any_directory(name):
    for command in (convert_command(Path(name), ""), merge_command(Path(name))):
        python, flag, code = shlex.split(command)
        assert (python, flag) == ("python", "-c")
        texts = {x.value for x in ast.walk(ast.parse(code)) if hasattr(x, "value")}
        assert name in texts
        assert {f"{name}-safetensors", f"{name}-merged"} & texts


def test_pickles_beside_safetensors_do_not_count(tmp_path):
    directory = written(tmp_path / "a", "pytorch_model.bin")
    save_file({"a": np.ones(2)}, directory / "model.safetensors")
    assert read_tensors(directory).keys() == {"a"}


def test_an_adapter_is_refused_with_what_merges_it(tmp_path):
    directory = written(tmp_path / "a", "adapter_config.json")
    save_file({"a": np.ones(2)}, directory / "adapter_model.safetensors")
    message = r"is a LoRA adapter .* python .*merge_and_unload\(\)"
    check_refused(directory, message)
    check_refused(directory / "adapter_model.safetensors", message)
    (directory / "adapter_config.json").unlink()
    save_file({"a": np.ones(2)}, directory / "model.safetensors")
    check_refused(directory, message)


def test_directories_of_weights_below_are_named(tmp_path):
    directory = written(tmp_path / "a", config=None)
    below = written(directory / "checkpoint-100")
    save_file({"a": np.ones(2)}, below / "model.safetensors")
    check_refused(directory, "holds no weights itself, but .*a/checkpoint-100 does")


@pytest.mark.parametrize(
    "name", ["q_proj.qweight", "q_proj.weight.absmax", "q_proj.weight_scale_inv"]
)
def test_quantized_tensors_are_refused_by_name(tmp_path, name):
    save_file({name: np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"is quantized .*{name}.* before quantizat"):
        read_tensors(tmp_path)


def test_weights_that_are_missing_are_refused_before_data_are_read(tmp_path):
    directory = written(tmp_path / "a")
    for message in ("holds no *.safetensors", "b.safetensors is missing"):
        with pytest.raises(UserError, match=re.escape(message)):
            check_start(tmp_path / "run", "auto", None, str(directory))
        index = {"weight_map": {"a": "b.safetensors"}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
