"""Roles of parameters, by which other rooms act without knowing a parameter by name.

A role is metadata of the parameter, `nnx.Param(value, role=Role(...))`. `roles_of`
collects them in a tree like that of the parameters. `role_of` finds the role of a
parameter, or of an optimizer's moment of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import jax
from flax import nnx
from flax.traverse_util import unflatten_dict

from trainer.errors import UserError

# Names by which a user selects all parameters of some kinds.
KIND_ALIASES = {
    "embeddings": ("table", "head"),
    "kernels": ("column", "row"),
    "gains": ("gain",),
    "biases": ("bias",),
}
Kind = Literal["column", "row", "table", "head", "gain", "bias"]


@dataclass(frozen=True)
class Role:
    """The role of a parameter.

    Attributes:
      kind: column (a linear layer's kernel [inputs, outputs], split by outputs over the
        mesh's axis `tensor`), row (a kernel split by inputs), table (vectors to look
        up), head (vectors that give logits), gain or bias (a vector of factors or
        summands).
      layer: the path by which the precision's patterns choose the layer, such as
        `h.3.mlp.c_fc`, or `h.*.mlp.c_fc` for stacked layers; None: it is never narrow.
      stacked: whether the first axis counts layers.
      split: the axis, counted from the end, that `tensor` splits; None: not split.
      groups: the number of groups of columns, such as 3 for queries, keys and values
        side by side. A device's share of several groups is not contiguous: such a
        kernel is stored split by rows, and resharded to columns where it is used; a
        bias is not split.
      gated: whether it belongs to a gated layer, where the outputs of the column
        kernels are multiplied and the row kernel takes the product.
      scaled_rows: whether, before rounding, the kernel's rows are multiplied by factors
        computed from the batch, as in smooth SwiGLU.
      padding: the number of rows at the end of a table or head that nothing reads.
    """

    kind: Kind
    layer: str | None = None
    stacked: bool = False
    split: int | None = None
    groups: int = 1
    gated: bool = False
    scaled_rows: bool = False
    padding: int = 0

    @property
    def is_kernel(self) -> bool:
        """Return whether it is the kernel of a linear layer inside the model."""
        return self.kind in ("column", "row")

    @property
    def is_matrix(self) -> bool:
        """Return whether it is a kernel, table or head: weight decay applies."""
        return self.kind not in ("gain", "bias")


def roles_of(model: nnx.Module) -> dict[str, Any]:
    """Return the roles of a model's parameters, in nested dictionaries.

    Raises:
      ValueError: a parameter has no role.
    """
    roles: dict[tuple[Any, ...], Role] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        role = variable.get_metadata().get("role")
        # Without a role, a parameter would be sharded, decayed and rounded by a guess.
        if not isinstance(role, Role):
            name = ".".join(map(str, path))
            raise ValueError(
                f"parameter {name} has no role; make it by nnx.Param(value,"
                " role=Role(kind, ...))"
            )
        roles[path] = role
    return unflatten_dict(roles)


def role_of(roles: Any, path: Sequence[Any]) -> Role | None:
    """Return the role of the array at a path of a state, or None.

    It is the role of a parameter, or of the parameter that the array is a moment of.

    Args:
      roles: the result of `roles_of`.
      path: a path of `jax.tree_util`; it may lead through a state before it comes to
        the dictionaries of parameters.

    Returns:
      None for an array without a parameter, such as a count of steps.
    """
    # Only keys of dictionaries: states before them are tuples and named tuples, and
    # scaled arrays behind them have fields.
    keys = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    # An optimizer's state may have dictionaries around those of the parameters.
    for start in range(len(keys)):
        node = roles
        for key in keys[start:]:
            node = node.get(key) if isinstance(node, dict) else None
        # The longest path that leads to a role counts, since it starts at the first
        # key.
        if isinstance(node, Role):
            return node
    return None


def select_roles(roles: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the roles of the parameters with some names, in nested dictionaries.

    Args:
      roles: the result of `roles_of`.
      names: `KIND_ALIASES`, or patterns of the parameters' paths, such as `h.0.*`;
        at least one. Stacked layers are `h.*`: a pattern with the number of one of them
        has no match.

    Raises:
      UserError: a name matches no parameter.
    """

    def path_of(path: Any, role: Role) -> str:
        first, *rest = [str(entry.key) for entry in path]
        # As in the paths of layers, so that one pattern means the same in all keys.
        layer_index = ["*"] if role.stacked else []
        return ".".join([first, *layer_index, *rest])

    leaves = {
        path_of(path, role): (path, role)
        for path, role in jax.tree_util.tree_leaves_with_path(roles)
    }
    # By path: two names may select one parameter.
    selected: dict[tuple[Any, ...], Role] = {}
    for name in names:
        kinds = KIND_ALIASES.get(name, ())
        matches = [
            (path, role)
            for full_name, (path, role) in leaves.items()
            if role.kind in kinds or fnmatchcase(full_name, name)
        ]
        if not matches:
            examples = ", ".join(sorted(leaves)[:3])
            raise UserError(
                f"{name!r} matches no parameter; valid: {', '.join(KIND_ALIASES)}, and"
                f" patterns of {examples}, ..."
            )
        for path, role in matches:
            selected[tuple(entry.key for entry in path)] = role
    return unflatten_dict(selected)
