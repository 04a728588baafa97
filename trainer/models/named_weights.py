"""Parameters by the names of Hugging Face's tensors, in both directions."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from trainer.errors import UserError
from trainer.files import read_object
from trainer.models.family import Spec
from trainer.models.fp8_checkpoints import Fp8Kernel, Fp8ScaleLayout
from trainer.models.model_functions import ModelFunctions, Params
from trainer.models.roles import Role
from trainer.models.weight_files import (
    check_shape,
    check_sizes,
    config_beside,
    missing_tensor,
    pop_tied_head,
    read_tensors,
    with_prefix,
)


class Layout(NamedTuple):
    """The differences of Hugging Face's tensors from parameters of unrolled layers.

    Attributes:
      table: Hugging Face's name of the token table.
      roots: starts of names from which a file may leave out `prefix`.
      prefix: the prefix that these names have in full.
      buffers: matches names of tensors that are no weights.
      modules: our names of modules -> Hugging Face's, where they differ.
      transposed: whether Hugging Face's kernels are [out, in]; ours are [in, out].
    """

    table: str
    roots: tuple[str, ...]
    prefix: str
    buffers: re.Pattern[str]
    modules: Mapping[str, str]
    transposed: bool = False


def load_params(
    path: Path,
    spec: Spec,
    build: Callable[[Any], ModelFunctions],
    layout: Layout,
    *,
    tied: bool,
) -> Params:
    """Return the parameters in a directory or file, each checked against the model's.

    Args:
      path: a directory, or one safetensors file.
      spec: the model's spec, of the config.json beside the weights if there is one.
      build: `Family.build`.
      layout: of the family.
      tied: whether a head in the files must be the table.

    Raises:
      UserError: missing or damaged files, or tensors that are missing, unknown or of
        another shape.
    """
    config, scales = config_beside(path), None
    # A GPT-2's single file may come without one.
    if config.is_file():
        scales = Fp8ScaleLayout.from_config(read_object(config))
        # Before the model is traced: 900 layers that the files lack take half a minute
        # to be found missing.
        check_sizes(path, spec.architecture())
    tensors = read_tensors(path, scales)
    # Patterns of buffers are of full names.
    named = with_prefix(path, tensors, layout.prefix, layout.roots)
    tensors = {
        name: tensor
        for name, tensor in named.items()
        if not layout.buffers.fullmatch(name)
    }
    if tied:
        pop_tied_head(path, tensors, layout.table)
    return to_params(path, tensors, build(spec), layout)


def named_leaves(
    model: ModelFunctions, params: Params, layout: Layout
) -> Iterator[tuple[str, Role, Any]]:
    """Yield every leaf of unrolled parameters with its Hugging Face name and its role.

    `h.0.ln_1.scale` is `h.0.ln_1.weight`.
    """
    leaves = jax.tree.map(lambda role, leaf: (role, leaf), model.roles, params)
    for path, (role, leaf) in jax.tree_util.tree_leaves_with_path(
        leaves, is_leaf=lambda node: isinstance(node, tuple)
    ):
        *modules, leaf_name = (entry.key for entry in path)
        # Numbers of layers are the same in both.
        parts = [layout.modules.get(module, str(module)) for module in modules]
        # Hugging Face calls kernels, tables and gains `weight`.
        parts.append("bias" if leaf_name == "bias" else "weight")
        yield ".".join(parts), role, leaf


def to_params(
    source: Path,
    tensors: Mapping[str, np.ndarray],
    model: ModelFunctions,
    layout: Layout,
) -> Params:
    """Return tensors as nested dictionaries, each checked against the model's.

    Tables are padded with zero rows. Transposed kernels are views.
    """
    unread, leaves = dict(tensors), []
    named = list(named_leaves(model, model.shapes, layout))
    names = {name for name, _, _ in named}
    for name, role, leaf in named:
        shape = (leaf.shape[0] - role.padding, *leaf.shape[1:])
        is_transposed = layout.transposed and role.is_kernel
        shape = shape[::-1] if is_transposed else shape
        if name not in unread:
            # Only names that the model lacks: they may be the missing tensor's in
            # another program.
            raise missing_tensor(source, name, shape, unread.keys() - names)
        tensor = unread.pop(name)
        check_shape(source, name, tensor, shape)
        # `np.pad` copies: a table without padding stays the array of the file.
        if role.padding:
            tensor = np.pad(tensor, ((0, role.padding), (0, 0)))
        leaves.append(tensor.T if is_transposed else tensor)
    # An unknown tensor is part of a function that this model does not compute.
    if unread:
        raise UserError(
            f"{source}: unknown tensors {', '.join(sorted(unread)[:3])} ({len(unread)}"
            " in all)"
        )
    return jax.tree.unflatten(jax.tree.structure(model.shapes), leaves)


def to_tensors(
    model: ModelFunctions, params: Params, layout: Layout
) -> dict[str, np.ndarray]:
    """Return unrolled parameters by Hugging Face's names, without padding rows.

    Scales of FP8 kernels are tensors of their own.
    """
    tensors: dict[str, np.ndarray] = {}
    for name, role, leaf in named_leaves(model, params, layout):
        if isinstance(leaf, Fp8Kernel):
            tensors |= leaf.scales(name)
            leaf = leaf.data
        data = np.asarray(leaf)
        # Not `[:-padding]`, which is empty for a padding of 0.
        data = data[: len(data) - role.padding]
        is_transposed = layout.transposed and role.is_kernel
        tensors[name] = data.T if is_transposed else data
    return tensors
