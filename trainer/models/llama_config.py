"""Reader of Llama's Hugging Face config.json, without importing JAX."""

from collections.abc import Mapping
from typing import Any

from trainer.errors import UserError
from trainer.models.llama_spec import LlamaSpec, RopeScaling

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
