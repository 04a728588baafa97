"""The fields of a precision, and their formats.

Nothing here imports JAX: the configuration is checked without it.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

import ml_dtypes
import numpy as np

from trainer.bounds import POWER_OF_TWO, Bound, Positive, Share, at_least, at_most

ComputeFormat = Literal["fp32", "bf16", "fp16"]
StorageFormat = Literal["fp32", "bf16", "fp16", "e4m3", "e5m2"]
DTYPES: dict[str, np.dtype] = {
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
}
# A copy of what `FloatFormat.parse` takes, whose module imports JAX. A test compares
# both.
ALIASES = (*DTYPES, "float32", "bfloat16", "float16")


def is_format(name: str) -> bool:
    """Return whether `FloatFormat` can parse this name."""
    bits = re.fullmatch(r"e(\d+)m(\d+)[ts]?", name.lower())
    if bits is None:
        return name.lower() in ALIASES
    # FP32 holds every number of these formats, and in FP32 they are simulated.
    return 2 <= int(bits[1]) <= 8 and 1 <= int(bits[2]) <= 23


Format = Annotated[
    str,
    Bound(
        is_format,
        "eXmY of 2 to 8 exponent bits and 1 to 23 mantissa bits, such as e4m3, e4m3t or"
        " e4m3s, or fp32, bf16 or fp16",
    ),
]

RESCALED_PLACES = Bound(
    lambda places: set(places) <= {"layer_norm", "qkv"},
    "a list of layer_norm, qkv, both or neither",
)
TWO_SHARES = Bound(
    lambda shares: len(shares) == 2,
    "two shares of blocks, first and last ones, such as [0.03,0.13]",
)


@dataclass(frozen=True)
class PrecisionFields:
    """The fields of a precision, which are keys of the group `precision` too.

    Attributes:
      compute: activations and all matmuls that `fp8_modules` does not choose: fp32,
        bf16 or fp16.
      forward: format of the operands of the chosen matmuls (e4m3; any eXmY when
        simulated); None: `compute`.
      backward: format of the gradient of their output.
      backward_e4m3: patterns of those among the chosen matmuls whose `backward` is
        e4m3, where the measured range allows it: one mantissa bit more than e5m2, 14
        octaves less range; None: nowhere.
      simulate: round FP32 values to `forward` and `backward` instead of multiplying in
        them. A format's name that ends in t, as e4m3t, truncates; in s, rounds
        stochastically; else to nearest.
      fp8_modules: patterns of module paths, such as `h.*` or `h.*.mlp.*`: the chosen
        matmuls.
      exclude: patterns of those among them that stay in `compute`, such as `h.0.*`.
      scaling: the method that keeps narrow numbers in range, of
        `trainer.precision.methods.METHODS`.
      weights: storage of the master weights: fp32, bf16 or fp16; scaled arrays where
        the method scales parameters.
      weights_rounding: rounding of updated weights: nearest, stochastic, or kahan: to
        nearest, with the rounding error kept in BF16 beside the weights and added to
        the next update.
      weight_grad: format of the gradient of a chosen matmul's weights, on its way to
        the optimizer: fp32, bf16, fp16, e4m3 or e5m2; see `Method.gradient_formats`.
      mu, nu: storage of the first and second moment: fp32, bf16, fp16, e4m3 or e5m2;
        narrow ones are scaled arrays.
      moments_rounding: auto (see `scalify_core.optim`), nearest or stochastic.
      update: what the optimizer computes in: fp32, or propagate, in scaled arrays of
        `compute` data.
      rescale_grads: where scales propagate, the places whose gradient gets the scale of
        its RMS, measured at run time: layer_norm (the input of each) and qkv (queries,
        keys and values of each attention).
      clip_outliers: multiple of their RMS to which operands of the chosen matmuls are
        clipped before the cast; None: no clipping.
      hadamard: size, a power of two, of the groups of channels along the contracted
        axis. Both operands of the chosen matmuls are multiplied in these groups by one
        random orthogonal matrix before the cast; None: no transform.
      amax_history: number of steps in the amax histories of delayed scaling.
      wide_ends: the shares of the first and of the last blocks, each rounded up to
        whole blocks, whose chosen matmuls stay in `compute`; null: none.
      four_over_six: NVFP4 blocks take the better of two scales; null: false.
      attention: the format of attention's operands in all seven products: e4m3; None:
        `compute`. With `simulate` it is simulated on GPUs, too.
    """

    compute: ComputeFormat
    forward: Format | None
    backward: Format | None
    backward_e4m3: tuple[str, ...] | None
    simulate: bool
    fp8_modules: tuple[str, ...]
    exclude: tuple[str, ...]
    scaling: str
    weights: ComputeFormat
    weights_rounding: Literal["nearest", "stochastic", "kahan"]
    weight_grad: StorageFormat
    mu: StorageFormat
    nu: StorageFormat
    moments_rounding: Literal["auto", "nearest", "stochastic"]
    update: Literal["fp32", "propagate"]
    rescale_grads: Annotated[tuple[str, ...], RESCALED_PLACES]
    # A bound of one RMS clips a third of normally distributed numbers.
    clip_outliers: Annotated[float, at_least(1)] | None
    hadamard: Annotated[int, at_least(2), at_most(256), POWER_OF_TWO] | None
    amax_history: Positive
    wide_ends: Annotated[tuple[Share, ...], TWO_SHARES] | None
    four_over_six: bool | None
    attention: Literal["e4m3"] | None

    @property
    def in_fp8(self) -> bool:
        """Return whether matmuls are chosen that run in FP8 or FP4 kernels, rather than
        simulate them in FP32.
        """
        return self.forward is not None and not self.simulate

    @property
    def has_fp8_attention(self) -> bool:
        """Return whether attention multiplies in FP8 rather than simulate it."""
        return self.attention is not None and not self.simulate
