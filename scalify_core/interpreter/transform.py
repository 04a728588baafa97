"""`scalify`: trace a function once, then evaluate its jaxpr with scales.

The evaluation is `interpreter`. Here is the border: pytrees, traces, and the gradient
of a scalified function.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

import scalify_core.interpreter.rules  # noqa: F401  (fills the table)
from scalify_core.array.scaled_array import (
    ScaledArray,
    asarray,
    is_scaled_array,
    is_unreadable,
    readable,
    undifferentiated,
)
from scalify_core.interpreter.arguments import Arguments
from scalify_core.interpreter.evaluator import Evaluator
from scalify_core.interpreter.outside_gradients import differentiable
from scalify_core.interpreter.program import Program, is_float, traced
from scalify_core.numerics.precision_warnings import PrecisionWarning, Reporter

Scales = Literal["auto", "static"]
# (jaxpr, arguments, dtypes of the results in plain code) -> results
Evaluate = Callable[[Any, Sequence[Any], Sequence[np.dtype | None]], list[Any]]
_OUTSIDE = (
    "scalify: a gradient with respect to a ScaledArray is taken inside, "
    "scalify(jax.grad(f)), not outside, jax.grad(scalify(f)), where JAX would add data "
    "to data and scale to scale"
)


def scalify(
    fun: Callable,
    *,
    scales: Scales = "auto",
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    check: bool = False,
) -> Callable:
    """`fun` with scale propagation: the same function, on `ScaledArray`s.

    Args:
        fun: any JAX function; pytrees in and out, of which leaves that are no arrays
            pass through. Where it is given a ScaledArray it sees a float32 array,
            whatever the dtype of the data.
        scales: where scales come from. "auto": between stores the arithmetic is FP32,
            on logical values; a value that is stored in a narrow format, as the operand
            of a product or as a result, gets the power of two that its largest
            magnitude calls for, measured there (`scalify_core.interpreter.measured`).
            Right for any function, without being told. "static": rules propagate what
            is expected of independent numbers, and nothing is measured but where
            `dynamic_rescale_*`
            stands: no operation more than the plain program has, for those who place
            the rescales themselves. There a plain array has scale 1 beside scaled ones,
            constants have any, and state that is carried round a loop wants a rescale
            in each turn.
        static_argnums: positions of arguments that are not arrays, as for `jax.jit`.
        static_argnames: their names.
        check: whether the program warns while it runs (`PrecisionWarning`, once per
            place and call) where a cast to a narrow format flushes to zero more than 1%
            of a tensor's norm, or saturates a finite number. The norm is what an error
            is measured by: however many small elements vanish beside large ones (a
            fifth of what GELU gives, in E4M3), the tensor is what it was while their
            share of it is small, and once that is not, its scale is astray. With
            measured scales, the rows and columns of a product of which more than 1% is
            lost are named, too, however small they are. A mask's constant (-1e9) may
            saturate. The program has callbacks then (`jax.debug.callback`), and is
            slower; without `check` it has not an operation more.

    Returns:
        A function of the same arguments. Arrays in them may be ScaledArrays. Every
        floating-point result that depends on a ScaledArray is one, but for a scalar in
        FP32, which is a plain array. With measured scales, products and results have
        the dtypes of plain code, in which arrays have the formats of the data (FP16 for
        those of 8 bits): FP32 by a cast or by promotion. A second trace tells; where it
        fails or has other products, a `PrecisionWarning` says so. With static scales
        all have the format of the data. Complex numbers have no scale: they are plain,
        and so is what is computed from them (`irfft(rfft(x))`). ScaledArrays that `fun`
        itself makes are plain numbers to it and to what it returns; `set_scaling` says
        what scale a result is to have.

        Called outside of `jit`, `fun` runs at each call, as any JAX function does: what
        it reads besides its arguments is what is there now. So a step is put under
        `jax.jit`, which traces it once.

        It can be jitted, vmapped and sharded. Gradients are taken inside,
        `scalify(jax.grad(fun))`. Outside, `jax.grad(scalify(fun))` gives those of plain
        arguments, the first derivative, through results that are plain (as a scalar in
        FP32 is) or have the range of FP32.

    Raises:
        ValueError: another `scales`; positional and named static arguments that the
            function does not have.
        TypeError, when differentiated with respect to a ScaledArray.
    """
    arguments = Arguments(fun, static_argnums, static_argnames)
    reporter = Reporter() if check else None
    evaluate = functools.partial(_evaluated, how=_evaluator(scales, reporter))

    @functools.wraps(fun)
    def scalified(*args: Any, **kwargs: Any) -> Any:
        call = arguments.call(args, kwargs)
        if not any(map(is_scaled_array, call.leaves)):
            # plain code, which a surrounding `scalify` sees as such
            return asarray(fun(*args, **kwargs))
        leaves = _entering(call.leaves, call.names, reporter)
        with _collector_paused():
            program, closed_over = traced(call.fun, leaves, narrow=scales == "auto")
            program.warn()
            leaves = [*closed_over, *leaves]
            if any(is_float(x) for x in leaves if not is_scaled_array(x)):
                results = differentiable(program, evaluate)(*leaves)
            else:
                results = evaluate(program, leaves)
        return call.unflatten(results)

    return scalified


def _entering(
    leaves: Sequence[Any], names: Callable[[], Sequence[str]], reporter: Reporter | None
) -> list[Any]:
    """Return the arguments, of which the scaled ones cannot be differentiated any more.

    With a reporter the program tells it which have a scale that is none.
    """
    if reporter is None:
        out = readable("argument", leaves, names)
    else:
        dynamic = {
            n: x
            for n, x in zip(names(), leaves, strict=True)
            if is_scaled_array(x) and not x.is_static
        }
        reporter.entered({name: is_unreadable(x) for name, x in dynamic.items()})
        with warnings.catch_warnings(action="ignore", category=PrecisionWarning):
            out = readable("argument", leaves, names)
    traced = {i: x for i, x in enumerate(out) if is_scaled_array(x) and _is_traced(x)}
    if traced:
        for i, x in undifferentiated(traced, _OUTSIDE).items():
            out[i] = x
    return out


def _is_traced(x: ScaledArray) -> bool:
    return any(isinstance(y, jax.core.Tracer) for y in (x.data, x.scale))


def _evaluator(scales: Scales, reporter: Reporter | None) -> Evaluate:
    """Return how a jaxpr is evaluated on arrays and ScaledArrays."""
    if scales not in get_args(Scales):
        raise ValueError(
            f'scalify: scales={scales!r}, expected "auto" (measured where stored) or'
            ' "static" (propagated)'
        )
    return Evaluator(scales == "auto", reporter).arrays


def _evaluated(program: Program, leaves: Sequence[Any], *, how: Evaluate) -> list[Any]:
    """Return the results of a program of arrays and ScaledArrays.

    An FP32 scalar is plain: who compares, averages or branches on a loss means that.
    """
    return list(map(_returned, how(program.jaxpr, leaves, program.dtypes)))


def _returned(x: Any) -> Any:
    if not is_scaled_array(x):
        return jnp.asarray(x)
    return x.unscale() if x.shape == () and x.dtype == jnp.float32 else x


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Objects by the hundred thousand are made, nearly all to stay.

    Looking for cycles among them is a fifth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
