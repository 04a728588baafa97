"""What a Hugging Face config.json says of a Llama. Importing it does not import JAX."""

from collections.abc import Mapping
from typing import Any

from trainer.errors import UserError
from trainer.models.llama_spec import LlamaSpec, RopeScaling

# What a configuration must say, where it says it, for this model to compute the same
# function.
REQUIRED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "architectures": (["LlamaForCausalLM"], None),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "quantization_config": (None,),
}
# Integers of a configuration that must be there, and what they are called here.
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
    """Sizes and choices that a configuration says; what is absent is what transformers
    takes then.
    """
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
    theta, scaling = rope_of(config)
    return LlamaSpec(
        **sizes,
        context=whole_number(config, "max_position_embeddings", 2048),
        n_kv_head=whole_number(config, "num_key_value_heads", heads),
        head_dim=(
            None
            if head_dim in (None, width / heads)
            else whole_number(config, "head_dim")
        ),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def whole_number(
    tree: Mapping[str, Any], key: str, otherwise: int | None = None
) -> int:
    """A positive integer of a configuration. UserError where there is none and nothing
    else holds.
    """
    found = tree.get(key)
    found = otherwise if found is None else found
    if type(found) is not int or found < 1:
        raise UserError(f"{key}={found!r}: expected a whole number, at least 1")
    return found


def number(tree: Mapping[str, Any], key: str, otherwise: float | None = None) -> float:
    """A number of a configuration, likewise."""
    found = tree.get(key, otherwise)
    if type(found) not in (int, float):
        raise UserError(f"{key}={found!r}: expected a number")
    return float(found)


def rope_of(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary positions: `rope_theta` and `rope_scaling`, or
    both as `rope_parameters`.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"rope_scaling={rope!r}: expected an object")
    said = {**config, **rope}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(
            f"rope_type={kind!r} is not supported; valid: 'default', 'llama3'"
        )
    if said.get("partial_rotary_factor") not in (None, 1):
        raise UserError(
            f"partial_rotary_factor={said['partial_rotary_factor']} is not supported;"
            " valid: 1"
        )
    theta = number(said, "rope_theta", 10_000.0)
    if kind == "default":
        return theta, None
    fields: dict[str, Any] = {
        ours: number(rope, key) for key, ours in ROPE_SCALING.items()
    }
    return theta, RopeScaling(
        **fields | {"original_context": int(fields["original_context"])}
    )
