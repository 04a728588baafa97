"""`explain`: a scaled program, equation by equation, beside the same program in plain
FP32.

It is evaluated eagerly by the rules that `scalify` uses. Calls are inlined and loops
are run turn by turn; a composite is one equation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax

from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.debug.eager_interpreter import Walk
from scalify_core.debug.explanation import Explanation
from scalify_core.interpreter.arguments import Arguments
from scalify_core.interpreter.program import traced
from scalify_core.interpreter.transform import Scales


def explain(
    fun: Callable,
    *args: Any,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    scales: Scales = "auto",
    tolerance: float = 0.01,
    **kwargs: Any,
) -> Explanation:
    """What `scalify(fun)(*args, **kwargs)` computes with, line by line of the user's
    code, and where it loses values.

    `fun` may be any function that `scalify` takes: a loss, `jax.grad` of one, a
    training step. It is run once, eagerly, with the scales that `scalify` gives it, and
    beside it in plain FP32 on the logical values of its arguments, which is slower than
    a compiled program by orders of magnitude: give it a small batch. Branches of `cond`
    and the number of turns of `while` are those of the scaled program.

    Args:
        fun: function of pytrees.
        args: its arguments, at least one of them a ScaledArray.
        static_argnums: positions of arguments that are not arrays, as for `scalify`.
        static_argnames: their names.
        scales: as for `scalify`. Where they are measured, none is astray: rows have no
            expected RMS, those of values that are not stored are of FP32 numbers
            without a scale, and what casts lose stands at who reads them so.
        tolerance: values are lost where a tensor's error, the norm of its difference
            from plain FP32 over the norm of that, exceeds this, and twice that of its
            operands, because values are flushed to zero, saturate, or have a scale that
            is astray. Where a format coarser than this takes part (FP8), its epsilon
            counts instead.
        kwargs: keyword arguments of `fun`.

    Returns:
        An Explanation: `print` it; `first_loss` is a sentence, `rows` has all figures.

    Raises:
        ValueError: another `scales`; none of the arguments is a ScaledArray, so nothing
            has a scale.
        TypeError: `fun` uses values of a surrounding transformation; call `explain`
            outside of jit, grad and vmap.
    """
    arguments = Arguments(fun, static_argnums, static_argnames)
    call = arguments.call(args, kwargs)
    leaves = call.leaves
    if not any(map(is_scaled_array, leaves)):
        raise ValueError(
            "explain: no argument is a ScaledArray; as_scaled_array(x,"
            " dtype=jnp.float16) makes them"
        )
    if scales not in get_args(Scales):
        raise ValueError(
            f"explain: scales={scales!r}, expected one of {get_args(Scales)}"
        )
    program, closed_over = traced(call.fun, leaves, narrow=scales == "auto")
    if closed_over or any(
        isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(leaves)
    ):
        raise TypeError(
            "explain: call it outside of jit, grad and vmap; it evaluates eagerly"
        )
    walk = Walk(tolerance, measures=scales == "auto")
    errors = walk.errors(program.jaxpr, leaves, program.dtypes)
    return Explanation(
        list(walk.rows.values()), errors, tolerance, walk.turned, program.unknown
    )
