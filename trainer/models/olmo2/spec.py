"""OLMo 2's sizes and choices."""

from dataclasses import dataclass

from trainer.models.llama.config_json import ConfigFormat
from trainer.models.llama.spec import LlamaSpec


@dataclass(frozen=True)
class Olmo2Spec(LlamaSpec):
    """An OLMo 2's sizes and choices: those of Llama.

    OLMo Team 2024, "2 OLMo 2 Furious" (arXiv 2501.00656).
    """

    config_format = ConfigFormat(
        "olmo2",
        "Olmo2ForCausalLM",
        {"hidden_act": "silu", "attention_bias": False},
        {"rms_norm_eps": 1e-5},
        {
            # Llama's name of the norm before the MLP: here it is behind attention.
            "attn_norm": "post_attention_layernorm",
            "mlp_norm": "post_feedforward_layernorm",
        },
    )
    qk_norm = "layer"
    norms = "after"
