"""The config.json of Llama, and of families that are nearly Llama."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.models.config_values import check_unquantized, number, truth, whole_number
from trainer.models.fp8_checkpoints import Fp8Weights
from trainer.models.llama.rope import rope_of, rope_to_config

if TYPE_CHECKING:
    from trainer.models.llama.spec import LlamaSpec


@dataclass(frozen=True)
class ConfigJson:
    """What the config.json of a family's weights says beside the sizes.

    Attributes:
      model_type: the family, as transformers names it.
      architecture: transformers' class.
      fixed: the values that keys must have, where they are there, for this model to
        compute the same function; they are written.
      defaults: transformers' values of keys that are not there.
      modules: names of modules in the weights, where they are not Llama's.
    """

    model_type: str
    architecture: str
    fixed: Mapping[str, Any]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)


# required integers of a config.json, and their names in LlamaSpec
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "d_mlp",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}


def fields_of(given: Mapping[str, Any], form: ConfigJson) -> dict[str, Any]:
    """Return the fields of `LlamaSpec` of a config.json; see `LlamaSpec.of_config`."""
    # The base of the rotary positions has two places.
    defaults = dict(form.defaults)
    default_theta = defaults.pop("rope_theta", 10_000.0)
    config = {**defaults, **given}
    if config.get("hidden_act") == "swish":  # transformers' other name of it
        config["hidden_act"] = "silu"
    required = {"model_type": form.model_type, "is_causal": True, **form.fixed}
    required.pop("use_sliding_window", None)  # see `check_layers`
    for key, valid in required.items():
        if config.get(key, valid) != valid:
            raise UserError(f"{key}={config[key]!r} is not supported; valid: {valid!r}")
    Fp8Weights.of_config(config)  # another quantization is refused
    check_unquantized(config, ["quantization", "compression_config"])
    # without a head of its own, which a tied model does not need
    headless = form.architecture.replace("ForCausalLM", "Model")
    if config.get("architectures") not in (None, [], [form.architecture], [headless]):
        raise UserError(
            f"architectures={config['architectures']!r} is not supported; valid:"
            f" {[form.architecture]!r}"
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
    check_layers(config, form, sizes["n_layer"])
    theta, scaling = rope_of(config, default_theta)
    return {
        **sizes,
        "context": whole_number(config, "max_position_embeddings", 2048),
        "n_kv_head": whole_number(config, "num_key_value_heads", heads),
        "head_dim": head_dim,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": number(config, "rms_norm_eps", 1e-6),
        "tied": truth(config, "tie_word_embeddings", default=False),
    }


def check_layers(config: Mapping[str, Any], form: ConfigJson, layers: int) -> None:
    """Raise UserError for `layer_types` or a window that is not full attention."""
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise UserError(
                f"layer_types: expected a list of num_hidden_layers={layers} entries"
            )
        # Mistral's window is that of all layers.
        is_mistral = form.model_type == "mistral"
        is_sliding = is_mistral and "sliding_attention" in kinds
        kind = "sliding_attention" if is_sliding else "full_attention"
        others = {*map(str, kinds)} - {kind}
        if others:
            raise UserError(
                f"layer_types with {min(others)!r} is not supported; choose weights"
                f" whose layers are all {kind!r}"
            )
    elif config.get("use_sliding_window") and "use_sliding_window" in form.fixed:
        window, first = config.get("sliding_window"), 0
        if "max_window_layers" in form.defaults:
            first = int(number(config, "max_window_layers"))
        if window is not None and first < layers:
            raise UserError(
                f"use_sliding_window=True is not supported with sliding_window={window}"
                f" in {layers - first} of {layers} layers; for contexts of at most"
                f" {window} tokens set it to false in the file, which is the same"
            )


def config_of(spec: "LlamaSpec", dtype: str, eot: int | None) -> dict[str, Any]:
    """Return the content of config.json for weights of `dtype`.

    `eot` is the id of the end of a text, which starts and ends documents, or None.
    """
    return {
        "architectures": [spec.config_json.architecture],
        "model_type": spec.config_json.model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "intermediate_size": spec.mlp_width,
        "num_hidden_layers": spec.n_layer,
        "num_attention_heads": spec.n_head,
        "num_key_value_heads": spec.n_kv_head,
        "head_dim": spec.head_width,
        "max_position_embeddings": spec.context,
        "initializer_range": spec.init_std,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": rope_to_config(spec.rope_scaling),
        **spec.config_json.fixed,
        **spec.extra_config(),
        "tie_word_embeddings": spec.tied,
        "torch_dtype": dtype,
        "bos_token_id": eot,
        "eos_token_id": eot,
    }
