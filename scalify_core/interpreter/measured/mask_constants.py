"""Which numbers that stand in a program may be elements of its results: those of masks
are treated by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from scalify_core.interpreter.measured.product_reads import (
    CALLS,
    MOVES,
    inner_jaxpr,
    is_float,
)
from scalify_core.numerics.caches import per_jaxpr

# Their results may have elements of the operands, or those times 1, or plus what is
# lost beside them.
_KEEP = (
    MOVES
    | {
        "select_n",
        "max",
        "min",
        "clamp",
        "concatenate",
        "pad",
        "sort",
        "dynamic_update_slice",
        "scatter",
    }
    | {
        "convert_element_type",
        "add",
        "add_any",
        "sub",
        "mul",
        "scatter-add",
        "reduce_max",
        "reduce_min",
        "reduce_sum",
        "cummax",
        "cummin",
        "cumsum",
        "real",
        "pvary",
        "psum",
        "all_gather",
        "ppermute",
        "all_to_all",
        "roll",
    }
)

UNKNOWN = (
    -math.inf
    # stands for large numbers that are not written in the program: of plain arrays, or
    # computed of them
)
# and below: in an operand of a product the lowest number of FP32 or a good part of it,
# so a mask
LOWEST = -(2.0**125)
_MOST = 16  # computed constants of a value that are followed


@per_jaxpr
def large_constants(jaxpr: Any) -> frozenset[float]:
    """The finite numbers beyond FP16 that stand in a program, here or further in: what
    masks and loops begin with.
    """
    found: set[float] = set()
    for eqn in jaxpr.eqns:
        found.update(*map(_large, eqn.invars))
        for inner in jaxprs_in_params(eqn.params):
            found |= large_constants(inner)
    return frozenset(found)


def _large(atom: Any) -> frozenset[float]:
    number = (
        type(atom) is Literal
        and is_float(atom.aval)
        and np.ndim(atom.val) == 0
        and 65504 < abs(atom.val) < np.inf
    )
    return frozenset({float(atom.val)}) if number else frozenset()


def of_arguments(
    args: Sequence[Any], formats: Sequence[Any]
) -> tuple[frozenset[float], ...]:
    """What `constants_in` is given of the arguments of a program: plain arrays of
    floats may hold masks.
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
    """The large constants that may be elements of each result, those of the arguments
    being `given`.

    So are their negatives, their sums, and what a number that stands in the program
    multiplies or divides them by. What a number that is computed makes of them is
    `UNKNOWN`, and so is what a plain array may hold. Any other function of such a
    number is another number.
    """
    known = _followed(jaxpr, given)
    return tuple(
        _large(atom) if type(atom) is Literal else known.get(atom, frozenset())
        for atom in jaxpr.outvars
    )


@per_jaxpr
def lowest_in(jaxpr: Any) -> frozenset[Any]:
    """The variables of a jaxpr of which elements may be the lowest numbers, by
    constants that stand in it.
    """
    if not any(c <= LOWEST for c in large_constants(jaxpr)):
        return frozenset()
    known = _followed(jaxpr, (frozenset[float](),) * len(jaxpr.invars))
    return frozenset(
        var for var, found in known.items() if any(UNKNOWN < c <= LOWEST for c in found)
    )


@per_jaxpr
def _followed(
    jaxpr: Any, given: tuple[frozenset[float], ...]
) -> dict[Any, frozenset[float]]:
    """The large constants that may be elements of each variable, see `constants_in`."""
    known = dict(zip(jaxpr.invars, given, strict=True))
    known.update(
        (var, frozenset({UNKNOWN})) for var in jaxpr.constvars if is_float(var.aval)
    )
    written = large_constants(jaxpr).union(*given)

    def few(found: frozenset[float]) -> frozenset[float]:
        # Each sum of two such values may be another constant: after a few, only those
        # that are written are followed.
        return found if len(found) <= _MOST else found & written | {UNKNOWN}

    def of(atom: Any) -> frozenset[float]:
        return _large(atom) if type(atom) is Literal else known.get(atom, frozenset())

    for eqn in jaxpr.eqns:
        operands, name = tuple(map(of, eqn.invars)), eqn.primitive.name
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
    """What arithmetic makes of large constants, in FP32: a temperature, a penalty, two
    masks added up, a mean.
    """
    name, found = eqn.primitive.name, set[float]()
    operands, given = tuple(some - {UNKNOWN} for some in operands), operands
    with np.errstate(all="ignore"):
        if name == "neg":
            found = {-c for c in operands[0]}
        elif name in ("add", "add_any", "sub") and len(operands) == 2:
            sign = -1 if name == "sub" else 1
            found = {
                float(np.float32(a) + np.float32(sign * b))
                for a in operands[0]
                for b in operands[1]
            }
        elif name in ("mul", "div"):
            a, b = (_number(atom) for atom in eqn.invars)
            if b:
                found = {
                    float(np.float32(c) * np.float32(b if name == "mul" else 1 / b))
                    for c in operands[0]
                }
            elif a and name == "mul":
                found = {float(np.float32(c) * np.float32(a)) for c in operands[1]}
        elif name == "reduce_sum":
            count = math.prod(eqn.invars[0].aval.shape) // max(
                1, math.prod(eqn.outvars[0].aval.shape)
            )
            found = {float(np.float32(c) * np.float32(count)) for c in operands[0]}
    found = {c for c in found if 65504 < abs(c) < np.inf}
    if (
        name in ("mul", "div")
        and any(given)
        and not any(type(atom) is Literal for atom in eqn.invars)
    ):
        found.add(UNKNOWN)
    return frozenset(
        found | {UNKNOWN} if any(UNKNOWN in some for some in given) else found
    )


def _number(atom: Any) -> float | None:
    """The number that a literal of a program is, or None."""
    return (
        float(atom.val)
        if type(atom) is Literal and is_float(atom.aval) and np.ndim(atom.val) == 0
        else None
    )
