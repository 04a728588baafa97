"""Llama's forward pass in float64 NumPy, one sequence and one head at a time, and
random weights under its names.

Written from the papers, to have another opinion than the model's own: no code in common
with it.
"""

import math

import numpy as np


def random_tensors(config, dtype=np.float32, seed=0):
    """A random LlamaForCausalLM under Hugging Face's names. No tensor is all 0 or 1:
    each must be in its place."""
    rng = np.random.default_rng(seed)
    d, f, v = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    q, kv = (
        config[key] * config["head_dim"]
        for key in ("num_attention_heads", "num_key_value_heads")
    )
    shapes = {"model.embed_tokens.weight": (v, d)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (q, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, q),
            "mlp.gate_proj": (f, d),
            "mlp.up_proj": (f, d),
            "mlp.down_proj": (d, f),
            "input_layernorm": (d,),
            "post_attention_layernorm": (d,),
        }
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()
        }
    shapes["model.norm.weight"] = (d,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, d)
    # Matrices that keep the size of what they multiply, gains around 1.
    values = {
        name: (
            rng.normal(size=shape) / math.sqrt(shape[-1])
            if len(shape) == 2
            else 1 + 0.3 * rng.normal(size=shape)
        )
        for name, shape in shapes.items()
    }
    return {name: value.astype(dtype) for name, value in values.items()}


def inverse_wavelengths(config):
    """Angle per position of each pair of channels, one after the other."""
    entries = []
    scaling = config.get("rope_scaling")
    for pair in range(config["head_dim"] // 2):
        frequency = config["rope_theta"] ** (-2 * pair / config["head_dim"])
        if scaling:
            wavelength = 2 * math.pi / frequency
            longest = (
                scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
            )
            shortest = (
                scaling["original_max_position_embeddings"]
                / scaling["high_freq_factor"]
            )
            if wavelength > longest:
                frequency /= scaling["factor"]
            elif wavelength > shortest:
                share = (
                    longest * scaling["low_freq_factor"] / wavelength
                    - scaling["low_freq_factor"]
                ) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
                frequency = (1 - share) * frequency / scaling[
                    "factor"
                ] + share * frequency
        entries.append(frequency)
    return np.array(entries)


def rotated(x, config):
    """[T, K]: channels k and k + K/2 as the parts of a complex number, turned by the
    position."""
    half = x.shape[1] // 2
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(
        1j * np.outer(np.arange(len(x)), inverse_wavelengths(config))
    )
    return np.concatenate([turned.real, turned.imag], axis=1)


def logits(tensors, config, tokens):
    """`[B, T, V]` of tokens [B, T]."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    heads, groups, size = (
        config[key]
        for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )

    def norm(x, name):
        return (
            x
            / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
            * w[f"{name}.weight"]
        )

    def layer(x, name):
        y = norm(x, f"{name}.input_layernorm")
        q, k, v = (y @ w[f"{name}.self_attn.{part}_proj.weight"].T for part in "qkv")
        outs = []
        for head in range(heads):
            group = head // (heads // groups)
            of_group = slice(group * size, (group + 1) * size)
            query = rotated(q[:, head * size : (head + 1) * size], config)
            scores = query @ rotated(k[:, of_group], config).T / math.sqrt(size)
            scores[np.triu_indices(len(x), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            outs.append(weights / weights.sum(-1, keepdims=True) @ v[:, of_group])
        x = x + np.concatenate(outs, -1) @ w[f"{name}.self_attn.o_proj.weight"].T
        y = norm(x, f"{name}.post_attention_layernorm")
        gate, up = (
            y @ w[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up")
        )
        return (
            x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{name}.mlp.down_proj.weight"].T
        )

    entries = []
    for ids in tokens:
        x = w["model.embed_tokens.weight"][ids]
        for i in range(config["num_hidden_layers"]):
            x = layer(x, f"model.layers.{i}")
        head = w[
            (
                "model.embed_tokens.weight"
                if config["tie_word_embeddings"]
                else "lm_head.weight"
            )
        ]
        entries.append(norm(x, "model.norm") @ head.T)
    return np.stack(entries)
