"""Llama's sizes and choices, validated."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from trainer.bounds import Layers, Natural, OneOf, Positive, check_fields, more_than
from trainer.errors import UserError
from trainer.models.choices import REMAT_MODES, DecoderSpec
from trainer.models.llama.config_json import ConfigFormat, fields_from_config
from trainer.models.llama.rope import RopeScaling


@dataclass(frozen=True)
class LlamaSpec(DecoderSpec):
    """A Llama's sizes and choices.

    The defaults are for programs; `trainer/configs/base/llama.yaml` has the same for
    users.

    Attributes:
      vocab_size: the number of token ids; tables and logits have `padded_vocab` rows.
      context: the longest sequence, in tokens. No parameter depends on it.
      n_layer: blocks.
      n_head: heads of queries.
      n_kv_head: heads of keys and values, each of which serves `n_head / n_kv_head`
          heads of queries.
      d_model: D.
      head_dim: K; None: `d_model / n_head`.
      mlp: swiglu (two projections D -> F, their gated product -> D), or smooth_swiglu
        (the same function; hidden channels are rescaled to similar amax before they are
        rounded).
      d_mlp: F; None: 8/3 D rounded up to a multiple of 64.
      rope_theta: the base of the rotary frequencies.
      rope_scaling: the scaling for a longer context; None: no scaling.
      norm_eps: added to the mean square that a norm divides by.
      tied: whether the head is the token table, or a separate parameter.
      scan_layers: as in GPT2Spec.
      remat: as in GPT2Spec.
      keep_fp8_weights: as in GPT2Spec.
      loss_logits: as in GPT2Spec.
      init_std: the standard deviation of initial weights; divided by sqrt(2 L) for
        projections into the residual stream.
      align_channels: as in GPT2Spec.
      align_gain: as in GPT2Spec.

    Families that are nearly Llama inherit from it, and override these class variables:
      config_format: the format of their config.json.
      qkv_bias: whether queries, keys and values have biases.
      qk_norm: normalization of queries and keys before they are rotated: of each
        "head" alone, or of all heads of the "layer" together; None: there is none.
      norms: "before" the branches, or "after" them.
    """

    config_format: ClassVar[ConfigFormat] = ConfigFormat(
        "llama",
        "LlamaForCausalLM",
        {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    )
    # Class variables: a family has them, and no key of the configuration sets them.
    qkv_bias: ClassVar[bool] = False
    qk_norm: ClassVar[Literal["head", "layer"] | None] = None
    norms: ClassVar[Literal["before", "after"]] = "before"

    vocab_size: Positive
    context: Positive = 2048
    # The sizes of SmolLM2 135M.
    n_layer: Layers = 30
    n_head: Positive = 9
    n_kv_head: Positive = 3
    d_model: Positive = 576
    head_dim: Positive | None = None
    mlp: Literal["swiglu", "smooth_swiglu"] = "swiglu"
    d_mlp: Positive | None = None
    rope_theta: Annotated[float, more_than(0, ", such as 10000")] = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: Annotated[float, more_than(0, ", such as 1e-5")] = 1e-5
    tied: bool = True
    scan_layers: bool = False
    remat: Annotated[str, OneOf(REMAT_MODES)] = "none"
    keep_fp8_weights: bool = True
    loss_logits: Literal["auto", "compute", "float32"] | None = "auto"
    init_std: Annotated[float, more_than(0, ", such as 0.02")] = 0.02
    align_channels: Natural = 0
    align_gain: Annotated[float, more_than(0, ", such as 64")] = 1.0

    def __post_init__(self) -> None:
        """Raise UserError for sizes that cannot be built."""
        check_fields(self, "model.")
        if self.head_dim is None and self.d_model % self.n_head:
            raise UserError(
                f"model.d_model={self.d_model} is not a multiple of"
                f" model.n_head={self.n_head}; change one of them, or set"
                " model.head_dim"
            )
        # Each head of keys and values serves the same number of query heads.
        if self.n_head % self.n_kv_head:
            raise UserError(
                f"model.n_head={self.n_head} is not a multiple of"
                f" model.n_kv_head={self.n_kv_head}; change one of them"
            )
        if self.head_width % 2:
            raise UserError(
                f"model.head_dim={self.head_width}: rotary positions turn pairs of"
                " channels; expected an even one"
            )
        self.check_align_channels()

    @property
    def dropout(self) -> float:
        """The dropout rate: 0."""
        return 0.0

    @property
    def head_width(self) -> int:
        """Width of a head, K."""
        if self.head_dim is None:
            return self.d_model // self.n_head
        return self.head_dim

    @property
    def attention_window(self) -> int | None:
        """The number of keys that a query sees, its own included; None: all."""
        return None

    @property
    def rope_layers(self) -> tuple[bool, ...] | None:
        """A flag for each layer: it has rotary positions; None: all have them."""
        return None

    @classmethod
    def checkpoint_fields(cls) -> tuple[str, ...]:
        """See `family.Spec`."""
        return (
            "n_layer", "n_head", "n_kv_head", "d_model", "head_dim", "context",
            "vocab_size", "d_mlp", "mlp", "rope_theta", "rope_scaling", "norm_eps",
            "tied",
        )  # fmt: skip

    @classmethod
    def fields_from_huggingface(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `family.Spec`."""
        # By the spec, so that bounds are checked and nested settings are plain
        # dictionaries.
        fields = dataclasses.asdict(cls.from_config(config))
        return {name: fields[name] for name in cls.checkpoint_fields()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the spec of a config.json, with transformers' defaults.

        Raises:
          UserError: a key is missing or damaged, or the model is a variant that is not
            implemented.
        """
        # A null stays: Mistral's sliding_window=null means no window, not the default.
        config = {**cls.config_format.defaults, **config}
        return cls(
            **fields_from_config(config, cls.config_format), **cls.extra_fields(config)
        )

    @classmethod
    def extra_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return, from a config.json, the fields that this family adds to LlamaSpec."""
        return {}

    def extra_config(self) -> dict[str, Any]:
        """Return the config.json keys of the fields that this family adds."""
        return {}

    def architecture(self) -> dict[str, Any]:
        """See `family.Spec`. Not all fields show in the parameters' shapes."""
        fields = dataclasses.asdict(self)
        # A default and the same size written out are one architecture.
        computed = {"d_mlp": self.mlp_width, "head_dim": self.head_width}
        return {name: fields[name] for name in self.checkpoint_fields()} | computed

    def is_compatible(self, name: str, value: Any) -> bool:
        """See `family.Spec`."""
        if name == "rope_scaling" and isinstance(value, Mapping):
            # Checkpoints of earlier versions have fewer keys.
            value = {**dataclasses.asdict(RopeScaling(factor=1)), **value}
        return super().is_compatible(name, value)
