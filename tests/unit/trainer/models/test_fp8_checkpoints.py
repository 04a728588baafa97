"""Weights of other trainers in FP8, with a scale for a block, a row or the tensor."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from trainer.errors import UserError
from trainer.models.fp8_checkpoints import Fp8Weights
from trainer.models.huggingface import save
from trainer.models.llama.huggingface import layout_of, load_llama
from trainer.models.llama.model import functional
from trainer.models.llama.spec import LlamaSpec
from trainer.models.named_weights import to_params

E4M3 = ml_dtypes.float8_e4m3fn
SPEC = LlamaSpec(
    vocab_size=40, context=16, n_layer=1, n_head=2, d_model=24, n_kv_head=1, d_mlp=40
)
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}
FORMS = {
    "blocks": {"quant_method": "fp8", "weight_block_size": [16, 16]},
    "tensor": {"quant_method": "fp8", "weight_block_size": None},
    "old tensor": {"quant_method": "fp8"},
    "blocks of a group": {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "block",
                    "block_structure": [16, 16],
                }
            }
        },
    },
    "rows": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": WEIGHTS}},
    },
}


def quantized(name, weight):
    """The E4M3 numbers of a weight, their scales, and what both stand for."""
    rows, columns = (16, 16) if "blocks" in name else weight.shape
    rows = 1 if name == "rows" else rows
    scales = np.empty((-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)))
    narrow, wide = np.empty(weight.shape, E4M3), np.empty(weight.shape, np.float32)
    for i, j in np.ndindex(scales.shape):
        block = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scales[i, j] = np.float32(np.abs(weight[block]).max() / 448)
        narrow[block] = (weight[block] / scales[i, j]).astype(E4M3)
        wide[block] = narrow[block].astype(np.float32) * np.float32(scales[i, j])
    return narrow, scales.astype(np.float32), wide


def write_safetensors(file, tensors):
    """Write a file with FP8, which the library writes from PyTorch alone."""
    names = {"float8_e4m3fn": "F8_E4M3", "float32": "F32"}
    header, end = {}, 0
    for name, x in tensors.items():
        header[name] = {
            "dtype": names[str(x.dtype)],
            "shape": x.shape,
            "data_offsets": [end, end := end + x.nbytes],
        }
    text = json.dumps(header).encode()
    data = b"".join(x.tobytes() for x in tensors.values())
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def checkpoint(tmp_path):
    """Writes the checkpoint of a form, and returns what its weights stand for."""

    def write(name, change=lambda tensors: None):
        params = functional(SPEC).init(jax.random.key(0))
        save(tmp_path / "wide", SPEC, params)
        config = json.loads((tmp_path / "wide" / "config.json").read_text())
        tensors = load_file(tmp_path / "wide" / "model.safetensors")
        expected = dict(tensors)
        for key in [k for k in tensors if "proj" in k]:
            end = "weight_scale" + "_inv" * (name in ("blocks", "tensor"))
            narrow, scales, expected[key] = quantized(name, tensors[key])
            scales = scales.reshape(()) if name == "tensor" else scales
            scales = scales.reshape(1) if name == "old tensor" else scales
            tensors |= {key: narrow, key.removesuffix("weight") + end: scales}
            for unused in ("input_scale", "activation_scale"):
                tensors[key.removesuffix("weight") + unused] = np.ones(1, np.float32)
        change(tensors)
        folder = tmp_path / name
        folder.mkdir()
        config["quantization_config"] = FORMS[name]
        (folder / "config.json").write_text(json.dumps(config))
        write_safetensors(folder / "model.safetensors", tensors)
        return folder, to_params(folder, expected, functional(SPEC), layout_of(SPEC))

    return write


@pytest.mark.parametrize("name", FORMS)
def test_weights_are_their_numbers_times_their_scales(checkpoint, name):
    folder, expected = checkpoint(name)
    spec, params = load_llama(folder, LlamaSpec)
    assert spec == SPEC
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (None, "is FP8, but it has no scale .*weight_scale_inv or .*weight_scale;"),
        (np.ones((1, 3), np.float32), r"has shape \(1, 3\); expected \(2, 2\)"),
        (-np.ones((2, 2), np.float32), "holds scales that are negative or not finite"),
    ],
)
def test_scales_that_do_not_fit_are_refused(checkpoint, scale, words):
    key = "model.layers.0.self_attn.q_proj.weight_scale_inv"

    def change(tensors):
        del tensors[key]
        if scale is not None:
            tensors[key] = scale

    folder, _ = checkpoint("blocks", change)
    with pytest.raises(UserError, match=words):
        load_llama(folder, LlamaSpec)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq', .*; valid: symmetric E4M3"),
        (FORMS["rows"] | {"transform_config": {"a": 1}}, "transform_config is not"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "expected two sizes"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": WEIGHTS | {"num_bits": 4}}},
            },
            "weights of 4 bits, type=float",
        ),
        ({"quant_method": "compressed-tensors"}, "weights of None bits"),
    ],
)
def test_other_quantizations_are_refused(given, words):
    with pytest.raises(UserError, match=words):
        Fp8Weights.of_config({"quantization_config": given})
