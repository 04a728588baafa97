"""GPT-2's sizes and choices, validated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

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
from trainer.models.choices import REMAT_MODES, DecoderSpec
from trainer.models.config_values import check_supported, whole_number
from trainer.models.fp8_checkpoints import check_quantization

# The keys of each field in a config.json: GPT-2's, and other names that transformers
# reads, or wrote.
CONFIG_KEYS = {
    "n_layer": ("n_layer", "num_hidden_layers"),
    "n_head": ("n_head", "num_attention_heads"),
    "d_model": ("n_embd", "hidden_size"),
    "context": ("n_positions", "max_position_embeddings", "n_ctx"),
    "vocab_size": ("vocab_size",),
}
# Other GPT-2s do not compute the same function.
SUPPORTED = {
    "model_type": ("gpt2",),
    # Three names of the tanh form.
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    # The epsilon of `scalify_core`'s layer norm.
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
    "add_cross_attention": (False,),
    "is_causal": (True,),
}
# transformers' values for keys that a config.json of `model_type` gpt2 leaves out
CONFIG_DEFAULTS = {
    "n_layer": 12,
    "n_head": 12,
    "d_model": 768,
    "context": 1024,
    "vocab_size": 50257,
}


@dataclass(frozen=True)
class GPT2Spec(DecoderSpec):
    """A GPT-2's sizes and choices: the configuration's group `model` for this family.

    The defaults are for programs; `trainer/configs/base/gpt2.yaml` has the same for
    users.

    Attributes:
      vocab_size: the number of token ids; tables and logits have `padded_vocab` rows.
      context: the longest sequence, in tokens.
      n_layer: blocks.
      n_head: heads.
      d_model: D.
      mlp: gelu (D -> F -> D), swiglu (two projections D -> F, their gated product ->
        D), or smooth_swiglu (the same function; hidden channels are rescaled to similar
        amax before they are rounded).
      d_mlp: F; None: 4 D (gelu) or 8/3 D rounded up to a multiple of 64 (the others,
          with the same number of parameters).
      dropout: rate on the embeddings and on each branch's output; fused attention has
          none inside.
      scan_layers: scan over stacked parameters instead of unrolling: compiles faster,
          moves more memory.
      remat: recompute in the backward pass: none, elementwise (norms and activations,
        the inputs of linear layers), block (full blocks), or one of REMAT_POLICIES
        inside blocks. Under `scalify` the inputs and outputs of a recomputed part are
        rounded, so numbers are the same up to roundings.
      keep_fp8_weights: under `scalify`, cast 16-bit weights to FP8 once for both passes
        instead of once for each: fewer kernels and less memory traffic, but a byte more
        per weight, except in recomputed blocks. No number changes. The cast is always
        kept for FP32 weights, for weights that are all-gathered in FP8
        (`parallel.fsdp`), and without `scalify`.
      loss_logits: the dtype of the loss's logits in memory. compute: that of the
        matmuls, with half the memory traffic; computations on them are FP32. auto:
        compute in training on GPUs, else float32. None is float32, as runs before
        "auto" saved it.
      init_std: the standard deviation of initial weights; divided by sqrt(2 L) for
        projections into the residual stream.
      value_gain: a power of two that multiplies the values, kernel and bias, and
        divides the attention's output kernel, where they are used. The function of the
        parameters is the same. The values are then a matmul of their own,
        `attn.c_value`. None: queries, keys and values are one matmul.
      align_channels: number of hidden channels of (smooth_)swiglu that start with the
        same column for both branches: their product is nearly a square, an outlier. For
        tests of narrow formats.
      align_gain: the factor by which these columns start larger than the others.
    """

    vocab_size: Positive
    context: Positive = 1024
    # The sizes of GPT-2's 124M.
    n_layer: Layers = 12
    n_head: Positive = 12
    d_model: Positive = 768
    mlp: Literal["gelu", "swiglu", "smooth_swiglu"] = "gelu"
    d_mlp: Positive | None = None
    dropout: ShareBelow1 = 0.0
    scan_layers: bool = False
    remat: Annotated[str, OneOf(REMAT_MODES)] = "none"
    keep_fp8_weights: bool = True
    loss_logits: Literal["auto", "compute", "float32"] | None = "auto"
    init_std: Annotated[float, more_than(0, "; GPT-2's is 0.02")] = 0.02
    value_gain: Annotated[float, POWER_OF_TWO] | None = None
    align_channels: Natural = 0
    align_gain: Annotated[float, more_than(0, ", such as 64")] = 1.0

    def __post_init__(self) -> None:
        """Raise UserError for sizes that cannot be built."""
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
        self.check_align_channels()

    @property
    def n_kv_head(self) -> int:
        """Heads of keys and values."""
        return self.n_head

    @property
    def head_width(self) -> int:
        """Width of a head, K."""
        return self.d_model // self.n_head

    @property
    def attention_window(self) -> None:
        """See `family.Spec`: a query sees all keys before it."""
        return None

    @classmethod
    def checkpoint_fields(cls) -> tuple[str, ...]:
        """See `family.Spec`."""
        return (
            "n_layer", "n_head", "d_model", "context", "vocab_size", "d_mlp", "mlp",
        )  # fmt: skip

    @classmethod
    def fields_from_huggingface(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `family.Spec`."""
        check_supported(config, SUPPORTED)
        check_quantization(config)
        # Without a model_type nothing says that these defaults are meant: all sizes are
        # required.
        defaults = CONFIG_DEFAULTS if config.get("model_type") == "gpt2" else {}
        fields = {
            name: size_from_config(config, keys, defaults.get(name))
            for name, keys in CONFIG_KEYS.items()
        }
        d_mlp = whole_number(config, "n_inner", 4 * fields["d_model"])
        is_default = d_mlp == 4 * fields["d_model"]
        return fields | {"d_mlp": None if is_default else d_mlp, "mlp": "gelu"}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the spec of a config.json; UserError for an unsupported variant."""
        return cls(**cls.fields_from_huggingface(config))

    def architecture(self) -> dict[str, Any]:
        """See `family.Spec`. Not all fields show in the parameters' shapes."""
        fields = {name: getattr(self, name) for name in self.checkpoint_fields()}
        return fields | {"d_mlp": self.mlp_width}


def size_from_config(
    config: Mapping[str, Any], keys: Sequence[str], default: int | None
) -> int:
    """Return a size in a config.json, which may have several of these keys.

    Raises:
      UserError: it is no positive integer, or two of the keys have different values.
    """
    present = [key for key in keys if config.get(key) is not None] or keys[:1]
    size = whole_number(config, present[0], default)
    for key in present[1:]:
        # transformers reads no `n_ctx`, which old files have beside `n_positions`.
        if key != "n_ctx" and config[key] != size:
            raise UserError(
                f"{present[0]}={size} and {key}={config[key]!r} contradict each other;"
                " leave one of them in"
            )
    return size
