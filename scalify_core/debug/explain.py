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
from scalify_core.debug.eager_interpreter import EagerInterpreter
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
    """Explain the scales of `scalify(fun)(*args, **kwargs)`, and the first loss of
    values.

    `fun` may be any function that `scalify` takes: a loss, `jax.grad` of one, a
    training step. It runs once, eagerly, with the scales that `scalify` gives it.
    Beside it runs plain FP32 on the logical values of its arguments. This is slower
    than a compiled program by orders of magnitude: use a small batch. Branches of
    `cond` and the number of iterations of `while` are those of the scaled program.

    Args:
        fun: function of pytrees.
        args: its arguments, at least one of them a ScaledArray.
        static_argnums: positions of arguments that are not arrays, as for `scalify`.
        static_argnames: their names.
        scales: as for `scalify`. Measured scales are never astray: rows have no
            expected RMS. Rows of values that are not stored have FP32 numbers without a
            scale. The losses of a cast are reported at the equation that reads the cast
            copy.
        tolerance: the limit of a tensor's error: the norm of its difference from plain
            FP32, over the norm of plain FP32. Values are lost where the error exceeds
            the limit, and twice the error of the operands. The cause is underflow,
            saturation, or a scale that is astray. If a coarser format takes
            part (FP8), its epsilon is the limit.
        kwargs: keyword arguments of `fun`.

    Returns:
        An Explanation: `print` it; `first_loss` is a sentence, `rows` has all figures.

    Raises:
        ValueError: `scales` is unknown, or no argument is a ScaledArray.
        TypeError: `fun` uses values of a surrounding transformation; call `explain`
            outside jit, grad and vmap.
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
    interpreter = EagerInterpreter(tolerance, measures=scales == "auto")
    errors = interpreter.errors(program.jaxpr, leaves, program.dtypes)
    return Explanation(
        list(interpreter.rows.values()),
        errors,
        tolerance,
        interpreter.first_difference,
        program.unknown,
    )
