"""Follow the constants of masks, such as -1e9 or the lowest number, through a program.

A mask does not take part in the scale of a value: beside -1e9, small numbers would lose
their digits. It saturates instead, at a magnitude that still masks.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from scalify_core.interpreter.measured.products import MOVES
from scalify_core.numerics.formats import is_float
from scalify_core.numerics.jaxprs import CALLS, inner_jaxpr, per_jaxpr

# At or below this an element is a mask, if the program contains a literal of this
# magnitude. The cost: `-x * 1e9`, in other units, saturates as a mask where it stands
# beside nothing but numbers 2^26 times as small (docs/trust.md).
WRITTEN = -1e7
# At or below this an element is always a mask: the lowest FP32 number, or a large part
# of it.
LOWEST = -(2.0**120)
NO_MASK = -math.inf

# A large operand may be an element of the result: the operation moves it, or adds
# numbers too small to change it.
_KEEP = MOVES | {
    "select_n", "max", "min", "clamp", "concatenate", "pad", "stack", "sort", "top_k",
    "approx_top_k", "dynamic_update_slice", "scatter", "scatter-add", "scatter-sub",
    "scatter-max", "scatter-min", "convert_element_type", "reduce_precision", "add",
    "add_any", "sub", "reduce_max", "reduce_min", "reduce_sum", "cummax", "cummin",
    "cumsum", "cumlogsumexp", "reduce_window_max", "reduce_window_min",
    "reduce_window_sum", "real", "round", "floor", "ceil", "pvary", "psum",
    "psum_invariant", "pmax", "pmin", "pbroadcast", "preduced", "reduce_scatter",
    "all_gather", "all_gather_invariant", "ppermute", "all_to_all", "device_put",
    "optimization_barrier", "layout_constraint", "stage", "tie",
}  # fmt: skip


@per_jaxpr
def limits_in(jaxpr: Any, given: tuple[float, ...] = ()) -> dict[Any, float]:
    """Return the limits of the variables of which elements may be masks.

    Elements of a variable at or below its limit are masks.

    Args:
        jaxpr: the program.
        given: the limits of its closed-over values and arguments; (): they hold none.
    """
    given = given or (NO_MASK,) * len((*jaxpr.constvars, *jaxpr.invars))
    # Most programs have no mask: then no variable needs a look, and no result is
    # measured by comparison.
    if not _writes_masks(jaxpr) and max(given, default=NO_MASK) == NO_MASK:
        return {}
    limits = dict(zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True))
    for eqn in jaxpr.eqns:
        operands = [limit_of(limits, atom) for atom in eqn.invars]
        name, largest = eqn.primitive.name, max(operands, default=NO_MASK)
        writes = any(map(_writes_masks, jaxprs_in_params(eqn.params)))
        if largest == NO_MASK and not writes:
            continue
        results = [NO_MASK] * len(eqn.outvars)
        if name in CALLS:
            inner = inner_jaxpr(eqn)
            constants = [NO_MASK] * len(inner.constvars)
            known = limits_in(inner, (*constants, *operands))
            results = [limit_of(known, atom) for atom in inner.outvars]
        elif writes:
            # Which of a loop's or branch's results get the mask is not followed: all
            # may.
            results = [WRITTEN] * len(results)
        elif name in _KEEP or any(True for _ in jaxprs_in_params(eqn.params)):
            results = [largest] * len(results)
        elif name in ("mul", "div"):
            # By a computed number, a mask may become one that the rest reaches.
            by_number = any(isinstance(atom, Literal) for atom in eqn.invars)
            results = [largest if by_number else min(largest, LOWEST)]
        limits |= zip(eqn.outvars, results, strict=True)
    return {var: limit for var, limit in limits.items() if limit > NO_MASK}


def limit_of(limits: dict[Any, float], atom: Any) -> float:
    """Return the limit of a variable or literal, given those of variables."""
    if not isinstance(atom, Literal):
        return limits.get(atom, NO_MASK)
    if _is_large(atom):
        return WRITTEN
    return NO_MASK


def limits_of_results(jaxpr: Any, is_plain: Sequence[bool]) -> list[float]:
    """Return the limits of the results of a program.

    Args:
        jaxpr: the program.
        is_plain: for each argument, whether it is a plain array, which may hold masks.
    """
    arguments = zip(jaxpr.invars, is_plain, strict=True)
    may_hold = [
        # Plain arrays may be masks that were made outside, as a model's causal mask is.
        *(is_float(var.aval) for var in jaxpr.constvars),
        *(
            plain and bool(var.aval.shape) and is_float(var.aval)
            for var, plain in arguments
        ),
    ]
    known = limits_in(jaxpr, tuple(LOWEST if may else NO_MASK for may in may_hold))
    return [limit_of(known, atom) for atom in jaxpr.outvars]


@per_jaxpr
def _writes_masks(jaxpr: Any) -> bool:
    """Return whether a jaxpr, or one inside it, has a number as large as a mask's."""
    return any(
        any(map(_is_large, eqn.invars))
        or any(map(_writes_masks, jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _is_large(atom: Any) -> bool:
    """Return whether an atom is a literal as large as a mask, of either sign."""
    if not isinstance(atom, Literal) or not is_float(atom.aval) or np.ndim(atom.val):
        return False
    # Of either sign: a mask may be written as `x - 1e9`. Infinity is not a number that
    # saturates.
    return -WRITTEN <= abs(float(atom.val)) < math.inf
