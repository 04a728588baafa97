"""Mistral's sizes and choices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.bounds import Positive
from trainer.models.config_values import whole_number
from trainer.models.llama.config_json import ConfigFormat
from trainer.models.llama.spec import LlamaSpec


@dataclass(frozen=True)
class MistralSpec(LlamaSpec):
    """A Mistral's sizes and choices: those of Llama, and a window.

    Jiang et al. 2023, "Mistral 7B" (arXiv 2310.06825).

    Attributes:
      window: the number of keys that a query sees, its own included; None: all.
    """

    config_format = ConfigFormat(
        "mistral",
        "MistralForCausalLM",
        {"hidden_act": "silu"},
        {
            # A file that leaves the window out has this one. Later Mistrals have null,
            # for none.
            "sliding_window": 4096,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
        window="all",
    )

    window: Positive | None = None

    @property
    def attention_window(self) -> int | None:
        """See `LlamaSpec`."""
        return self.window

    @classmethod
    def checkpoint_fields(cls) -> tuple[str, ...]:
        """See `family.Spec`."""
        return (*super().checkpoint_fields(), "window")

    @classmethod
    def extra_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `LlamaSpec`."""
        # `check_layers` has checked that all layers are of one kind.
        kinds = config.get("layer_types") or ["sliding_attention"]
        if config["sliding_window"] is None or "sliding_attention" not in kinds:
            return {"window": None}
        return {"window": whole_number(config, "sliding_window")}

    def extra_config(self) -> dict[str, Any]:
        """See `LlamaSpec`."""
        # Null is written, too: without the key transformers takes 4096.
        return {"sliding_window": self.window}
