"""The bodies of loops, branches and recomputed blocks.

They are inner jaxprs that are evaluated once, however often a rule inspects them. To
know the scales of its results, a rule evaluates a body before it builds the operation.
Evaluating it anew each time would cost two to the power of the nesting depth.
"""

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import jax

from scalify_core.interpreter.value import Value, narrow, pack, unpack
from scalify_core.numerics.jaxprs import per_jaxpr


def run(jaxpr: Any, evaluate: Any, operands: Any, carry_count: int = 0) -> list[Any]:
    """Return the results of a body, with their scales and rounded to their formats.

    Fill values and the first `carry_count` results are not rounded.
    """
    packed = pack(operands)
    # A debugger and `explain` read the body equation by equation.
    if jax.config.jax_disable_jit:
        return unpack(_packed_results(jaxpr, evaluate, carry_count, packed))
    traced = traced_body(jaxpr, evaluate, packed, carry_count)
    out = jax.core.eval_jaxpr(
        traced.jaxpr, traced.jaxpr.consts, *jax.tree.leaves(packed)
    )
    return unpack(jax.tree.unflatten(jax.tree.structure(traced.out_info), out))


def traced_body(jaxpr: Any, evaluate: Any, packed: Any, carry_count: int = 0) -> Any:
    """Return the trace of an evaluated body on packed operands, to packed results."""
    return _evaluated(jaxpr, evaluate, carry_count).trace(*packed)


@per_jaxpr
def _evaluated(jaxpr: Any, evaluate: Any, carry_count: int) -> Any:
    """Return the jitted function of a body, one for each body.

    `jit` keeps its traces, one for each structure of the operands.
    """
    jaxpr_ref = weakref.ref(jaxpr)  # freed with its program

    def evaluated(*operands: Any) -> list[Any]:
        return _packed_results(jaxpr_ref(), evaluate, carry_count, operands)

    return jax.jit(evaluated)


def _packed_results(
    jaxpr: Any, evaluate: Any, carry_count: int, packed: Any
) -> list[Any]:
    out = evaluate(jaxpr, unpack(packed))
    # Measured scales leave a body in FP32, but for the stacks of a scan.
    if not evaluate.measures:
        out = [_result(x, i < carry_count) for i, x in enumerate(out)]
    return pack(out)


def _result(x: Any, wide: bool) -> Any:
    if not isinstance(x, Value):
        return x
    if not wide and not x.is_fill_value:
        x = narrow(x)
    return dataclasses.replace(x, rms_correction=None)


def shape_of(fun: Callable, operands: Any) -> list[Any]:
    """Return the results of `fun` without data; static scales are known."""
    return unpack(jax.eval_shape(lambda xs: pack(fun(unpack(xs))), pack(operands)))
