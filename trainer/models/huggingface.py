"""Weights in Hugging Face's directories; `model_type` names their family."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from trainer.errors import UserError
from trainer.files import has_file, well_formed
from trainer.models.blocks import unstack_layers
from trainer.models.config_values import read_config
from trainer.models.family import Family, Spec
from trainer.models.fp8_checkpoints import Fp8Kernel
from trainer.models.model_functions import Params
from trainer.models.registry import SPECS, family_name_of, family_of
from trainer.models.roles import Role
from trainer.models.weight_files import config_beside


def family_at(source: Path) -> Family | None:
    """Return the family of weights by the config.json beside them, or None.

    Raises:
      UserError: a damaged config.json, or an unknown family.
    """
    file = config_beside(source)
    # `has_file` refuses a link that leads nowhere: taken for an absent file, its
    # settings would be left out without a word.
    if not has_file(file):
        return None
    return family_of(SPECS[read_config(file, family_name_of)])


def load(source: Path, spec: Spec) -> tuple[Any, Params]:
    """Return spec and parameters of a directory or a safetensors file.

    Parameters are NumPy arrays in the file's dtype, with unrolled layers.

    Args:
      source: the directory or file.
      spec: the spec of the model that gets the weights; it tells the sizes if there is
        no config.json.

    Raises:
      UserError: missing or damaged files, or an unknown family.
    """
    # Around all readers: a damaged file may raise any error in them.
    with well_formed(f"the model in {source}", "download or copy it again"):
        family = family_at(source)
        if family is None:
            loaded = family_of(spec).huggingface.load(source, spec)
        else:
            # The sizes are those of the config.json: the given spec may be of another
            # family.
            loaded = family.huggingface.load(source, None)
        check_dtypes(source, loaded[1])
    return loaded


def check_dtypes(source: Path, params: Params) -> None:
    """Raise UserError for the first tensor that is not of floating-point numbers."""
    for path, tensor in jax.tree_util.tree_leaves_with_path(params):
        # Integers are weights of an unknown scale, and a cast to floats would not fail.
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise UserError(
                f"{source}: {name} is {tensor.dtype}; give weights in float32, float16"
                " or bfloat16"
            )


def save(
    directory: str | Path,
    spec: Spec,
    params: Params,
    eot: int | None = None,
    fp8: Mapping[str, Fp8Kernel] | None = None,
) -> list[Path]:
    """Write parameters, unrolled or stacked, and a config.json.

    Args:
      directory: made if absent.
      spec: the model's spec.
      params: the parameters; written in their own dtype.
      eot: the tokenizer's end-of-text id, or None.
      fp8: kernels that are written in place of those of `params`, by the path of their
        unrolled layer, such as `h.3.mlp.c_fc`.

    Returns:
      the paths of the weights.

    Raises:
      UserError: the spec has a choice that Hugging Face's models of the family lack,
        or there are weights already.
    """
    family = family_of(spec)
    # Names in files have the number of a layer.
    if spec.scan_layers:
        params = unstack_layers(params)
        spec = dataclasses.replace(spec, scan_layers=False)
    # After unstacking: the kernels have the paths of unrolled layers.
    if fp8 is not None:
        params = with_kernels(params, family.build(spec).roles, fp8)
    return family.huggingface.save(Path(directory), spec, params, eot)


def with_kernels(
    params: Params, roles: Params, kernels: Mapping[str, Fp8Kernel]
) -> Params:
    """Return unrolled parameters with these kernels, by the paths of their layers."""

    def choose(role: Role, p: Any) -> Any:
        return kernels.get(role.layer or "", p)

    return jax.tree.map(choose, roles, params)
