"""Choose power-of-two scales for the weights: data near RMS 1, for gated layers
jointly.

The rules of scale propagation assume an RMS of 1 for every weight's data, so the errors
of two weights multiply. If each weight were rescaled by its own nearest power of two, a
hidden channel of SwiGLU, a product of two matmuls, would be off by up to a factor of 2.
Training aligns the two branches, which multiplies it further: 9.4 times was measured
(docs/lab.md, "Sizes multiply in a gated layer").
"""

import math
from collections.abc import Mapping
from typing import Any

import jax

from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.numerics.formats import pow2_floor, pow2_round
from scalify_core.numerics.scales import rms_of


def rescale_factors(rms: Mapping[str, float], roles: Any) -> dict[str, float]:
    """Return the powers of two to divide the data of each weight by, by path.

    Outside gated layers it is the power nearest to the RMS. In a gated layer the
    kernels are rescaled one after another:

    - First column kernel: the power nearest to its RMS.
    - Second column kernel: the power nearest to its RMS times the rescaled RMS of the
      first, so that the product of both branches is near 1.
    - Row kernel: the next power above its RMS times the larger rescaled RMS of a column
      kernel. This bounds the gradients, which pass through the row kernel and the other
      branch.

    Args:
      rms: RMS of the data, by path as from `jax.tree_util.keystr`. Weights whose RMS
        is zero or not finite are left out.
      roles: roles of the parameters.
    """
    role_by_path, layer_by_path = {}, {}
    for keys, role in jax.tree_util.tree_leaves_with_path(roles):
        path = jax.tree_util.keystr(keys)
        role_by_path[path] = role
        # The last two keys name the linear layer and its kernel.
        layer_by_path[path] = jax.tree_util.keystr(keys[:-2])
    # Row kernels last: they depend on the column kernels of their layer.
    rows_last = sorted(rms, key=lambda path: role_by_path[path].kind == "row")
    powers: dict[str, float] = {}
    # The RMS of rescaled column kernels, by the path of their gated layer.
    column_rms_by_layer: dict[str, list[float]] = {}
    for path in rows_last:
        # A bias that is still zero has no size, and keeps its scale.
        if not 0 < rms[path] < math.inf:
            continue
        role = role_by_path[path]
        column_rms = []
        if role.gated:
            column_rms = column_rms_by_layer.setdefault(layer_by_path[path], [])
        if column_rms and role.kind == "row":
            powers[path] = 2 * pow2_floor(rms[path] * max(column_rms))
        else:
            powers[path] = pow2_round(rms[path] * math.prod(column_rms))
        if role.gated and role.kind == "column":
            column_rms.append(rms[path] / powers[path])
    return powers


def rms_of_params(params: Any) -> dict[str, float]:
    """Return the RMS of the data of every ScaledArray in a tree, by its path.

    Not for use inside jit.
    """
    named = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_scaled_array)
    data = {
        jax.tree_util.keystr(path): x.data for path, x in named if is_scaled_array(x)
    }
    return {path: float(_rms(x)) for path, x in data.items()}


def rescale_params(params: Any, powers: Mapping[str, float]) -> Any:
    """Return `params` with some scales multiplied by powers of two, and the data
    divided.

    Parameters without a path in `powers` are returned unchanged. The values are the
    same, except that subnormal data may become normal or the reverse, and data beyond
    the format saturates. A new static scale is a new constant: steps are compiled
    again.
    """

    def rescale(path: Any, x: Any) -> Any:
        power = powers.get(jax.tree_util.keystr(path))
        if power is None:
            return x
        return x.rescale(x.scale * power)

    return jax.tree_util.tree_map_with_path(rescale, params, is_leaf=is_scaled_array)


_rms = jax.jit(rms_of)
