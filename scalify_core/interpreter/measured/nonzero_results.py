"""Find results of which a program takes a root, a logarithm or a reciprocal.

Such a result must not be rounded to zero.

An optimizer's mean of squares spans twice the octaves of the gradient. Returned as
FP16, its small elements underflow beside the large ones. As zeros they would make the
next step divide the first moment by epsilon. As the smallest number of the format they
make the step small instead.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Literal

from scalify_core.interpreter.measured.products import CALLS, MOVES, inner_jaxpr
from scalify_core.numerics.jaxprs import per_jaxpr

# They need their first operand to be nonzero.
_NEEDS_NONZERO = frozenset({"sqrt", "rsqrt", "log", "cbrt", "pow"})
# The result is zero where the operand is zero, apart from a term that is added.
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
def needs_nonzero(
    jaxpr: Any, read_later: tuple[bool, ...]
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return for each result and each argument whether it must not become zero.

    Args:
        jaxpr: the program.
        read_later: for each result, whether a later program takes a root, a logarithm
            or a reciprocal of it.
    """
    variables = {
        atom
        for atom, needed in zip(jaxpr.outvars, read_later, strict=True)
        if needed and type(atom) is not Literal
    }
    for eqn in reversed(jaxpr.eqns):
        name, outs = eqn.primitive.name, tuple(var in variables for var in eqn.outvars)
        read: list[Any] = []
        if name in CALLS or name == "scan":
            inside = _in_scan if name == "scan" else _in_call
            needed_results, needed_operands = inside(eqn, outs)
            variables.update(
                var
                for var, needed in zip(eqn.outvars, needed_results, strict=True)
                if needed
            )
            read = [
                atom
                for atom, needed in zip(eqn.invars, needed_operands, strict=True)
                if needed
            ]
        elif name in _NEEDS_NONZERO:
            read = eqn.invars[:1]
        elif name == "div":
            read = eqn.invars[:2] if any(outs) else eqn.invars[1:]
        elif name in _SCALED and any(outs):
            read = [atom for atom in eqn.invars if atom.aval.shape]
        variables.update(atom for atom in read if type(atom) is not Literal)
    results = (type(x) is not Literal and x in variables for x in jaxpr.outvars)
    return tuple(results), tuple(x in variables for x in jaxpr.invars)


def _in_call(
    eqn: Any, read_later: tuple[bool, ...]
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    return needs_nonzero(inner_jaxpr(eqn), read_later)


def _in_scan(
    eqn: Any, read_later: tuple[bool, ...]
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """As `needs_nonzero`: the next iteration reads what one makes of the carry."""
    consts, carry, _ = eqn.params["ft_in"].update(eqn.invars).unpack()
    first, count = len(consts), len(carry)
    while True:
        results, operands = needs_nonzero(eqn.params["jaxpr"], read_later)
        read_next = operands[first : first + count] + (False,) * len(read_later)
        joined = tuple(map(any, zip(read_later, read_next, strict=False)))
        if joined == read_later:
            return tuple(map(any, zip(results, joined, strict=True))), operands
        read_later = joined
