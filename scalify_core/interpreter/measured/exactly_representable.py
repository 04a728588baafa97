"""Find plain FP32 numbers of a program that a narrow format represents exactly.

Such numbers are masks, one-hot vectors and small integers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from scalify_core.interpreter.measured.product_reads import CALLS, inner_jaxpr
from scalify_core.numerics.caches import per_jaxpr

# The source of a number: a narrow dtype, or a constant of the program.
Origin = np.dtype | float
Origins = frozenset[Origin] | None  # of the elements of a value; None: any

# Their results have elements of their operands, or those negated.
_SAME = frozenset(
    {
        "reshape", "transpose", "broadcast_in_dim", "squeeze", "rev", "slice",
        "dynamic_slice", "gather", "copy", "copy_p", "stop_gradient", "name",
        "expand_dims", "neg", "concatenate", "pad", "max", "min", "abs", "select_n",
        "dynamic_update_slice", "split", "tile", "reduce_max", "reduce_min", "sort",
        "scatter",
    }
)  # fmt: skip
_CALLS = frozenset({"jit", "closed_call", "custom_jvp_call", "custom_vjp_call"})


@per_jaxpr
def origins_in(
    jaxpr: Any, given: tuple[Origins, ...]
) -> tuple[dict[Any, Origins], tuple[Origins, ...]]:
    """Return the origins of all variables of a jaxpr, and those of its results.

    Args:
        jaxpr: the program.
        given: the origins of its arguments.
    """
    known: dict[Any, Origins] = dict(zip(jaxpr.invars, given, strict=True))
    origins_of = functools.partial(origins_of_atom, known)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _CALLS:
            operands = tuple(map(origins_of, eqn.invars))
            _, results = origins_in(inner_jaxpr(eqn), operands)
            known |= zip(eqn.outvars, results, strict=True)
        elif name == "convert_element_type":
            (x,) = eqn.invars
            known[eqn.outvars[0]] = (
                frozenset({x.aval.dtype}) if is_narrow(x.aval.dtype) else origins_of(x)
            )
        elif name == "mul":
            if all(is_mask(origins_of(x)) for x in eqn.invars):
                known[eqn.outvars[0]] = _joined([origins_of(x) for x in eqn.invars])
        elif name in _SAME:
            origins = _joined([origins_of(x) for x in _elements(eqn)])
            known.update(dict.fromkeys(eqn.outvars, origins))
    return known, tuple(map(origins_of, jaxpr.outvars))


def origins_of_atom(known: Mapping[Any, Origins], atom: Any) -> Origins:
    """Return the origins of a variable or literal, those of variables being `known`."""
    if type(atom) is Literal:
        return _of_number(atom)
    is_bool = atom.aval.dtype == np.bool_
    return known.get(atom) or (frozenset({atom.aval.dtype}) if is_bool else None)


def origins_inside(
    eqn: Any, known: Mapping[Any, Origins]
) -> tuple[Origins, ...] | None:
    """Return the origins of an inner jaxpr's arguments; None: they are not known."""
    origins = [origins_of_atom(known, atom) for atom in eqn.invars]
    name = eqn.primitive.name
    if name == "cond":
        return tuple(origins[1:])
    if name == "scan":
        consts, carry, xs = eqn.params["ft_in"].update(origins).unpack()
        return (*consts, *[None] * len(carry), *xs)
    return tuple(origins) if name in CALLS else None


def _elements(eqn: Any) -> Sequence[Any]:
    """Return the operands whose elements the result has.

    The remaining operands are indices that select among them.
    """
    if eqn.primitive.name == "select_n":
        return eqn.invars[1:]
    return [
        x for x in eqn.invars if not jnp.issubdtype(x.aval.dtype, jnp.integer)
    ] or eqn.invars


def _joined(operand_origins: Sequence[Origins]) -> Origins:
    if any(x is None for x in operand_origins):
        return None
    return frozenset[Origin]().union(*filter(None, operand_origins))


def _of_number(atom: Any) -> Origins:
    is_real = not jnp.issubdtype(atom.aval.dtype, jnp.complexfloating)
    return frozenset({float(atom.val)}) if is_real and np.ndim(atom.val) == 0 else None


def are_powers(origins: Origins) -> bool:
    """Return whether all these numbers are zeros or powers of two, of either sign.

    A product with such an operand copies elements of the other operand.
    """
    return origins is not None and all(
        x == np.bool_ or (isinstance(x, float) and math.frexp(x)[0] in (0, 0.5, -0.5))
        for x in origins
    )


def is_narrow(dtype: np.dtype) -> bool:
    """Return whether a dtype has 8 bits, or is a float of 16 bits."""
    return dtype.itemsize == 1 or (
        dtype.itemsize == 2 and jnp.issubdtype(dtype, jnp.floating)
    )


def is_mask(origins: Origins) -> bool:
    """Return whether all these numbers are zeros and ones.

    They are booleans, or constants of the program.
    """
    return (
        origins is not None
        and bool(origins)
        and origins <= {np.dtype(np.bool_), 0.0, 1.0}
    )
