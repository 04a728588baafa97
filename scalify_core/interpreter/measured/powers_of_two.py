"""Find arrays that a program makes of zeros and powers of two, such as one-hot vectors.

A product by such an array copies elements of the other operand. What is found are the
numbers that the elements of a variable may be, where they are numbers of the program.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from scalify_core.interpreter.measured.products import CALLS, inner_jaxpr
from scalify_core.numerics.jaxprs import per_jaxpr

Numbers = frozenset[float] | None  # that elements may be; None: any

_BOOLEANS = frozenset({0.0, 1.0})
# Their results have elements of their operands, or those negated.
_SAME = frozenset(
    {
        "reshape", "transpose", "broadcast_in_dim", "squeeze", "rev", "slice",
        "dynamic_slice", "gather", "copy", "copy_p", "stop_gradient", "name",
        "expand_dims", "neg", "concatenate", "pad", "max", "min", "abs", "select_n",
        "dynamic_update_slice", "split", "tile", "reduce_max", "reduce_min", "sort",
        "scatter", "convert_element_type",
    }
)  # fmt: skip
_CALLS = frozenset({"jit", "closed_call", "custom_jvp_call", "custom_vjp_call"})


@per_jaxpr
def numbers_in(
    jaxpr: Any, given: tuple[Numbers, ...]
) -> tuple[dict[Any, Numbers], tuple[Numbers, ...]]:
    """Return the numbers of all variables of a jaxpr, and those of its results.

    Args:
        jaxpr: the program.
        given: the numbers of its arguments.
    """
    known: dict[Any, Numbers] = dict(zip(jaxpr.invars, given, strict=True))
    numbers_of = functools.partial(numbers_of_atom, known)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _CALLS:
            operands = tuple(map(numbers_of, eqn.invars))
            _, results = numbers_in(inner_jaxpr(eqn), operands)
            known |= zip(eqn.outvars, results, strict=True)
        elif name == "mul":
            numbers = _joined(list(map(numbers_of, eqn.invars)))
            is_mask = numbers is not None and numbers <= _BOOLEANS
            known[eqn.outvars[0]] = numbers if is_mask else None
        elif name in _SAME:
            numbers = _joined([numbers_of(x) for x in _elements(eqn)])
            known.update(dict.fromkeys(eqn.outvars, numbers))
    return known, tuple(map(numbers_of, jaxpr.outvars))


def numbers_of_atom(known: Mapping[Any, Numbers], atom: Any) -> Numbers:
    """Return the numbers of a variable or literal, those of variables being `known`."""
    dtype = atom.aval.dtype
    if type(atom) is Literal:
        is_real = not jnp.issubdtype(dtype, jnp.complexfloating)
        is_number = is_real and np.ndim(atom.val) == 0
        if is_number:
            return frozenset({float(atom.val)})
        return None
    return known.get(atom) or (_BOOLEANS if dtype == np.bool_ else None)


def numbers_inside(
    eqn: Any, known: Mapping[Any, Numbers]
) -> tuple[Numbers, ...] | None:
    """Return the numbers of an inner jaxpr's arguments; None: they are not known."""
    numbers = [numbers_of_atom(known, atom) for atom in eqn.invars]
    name = eqn.primitive.name
    if name == "cond":
        return tuple(numbers[1:])
    if name == "scan":
        consts, carry, xs = eqn.params["ft_in"].update(numbers).unpack()
        return (*consts, *[None] * len(carry), *xs)
    if name in CALLS:
        return tuple(numbers)
    return None


def select_elements(numbers: Numbers) -> bool:
    """Return whether a product by such numbers copies elements of the other operand.

    They are zeros and powers of two, of either sign. Equal ones only add elements up.
    """
    return (
        numbers is not None
        and len(numbers) > 1
        and all(math.frexp(x)[0] in (0, 0.5, -0.5) for x in numbers)
    )


def _elements(eqn: Any) -> Sequence[Any]:
    """Return the operands whose elements the result has.

    The remaining operands are indices that select among them.
    """
    if eqn.primitive.name == "select_n":
        return eqn.invars[1:]
    return [
        x for x in eqn.invars if not jnp.issubdtype(x.aval.dtype, jnp.integer)
    ] or eqn.invars


def _joined(numbers: Sequence[Numbers]) -> Numbers:
    if any(x is None for x in numbers):
        return None
    return frozenset[float]().union(*filter(None, numbers))
