"""Parameters by the names of Hugging Face's tensors, in both directions."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from trainer.errors import UserError
from trainer.models.fp8_checkpoints import Fp8Kernel
from trainer.models.model_functions import ModelFunctions, Params
from trainer.models.roles import Role
from trainer.models.weight_files import check_shape, missing_tensor


class Layout(NamedTuple):
    """The differences of Hugging Face's tensors from parameters of unrolled layers.

    Attributes:
      names: our names of modules -> Hugging Face's, where they differ.
      prefix: the prefix of all names.
      transposed: whether Hugging Face's kernels are [out, in]; ours are [in, out].
    """

    names: Mapping[str, str] = {}
    prefix: str = ""
    transposed: bool = False


def named_leaves(
    model: ModelFunctions, params: Params, layout: Layout
) -> Iterator[tuple[str, Role, Any]]:
    """Yield every leaf of unrolled parameters with its Hugging Face name and its role.

    `h.0.ln_1.scale` is `h.0.ln_1.weight`.
    """
    roles = jax.tree.leaves(model.roles)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for role, (path, leaf) in zip(roles, leaves, strict=True):
        *modules, leaf_name = (entry.key for entry in path)
        parts = [layout.names.get(module, str(module)) for module in modules]
        parts.append("bias" if leaf_name == "bias" else "weight")
        yield layout.prefix + ".".join(parts), role, leaf


def to_params(
    source: Path,
    tensors: Mapping[str, np.ndarray],
    model: ModelFunctions,
    layout: Layout,
) -> Params:
    """Return tensors as nested dictionaries, each checked against the model's.

    Tables are padded with zero rows. Transposed kernels are views.
    """
    expected = jax.eval_shape(model.init, jax.random.key(0))
    unread, leaves = dict(tensors), []
    named = list(named_leaves(model, expected, layout))
    names = {name for name, _, _ in named}
    for name, role, leaf in named:
        shape = (leaf.shape[0] - role.padding, *leaf.shape[1:])
        is_transposed = layout.transposed and role.is_kernel
        shape = shape[::-1] if is_transposed else shape
        if name not in unread:
            raise missing_tensor(source, name, shape, unread.keys() - names)
        tensor = unread.pop(name)
        check_shape(source, name, tensor, shape)
        if role.padding:
            tensor = np.pad(tensor, ((0, role.padding), (0, 0)))
        leaves.append(tensor.T if is_transposed else tensor)
    if unread:
        raise UserError(
            f"{source}: unknown tensors {', '.join(sorted(unread)[:3])} ({len(unread)}"
            " in all)"
        )
    return jax.tree.unflatten(jax.tree.structure(expected), leaves)


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
        data = data[: len(data) - role.padding]
        is_transposed = layout.transposed and role.is_kernel
        tensors[name] = data.T if is_transposed else data
    return tensors
