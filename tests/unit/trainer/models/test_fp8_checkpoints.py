"""Weights of other trainers in FP8, with a scale for a block, a row or the tensor."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from trainer.errors import UserError
from trainer.models.fp8_checkpoints import Fp8ScaleLayout
from trainer.models.weight_files import read_tensors

NAME = "model.layers.0.self_attn.q_proj."
SHAPE = (24, 40)
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}
BLOCK = {"strategy": "block", "block_structure": [16, 8]}


def compressed(**weights):
    """Return the settings of compressed-tensors with one group."""
    groups = {"group_0": {"weights": WEIGHTS | weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 8]}
TENSOR = {"quant_method": "fp8", "weight_block_size": None}


def widened(settings, suffix, scale):
    """Read a weight with its scale, beside a norm and scales that nothing needs."""
    weight = np.arange(960).reshape(SHAPE) % 7 - 3
    weight = weight.astype(ml_dtypes.float8_e4m3fn)
    norm = np.ones(24, ml_dtypes.bfloat16)
    tensors = {f"{NAME}weight": weight, "norm.weight": norm}
    tensors |= {f"{NAME}input_scale": norm, f"{NAME}activation_scale": norm}
    if scale is not None:
        tensors[NAME + suffix] = np.asarray(scale, np.float32)
    fp8 = Fp8ScaleLayout.from_config({"quantization_config": settings})
    wide = fp8.widen(Path("model"), tensors)
    assert wide.keys() == {f"{NAME}weight", "norm.weight"}
    assert wide["norm.weight"] is norm
    return wide[f"{NAME}weight"], weight.astype(np.float32)


SCALES = 2.0 ** np.arange(10).reshape(2, 5)


@pytest.mark.parametrize(
    ("settings", "suffix", "scale", "factors"),
    [
        (BLOCKS, "weight_scale_inv", SCALES, SCALES),
        (compressed(**BLOCK), "weight_scale", SCALES, SCALES),
        (TENSOR, "weight_scale_inv", 0.3, np.full((2, 5), 0.3)),
        ({"quant_method": "fp8"}, "weight_scale", [0.3], np.full((2, 5), 0.3)),
    ],
)
def test_weights_are_their_numbers_times_their_scales(settings, suffix, scale, factors):
    wide, numbers = widened(settings, suffix, scale)
    assert wide.dtype == np.float32
    for i, j in np.ndindex(SHAPE):
        assert wide[i, j] == numbers[i, j] * np.float32(factors[i // 16, j // 8])


def test_weights_beside_a_quantized_cache_are_as_they_are():
    settings = {"quant_method": "compressed-tensors", "config_groups": {}}
    tensors = {f"{NAME}weight": np.ones(SHAPE), f"{NAME}k_scale": np.ones(1)}
    fp8 = Fp8ScaleLayout.from_config({"quantization_config": settings})
    assert fp8 is None or fp8.widen(Path("model"), tensors).keys() <= tensors.keys()


def test_each_row_may_have_a_scale():
    scale = 1 + np.arange(24, dtype=np.float32)[:, None]
    wide, numbers = widened(compressed(), "weight_scale", scale)
    np.testing.assert_array_equal(wide, numbers * scale)


@pytest.mark.parametrize(
    ("settings", "scale", "words"),
    [
        (BLOCKS, None, "is FP8, but it has no scale .*weight_scale_inv or .*weight_sc"),
        (BLOCKS, np.ones((1, 3)), r"has shape \(1, 3\); expected \(2, 5\)"),
        (BLOCKS, -SCALES, "holds scales that are negative or not finite"),
        (BLOCKS, SCALES * np.inf, "holds scales that are negative or not finite"),
        ({"quant_method": "gptq", "bits": 4}, 1, "'gptq', .*; valid: symmetric E4M3"),
        (compressed() | {"transform_config": {"a": 1}}, 1, "transform_config is not"),
        (BLOCKS | {"weight_block_size": [128]}, 1, "expected two sizes"),
        (compressed(num_bits=4), 1, "weights of 4 bits, type=float"),
        ({"quant_method": "compressed-tensors"}, 1, "weights of None bits"),
    ],
)
def test_scales_and_quantizations_that_do_not_fit_are_refused(settings, scale, words):
    with pytest.raises(UserError, match=words):
        widened(settings, "weight_scale", scale)


def test_a_block_may_be_larger_than_the_weight_and_takes_no_memory(tmp_path):
    narrow = np.full((4, 6), 2, ml_dtypes.float8_e4m3fn)
    scale = np.array([[1.0, 3.0]], np.float32)
    weights = Fp8ScaleLayout((1 << 70, 3))
    tensors = {"a.weight": narrow, "a.weight_scale": scale}
    (wide,) = weights.widen(tmp_path, tensors).values()
    np.testing.assert_array_equal(wide, [[2, 2, 2, 6, 6, 6]] * 4)


def test_fp8_without_settings_is_named_and_what_has_them_instead(tmp_path):
    header = {"w": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0\0")
    problem = "w is F8_E4M3, but config.json has no quantization_config"
    with pytest.raises(UserError, match=f"{problem}.* float32") as error:
        read_tensors(tmp_path)
    assert "numpy" not in str(error.value)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"hf_quant_config\.json of NVIDIA's ModelOpt"):
        read_tensors(tmp_path)
    file.write_bytes(file.read_bytes().replace(b"F8_E4M3", b"F8_E5M2"))
    with pytest.raises(UserError, match="w is F8_E5M2, which is not read"):
        read_tensors(tmp_path, Fp8ScaleLayout(None))
