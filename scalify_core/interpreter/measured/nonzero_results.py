"""Which results of a program it also takes a root, a logarithm or a reciprocal of: such
a number is not to become zero.

An optimiser's mean of squares spans twice the octaves of the gradient. Where it is
returned as FP16, its small elements are below what the format holds beside the large
ones; as zeros they would make the next step divide what the first moment still holds by
epsilon. As the smallest number of the format they make it small instead.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Literal

from scalify_core.interpreter.measured.product_reads import CALLS, MOVES, inner_jaxpr
from scalify_core.numerics.caches import per_jaxpr

_TAKEN = frozenset({"sqrt", "rsqrt", "log", "cbrt", "pow"})  # of the first operand
# Their result is zero where, up to what is added, the operand is.
_SCALED = MOVES | {
    "mul",
    "div",
    "add",
    "convert_element_type",
    "max",
    "select_n",
    "clamp",
}


@per_jaxpr
def taken_of(
    jaxpr: Any, further: tuple[bool, ...]
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Of each result and of each argument, whether one is taken of it.

    `further`: of which results those who read them take one.
    """
    found = {
        atom
        for atom, so in zip(jaxpr.outvars, further, strict=True)
        if so and type(atom) is not Literal
    }
    for eqn in reversed(jaxpr.eqns):
        name, outs = eqn.primitive.name, tuple(var in found for var in eqn.outvars)
        read: list[Any] = []
        if name in CALLS:
            of_results, of_operands = taken_of(inner_jaxpr(eqn), outs)
            found.update(
                var for var, so in zip(eqn.outvars, of_results, strict=True) if so
            )
            read = [
                atom for atom, so in zip(eqn.invars, of_operands, strict=True) if so
            ]
        elif name in _TAKEN:
            read = eqn.invars[:1]
        elif name == "div":
            read = eqn.invars[:2] if any(outs) else eqn.invars[1:]
        elif name in _SCALED and any(outs):
            read = [atom for atom in eqn.invars if atom.aval.shape]
        found.update(atom for atom in read if type(atom) is not Literal)
    return tuple(type(x) is not Literal and x in found for x in jaxpr.outvars), tuple(
        x in found for x in jaxpr.invars
    )
