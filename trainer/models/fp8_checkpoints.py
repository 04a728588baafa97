"""Checkpoints in FP8 with scales, read as the numbers that they stand for.

DeepSeek's and Qwen's have a scale for each block of a weight (`weight_scale_inv`);
those of vLLM's compressed-tensors and of AutoFP8 have one for the tensor, or for each
row (`weight_scale`). A weight is its E4M3 number times its scale.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from trainer.errors import UserError

QUANTIZATION = "quantization_config"
KIND = "E4M3 (quant_method fp8 or compressed-tensors) is read, and no other"
# by safetensors' names
DTYPES = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
# ends of names of scales that only FP8 activations and caches need
UNUSED = (".input_scale", ".output_scale", ".k_scale", ".v_scale")


class Fp8Weights(NamedTuple):
    """The FP8 weights of a checkpoint.

    Attributes:
      scale: the end of the names of their scales, in place of "weight".
      block: rows and columns with one scale; None: the tensor, or each row.
    """

    scale: str
    block: tuple[int, int] | None

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "Fp8Weights | None":
        """Return the FP8 weights that a config.json describes; None: there are none.

        Raises:
          UserError: another quantization.
        """
        given = config.get(QUANTIZATION)
        if given is None:
            return None
        method = given.get("quant_method") if isinstance(given, dict) else None
        if method == "fp8":
            block = given.get("weight_block_size")
            if block is None:
                return cls("weight_scale", None)
            if not (
                isinstance(block, list)
                and len(block) == 2
                and all(type(size) is int and size > 0 for size in block)
            ):
                raise UserError(
                    f"{QUANTIZATION}.weight_block_size={block!r}: expected two sizes,"
                    " such as [128, 128]"
                )
            return cls("weight_scale_inv", (block[0], block[1]))
        if method == "compressed-tensors":
            check_compressed(given)
            return cls("weight_scale", None)
        raise UserError(
            f"{QUANTIZATION}={{'quant_method': {method!r}, ...}} is not supported:"
            f" {KIND}; give the weights before quantization, in float32, float16 or"
            " bfloat16"
        )

    def widen(
        self, file: Path, tensors: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the tensors in FP32 where they are FP8, without their scales.

        Raises:
          UserError: a scale is missing, of another shape, or not a positive number.
        """
        scales: set[str] = set()
        wide: dict[str, np.ndarray] = {}
        for name, tensor in tensors.items():
            if tensor.dtype != DTYPES["F8_E4M3"]:
                wide[name] = tensor
                continue
            key = name.removesuffix("weight") + self.scale
            if key not in tensors:
                raise UserError(
                    f"{file}: {name} is FP8, but its scale {key} is missing; download"
                    " or copy the files again"
                )
            wide[name] = tensor.astype(np.float32) * self._scale_of(
                file, key, tensors[key], tensor.shape
            )
            scales.add(key)
        return {
            name: tensor
            for name, tensor in wide.items()
            if name not in scales and not name.endswith(UNUSED)
        }

    def _scale_of(
        self, file: Path, name: str, scale: np.ndarray, shape: tuple[int, ...]
    ) -> np.ndarray:
        """Return a scale that multiplies a weight of this shape."""
        scale = scale.astype(np.float32)
        if not np.all(np.isfinite(scale) & (scale > 0)):
            raise UserError(f"{file}: {name} holds numbers that are no scales")
        if self.block is not None and len(shape) == 2:
            blocks = tuple(map(math.ceil, np.divide(shape, self.block)))
            valid = [blocks]
        else:
            valid = [(), (1,), (shape[0], 1)]
        if scale.shape not in valid:
            raise UserError(
                f"{file}: {name} has shape {scale.shape}; expected"
                f" {' or '.join(map(str, valid))} for a weight {shape}"
            )
        if self.block is None or len(shape) != 2:
            return scale
        rows = np.repeat(scale, self.block[0], axis=0)[: shape[0]]
        return np.repeat(rows, self.block[1], axis=1)[:, : shape[1]]


def check_compressed(given: Mapping[str, Any]) -> None:
    """Raise UserError for weights of compressed-tensors that are no E4M3."""
    groups = given.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else [{}]:
        weights = group.get("weights") if isinstance(group, dict) else None
        weights = weights if isinstance(weights, dict) else {}
        kind = tuple(weights.get(key) for key in ("num_bits", "type", "strategy"))
        if kind[:2] != (8, "float") or kind[2] not in ("tensor", "channel"):
            raise UserError(
                f"{QUANTIZATION}: weights of {kind[0]} bits, type={kind[1]},"
                f" strategy={kind[2]} are not supported: {KIND}, with a scale for the"
                " tensor or for each row"
            )
