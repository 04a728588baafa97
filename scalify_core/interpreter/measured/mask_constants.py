"""Follow the large constants of a program to its results.

Constants of masks, such as -1e9, do not take part in the scale of a result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from scalify_core.interpreter.measured.products import (
    CALLS,
    MOVES,
    inner_jaxpr,
    is_float,
)
from scalify_core.numerics.jaxprs import per_jaxpr

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
UNKNOWN = -math.inf
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

    Plain arrays of floats may hold masks, so they get `UNKNOWN`.
    """
    none, unknown = frozenset[float](), frozenset({UNKNOWN})

    def may(x: Any, format: Any) -> bool:
        return (
            format is None
            and np.ndim(x) > 0
            and jnp.issubdtype(jnp.result_type(x), jnp.floating)
        )

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
    followed as numbers. Products with a computed number are `UNKNOWN`, as are the
    elements of a plain array. The result of any other function is not a large constant.

    Args:
        jaxpr: the program.
        given: the large constants of its arguments.
    """
    known = _followed(jaxpr, given)
    return tuple(
        _large(atom) if type(atom) is Literal else known.get(atom, frozenset())
        for atom in jaxpr.outvars
    )


def constants_of(jaxpr: Any, atom: Any) -> frozenset[float]:
    """Return the large constants that may be elements of a variable of a jaxpr.

    Those that its arguments may have are not known.
    """
    if type(atom) is Literal or not large_constants(jaxpr):
        return frozenset()
    known = _followed(jaxpr, (frozenset[float](),) * len(jaxpr.invars))
    return known.get(atom, frozenset()) - {UNKNOWN}


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
        if any(UNKNOWN < c <= LOWEST for c in constants)
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
        (var, frozenset({UNKNOWN})) for var in jaxpr.constvars if is_float(var.aval)
    )
    written = large_constants(jaxpr).union(*given)

    def few(constants: frozenset[float]) -> frozenset[float]:
        # Each sum of two such values may be another constant: after a few, only those
        # that are written are followed.
        if len(constants) <= _MOST:
            return constants
        return constants & written | {UNKNOWN}

    def constants_of(atom: Any) -> frozenset[float]:
        if type(atom) is Literal:
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
    operands, given = tuple(some - {UNKNOWN} for some in operands), operands
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
        and not any(type(atom) is Literal for atom in eqn.invars)
    ):
        constants.add(UNKNOWN)
    return frozenset(
        constants | {UNKNOWN} if any(UNKNOWN in some for some in given) else constants
    )


def _number(atom: Any) -> float | None:
    """Return the number of a literal, or None."""
    if type(atom) is Literal and is_float(atom.aval) and np.ndim(atom.val) == 0:
        return float(atom.val)
    return None
