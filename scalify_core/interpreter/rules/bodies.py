"""The bodies of loops, branches and recomputed blocks: inner jaxprs that are evaluated
once, however often looked at.

To know the scales of its results, a rule looks at a body before it builds the operation
that has it. Were the body evaluated anew each time, bodies within bodies would cost two
to the power of their depth.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import jax

from scalify_core.interpreter import value as v
from scalify_core.interpreter.value import Value, narrow, pack, unpack
from scalify_core.numerics.caches import per_jaxpr


def run(jaxpr: Any, evaluate: Callable, operands: Any, wide: int = 0) -> list[Any]:
    """The results of a body, rounded to their formats but for guards and the first
    `wide`, and with their scales.
    """
    packed = pack(operands)
    # equation by equation, as a debugger and `explain` want it
    if jax.config.jax_disable_jit:
        return unpack(pack(_stored(evaluate(jaxpr, unpack(packed)), wide, evaluate)))
    traced = traced_body(jaxpr, evaluate, packed, wide)
    out = jax.core.eval_jaxpr(
        traced.jaxpr, traced.jaxpr.consts, *jax.tree.leaves(packed)
    )
    return unpack(jax.tree.unflatten(jax.tree.structure(traced.out_info), out))


def traced_body(jaxpr: Any, evaluate: Callable, packed: Any, wide: int = 0) -> Any:
    """The trace of an evaluated body on packed operands, to packed results."""
    return _evaluated(jaxpr, evaluate, wide).trace(*packed)


@per_jaxpr
def _evaluated(jaxpr: Any, evaluate: Callable, wide: int) -> Any:
    """One function per body, whose traces jit keeps: one for each structure of the
    operands.
    """
    found = weakref.ref(jaxpr)  # which is forgotten with its program

    def evaluated(*operands: Any) -> list[Any]:
        return pack(_stored(evaluate(found(), unpack(operands)), wide, evaluate))

    return jax.jit(evaluated)


def _stored(out: list[Any], wide: int, evaluate: Callable) -> list[Any]:
    if measures(evaluate):
        return out
    return [
        _result(x, i < wide) if isinstance(x, Value) else x for i, x in enumerate(out)
    ]


def _result(x: Value, wide: bool) -> Value:
    x = v.settle(x) if wide or x.guard else narrow(x)
    return dataclasses.replace(x, excess=None)


def measures(evaluate: Callable) -> bool:
    """Return whether scales are measured where values are stored."""
    return getattr(evaluate, "measures", False)


def shape_of(fun: Callable, operands: Any) -> list[Any]:
    """The results of `fun` with their scales, of which the static ones are known, but
    without data.
    """
    return unpack(jax.eval_shape(lambda xs: pack(fun(unpack(xs))), pack(operands)))
