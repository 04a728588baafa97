"""Operations that move elements about."""

from __future__ import annotations

from typing import Any

from scalify_core import value as v
from scalify_core.registry import bind, rule, structural
from scalify_core.rules.elementwise import common
from scalify_core.value import Value

structural(
    "reshape", "transpose", "broadcast_in_dim", "squeeze", "slice", "rev", "split", "tile", "unstack", "stage",
    "optimization_barrier", "tie", "sharding_constraint", "reshard", "layout_constraint", "device_put", "name",
    "copy_p", "sort", "top_k",
)  # fmt: skip


@rule("concatenate", "pad", "stack")
def _join(eqn: Any, *operands: Any) -> Value:
    data, scale, rho, dtype = common(*operands)
    return v.value(bind(eqn, *data), scale, rho, dtype)
