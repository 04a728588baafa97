"""Where the data of weights has its place: near RMS 1, and in gated layers what meets
in a product together.

The rules of scales take every weight's data to have an RMS of 1, so that of a product
of two is off by both. Each being rounded to an octave by itself, a hidden channel of
SwiGLU, which is a product of two products, would be off by up to one octave by that
alone; and training aligns the branches, which adds another two.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax

from scalify_core.formats import pow2_floor, pow2_round
from trainer.models.roles import Role


def powers_to_place(rms: Mapping[str, float], roles: Any) -> dict[str, float]:
    """The powers of two that weights' data has to be divided by to be in its place, by
    path.

    That is the one nearest to its RMS but for the kernels of a gated layer, but for the
    first: a second column's takes what the first one's left over, so that the product
    of both is near 1; the row kernel's is as large as its RMS times that of the larger
    column, so that the gradients, which both go through, are at most what is expected.

    Args:
      rms: of the data, by path as `jax.tree_util.keystr` gives it; zero or not finite:
          it stays where it is.
      roles: of the parameters.
    """
    found = {
        jax.tree_util.keystr(path): (path, role)
        for path, role in jax.tree_util.tree_leaves_with_path(roles)
    }
    in_order = sorted(rms, key=lambda path: found[path][1].kind == "row")
    powers: dict[str, float] = {}
    # over of the columns of a gated layer, by its path
    left: dict[str, list[float]] = {}
    for path in in_order:
        if not 0 < rms[path] < math.inf:
            continue
        keys, role = found[path]
        columns = (
            left.setdefault(jax.tree_util.keystr(keys[:-2]), []) if role.gated else []
        )
        powers[path] = power_of(rms[path], role, columns)
        if role.gated and role.kind == "column":
            columns.append(rms[path] / powers[path])
    return powers


def power_of(rms: float, role: Role, columns: list[float]) -> float:
    """One of `powers_to_place`; `columns`: what is left over of the columns of a gated
    layer before it.
    """
    if columns and role.kind == "row":
        return 2 * pow2_floor(rms * max(columns))
    return pow2_round(rms * math.prod(columns))
