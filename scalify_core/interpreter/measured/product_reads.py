"""Find the parts in which the products of a program read its variables.

A value that several products read is stored once, with as many scales as suit all of
them. So the readers of a variable are found before it is stored, in its own jaxpr and
in the jaxprs of calls and loops.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from scalify_core.interpreter.measured.products import (
    contracted_size,
    is_finer,
    readings,
)
from scalify_core.numerics.amax import Parts
from scalify_core.numerics.caches import per_jaxpr

PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})
# Elements only move, so a stored copy may be moved without storing it anew.
MOVES = frozenset(
    {
        "reshape", "transpose", "broadcast_in_dim", "squeeze", "rev", "slice",
        "dynamic_slice", "gather", "split", "copy", "copy_p", "stop_gradient", "name",
        "sharding_constraint", "reshard", "expand_dims", "unstack", "tile", "neg",
    }
)  # fmt: skip
KEEP_AXES = frozenset(
    {"copy", "copy_p", "stop_gradient", "name", "sharding_constraint", "reshard", "neg"}
)
# A reader of the entire result reads the entire operand.
_MOVES_ALL = MOVES - {"slice", "dynamic_slice", "gather", "split", "unstack"}
CALLS = frozenset(
    {
        "jit", "closed_call", "core_call", "remat2", "shard_map", "custom_jvp_call",
        "custom_vjp_call",
    }
)  # fmt: skip
IN_FULL = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


class Reading(NamedTuple):
    """The parts in which products read a value.

    Attributes:
        must: the parts that differ in size by the meaning of the program, as the
            entries of a batch do.
        may: the finest parts that suit all readers.
    """

    must: Parts
    may: Parts


def is_narrow_product(eqn: Any) -> bool:
    """Return whether a product may read its operands in a narrow format."""
    return eqn.params["precision"] != IN_FULL and contracted_size(eqn) > 1


def is_float(aval: Any) -> bool:
    """Return whether an abstract value is of real floating-point numbers."""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating)


def inner_jaxpr(eqn: Any) -> Any:
    """Return the jaxpr of a call, or the body of a scan."""
    return eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"]


@per_jaxpr
def reads_in(jaxpr: Any) -> dict[Any, Reading]:
    """Return how products in a jaxpr, and in its inner jaxprs, read its variables."""
    readings_of: dict[Any, list[Reading]] = {}
    reads: dict[Any, Reading] = {}

    def settle(var: Any) -> Reading | None:
        if var in readings_of and var not in reads:
            reads[var] = _common(readings_of[var])
        return reads.get(var)

    for eqn in reversed(jaxpr.eqns):
        result_readings = list(map(settle, eqn.outvars))
        for atom, reading in zip(
            eqn.invars, operand_readings(eqn, result_readings), strict=True
        ):
            if reading is not None and type(atom) is not Literal:
                readings_of.setdefault(atom, []).append(reading)
    for var in (*jaxpr.constvars, *jaxpr.invars):
        settle(var)
    return reads


def operand_readings(
    eqn: Any, result_readings: Sequence[Reading | None]
) -> Sequence[Reading | None]:
    """Return the reading of each operand of an equation, given those of its results."""
    name = eqn.primitive.name
    nothing = [None] * len(eqn.invars)
    if name in PRODUCTS and is_narrow_product(eqn):
        return [Reading(*parts) for parts in readings(eqn)] + nothing[2:]
    if name in MOVES:
        return [reading_before_move(eqn, result_readings[0]), *nothing[1:]]
    if name == "scan":
        reads = reads_in(eqn.params["jaxpr"])
        inner = [reads.get(var) for var in eqn.params["jaxpr"].invars]
        consts, carry, xs = eqn.params["ft_in"].update(inner).unpack()
        length = max(eqn.params["length"], 1)
        return [*consts, *[None] * len(carry), *(_of_stack(x, length) for x in xs)]
    if name in CALLS and name != "shard_map":  # its parts are per device
        reads = reads_in(inner_jaxpr(eqn))
        return [reads.get(var) for var in inner_jaxpr(eqn).invars]
    return nothing


def reading_before_move(eqn: Any, reading: Reading | None) -> Reading | None:
    """Return the reading of the operand of a move, given that of its result."""
    name = eqn.primitive.name
    if reading is None or name not in _MOVES_ALL:
        return None
    if name in KEEP_AXES:
        return reading
    if name == "transpose":
        back = np.argsort(eqn.params["permutation"])
        return Reading(*(tuple(parts[i] for i in back) for parts in reading))
    # Parts are not followed through reshapes and broadcasts.
    if max(reading.may, default=1) > 1:
        return None
    ones = (1,) * len(eqn.invars[0].aval.shape)
    return Reading(ones, ones)


def _of_stack(reading: Reading | None, length: int) -> Reading | None:
    """Return the reading of a stack of which each iteration of a scan reads a slice."""
    if reading is None:
        return None
    return Reading(*((length, *parts) for parts in reading))


def _common(readings: Sequence[Reading]) -> Reading:
    may = functools.reduce(
        lambda a, b: tuple(map(math.gcd, a, b)), [x.may for x in readings]
    )
    fits = [x.must for x in readings if is_finer(may, x.must)]
    ones = (1,) * len(may)
    return Reading(max(fits, key=math.prod, default=ones), may)
