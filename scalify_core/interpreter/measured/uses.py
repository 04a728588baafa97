"""Find how the readers of a variable use it: two questions, one walk.

A question is a function of an equation, and of the marks of its results. It returns the
marks of the operands, or None where the equation's inner jaxprs tell. The walk goes
from the results of a program to its arguments, and into calls, branches and loops.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import Literal

from scalify_core.interpreter.measured.products import MOVES
from scalify_core.numerics.jaxprs import CALLS, CONTROL, inner_jaxpr, needed, per_jaxpr

Marks = tuple[bool, ...]
Question = Callable[[Any, Marks], Sequence[bool] | None]


@per_jaxpr
def marked(jaxpr: Any, results: Marks, question: Question) -> frozenset[Any]:
    """Return the marked variables of a jaxpr, given the marks of its results."""
    variables = _chosen(jaxpr.outvars, results)
    for eqn in reversed(jaxpr.eqns):
        outs = tuple(var in variables for var in eqn.outvars)
        operands = question(eqn, outs)
        if operands is None:
            outs, operands = _inside(eqn, outs, question)
            variables |= _chosen(eqn.outvars, outs)
        variables |= _chosen(eqn.invars, operands)
    return frozenset(variables)


def _chosen(atoms: Sequence[Any], marks: Iterable[bool]) -> set[Any]:
    pairs = zip(atoms, marks, strict=True)
    return {atom for atom, mark in pairs if mark and not isinstance(atom, Literal)}


def _body(jaxpr: Any, results: Marks, question: Question) -> tuple[Marks, Marks]:
    """Return the marks of an inner jaxpr's results and arguments.

    A result that the jaxpr itself reads may be marked for that.
    """
    variables = marked(jaxpr, results, question)
    given = [not isinstance(x, Literal) and x in variables for x in jaxpr.outvars]
    return tuple(given), tuple(x in variables for x in jaxpr.invars)


def _inside(eqn: Any, results: Marks, question: Question) -> tuple[Marks, Marks]:
    """Return the marks of an equation's results and operands, by its inner jaxprs."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        consts, carry, _ = params["ft_in"].update(eqn.invars).unpack()
        return _loop(params["jaxpr"], results, len(consts), len(carry), question)
    if name == "while":
        first = params["body_nconsts"]
        body = needed(params["body_jaxpr"])
        outs, operands = _loop(body, results, first, len(results), question)
        return outs, (False,) * params["cond_nconsts"] + operands
    if name == "cond":
        branches = [_body(x, results, question) for x in params["branches"]]
        outs, operands = (_either(*marks) for marks in zip(*branches, strict=True))
        return outs, (False, *operands)
    return _body(inner_jaxpr(eqn), results, question)


def _loop(
    body: Any, results: Marks, first: int, count: int, question: Question
) -> tuple[Marks, Marks]:
    """Return the marks of `_body`; the next iteration reads the carry of this one."""
    # Followed part by part. Were all marked that a loop with a root reads, gradients of
    # layers in a scan would be FP16's smallest number in place of zeros, which Adam
    # takes for a step.
    while True:
        outs, operands = _body(body, results, question)
        read_next = operands[first : first + count]
        # Marks only grow, so this ends: after as many looks as a mark takes to be
        # handed from part to part.
        joined = _either(results, read_next + (False,) * (len(results) - count))
        if joined == results:
            return _either(outs, results), operands
        results = joined


def _either(*marks: Marks) -> Marks:
    return tuple(map(any, zip(*marks, strict=True)))


# Results that must not be rounded to zero. An optimizer's mean of squares spans twice
# the octaves of the gradient. Returned as FP16, its small elements underflow beside the
# large ones. As zeros they would make the next step divide the first moment by epsilon.
# As the smallest number of the format they make the step small instead.
_NEEDS_NONZERO = frozenset({"sqrt", "rsqrt", "log", "cbrt", "pow"})  # the first operand
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


def needs_nonzero(eqn: Any, outs: Marks) -> Sequence[bool] | None:
    """Ask for variables of which a root, a logarithm or a reciprocal is taken."""
    name = eqn.primitive.name
    if name in CONTROL:
        return None
    marks = [False] * len(eqn.invars)
    if name in _NEEDS_NONZERO:
        marks[0] = True
    elif name == "div":
        # x / nu is as bad as x / sqrt(nu) where nu was rounded to zero.
        marks = [any(outs), True]
    elif name in _SCALED and any(outs):
        marks = [bool(atom.aval.shape) for atom in eqn.invars]
    return marks


# The forward pass of a scan leaves stacks for the backward pass. They are the memory of
# a deep model, so they are stored in their format, as plain code stores them. Stacks
# that other equations read, as losses or outputs, stay in FP32.


def reads_beside_loops(eqn: Any, outs: Marks) -> Sequence[bool] | None:
    """Ask for variables that anything but a scan's slicing reads."""
    if eqn.primitive.name in CALLS:
        return None
    marks = [True] * len(eqn.invars)
    if eqn.primitive.name == "scan":
        consts, carry, xs = eqn.params["ft_in"].update(eqn.invars).unpack()
        marks[len(consts) + len(carry) :] = [False] * len(xs)
    return marks
