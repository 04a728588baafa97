"""Choose power-of-two scales for the weights: data near RMS 1, for gated layers
jointly.

The rules of scale propagation assume an RMS of 1 for every weight's data, so the errors
of two weights multiply. If the RMS of each were rounded to a power of two alone, a
hidden channel of SwiGLU, a product of two matmuls, would be off by up to a factor of 2.
Training aligns the two branches, which multiplies it further: 9.4 times was measured
(docs/lab.md, "Sizes multiply in a gated layer").
"""

import math
from collections.abc import Mapping
from typing import Any

import jax

from scalify_core.numerics.formats import pow2_floor, pow2_round


def rescale_factors(rms: Mapping[str, float], roles: Any) -> dict[str, float]:
    """Return the powers of two to divide the data of each weight by, by path.

    It is the power nearest to the RMS, except in a gated layer. The second column
    kernel's power is the one nearest to its RMS times the RMS that the first keeps, so
    that the product of both is near 1. The row kernel's is the next power above its RMS
    times the larger RMS that a column kernel keeps. That bounds the gradients, which
    pass through both.

    Args:
      rms: RMS of the data, by path as from `jax.tree_util.keystr`. Weights whose RMS
        is zero or not finite are left out.
      roles: roles of the parameters.
    """
    parameters = {
        jax.tree_util.keystr(path): (path, role)
        for path, role in jax.tree_util.tree_leaves_with_path(roles)
    }
    # Rows last: they depend on the columns of their layer.
    rows_last = sorted(rms, key=lambda path: parameters[path][1].kind == "row")
    powers: dict[str, float] = {}
    # The RMS of rescaled columns, by the path of their gated layer.
    column_rms: dict[str, list[float]] = {}
    for path in rows_last:
        if not 0 < rms[path] < math.inf:
            continue
        keys, role = parameters[path]
        columns = []
        if role.gated:
            columns = column_rms.setdefault(jax.tree_util.keystr(keys[:-2]), [])
        if columns and role.kind == "row":
            # The next power of two above bounds the gradients.
            powers[path] = 2 * pow2_floor(rms[path] * max(columns))
        else:
            powers[path] = pow2_round(rms[path] * math.prod(columns))
        if role.gated and role.kind == "column":
            columns.append(rms[path] / powers[path])
    return powers
