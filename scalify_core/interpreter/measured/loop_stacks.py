"""Find the stacks that loops leave for later loops alone.

The forward pass of a scan leaves such stacks for the backward pass. They are the memory
of a deep model, so they are stored in their format, as plain code stores them. Stacks
that other equations read, as losses or outputs, stay in FP32 like all values between
stores.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Literal

from scalify_core.interpreter.measured.products import CALLS, inner_jaxpr
from scalify_core.numerics.jaxprs import per_jaxpr


@per_jaxpr
def read_outside_loops(jaxpr: Any, returned: tuple[bool, ...]) -> frozenset[Any]:
    """Return the variables of a jaxpr that are read but as the slices of a scan.

    Args:
        jaxpr: the program.
        returned: for each result, whether it is so read by later equations.
    """
    variables = _chosen(jaxpr.outvars, returned)
    for eqn in reversed(jaxpr.eqns):
        reads = [True] * len(eqn.invars)
        if eqn.primitive.name == "scan":
            consts, carry, xs = eqn.params["ft_in"].update(eqn.invars).unpack()
            reads[len(consts) + len(carry) :] = [False] * len(xs)
        elif eqn.primitive.name in CALLS:
            inner = inner_jaxpr(eqn)
            outs = tuple(var in variables for var in eqn.outvars)
            inner_variables = read_outside_loops(inner, outs)
            reads = [var in inner_variables for var in inner.invars]
        variables |= _chosen(eqn.invars, reads)
    return frozenset(variables)


def _chosen(atoms: Any, chosen: Any) -> set[Any]:
    pairs = zip(atoms, chosen, strict=True)
    return {
        atom for atom, is_chosen in pairs if is_chosen and type(atom) is not Literal
    }
