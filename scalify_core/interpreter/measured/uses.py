"""Find how the readers of a variable use it: two questions, one walk.

A question is a function of an equation, and of whether one of its results is marked. It
returns the variables to mark. The walk goes from the results of a program to its
arguments, and into calls.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import Literal, jaxprs_in_params

from scalify_core.interpreter.measured.products import MOVES
from scalify_core.numerics.jaxprs import CALLS, CONTROL, inner_jaxpr, per_jaxpr

Question = Callable[[Any, bool], Sequence[Any]]


@per_jaxpr
def marked(jaxpr: Any, results: tuple[bool, ...], question: Question) -> frozenset[Any]:
    """Return the marked variables of a jaxpr, given which of its results are marked."""
    pairs = zip(jaxpr.outvars, results, strict=True)
    variables = _variables(atom for atom, is_marked in pairs if is_marked)
    for eqn in reversed(jaxpr.eqns):
        outs = tuple(var in variables for var in eqn.outvars)
        if eqn.primitive.name in CALLS:
            variables |= _marked_by_call(eqn, outs, question)
        else:
            variables |= _variables(question(eqn, any(outs)))
    return frozenset(variables)


def _marked_by_call(
    eqn: Any, results: tuple[bool, ...], question: Question
) -> set[Any]:
    """Return the operands and results of a call that are marked inside it."""
    inner = inner_jaxpr(eqn)
    inside = marked(inner, results, question)
    pairs = zip(
        (*inner.outvars, *inner.invars), (*eqn.outvars, *eqn.invars), strict=True
    )
    return _variables(
        atom for x, atom in pairs if not isinstance(x, Literal) and x in inside
    )


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, Literal)}


# Results that must not be rounded to zero. An optimizer's mean of squares spans twice
# the octaves of the gradient. Returned as FP16, its small elements underflow beside the
# large ones. As zeros they would make the next step divide the first moment by epsilon.
# As the smallest number of the format they make the step small instead.
_NEEDS_NONZERO = frozenset({"sqrt", "rsqrt", "log", "cbrt", "pow"})  # the first operand
# The result is zero where the operand is zero, apart from a term that is added.
_SCALED = MOVES | {
    "mul",
    "add",
    "convert_element_type",
    "max",
    "select_n",
    "clamp",
}


def needs_nonzero(eqn: Any, is_marked: bool) -> Sequence[Any]:
    """Ask for variables of which a root, a logarithm or a reciprocal is taken.

    A loop or branch with one inside may take it of all that it reads and returns. The
    smallest number in place of a zero is within the rounding of the others.
    """
    name = eqn.primitive.name
    if name in CONTROL:
        if is_marked or any(map(_takes_roots, jaxprs_in_params(eqn.params))):
            return *eqn.outvars, *eqn.invars
        return ()
    if name in _NEEDS_NONZERO:
        return eqn.invars[:1]
    if name == "div":
        return eqn.invars if is_marked else eqn.invars[1:]
    if name in _SCALED and is_marked:
        return [atom for atom in eqn.invars if atom.aval.shape]
    return ()


@per_jaxpr
def _takes_roots(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in _NEEDS_NONZERO | {"div"}
        or any(map(_takes_roots, jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


# The forward pass of a scan leaves stacks for the backward pass. They are the memory of
# a deep model, so they are stored in their format, as plain code stores them. Stacks
# that other equations read, as losses or outputs, stay in FP32.


def reads_beside_loops(eqn: Any, is_marked: bool) -> Sequence[Any]:
    """Ask for variables that anything but a scan's slicing reads."""
    del is_marked
    if eqn.primitive.name != "scan":
        return eqn.invars
    consts, carry, _ = eqn.params["ft_in"].update(eqn.invars).unpack()
    return *consts, *carry
