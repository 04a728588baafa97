"""Hugging Face's LlamaForCausalLM, in and out: a directory of safetensors with its config.json.

Kernels are `[in, out]` here and `[out, in]` there; the table and the head are padded here.

Legend: D model, V vocabulary.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trainer.errors import UserError
from trainer.models.functional import Params, unstack_layers
from trainer.models.llama import functional
from trainer.models.llama_spec import LlamaSpec, RopeScaling
from trainer.models.weight_files import (
    SHARD_BYTES,
    config_beside,
    read_object,
    read_tensors,
    write_object,
    write_tensors,
)

# What a configuration must say, where it says it, for this model to compute the same function.
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
MODULES = {
    "wte": "model.embed_tokens",
    "norm": "model.norm",
    "h": "model.layers",
    "attn_norm": "input_layernorm",
    "attn": "self_attn",
    "mlp_norm": "post_attention_layernorm",
}
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
# Rotary frequencies that old files carry along: no weights.
BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def load_llama(path: str | Path) -> tuple[LlamaSpec, Params]:
    """Sizes and parameters (NumPy, the files' dtypes, unrolled layers, vocabulary padded with zero rows).

    Args:
      path: a directory with *.safetensors (and their index) and config.json, or one file with config.json beside it.

    Raises:
      UserError: no such files, damaged, a variant that this model does not compute, or tensors missing, unknown or of
        another shape.
    """
    path = Path(path)
    spec = read_spec(config_beside(path))
    tensors = {name: tensor for name, tensor in read_tensors(path).items() if not BUFFERS.fullmatch(name)}
    head = tensors.pop(HEAD, None) if spec.tied else None
    if head is not None and not np.array_equal(head, tensors.get(TABLE, ())):
        raise UserError(f"{path}: {HEAD} differs from {TABLE}, but config.json says tie_word_embeddings=true")
    return spec, to_params(tensors, spec, path)


def read_spec(file: Path) -> LlamaSpec:
    """Sizes and choices that a config.json says. UserError for what this model does not compute."""
    if not file.is_file():
        raise UserError(f"{file} does not exist, and no tensor tells the number of heads; put it beside the weights")
    config = read_object(file)
    try:
        return spec_of(config)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def spec_of(config: Mapping[str, Any]) -> LlamaSpec:
    """Sizes and choices that a configuration says; what is absent is what transformers takes then."""
    for key, valid in REQUIRED.items():
        if key in config and config[key] not in valid:
            raise UserError(f"{key}={config[key]!r} is not supported; valid: {valid[0]!r}")
    sizes: dict[str, Any] = {ours: whole_number(config, key) for key, ours in SIZES.items()}
    heads, width = sizes["n_head"], sizes["d_model"]
    head_dim = config.get("head_dim")
    theta, scaling = rope_of(config)
    return LlamaSpec(
        **sizes,
        context=whole_number(config, "max_position_embeddings", 2048),
        n_kv_head=whole_number(config, "num_key_value_heads", heads),
        head_dim=None if head_dim in (None, width / heads) else whole_number(config, "head_dim"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def whole_number(tree: Mapping[str, Any], key: str, otherwise: int | None = None) -> int:
    """A positive integer of a configuration. UserError where there is none and nothing else holds."""
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
    """Base and scaling of the rotary positions: `rope_theta` and `rope_scaling`, or both as `rope_parameters`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"rope_scaling={rope!r}: expected an object")
    said = {**config, **rope}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(f"rope_type={kind!r} is not supported; valid: 'default', 'llama3'")
    if said.get("partial_rotary_factor") not in (None, 1):
        raise UserError(f"partial_rotary_factor={said['partial_rotary_factor']} is not supported; valid: 1")
    theta = number(said, "rope_theta", 10_000.0)
    if kind == "default":
        return theta, None
    fields: dict[str, Any] = {ours: number(rope, key) for key, ours in ROPE_SCALING.items()}
    return theta, RopeScaling(**fields | {"original_context": int(fields["original_context"])})


def named_leaves(params: Params) -> Iterator[tuple[str, str, Any]]:
    """Every leaf of unrolled parameters: its Hugging Face name, what it is called here, and the leaf."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        *modules, last = (entry.key for entry in path)
        yield ".".join([*(MODULES.get(part, str(part)) for part in modules), "weight"]), last, leaf


def to_params(tensors: Mapping[str, np.ndarray], spec: LlamaSpec, path: Path) -> Params:
    """Nested dictionaries from named tensors, checked leaf by leaf against `spec`. Kernels are views."""
    expected = jax.eval_shape(functional(spec).init, jax.random.key(0))
    left, leaves = dict(tensors), []
    for name, last, leaf in named_leaves(expected):
        shape = leaf.shape[::-1] if last == "kernel" else leaf.shape
        shape = (spec.vocab_size, spec.d_model) if last == "embedding" else shape
        if name not in left:
            raise UserError(f"{path}: tensor {name} {shape} is missing; these are not all weights of this Llama")
        tensor = left.pop(name)
        if tensor.shape != shape:
            raise UserError(f"{path}: tensor {name} has shape {tensor.shape}, expected {shape}")
        if last == "embedding":
            tensor = np.pad(tensor, ((0, spec.padded_vocab - spec.vocab_size), (0, 0)))
        leaves.append(tensor.T if last == "kernel" else tensor)
    if left:
        raise UserError(f"{path}: unknown tensors {', '.join(sorted(left)[:3])} ({len(left)} in all)")
    return jax.tree.unflatten(jax.tree.structure(expected), leaves)


def save_llama(
    directory: str | Path, spec: LlamaSpec, params: Params, eot: int | None = None, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write weights and config.json as LlamaForCausalLM does; the paths of the former. The inverse of `load_llama`.

    Args:
      directory: made if absent.
      spec: the model's; what `smooth_swiglu` divides by is no part of the function, and not written.
      params: its parameters, unrolled or scanned; written in their own dtype.
      eot: the tokenizer's end-of-text id, which begins and ends documents; None: not told.
      shard_bytes: of the largest file, where one tensor is not larger.

    Raises:
      UserError: weights already there.
    """
    tensors = {}
    for name, last, leaf in named_leaves(unstack_layers(params) if spec.scan_layers else params):
        data = np.asarray(leaf)
        data = data[: spec.vocab_size] if last == "embedding" else data
        tensors[name] = data.T if last == "kernel" else data
    directory = Path(directory)
    files = write_tensors(directory, tensors, shard_bytes)
    write_object(directory / "config.json", config_of(spec, str(tensors[TABLE].dtype), eot))
    return files


def config_of(spec: LlamaSpec, dtype: str, eot: int | None) -> dict[str, Any]:
    """The content of config.json."""
    scaling = spec.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "intermediate_size": spec.mlp_width,
        "num_hidden_layers": spec.n_layer,
        "num_attention_heads": spec.n_head,
        "num_key_value_heads": spec.n_kv_head,
        "head_dim": spec.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": spec.context,
        "initializer_range": spec.init_std,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling
        and {"rope_type": "llama3"} | {key: getattr(scaling, ours) for key, ours in ROPE_SCALING.items()},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": spec.tied,
        "torch_dtype": dtype,
        "bos_token_id": eot,
        "eos_token_id": eot,
    }
