"""Choices, sizes and checks that the specs of several families share."""

import dataclasses
import math
from typing import Any, Self

from trainer.errors import UserError

# The members of jax.checkpoint_policies that are policies; other members are functions
# that return policies.
REMAT_POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
)
REMAT_MODES = ("none", "elementwise", "block", *REMAT_POLICIES)

# MLPs that compute the same function, and differ only in roundings.
EQUIVALENT_MLPS = {"swiglu", "smooth_swiglu"}


class DecoderSpec:
    """The base of the specs of GPT-2 and Llama; see `family.Spec`."""

    vocab_size: int
    n_layer: int
    d_model: int
    d_mlp: int | None
    mlp: str
    init_std: float
    align_channels: int

    @property
    def padded_vocab(self) -> int:
        """Rows of token table and head: `vocab_size` rounded up to a multiple of 64.

        For example 50304 for 50257.
        """
        # GPU matmuls want multiples of 16: 50257 columns cost a kernel that pads and
        # one that slices.
        return -(-self.vocab_size // 64) * 64

    @property
    def mlp_width(self) -> int:
        """Number of hidden channels, F."""
        if self.d_mlp is not None:
            return self.d_mlp
        if self.mlp == "gelu":
            return 4 * self.d_model
        # Three matrices of 8/3 D have as many parameters as GELU's two of 4 D.
        return math.ceil(8 * self.d_model / 3 / 64) * 64

    @property
    def residual_stddev(self) -> float:
        """Initial standard deviation of projections into the residual stream."""
        # 2 L branches add up: each starts with 1 / (2 L) of the variance.
        return self.init_std / math.sqrt(2 * self.n_layer)

    def check_align_channels(self) -> None:
        """Raise UserError for more aligned channels than the MLP has."""
        if self.align_channels > self.mlp_width:
            raise UserError(
                f"model.align_channels={self.align_channels}: expected at most the"
                f" MLP's {self.mlp_width}"
            )

    def architecture(self) -> dict[str, Any]:
        """See `family.Spec`."""
        raise NotImplementedError

    def is_compatible(self, name: str, value: Any) -> bool:
        """See `family.Spec`: both kinds of gated MLP are one function."""
        current = self.architecture()[name]
        is_same_mlp = name == "mlp" and {current, value} == EQUIVALENT_MLPS
        return bool(current == value or is_same_mlp)

    def for_sampling(self) -> Self:
        """See `family.Spec`."""
        if self.mlp != "smooth_swiglu":
            return self
        # Divisors of a batch would make the roundings of a token depend on the others
        # in it.
        spec: Any = self
        unsmoothed: Self = dataclasses.replace(spec, mlp="swiglu")
        return unsmoothed
