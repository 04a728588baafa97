"""Qwen2's sizes and choices."""

from dataclasses import dataclass

from trainer.models.llama.config_json import ConfigFormat
from trainer.models.llama.spec import LlamaSpec


@dataclass(frozen=True)
class Qwen2Spec(LlamaSpec):
    """A Qwen2's sizes and choices: those of Llama.

    Qwen Team 2024, "Qwen2.5 technical report" (arXiv 2412.15115).
    """

    config_format = ConfigFormat(
        "qwen2",
        "Qwen2ForCausalLM",
        {"hidden_act": "silu"},
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            # transformers' defaults: by these two a file is judged that has
            # use_sliding_window alone.
            "max_window_layers": 28,
        },
        window="switched_after_first_layers",
    )
    qkv_bias = True
