"""Llama's sizes and choices, validated."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from trainer.bounds import Layers, Natural, OneOf, Positive, check_fields, more_than
from trainer.errors import UserError
from trainer.models.choices import REMATS, SAME_MLP

ARCHITECTURE = (
    "n_layer", "n_head", "n_kv_head", "d_model", "head_dim", "context", "vocab_size",
    "d_mlp", "mlp",
    "rope_theta", "rope_scaling", "norm_eps", "tied",
)  # fmt: skip


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of rotary positions for a longer context.

    Slow rotations become slower, fast ones stay.

    Attributes:
      factor: divides the frequencies whose wavelength is longer than
          `original_context / low_freq_factor`.
      low_freq_factor: see `factor`.
      high_freq_factor: wavelengths shorter than `original_context / high_freq_factor`
        stay; between the two, the frequency is interpolated.
      original_context: tokens of the model's earlier context.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        """Raise UserError for invalid factors."""
        if (
            self.factor <= 0
            or self.original_context < 1
            or not 0 < self.low_freq_factor < self.high_freq_factor
        ):
            raise UserError(
                f"rope_scaling: factor={self.factor},"
                f" low_freq_factor={self.low_freq_factor},"
                f" high_freq_factor={self.high_freq_factor},"
                f" original_context={self.original_context}: expected numbers above 0,"
                " and low_freq_factor below high_freq_factor, such as 8, 1, 4, 8192"
            )


@dataclass(frozen=True)
class LlamaSpec:
    """A Llama's sizes and choices.

    The defaults are for programs; `trainer/configs/base/llama.yaml` has the same for
    users.

    Attributes:
      vocab_size: of the tokenizer; tables and logits have `padded_vocab` rows.
      context: the longest sequence, in tokens. No parameter depends on it.
      n_layer: blocks.
      n_head: heads of queries.
      n_kv_head: heads of keys and values, each of which serves `n_head / n_kv_head`
          heads of queries.
      d_model: D.
      head_dim: K; None: `d_model / n_head`.
      mlp: swiglu (two projections D -> F, their gated product -> D), or smooth_swiglu
        (the same function with the hidden channels brought to one size before they are
        rounded).
      d_mlp: F; None: 8/3 D rounded up to a multiple of 64.
      rope_theta: the base of the rotary frequencies.
      rope_scaling: for a longer context; None: no scaling.
      norm_eps: added to the mean square that a norm divides by.
      tied: whether the head is the token table, or a separate parameter.
      scan_layers: as in GPT2Spec.
      remat: as in GPT2Spec.
      keep_fp8_weights: as in GPT2Spec.
      loss_logits: as in GPT2Spec.
      init_std: of the initial normal weights; divided by sqrt(2 L) for projections into
          the residual stream.
      align_channels: as in GPT2Spec.
      align_gain: as in GPT2Spec.
    """

    vocab_size: Positive
    context: Positive = 2048
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
    remat: Annotated[str, OneOf(REMATS)] = "none"
    keep_fp8_weights: bool = True
    loss_logits: Literal["compute"] | None = None
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
        if self.align_channels > self.mlp_width:
            raise UserError(
                f"model.align_channels={self.align_channels}: expected at most the"
                f" MLP's {self.mlp_width}"
            )

    @property
    def padded_vocab(self) -> int:
        """Rows of token table and head: `vocab_size` rounded up to a multiple of 64."""
        return -(-self.vocab_size // 64) * 64

    @property
    def mlp_width(self) -> int:
        """Number of hidden channels, F."""
        if self.d_mlp is not None:
            return self.d_mlp
        return math.ceil(8 * self.d_model / 3 / 64) * 64

    @property
    def dropout(self) -> float:
        """The dropout rate: 0."""
        return 0.0

    @property
    def head_width(self) -> int:
        """Width of a head, K."""
        return self.d_model // self.n_head if self.head_dim is None else self.head_dim

    @classmethod
    def checkpoint_fields(cls) -> tuple[str, ...]:
        """See `family.Spec`."""
        return ARCHITECTURE

    @classmethod
    def keys_of_huggingface(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `family.Spec`."""
        fields = dataclasses.asdict(spec_of(config))
        return {name: fields[name] for name in ARCHITECTURE}

    def architecture(self) -> dict[str, Any]:
        """See `family.Spec`. Not all fields show in the parameters' shapes."""
        fields = dataclasses.asdict(self)
        filled = {"d_mlp": self.mlp_width, "head_dim": self.head_width}
        return {name: fields[name] for name in ARCHITECTURE} | filled

    def is_compatible(self, name: str, value: Any) -> bool:
        """See `family.Spec`: both kinds of gated MLP are one function."""
        ours = self.architecture()[name]
        return bool(ours == value or (name == "mlp" and {ours, value} == SAME_MLP))

    def for_sampling(self) -> Self:
        """See `family.Spec`."""
        return dataclasses.replace(self, mlp="swiglu")


def linear_sizes(spec: LlamaSpec) -> dict[str, tuple[int, int]]:
    """Return input and output width of each linear layer inside the blocks, by path.

    A path is `h.3.mlp.up_proj`, or `h.*.mlp.up_proj` for scanned layers.
    """
    d, f = spec.d_model, spec.mlp_width
    q, kv = spec.n_head * spec.head_width, spec.n_kv_head * spec.head_width
    sizes = {
        "attn.q_proj": (d, q),
        "attn.k_proj": (d, kv),
        "attn.v_proj": (d, kv),
        "attn.o_proj": (q, d),
    }
    sizes |= {"mlp.gate_proj": (d, f), "mlp.up_proj": (d, f), "mlp.down_proj": (f, d)}
    layers = ["*"] if spec.scan_layers else [str(i) for i in range(spec.n_layer)]
    return {f"h.{i}.{name}": size for i in layers for name, size in sizes.items()}


def forward_flops_per_token(spec: LlamaSpec) -> int:
    """Return the FLOPs of one token's forward pass at the full context; see `flops`."""
    sizes = linear_sizes(dataclasses.replace(spec, scan_layers=True))
    weights = spec.n_layer * sum(inputs * outputs for inputs, outputs in sizes.values())
    scores = 4 * spec.n_layer * spec.context * spec.n_head * spec.head_width
    return 2 * weights + scores + 2 * spec.d_model * spec.vocab_size


# The values that a config.json may have, where it has the key, for this model to
# compute the same function.
REQUIRED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "architectures": (["LlamaForCausalLM"], None),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "quantization_config": (None,),
}
# required integers of a config.json, and their names in LlamaSpec
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "d_mlp",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}
ROPE_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context",
}


def spec_of(config: Mapping[str, Any]) -> LlamaSpec:
    """Return the spec of a config.json, with transformers' defaults."""
    for key, valid in REQUIRED.items():
        if key in config and config[key] not in valid:
            raise UserError(
                f"{key}={config[key]!r} is not supported; valid: {valid[0]!r}"
            )
    sizes: dict[str, Any] = {
        ours: whole_number(config, key) for key, ours in SIZES.items()
    }
    heads, width = sizes["n_head"], sizes["d_model"]
    head_dim = config.get("head_dim")
    if head_dim in (None, width / heads):
        head_dim = None
    else:
        head_dim = whole_number(config, "head_dim")
    theta, scaling = rope_of(config)
    return LlamaSpec(
        **sizes,
        context=whole_number(config, "max_position_embeddings", 2048),
        n_kv_head=whole_number(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def whole_number(tree: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer of a configuration, or raise UserError."""
    value = tree.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:  # a bool is an int, but not a number
        raise UserError(f"{key}={value!r}: expected a whole number, at least 1")
    return value


def number(tree: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a number of a configuration, or raise UserError."""
    value = tree.get(key, default)
    if type(value) not in (int, float):
        raise UserError(f"{key}={value!r}: expected a number")
    return float(value)


def rope_of(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return base and scaling of the rotary positions.

    They are in `rope_theta` and `rope_scaling`, or both in `rope_parameters`.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"rope_scaling={rope!r}: expected an object")
    settings = {**config, **rope}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(
            f"rope_type={kind!r} is not supported; valid: 'default', 'llama3'"
        )
    partial = settings.get("partial_rotary_factor")
    if partial not in (None, 1):
        raise UserError(f"partial_rotary_factor={partial} is not supported; valid: 1")
    theta = number(settings, "rope_theta", 10_000.0)
    if kind == "default":
        return theta, None
    fields: dict[str, Any] = {
        ours: number(rope, key) for key, ours in ROPE_SCALING.items()
    }
    fields["original_context"] = int(fields["original_context"])
    return theta, RopeScaling(**fields)
