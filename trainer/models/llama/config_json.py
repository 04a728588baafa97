"""The config.json of Llama, and of families that are nearly Llama."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from trainer.errors import UserError
from trainer.models.config_values import (
    boolean,
    check_supported,
    number,
    whole_number,
)
from trainer.models.fp8_checkpoints import check_quantization
from trainer.models.llama.rope import rope_of, rope_to_config

if TYPE_CHECKING:
    from trainer.models.llama.spec import LlamaSpec


Window = Literal["none", "all", "switched", "switched_after_first_layers"]


@dataclass(frozen=True)
class ConfigFormat:
    """The fixed keys and defaults of a family's config.json.

    Attributes:
      model_type: transformers' name of the family.
      class_name: transformers' class of the model.
      fixed: the only valid values of keys that a file may have; exports write them.
        With other values this model would not compute the same function.
      defaults: transformers' defaults of keys that a file may leave out.
      rope_theta: transformers' default of the base of the rotary frequencies.
      modules: our names of modules -> their names in the weights, where these differ
        from Llama's.
      window: the layers with a sliding window: "none", or "all", which is supported.
        "switched": all of them if the file has use_sliding_window=true.
        "switched_after_first_layers": then only those after the first
        max_window_layers.
    """

    model_type: str
    class_name: str
    fixed: Mapping[str, Any]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    window: Window = "none"
    rope_theta: float = 10_000.0

    @property
    def has_window_switch(self) -> bool:
        """Return whether use_sliding_window decides if there are windows."""
        return self.window.startswith("switched")


# Required integers of a config.json -> their names in LlamaSpec.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "d_mlp",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}


def fields_from_config(
    config: Mapping[str, Any], config_format: ConfigFormat
) -> dict[str, Any]:
    """Return LlamaSpec's fields of a config.json; see `LlamaSpec.from_config`."""
    fixed = {
        "model_type": config_format.model_type,
        "is_causal": True,
        **config_format.fixed,
    }
    supported: dict[str, tuple[Any, ...]] = {k: (value,) for k, value in fixed.items()}
    # transformers has two names of the function.
    supported["hidden_act"] = ("silu", "swish")
    check_supported(config, supported)
    check_quantization(config)
    check_architectures(config, config_format.class_name)
    # Without defaults, unlike transformers: a file without its sizes is damaged.
    sizes: dict[str, Any] = {
        field_name: whole_number(config, key) for key, field_name in SIZES.items()
    }
    heads, width = sizes["n_head"], sizes["d_model"]
    head_dim = config.get("head_dim")
    # A quotient, not `//`: a width that the heads do not divide needs its head_dim.
    if head_dim in (None, width / heads):
        head_dim = None
    else:
        head_dim = whole_number(config, "head_dim")
    check_layers(config, config_format, sizes["n_layer"])
    theta, scaling = rope_of(config, config_format.rope_theta)
    return {
        **sizes,
        "context": whole_number(config, "max_position_embeddings", 2048),
        "n_kv_head": whole_number(config, "num_key_value_heads", heads),
        "head_dim": head_dim,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": number(config, "rms_norm_eps", 1e-6),
        "tied": boolean(config, "tie_word_embeddings", default=False),
    }


def check_architectures(config: Mapping[str, Any], class_name: str) -> None:
    """Raise UserError for another class of transformers than `class_name`."""
    # A tied checkpoint may be saved without its head, as `LlamaModel`.
    headless = class_name.replace("ForCausalLM", "Model")
    classes = config.get("architectures") or []
    # Early conversions wrote LLaMAForCausalLM.
    valid: list[list[str]] = [[], [class_name.lower()], [headless.lower()]]
    if not isinstance(classes, list) or [str(c).lower() for c in classes] not in valid:
        raise UserError(
            f"architectures={classes!r} is not supported; valid: {[class_name]!r}"
        )


def check_layers(
    config: Mapping[str, Any], config_format: ConfigFormat, layers: int
) -> None:
    """Raise UserError for unsupported `layer_types` or sliding windows."""
    kinds = config.get("layer_types")
    # `layer_types` counts where it is given, as in transformers: the other keys are
    # what it is derived from.
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise UserError(
                f"layer_types: expected a list of num_hidden_layers={layers} entries"
            )
        # A mixture of windows and full attention would need a model with both.
        is_sliding = config_format.window == "all" and "sliding_attention" in kinds
        supported = "sliding_attention" if is_sliding else "full_attention"
        unsupported = {*map(str, kinds)} - {supported}
        if unsupported:
            raise UserError(
                f"layer_types with {min(unsupported)!r} is not supported; choose"
                f" weights whose layers are all {supported!r}"
            )
        return
    if config_format.has_window_switch and config.get("use_sliding_window"):
        window, full_attention_layers = config.get("sliding_window"), 0
        if config_format.window == "switched_after_first_layers":
            full_attention_layers = int(number(config, "max_window_layers"))
        # A window in none of the layers changes nothing.
        if window is not None and full_attention_layers < layers:
            window_layers = layers - full_attention_layers
            raise UserError(
                f"use_sliding_window=True is not supported with sliding_window={window}"
                f" in {window_layers} of {layers} layers; for contexts of at most"
                f" {window} tokens set it to false in the file, which is the same"
            )


def config_from_spec(spec: "LlamaSpec", dtype: str, eot: int | None) -> dict[str, Any]:
    """Return the content of config.json for weights of `dtype`.

    `eot` is the end-of-text id, which starts and ends documents, or None.
    """
    no_window = {"use_sliding_window": False}
    return {
        "architectures": [spec.config_format.class_name],
        "model_type": spec.config_format.model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "intermediate_size": spec.mlp_width,
        "num_hidden_layers": spec.n_layer,
        "num_attention_heads": spec.n_head,
        "num_key_value_heads": spec.n_kv_head,
        # Also where it is the quotient: Qwen3's default is 128.
        "head_dim": spec.head_width,
        "max_position_embeddings": spec.context,
        "initializer_range": spec.init_std,
        "rms_norm_eps": spec.norm_eps,
        # Keys of transformers 4, which version 5 reads, too; so is `torch_dtype`.
        "rope_theta": spec.rope_theta,
        "rope_scaling": rope_to_config(spec.rope_scaling),
        **spec.config_format.fixed,
        **(no_window if spec.config_format.has_window_switch else {}),
        **spec.extra_config(),
        "tie_word_embeddings": spec.tied,
        "torch_dtype": dtype,
        "bos_token_id": eot,
        "eos_token_id": eot,
    }
