"""Qwen3's sizes and choices."""

from dataclasses import dataclass

from trainer.models.llama.config_json import ConfigFormat
from trainer.models.llama.spec import LlamaSpec


@dataclass(frozen=True)
class Qwen3Spec(LlamaSpec):
    """A Qwen3's sizes and choices: those of Llama.

    Qwen Team 2025, "Qwen3 technical report" (arXiv 2505.09388).
    """

    config_format = ConfigFormat(
        "qwen3",
        "Qwen3ForCausalLM",
        {"hidden_act": "silu", "attention_bias": False},
        {
            # transformers' default: the width over the number of heads is another one
            # in some sizes.
            "head_dim": 128,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        window="switched_after_first_layers",
    )
    qk_norm = "head"
