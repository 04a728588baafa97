"""Checkpoints of FP8 weights with scales: read, and widened to FP32, or written.

A weight has a scale for each block, as in DeepSeek's and Qwen's checkpoints, for each
row, or for the tensor. The scale's name ends in `weight_scale_inv` (DeepSeek,
transformers) or in `weight_scale` (vLLM's compressed-tensors, AutoFP8). In both cases
the weight is its E4M3 number times the scale.

Exports are compressed-tensors with one scale for a weight, and one for its layer's
input unless that is measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from trainer.errors import UserError

QUANTIZATION = "quantization_config"
# Keys of MLX, and of early compressed-tensors.
OTHER_QUANTIZATIONS = ("quantization", "compression_config")
SUPPORTED = (
    "valid: symmetric E4M3 (quant_method fp8 or compressed-tensors) with one scale for"
    " each block or row, or for the tensor"
)
SCALE_SUFFIXES = ("weight_scale_inv", "weight_scale")
# safetensors' name -> NumPy's dtype; `safetensors.numpy` knows no FP8.
DTYPES = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}
# Suffixes of scales that only FP8 activations and caches need.
UNUSED_SCALES = (
    ".input_scale", ".output_scale", ".activation_scale",
    ".q_scale", ".k_scale", ".v_scale", ".prob_scale",
)  # fmt: skip


@dataclass(frozen=True)
class Fp8Kernel:
    """The kernel of an FP8 product, a leaf among the parameters that are written.

    Attributes:
      data: E4M3 [inputs, outputs].
      weight_scale: FP32 [1].
      input_scale: of the layer's input, FP32 [1]; None: it is measured.
    """

    data: np.ndarray
    weight_scale: np.ndarray
    input_scale: np.ndarray | None

    def scales(self, weight: str) -> dict[str, np.ndarray]:
        """Return the scales by the names that belong to that of the weight."""
        layer = weight.removesuffix("weight")
        scales = {f"{layer}weight_scale": self.weight_scale}
        if self.input_scale is not None:
            scales[f"{layer}input_scale"] = self.input_scale
        return scales


def quantization_of(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the keys of config.json for FP8 weights among the tensors of an export.

    The keys are those of compressed-tensors, as vLLM reads them. Matrices in other
    formats are in `ignore`, and so is the head, which may be a table.
    """
    # Then config.json has no such key: readers would look for scales.
    if not any(tensor.dtype == DTYPES["F8_E4M3"] for tensor in tensors.values()):
        return {}
    # compressed-tensors has one scheme for a group, so that layers are static or
    # dynamic together.
    is_static = any(name.endswith(".input_scale") for name in tensors)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    wide = {
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if tensor.ndim == 2 and tensor.dtype != DTYPES["F8_E4M3"]
    }
    group = {
        "targets": ["Linear"],
        "weights": {**scheme, "dynamic": False},
        "input_activations": {**scheme, "dynamic": not is_static},
        "output_activations": None,
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        # A tied head has no tensor of its own to be found among `wide`, but is a
        # Linear.
        "ignore": sorted(wide | {"lm_head"}),
    }
    return {QUANTIZATION: settings}


class Fp8ScaleLayout(NamedTuple):
    """Which FP8 weights of a checkpoint share a scale.

    Attributes:
      block: the numbers of rows and columns that share a scale; None: each row has a
        scale, or the tensor has one.
    """

    block: tuple[int, int] | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Fp8ScaleLayout | None":
        """Return the layout that a config.json describes; None: no weight is FP8.

        Raises:
          UserError: the weights are quantized in another way.
        """
        settings = config.get(QUANTIZATION)
        if settings is None:
            return None
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        if method == "fp8":
            # Without blocks, rows and tensors are told apart by the shapes of the
            # scales.
            return cls(block_of(settings, "weight_block_size"))
        if method == "compressed-tensors":
            return cls(compressed_block(settings))
        raise UserError(
            f"{QUANTIZATION}={{'quant_method': {method!r}, ...}} is not supported;"
            f" {SUPPORTED}; give the weights before quantization, in float32, float16"
            " or bfloat16"
        )

    def widen(
        self, file: Path, tensors: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the tensors without their scales, in FP32 instead of FP8.

        Raises:
          UserError: a scale is missing, of another shape, negative or not finite.
        """
        scales: set[str] = set()
        wide: dict[str, np.ndarray] = {}
        for name, tensor in tensors.items():
            if tensor.dtype != DTYPES["F8_E4M3"]:
                wide[name] = tensor
                continue
            # The scale's name has the place of the weight's: `a.b.weight`,
            # `a.b.weight_scale`.
            stem = name.removesuffix("weight")
            scale_names = [stem + suffix for suffix in SCALE_SUFFIXES]
            scale_name = next((key for key in scale_names if key in tensors), None)
            # Without its scale an FP8 number is a weight in unknown units.
            if scale_name is None or not name.endswith("weight"):
                raise UserError(
                    f"{file}: {name} is FP8, but it has no scale"
                    f" {' or '.join(scale_names)}; {SUPPORTED}"
                )
            wide[name] = tensor.astype(np.float32) * self._scale_of(
                file, scale_name, tensors[scale_name], tensor.shape
            )
            scales.add(scale_name)
        return {
            name: tensor
            for name, tensor in wide.items()
            if name not in scales and not name.endswith(UNUSED_SCALES)
        }

    def _scale_of(
        self, file: Path, name: str, scale: np.ndarray, shape: tuple[int, ...]
    ) -> np.ndarray:
        """Return a scale that can multiply a weight of shape `shape`."""
        scale = scale.astype(np.float32)
        # Damaged scales would be trained from as weights, without a word.
        if not np.all(np.isfinite(scale) & (scale >= 0)):
            raise UserError(
                f"{file}: {name} holds scales that are negative or not finite"
            )
        # The tensor's scale is a scalar or has one element, by the program that wrote
        # it.
        valid: list[tuple[int, ...]] = [(), (1,), (shape[0], 1)]
        if self.block is not None and len(shape) == 2:
            rows, columns = self.block
            # The last block of each axis may be smaller.
            valid = [(-(-shape[0] // rows), -(-shape[1] // columns))]
        if scale.shape not in valid:
            raise UserError(
                f"{file}: {name} has shape {scale.shape}; expected"
                f" {' or '.join(map(str, valid))} for a weight {shape}"
            )
        if self.block is None or len(shape) != 2:
            return scale
        # config.json may name blocks that are larger than any weight.
        rows, columns = map(min, self.block, shape)
        scale = np.repeat(scale, rows, axis=0)[: shape[0]]
        return np.repeat(scale, columns, axis=1)[:, : shape[1]]


def check_quantization(config: Mapping[str, Any]) -> None:
    """Raise UserError for a config.json of weights whose quantization is not read."""
    Fp8ScaleLayout.from_config(config)
    for key in OTHER_QUANTIZATIONS:
        value = config.get(key)
        if value is not None:
            method = value.get("quant_method") if isinstance(value, dict) else value
            raise UserError(
                f"{key}={{'quant_method': {method!r}, ...}} is not supported; give the"
                " weights before quantization, in float32, float16 or bfloat16"
            )


def block_of(settings: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """Return the two sizes of a block, or None; UserError for anything else."""
    match settings.get(key):
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case block:
            raise UserError(
                f"{QUANTIZATION}: {key}={block!r}: expected two sizes, such as"
                " [128, 128]"
            )


def compressed_block(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the block of compressed-tensors' weights, or None.

    Raises:
      UserError: weights are not symmetric E4M3, or groups have different blocks.
    """
    for key in ("transform_config", "sparsity_config"):
        # The weights of such files are more than their numbers times the scales.
        if settings.get(key):
            raise UserError(f"{QUANTIZATION}: {key} is not supported; {SUPPORTED}")
    groups = settings.get("config_groups")
    blocks = set()
    # `{}` has no bits and no type: a file without groups is refused below.
    for group in groups.values() if isinstance(groups, dict) else [{}]:
        weights = group.get("weights") if isinstance(group, dict) else None
        weights = weights if isinstance(weights, dict) else {}
        # These and the blocks decide how stored numbers become weights. What is said of
        # activations does not count.
        keys = ("num_bits", "type", "strategy", "symmetric")
        bits, kind, strategy, symmetric = (weights.get(key) for key in keys)
        if (
            (bits, kind) != (8, "float")
            or strategy not in ("tensor", "channel", "block")
            # A file that leaves the key out means symmetric weights.
            or symmetric is False
        ):
            raise UserError(
                f"{QUANTIZATION}: weights of {bits} bits, type={kind},"
                f" strategy={strategy}, symmetric={symmetric} are not supported;"
                f" {SUPPORTED}"
            )
        is_block = strategy == "block"
        blocks.add(block_of(weights, "block_structure") if is_block else None)
    if len(blocks) > 1:
        raise UserError(
            f"{QUANTIZATION}: config_groups have different blocks; {SUPPORTED}"
        )
    return blocks.pop() if blocks else None  # only the cache is quantized
