"""GPT-2's sizes and choices, checked."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from trainer.bounds import (
    POWER_OF_TWO,
    Layers,
    Natural,
    OneOf,
    Positive,
    ShareBelow1,
    check_fields,
    more_than,
)
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.models.family import Family

# The members of jax.checkpoint_policies that are policies themselves; the others are
# functions that make one.
REMAT_POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
)
REMATS = ("none", "elementwise", "block", *REMAT_POLICIES)
ARCHITECTURE = ("n_layer", "n_head", "d_model", "context", "vocab_size", "d_mlp", "mlp")
# Fields, and Hugging Face's names of them.
HUGGING_FACE = {
    "n_layer": "n_layer",
    "n_head": "n_head",
    "d_model": "n_embd",
    "context": "n_positions",
    "vocab_size": "vocab_size",
}

SAME_MLP = {"swiglu", "smooth_swiglu"}  # the second is rounded otherwise


@dataclass(frozen=True)
class GPT2Spec:
    """A GPT-2's sizes and choices: the keys of the configuration's group `model` for
    this family.

    The defaults are for programs; `configs/base/gpt2.yaml` has the same for users.

    Attributes:
      vocab_size: of the tokenizer; tables and logits hold `padded_vocab` rows.
      context: the longest sequence, in tokens.
      mlp: gelu (D -> F -> D), swiglu (two projections D -> F, their gated product ->
        D), or smooth_swiglu (the same function with the hidden channels brought to one
        size before they are rounded).
      d_mlp: F; None: 4 D (gelu) or 8/3 D rounded up to a multiple of 64 (the others,
          the same number of parameters).
      dropout: rate on the embeddings and on each branch's output; fused attention has
          none inside.
      scan_layers: loop over stacked parameters instead of unrolling: compiles faster,
          moves more memory.
      remat: recompute in the backward pass: none, elementwise (norms and activations:
        what the linear layers take), block (whole blocks), or one of REMAT_POLICIES
        inside blocks. Under `scalify` what enters and leaves what is recomputed is then
        rounded there: the same numbers up to roundings.
      keep_fp8_weights: under `scalify`, 16-bit weights are cast to FP8 once for both
        passes, not once for each: fewer kernels and less memory traffic, and a byte
        more a weight, but in blocks that are recomputed. No number changes. Others are
        kept in any case: FP32 weights, those that are gathered in FP8 (`fsdp`), and
        without `scalify`.
      loss_logits: in which the logits of the loss are written and read. None: FP32.
        compute: the dtype of the matmuls, half the memory traffic; all that is computed
            of them is FP32.
      init_std: of the initial normal weights; those of the projections into the
          residual stream, over sqrt(2 L).
      value_gain: a power of two that the values are multiplied by, kernel and bias, and
        the attention's output kernel divided, where they are used: the function of the
        parameters is the same. The values are then a product of their own,
        `attn.c_value`. None: queries, keys and values are one product.
      align_channels: of the hidden channels of (smooth_)swiglu, the first so many start
        with one column for both branches: their product is nearly a square, and
        outlies.
      align_gain: how much larger than the others these columns start.
    """

    vocab_size: Positive
    context: Positive = 1024
    n_layer: Layers = 12
    n_head: Positive = 12
    d_model: Positive = 768
    mlp: Literal["gelu", "swiglu", "smooth_swiglu"] = "gelu"
    d_mlp: Positive | None = None
    dropout: ShareBelow1 = 0.0
    scan_layers: bool = False
    remat: Annotated[str, OneOf(REMATS)] = "none"
    keep_fp8_weights: bool = True
    loss_logits: Literal["compute"] | None = None
    init_std: Annotated[float, more_than(0, "; GPT-2's is 0.02")] = 0.02
    value_gain: Annotated[float, POWER_OF_TWO] | None = None
    align_channels: Natural = 0
    align_gain: Annotated[float, more_than(0, ", such as 64")] = 1.0

    def __post_init__(self) -> None:
        """Raise UserError for what cannot be built."""
        check_fields(self, "model.")
        if self.d_model % self.n_head:
            raise UserError(
                f"model.d_model={self.d_model} is not a multiple of"
                f" model.n_head={self.n_head}; change one of them"
            )
        if self.align_channels and self.mlp == "gelu":
            raise UserError(
                f"model.align_channels={self.align_channels}, but model.mlp=gelu has"
                " one branch; choose model.mlp=swiglu or smooth_swiglu"
            )
        if self.align_channels > self.mlp_width:
            raise UserError(
                f"model.align_channels={self.align_channels}: expected at most the"
                f" MLP's {self.mlp_width}"
            )

    @property
    def padded_vocab(self) -> int:
        """Rows of the token table: `vocab_size` rounded up to a multiple of 64, so
        50304 for 50257.
        """
        return -(-self.vocab_size // 64) * 64

    @property
    def mlp_width(self) -> int:
        """The number of hidden channels, F."""
        if self.d_mlp is not None:
            return self.d_mlp
        return (
            4 * self.d_model
            if self.mlp == "gelu"
            else math.ceil(8 * self.d_model / 3 / 64) * 64
        )

    @property
    def head_dim(self) -> int:
        """The width of a head, K."""
        return self.d_model // self.n_head

    @classmethod
    def family(cls) -> "Family":
        """GPT-2; its layers are imported here, so that a configuration can be read
        without JAX.
        """
        from trainer.models.gpt2_family import GPT2_FAMILY

        return GPT2_FAMILY

    @classmethod
    def deciding(cls) -> tuple[str, ...]:
        """The fields that decide which function parameters stand for."""
        return ARCHITECTURE

    @classmethod
    def keys_of_huggingface(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """What a Hugging Face config.json says of the `deciding` fields. KeyError where
        it does not.
        """
        theirs = {key: config[name] for key, name in HUGGING_FACE.items()}
        return theirs | {"d_mlp": config.get("n_inner"), "mlp": "gelu"}

    def architecture(self) -> dict[str, Any]:
        """The `deciding` fields as JSON values, all filled in; not all of it shows in
        the parameters' shapes.
        """
        return {name: getattr(self, name) for name in ARCHITECTURE} | {
            "d_mlp": self.mlp_width
        }

    def agrees(self, name: str, value: Any) -> bool:
        """See `family.Spec`: both kinds of gated MLP are one function."""
        ours = self.architecture()[name]
        return bool(ours == value or (name == "mlp" and {ours, value} == SAME_MLP))

    def folded(self) -> Self:
        """The same function of the same parameters, without what only serves to round
        it well.
        """
        return dataclasses.replace(
            self, mlp="swiglu" if self.mlp == "smooth_swiglu" else self.mlp
        )


def linear_sizes(spec: GPT2Spec) -> dict[str, tuple[int, int]]:
    """The linear layers inside the blocks: input and output width of each, by path,
    such as `h.3.mlp.c_fc`.

    Scanned layers, which share one program, are `h.*.mlp.c_fc`.
    """
    d, f = spec.d_model, spec.mlp_width
    layers = ["*"] if spec.scan_layers else [str(i) for i in range(spec.n_layer)]
    sizes = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d)}
    if spec.value_gain is not None:
        sizes |= {"attn.c_attn": (d, 2 * d), "attn.c_value": (d, d)}
    sizes |= {} if spec.mlp == "gelu" else {"mlp.c_gate": (d, f)}
    sizes |= {"mlp.c_fc": (d, f), "mlp.c_proj": (f, d)}
    return {f"h.{i}.{name}": size for i in layers for name, size in sizes.items()}


def forward_flops_per_token(spec: GPT2Spec) -> int:
    """FLOPs of one token's forward pass at the full context T, counted as `flops` says.

    Matmuls with weights: 2 L (4 D^2 + m D F) with m = 2 (gelu) or 3 (swiglu);
    attention's scores and weighted sum: 4 L T D; tied head: 2 D V without padding.
    """
    D, F = spec.d_model, spec.mlp_width
    mlp_matrices = 2 if spec.mlp == "gelu" else 3
    weights = spec.n_layer * (4 * D * D + mlp_matrices * D * F)
    scores = 4 * spec.n_layer * spec.context * D
    return 2 * weights + scores + 2 * D * spec.vocab_size
