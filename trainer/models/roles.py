"""What each parameter is, said where it is made: other rooms act on roles, and know no
layer and no leaf by name.

A role is metadata of the parameter, `nnx.Param(value, role=Role(...))`. `roles_of`
collects them in a tree of the structure of the parameters; `role_of` finds that of a
parameter, or of what an optimizer keeps of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import jax
from flax import nnx

from trainer.errors import UserError

# What several kinds of parameters are called together, where some are to be chosen.
GROUPS = {
    "embeddings": ("table", "head"),
    "kernels": ("column", "row"),
    "gains": ("gain",),
    "biases": ("bias",),
}
Kind = Literal["column", "row", "table", "head", "gain", "bias"]


@dataclass(frozen=True)
class Role:
    """What a parameter is.

    Attributes:
      kind: column (the kernel of a linear layer, [inputs, outputs], of which a device
        of the mesh's axis `tensor` computes some outputs), row (one of which it takes
        some inputs), table (vectors to look up), head (vectors that are multiplied by
        what leaves the model), gain or bias (a vector of factors or summands).
      layer: the path by which patterns of the precision choose the layer's product,
        such as `h.3.mlp.c_fc`, or `h.*.mlp.c_fc` of stacked layers; None: its product
        is never narrow.
      stacked: whether the first axis counts layers.
      split: the axis, counted from the end, that `tensor` splits; None: every device
          has the whole.
      groups: of columns, such as 3 of queries, keys and values side by side. A device's
        share of more than one is not contiguous: such a kernel is stored split by rows,
        and brought to columns where it is used; a bias is whole.
      gated: whether it is of a gated layer: what the column kernels of its parent give
        is multiplied with each other, and the row kernel there takes the product.
      scaled_rows: whether the rows of a kernel are multiplied by what depends on the
          batch before they are rounded.
      padding: rows at the end of a table or head that nothing reads.
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
        """Return whether it is a kernel, a table or a head: what weight decay applies
        to.
        """
        return self.kind not in ("gain", "bias")


def roles_of(model: nnx.Module) -> dict[str, Any]:
    """The roles of a model's parameters: nested dictionaries as `nnx.to_pure_dict`
    makes them of the parameters.

    Raises:
      ValueError: a parameter has no role.
    """
    tree: dict[Any, Any] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        role = variable.get_metadata().get("role")
        if not isinstance(role, Role):
            name = ".".join(map(str, path))
            raise ValueError(
                f"parameter {name} has no role; make it by nnx.Param(value,"
                " role=Role(kind, ...))"
            )
        *modules, last = path
        place = tree
        for key in modules:
            place = place.setdefault(key, {})
        place[last] = role
    return tree


def role_of(roles: Any, path: Sequence[Any]) -> Role | None:
    """The role of the array at a path of a state: of a parameter, or of the parameter
    that it is a moment of.

    Args:
      roles: as of `roles_of`.
      path: as `jax.tree_util` gives it; it may lead through a state before it comes to
          the dictionaries of parameters.

    Returns:
      None for what is no parameter's, such as a count of steps.
    """
    keys = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    for start in range(len(keys)):
        found = roles
        for key in keys[start:]:
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, Role):
            return found
    return None


def chosen(roles: Any, wanted: Sequence[str]) -> dict[str, Any]:
    """The part of a model's roles that some names stand for: nested dictionaries with
    those parameters alone.

    Args:
      roles: as of `roles_of`.
      wanted: groups of `GROUPS`, or patterns of the parameters' paths, such as `h.0.*`;
        at least one. Stacked layers are `h.*`: a pattern with the number of one of them
        has no match.

    Raises:
      UserError: a name stands for no parameter.
    """

    def name_of(path: Any, role: Role) -> str:
        first, *rest = [str(entry.key) for entry in path]
        return ".".join([first, *["*"] * role.stacked, *rest])

    leaves = {
        name_of(path, role): (path, role)
        for path, role in jax.tree_util.tree_leaves_with_path(roles)
    }
    found: dict[Any, Any] = {}
    for name in wanted:
        kinds = GROUPS.get(name, ())
        matches = [
            leaves[at]
            for at in leaves
            if leaves[at][1].kind in kinds or fnmatchcase(at, name)
        ]
        if not matches:
            some = ", ".join(sorted(leaves)[:3])
            raise UserError(
                f"{name!r} is no parameter's; valid: {', '.join(GROUPS)}, and patterns"
                f" of {some}, ..."
            )
        for path, role in matches:
            *modules, last = [key.key for key in path]
            place = found
            for key in modules:
                place = place.setdefault(key, {})
            place[last] = role
    return found
