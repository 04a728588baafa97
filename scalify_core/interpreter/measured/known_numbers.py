"""Follow the large constants of a program to its results.

Constants of masks, such as -1e9, do not take part in the scale of a result.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from scalify_core.interpreter.measured.products import CALLS, MOVES
from scalify_core.numerics.formats import is_float
from scalify_core.numerics.jaxprs import inner_jaxpr, per_jaxpr

# A large constant among the operands may be an element of the result: the operation
# moves it, multiplies it by 1, or adds a number too small to change it.
_KEEP = MOVES | {
    "select_n", "max", "min", "clamp", "concatenate", "pad", "sort",
    "dynamic_update_slice", "scatter", "convert_element_type", "add", "add_any", "sub",
    "mul", "scatter-add", "reduce_max", "reduce_min", "reduce_sum", "cummax", "cummin",
    "cumsum", "real", "pvary", "psum", "all_gather", "ppermute", "all_to_all", "roll",
}  # fmt: skip

# Stands for large numbers that are no literals of the program: elements of plain
# arrays, or results computed from them.
ANY_LARGE = -math.inf
# Elements of an operand at or below this number are a mask: the lowest FP32 number, or
# a large part of it.
LOWEST = -(2.0**125)
_MOST = 16  # constants that are followed for one value


@per_jaxpr
def large_constants(jaxpr: Any) -> frozenset[float]:
    """Return the finite literals beyond FP16's range in a jaxpr and its inner jaxprs.

    They are the constants of masks, and the start values of loops.
    """
    constants: set[float] = set()
    for eqn in jaxpr.eqns:
        constants.update(*map(_large, eqn.invars))
        for inner in jaxprs_in_params(eqn.params):
            constants |= large_constants(inner)
    return frozenset(constants)


def _large(atom: Any) -> frozenset[float]:
    number = _number(atom)
    if number is None or not 65504 < abs(number) < math.inf:
        return frozenset()
    return frozenset({number})


def argument_constants(
    args: Sequence[Any], formats: Sequence[Any]
) -> tuple[frozenset[float], ...]:
    """Return `constants_in`'s `given` for the arguments of a program.

    Plain arrays of floats may hold masks, so they get `ANY_LARGE`.
    """
    none, unknown = frozenset[float](), frozenset({ANY_LARGE})

    def may(x: Any, format: Any) -> bool:
        return format is None and np.ndim(x) > 0 and is_float(x)

    return tuple(
        unknown if may(x, format) else none
        for x, format in zip(args, formats, strict=True)
    )


@per_jaxpr
def constants_in(
    jaxpr: Any, given: tuple[frozenset[float], ...]
) -> tuple[frozenset[float], ...]:
    """Return the large constants that may be elements of each result.

    Negatives of a constant, sums, and its products or quotients with a literal are
    followed as numbers. Products with a computed number are `ANY_LARGE`, as are the
    elements of a plain array. The result of any other function is not a large constant.

    Args:
        jaxpr: the program.
        given: the large constants of its arguments.
    """
    known = _followed(jaxpr, given)
    return tuple(
        _large(atom) if isinstance(atom, Literal) else known.get(atom, frozenset())
        for atom in jaxpr.outvars
    )


def constants_of(jaxpr: Any, atom: Any) -> frozenset[float]:
    """Return the large constants that may be elements of a variable of a jaxpr.

    Those that its arguments may have are not known.
    """
    if isinstance(atom, Literal) or not large_constants(jaxpr):
        return frozenset()
    known = _followed(jaxpr, (frozenset[float](),) * len(jaxpr.invars))
    return known.get(atom, frozenset()) - {ANY_LARGE}


@per_jaxpr
def lowest_in(jaxpr: Any) -> frozenset[Any]:
    """Return the variables of which elements may be the lowest numbers.

    Only literals of the jaxpr are considered.
    """
    if not any(c <= LOWEST for c in large_constants(jaxpr)):
        return frozenset()
    known = _followed(jaxpr, (frozenset[float](),) * len(jaxpr.invars))
    return frozenset(
        var
        for var, constants in known.items()
        if any(ANY_LARGE < c <= LOWEST for c in constants)
    )


@per_jaxpr
def _followed(
    jaxpr: Any, given: tuple[frozenset[float], ...]
) -> dict[Any, frozenset[float]]:
    """Return the large constants that may be elements of each variable.

    See `constants_in`.
    """
    known = dict(zip(jaxpr.invars, given, strict=True))
    known.update(
        (var, frozenset({ANY_LARGE})) for var in jaxpr.constvars if is_float(var.aval)
    )
    written = large_constants(jaxpr).union(*given)

    def few(constants: frozenset[float]) -> frozenset[float]:
        # Each sum of two such values may be another constant: after a few, only those
        # that are written are followed.
        if len(constants) <= _MOST:
            return constants
        return constants & written | {ANY_LARGE}

    def constants_of(atom: Any) -> frozenset[float]:
        if isinstance(atom, Literal):
            return _large(atom)
        return known.get(atom, frozenset())

    for eqn in jaxpr.eqns:
        operands, name = tuple(map(constants_of, eqn.invars)), eqn.primitive.name
        outs: tuple[frozenset[float], ...] = (frozenset(),) * len(eqn.outvars)
        if name in CALLS:
            outs = constants_in(inner_jaxpr(eqn), operands)
        elif inner := [
            large_constants(jaxpr) for jaxpr in jaxprs_in_params(eqn.params)
        ]:
            outs = (frozenset().union(*operands, *inner),) * len(outs)
        elif name in _KEEP:
            outs = (frozenset().union(*operands, _computed(eqn, operands)),) * len(outs)
        elif name in ("neg", "div"):
            outs = (_computed(eqn, operands),)
        known.update(zip(eqn.outvars, map(few, outs), strict=True))
    return known


def _computed(eqn: Any, operands: tuple[frozenset[float], ...]) -> frozenset[float]:
    """Return the results of arithmetic on large constants, in FP32.

    Such arithmetic is a temperature, a penalty, the sum of two masks, or a mean.
    """
    name, constants = eqn.primitive.name, set[float]()
    operands, given = tuple(some - {ANY_LARGE} for some in operands), operands
    with np.errstate(all="ignore"):
        if name == "neg":
            constants = {-c for c in operands[0]}
        elif name in ("add", "add_any", "sub") and len(operands) == 2:
            sign = -1 if name == "sub" else 1
            for left, right in itertools.product(*operands):
                constants.add(float(np.float32(left) + np.float32(sign * right)))
        elif name in ("mul", "div"):
            a, b = (_number(atom) for atom in eqn.invars)
            if b:
                constants = {
                    float(np.float32(c) * np.float32(b if name == "mul" else 1 / b))
                    for c in operands[0]
                }
            elif a and name == "mul":
                constants = {float(np.float32(c) * np.float32(a)) for c in operands[1]}
        elif name == "reduce_sum":
            count = math.prod(eqn.invars[0].aval.shape) // max(
                1, math.prod(eqn.outvars[0].aval.shape)
            )
            constants = {float(np.float32(c) * np.float32(count)) for c in operands[0]}
    constants = {c for c in constants if 65504 < abs(c) < np.inf}
    if (
        name in ("mul", "div")
        and any(given)
        and not any(isinstance(atom, Literal) for atom in eqn.invars)
    ):
        constants.add(ANY_LARGE)
    return frozenset(
        constants | {ANY_LARGE}
        if any(ANY_LARGE in some for some in given)
        else constants
    )


def _number(atom: Any) -> float | None:
    """Return the number of a literal, or None."""
    if isinstance(atom, Literal) and is_float(atom.aval) and np.ndim(atom.val) == 0:
        return float(atom.val)
    return None


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
        if name in CALLS:
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
    if isinstance(atom, Literal):
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
