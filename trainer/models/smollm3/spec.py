"""SmolLM3's sizes and choices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.bounds import Natural
from trainer.errors import UserError
from trainer.models.config_values import whole_number
from trainer.models.llama.config_json import ConfigFormat
from trainer.models.llama.spec import LlamaSpec


@dataclass(frozen=True)
class SmolLM3Spec(LlamaSpec):
    """A SmolLM3's sizes and choices: those of Llama, and layers without positions.

    Bakouch et al. 2025, "SmolLM3: smol, multilingual, long-context reasoner"; Yang et
    al. 2025, "RoPE to NoPE and back again" (arXiv 2501.18795).

    Attributes:
      unrotated_every: n: layers n, 2n, ... have no rotary positions; 0: all layers have
        them.
    """

    config_format = ConfigFormat(
        "smollm3",
        "SmolLM3ForCausalLM",
        {
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        },
        {
            "no_rope_layer_interval": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            # transformers' default is true here, and false for Llama and the other
            # families that inherit from it.
            "tie_word_embeddings": True,
        },
        window="switched",
        rope_theta=2_000_000.0,
    )

    unrotated_every: Natural = 4

    @property
    def rope_layers(self) -> tuple[bool, ...] | None:
        """See `LlamaSpec`."""
        every = self.unrotated_every
        if every:
            return _rope_layers(self.n_layer, every)
        return None

    @classmethod
    def checkpoint_fields(cls) -> tuple[str, ...]:
        """See `family.Spec`."""
        return (*super().checkpoint_fields(), "unrotated_every")

    @classmethod
    def extra_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `LlamaSpec`; only every n-th layer may lack rotary positions."""
        layers = whole_number(config, "num_hidden_layers")
        # Despite the key's name, 1 stands for a layer with rotary positions.
        flags = config.get("no_rope_layers")
        interval = whole_number(config, "no_rope_layer_interval")
        if flags is None:
            return {"unrotated_every": interval}
        if not isinstance(flags, list) or len(flags) < layers:
            raise UserError(
                f"no_rope_layers is not a list of num_hidden_layers={layers} entries;"
                " valid: 1 for each layer with rotary positions, 0 for each without"
            )
        flags = flags[:layers]  # transformers ignores further entries
        # The list wins over the interval: also try the one that the list shows.
        interval_of_list = flags.index(0) + 1 if 0 in flags else 0
        for every in (interval, interval_of_list):
            if flags == [int(uses_rope) for uses_rope in _rope_layers(layers, every)]:
                return {"unrotated_every": every}
        raise UserError(
            f"no_rope_layers={flags} is not supported; valid: 1 for each of the"
            f" {layers} layers, except 0 for every n-th layer (n, 2n, ...)"
        )

    def extra_config(self) -> dict[str, Any]:
        """See `LlamaSpec`."""
        uses_rope = self.rope_layers or (True,) * self.n_layer
        return {
            "no_rope_layers": list(map(int, uses_rope)),
            # An interval is at least 1: one beyond the last layer leaves all layers
            # rotated.
            "no_rope_layer_interval": self.unrotated_every or self.n_layer + 1,
            "pad_token_id": None,  # transformers' default exceeds most vocabularies
        }


def _rope_layers(layers: int, every: int) -> tuple[bool, ...]:
    # Counted from 1, as transformers does: the first layer of each group is rotated.
    return tuple(every == 0 or (i + 1) % every != 0 for i in range(layers))
