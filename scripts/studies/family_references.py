"""Write tiny random models of transformers with their logits, for the tests.

    ENVIRONMENT/bin/python scripts/studies/family_references.py tests/data/families

The environment has PyTorch and transformers, whose versions are written down; nothing
of this project is imported. Each case is a directory: config.json, model.safetensors,
and reference.npz with `ids` [2, 24] and `logits` [2, 24, vocabulary], FP32.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

SIZES = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # Written files have a run's dropout, which is none here.
    "gpt2": (
        "GPT2Config",
        {"n_inner": 24, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama_llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama_linear": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "linear",
                "rope_theta": 1e4,
                "factor": 4.0,
            }
        },
    ),
    "llama_dynamic": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "factor": 2.0,
            }
        },
    ),
    "qwen2_yarn": (
        "Qwen2Config",
        {
            "hidden_size": 32,
            "rope_parameters": YARN | {"original_max_position_embeddings": 8},
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral_window": ("MistralConfig", {"sliding_window": 5, "head_dim": 8}),
    "qwen2": ("Qwen2Config", {"rope_theta": 1e6}),
    "qwen2_tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4}),
    "olmo2": ("Olmo2Config", {}),
    "qwen3_sharded_bf16": ("Qwen3Config", {"head_dim": 8}),
}
SHARD = "8KB"  # of files of the cases whose name has `sharded`


def main(directory: Path) -> None:
    """Write all cases below a directory."""
    for name, (config_class, choices) in CASES.items():
        torch.manual_seed(0)
        config = getattr(transformers, config_class)(**{**SIZES, **choices})
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for path, parameter in model.named_parameters():
            # Gains and biases count, too.
            mean = 1.0 if parameter.ndim == 1 and not path.endswith("bias") else 0.0
            torch.nn.init.normal_(parameter, mean=mean, std=0.2)
            if name.endswith("bf16"):
                parameter.data = parameter.data.bfloat16().float()
        ids = torch.randint(0, SIZES["vocab_size"], (2, 24))
        with torch.no_grad():
            logits = model(ids).logits
        out = directory / name
        shutil.rmtree(out, ignore_errors=True)
        if name.endswith("bf16"):
            model.to(torch.bfloat16)
        model.save_pretrained(out, max_shard_size=SHARD if "sharded" in name else "1MB")
        (out / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(
            out / "reference.npz", ids=ids.numpy(), logits=logits.numpy()
        )
    versions = {module.__name__: module.__version__ for module in (torch, transformers)}
    (directory / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
