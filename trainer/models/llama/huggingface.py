"""Hugging Face Llama weights: import and export of safetensors with config.json.

Kernels are `[in, out]` in parameters and `[out, in]` in files. Only in parameters are
the table and the head padded.

Legend: D model, V vocabulary.
"""

import re
from pathlib import Path

from trainer.errors import UserError
from trainer.models.config_values import read_config
from trainer.models.fp8_checkpoints import quantization_of
from trainer.models.llama.config_json import config_from_spec
from trainer.models.llama.model import build_functions
from trainer.models.llama.spec import LlamaSpec
from trainer.models.model_functions import Params
from trainer.models.named_weights import Layout, load_params, to_tensors
from trainer.models.weight_files import (
    SHARD_BYTES,
    config_beside,
    write_object,
    write_tensors,
)

MODULES = {
    "wte": "model.embed_tokens",
    "norm": "model.norm",
    "h": "model.layers",
    "attn_norm": "input_layernorm",
    "attn": "self_attn",
    "mlp_norm": "post_attention_layernorm",
}
TABLE = "model.embed_tokens.weight"
# Tensors of rotary positions in files of earlier transformers are not weights.
BUFFERS = re.compile(
    r"model\.(layers\.\d+\.(self_attn\.)?)?rotary_emb"
    r"\.(inv_freq|original_inv_freq|cos_cached|sin_cached)"
)


def load_llama(
    path: str | Path, cls: type[LlamaSpec] = LlamaSpec
) -> tuple[LlamaSpec, Params]:
    """Return sizes and parameters of a Llama, or of a family that inherits from it.

    Parameters are NumPy arrays in the files' dtypes, with unrolled layers and a
    vocabulary padded with zero rows.

    Args:
      path: a directory with *.safetensors (and their index) and config.json, or one
          file with config.json beside it.
      cls: the family's spec.

    Raises:
      UserError: missing or damaged files, a variant that this model does not compute,
        or tensors that are missing, unknown or of another shape.
    """
    path = Path(path)
    file = config_beside(path)
    if not file.is_file():
        raise UserError(
            f"{file} does not exist, and no tensor tells the number of heads; put it"
            " beside the weights"
        )
    spec = read_config(file, cls.from_config)
    params = load_params(path, spec, build_functions, layout_of(spec), tied=spec.tied)
    return spec, params


def layout_of(spec: LlamaSpec) -> Layout:
    """Return the layout of the weights of a family that is Llama or nearly so."""
    return Layout(
        table=TABLE,
        # As they are called in a file that was saved without its head.
        roots=("embed_tokens.", "layers.", "norm.", "rotary_emb."),
        prefix="model.",
        buffers=BUFFERS,
        modules={**MODULES, **spec.config_format.modules},
        # PyTorch's `Linear` holds [out, in]; GPT-2's files are of `Conv1D`, [in, out].
        transposed=True,
    )


def save_llama(
    directory: str | Path,
    spec: LlamaSpec,
    params: Params,
    eot: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write weights and config.json, as transformers does.

    Args:
      directory: made if absent.
      spec: the model's spec; the divisors of `smooth_swiglu` are not part of the
        function, and not written.
      params: the parameters, of unrolled layers; written in their own dtype.
      eot: the tokenizer's end-of-text id, which starts and ends documents, or None.
      shard_bytes: the largest size of a file, unless one tensor is larger.

    Returns:
      the paths of the weights, which `load_llama` reads.

    Raises:
      UserError: existing weights.
    """
    tensors = to_tensors(build_functions(spec), params, layout_of(spec))
    directory = Path(directory)
    files = write_tensors(directory, tensors, shard_bytes)
    config = config_from_spec(spec, str(tensors[TABLE].dtype), eot)
    write_object(directory / "config.json", config | quantization_of(tensors))
    return files
