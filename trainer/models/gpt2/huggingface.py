"""Hugging Face GPT-2 weights: import from safetensors, export to one file.

Both naming styles are read (`h.0.ln_1.weight`, as in the published files, and
`transformer.h.0.ln_1.weight`, as GPT2LMHeadModel saves); the second is written. Kernels
are `[in, out]` on both sides, so that no tensor is transposed.

Legend: D model, V vocabulary.
"""

import re
from pathlib import Path

from trainer.errors import UserError
from trainer.models.config_values import read_config
from trainer.models.fp8_checkpoints import quantization_of
from trainer.models.gpt2.model import build_functions
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.model_functions import Params
from trainer.models.named_weights import Layout, load_params, to_tensors
from trainer.models.weight_files import config_beside, write_object, write_tensors

# Causal masks in old files are not weights.
BUFFERS = re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias")
PREFIX = "transformer."
ROOT_MODULES = ("wte", "wpe", "h", "ln_f")
LAYOUT = Layout(
    table="transformer.wte.weight",
    roots=tuple(f"{module}." for module in ROOT_MODULES),
    prefix=PREFIX,
    buffers=BUFFERS,
    modules={module: PREFIX + module for module in ROOT_MODULES},
)


def load_gpt2(
    path: str | Path, spec: GPT2Spec | None = None
) -> tuple[GPT2Spec, Params]:
    """Return sizes and parameters of a GPT-2.

    Parameters are NumPy arrays in the file's dtype, with unrolled layers and a
    vocabulary padded with zero rows.

    Args:
      path: a directory with *.safetensors and config.json, or one safetensors file
          (with config.json beside it or not).
      spec: sizes, needed without a config.json, because no tensor tells the number of
          heads.

    Raises:
      UserError: missing or damaged files, a variant that this model does not compute,
        or tensors that are missing, unknown or of another shape.
    """
    path = Path(path)
    file = config_beside(path)
    if file.is_file():
        spec = read_config(file, GPT2Spec.from_config)
    elif spec is None:
        raise UserError(
            f"{path}: no config.json tells the number of heads; put it beside the"
            " weights"
        )
    else:
        # Only the sizes are the given spec's: Hugging Face's GPT-2 always has gelu.
        spec = GPT2Spec(**spec.architecture() | {"mlp": "gelu"})
    return spec, load_params(path, spec, build_functions, LAYOUT, tied=True)


def save_gpt2(
    directory: str | Path, spec: GPT2Spec, params: Params, eot: int | None = None
) -> list[Path]:
    """Write weights and config.json, as GPT2LMHeadModel does.

    Args:
      directory: made if absent.
      spec: the model's spec.
      params: the parameters, of unrolled layers; written in their own dtype.
      eot: the tokenizer's end-of-text id, which starts and ends documents, or None.

    Returns:
      the paths of the weights, which `load_gpt2` reads.

    Raises:
      UserError: Hugging Face's GPT-2 lacks the MLP, or there are weights already.
    """
    # Before `write_tensors`, whose files would make the next export there fail.
    if spec.mlp != "gelu":
        raise UserError(
            f"model.mlp={spec.mlp}: Hugging Face's GPT-2 has only gelu; this run cannot"
            " be exported"
        )
    directory = Path(directory)
    tensors = to_tensors(build_functions(spec), params, LAYOUT)
    files = write_tensors(directory, tensors)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": spec.vocab_size,
        "n_positions": spec.context,
        "n_ctx": spec.context,
        "n_embd": spec.d_model,
        "n_layer": spec.n_layer,
        "n_head": spec.n_head,
        "n_inner": spec.mlp_width,
        # The tanh form; `gelu` is another function there.
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": spec.dropout,
        "resid_pdrop": spec.dropout,
        # The probabilities of attention have no dropout here.
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
        # transformers 5 calls it `dtype`, and reads this name, too.
        "torch_dtype": str(tensors[LAYOUT.table].dtype),
        "bos_token_id": eot,
        "eos_token_id": eot,
        **quantization_of(tensors),
    }
    write_object(directory / "config.json", config)
    return files
