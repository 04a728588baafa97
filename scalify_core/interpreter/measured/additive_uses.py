"""Which values of a program only add to others: what is small in them by itself is
nothing there, and need not be told.

A row of a product's result that is lost beside larger rows is a loss to who divides by
its size afterwards, as a norm does, or multiplies it by an array. It is none where the
result goes on as it is, with all its rows: is returned, and so stored at one scale, or
is added to another value. So is the gradient of the keys of causal attention, of which
the last ones have nearly none.
"""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import Literal

from scalify_core.interpreter.measured.product_reads import (
    CALLS,
    MOVES,
    PRODUCTS,
    inner_jaxpr,
)
from scalify_core.numerics.caches import per_jaxpr

_SUMS = frozenset({"add", "sub", "add_any"})
_AS_IT_IS = (
    MOVES | PRODUCTS | {"reduce_sum", "convert_element_type", "concatenate", "pad"}
)


@per_jaxpr
def resized(jaxpr: Any, returned: tuple[bool, ...]) -> frozenset[Any]:
    """The variables of a jaxpr whose rows may be given other sizes; `returned`: of
    which results that may be done.
    """
    found = {
        atom
        for atom, may in zip(jaxpr.outvars, returned, strict=True)
        if may and type(atom) is not Literal
    }
    for eqn in reversed(jaxpr.eqns):
        name, outs = eqn.primitive.name, [var in found for var in eqn.outvars]
        if name in CALLS:
            inner = inner_jaxpr(eqn)
            of_inner = resized(inner, tuple(outs))
            may = [var in of_inner for var in inner.invars]
        elif name in _SUMS and not any(type(atom) is Literal for atom in eqn.invars):
            may = [False] * len(eqn.invars)
        elif (
            name in _AS_IT_IS
            or name in _SUMS
            or (name in ("mul", "div") and any(map(_is_number, eqn.invars)))
        ):
            may = [any(outs)] * len(eqn.invars)
        else:
            may = [True] * len(eqn.invars)
        found.update(
            atom
            for atom, so in zip(eqn.invars, may, strict=True)
            if so and type(atom) is not Literal
        )
    return frozenset(found)


def _is_number(atom: Any) -> bool:
    return math.prod(getattr(atom.aval, "shape", ())) == 1
