"""Find the values of a program that are only ever added to larger ones.

Lost rows of such values are not reported.

A row of a product's result may be lost beside larger rows. That is a loss if a later
equation divides by the row's size, as a norm does, or multiplies the row by an array.
It is no loss if the result is returned, and so stored at one scale, or is added to
another value. The gradient of the keys of causal attention is such a value: its last
rows are nearly zero.
"""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import Literal

from scalify_core.interpreter.measured.products import (
    CALLS,
    MOVES,
    PRODUCTS,
    inner_jaxpr,
)
from scalify_core.numerics.jaxprs import per_jaxpr

_SUMS = frozenset({"add", "sub", "add_any"})
_PRESERVES_ROWS = (
    MOVES | PRODUCTS | {"reduce_sum", "convert_element_type", "concatenate", "pad"}
)


@per_jaxpr
def resized(jaxpr: Any, returned: tuple[bool, ...]) -> frozenset[Any]:
    """Return the variables of a jaxpr whose rows a later equation may resize.

    Args:
        jaxpr: the program.
        returned: for each result, whether its readers may resize its rows.
    """
    variables = {
        atom
        for atom, may in zip(jaxpr.outvars, returned, strict=True)
        if may and type(atom) is not Literal
    }
    for eqn in reversed(jaxpr.eqns):
        name, outs = eqn.primitive.name, [var in variables for var in eqn.outvars]
        if name in CALLS:
            inner = inner_jaxpr(eqn)
            inner_variables = resized(inner, tuple(outs))
            may = [var in inner_variables for var in inner.invars]
        elif name in _SUMS and not any(type(atom) is Literal for atom in eqn.invars):
            may = [False] * len(eqn.invars)
        elif (
            name in _PRESERVES_ROWS
            or name in _SUMS
            or (name in ("mul", "div") and any(map(_is_number, eqn.invars)))
        ):
            may = [any(outs)] * len(eqn.invars)
        else:
            may = [True] * len(eqn.invars)
        variables.update(
            atom
            for atom, resizes in zip(eqn.invars, may, strict=True)
            if resizes and type(atom) is not Literal
        )
    return frozenset(variables)


def _is_number(atom: Any) -> bool:
    return math.prod(getattr(atom.aval, "shape", ())) == 1
