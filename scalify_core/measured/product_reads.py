"""Which values products alone read, so that they are stored once, for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from jax.extend.core import Literal

from scalify_core.caches import per_jaxpr
from scalify_core.measured.plan import (
    CALLS,
    Format,
    Step,
    inner_jaxpr,
    plan_of,
    scan_formats,
    scan_parts,
)


@per_jaxpr
def read_by_products_alone(jaxpr: Any, formats: tuple[Format, ...]) -> tuple[bool, ...]:
    """Of each argument, whether nothing but products reads it, here or further in, or
    what only moves it for them.
    """
    wide = {atom for atom in jaxpr.outvars if type(atom) is not Literal}
    for step in reversed(plan_of(jaxpr, formats).steps):
        for atom, alone in zip(
            step.eqn.invars, reads_for_products(step, wide), strict=True
        ):
            if not alone and type(atom) is not Literal:
                wide.add(atom)
    return tuple(var not in wide for var in jaxpr.invars)


def reads_for_products(
    step: Step, wide: AbstractSet[Any] = frozenset()
) -> Sequence[bool]:
    """Of each operand, whether this step reads it for products alone, `wide` being all
    that others read.
    """
    eqn = step.eqn
    others = [False] * len(eqn.invars)
    if step.kind == "product":
        return [not step.whole, not step.whole, *others[2:]]
    if step.kind == "move":
        return [step.wants[0] is not None and eqn.outvars[0] not in wide, *others[1:]]
    if step.kind == "scan":
        consts, carry, _ = scan_parts(eqn, eqn.invars)
        inner = read_by_products_alone(
            inner_jaxpr(eqn), scan_formats(eqn, step.formats)[0]
        )
        n, m = len(consts), len(consts) + len(carry)
        return [*inner[:n], *[False] * len(carry), *inner[m:]]
    if step.kind in CALLS:
        return read_by_products_alone(inner_jaxpr(eqn), step.formats)
    return others
