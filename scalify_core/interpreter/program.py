"""The program that `scalify` evaluates: a jaxpr, and the dtypes of its results.

Its gradient is a program of the same kind: the backward pass, of both traces.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core.interpreter import reference_trace
from scalify_core.interpreter.reference_trace import (
    DifferentProductsError,
    TraceError,
    aval_of,
    has_narrow_data,
    has_products,
    trace_of,
    with_fp32_products,
)
from scalify_core.numerics.precision_warnings import PrecisionWarning

_DIFFERENT = (
    "with arrays in the formats of its data it has other products, or in another order"
)


class Program(NamedTuple):
    """A traced function.

    Attributes:
        name: the name of the function, for warnings.
        jaxpr: the jaxpr, traced with FP32 arrays for scaled arguments. Products that
            are FP32 in plain code are FP32. Closed-over values precede the arguments.
        dtypes: the dtypes of the results in plain code; None where they are unknown or
            not needed.
        unknown: the reason why the FP32 products of plain code are unknown; None: they
            are known.
        traces: the jaxprs of the function, with FP32 arrays and in the formats of the
            data. The latter is None without narrow data or measured scales, or if the
            trace fails.
    """

    name: str
    jaxpr: Any
    dtypes: Sequence[np.dtype | None]
    unknown: str | None
    traces: tuple[Any, Any]

    def vjp(self, wanted: Sequence[int], given: Sequence[int]) -> Program:
        """Return the backward pass, of the arguments and of cotangents.

        Args:
            wanted: the arguments whose gradients it returns.
            given: the results that have a cotangent. Others need no gradient, as those
                of a loop of unknown length, which has none.
        """
        wide, narrow = (x and _trace_vjp(x, wanted, given) for x in self.traces)
        return _compared(f"{self.name}, backward pass", wide, narrow)

    def warn(self) -> None:
        """Warn (`PrecisionWarning`) if the FP32 operands of plain code are unknown."""
        if self.unknown is not None:
            text = (
                f"{self.name}: {self.unknown}, so products that plain code has in FP32,"
                " by a cast or by promotion, are "
                f'read in the format of the data; precision="highest" keeps FP32'
            )
            warnings.warn(text, PrecisionWarning, stacklevel=2)


def traced(
    fun: Callable, leaves: Sequence[Any], *, narrow: bool
) -> tuple[Program, list[Any]]:
    """Trace a function of leaves, with FP32 arrays for scaled ones.

    Args:
        fun: function of the leaves.
        leaves: arrays and ScaledArrays.
        narrow: whether to find the FP32 results of plain code in the data's formats.

    Returns:
        The program, and the values that it closes over, which are its first arguments.
    """
    wide = trace_of(fun, list(map(aval_of, leaves)))
    closed_over = _closed_over(wide)
    name = getattr(fun, "__name__", "scalified")
    if not narrow or not has_narrow_data(leaves):
        return _compared(name, wide.jaxpr, None), closed_over
    try:
        second = reference_trace.reference_trace(fun, leaves)
    except TraceError as error:
        program = _compared(name, wide.jaxpr, None)
        unknown = str(error) if has_products(wide.jaxpr) else None
        return program._replace(unknown=unknown), closed_over
    if list(map(id, _closed_over(second))) != list(map(id, closed_over)):
        return (
            _compared(name, wide.jaxpr, None)._replace(unknown=_DIFFERENT),
            closed_over,
        )
    return _compared(name, wide.jaxpr, second.jaxpr), closed_over


def _compared(name: str, wide: Any, narrow: Any) -> Program:
    """Return the program of two traces, of which the second may be None."""
    unknown: tuple[None, ...] = (None,) * len(wide.outvars)
    if narrow is None:
        return Program(name, wide, unknown, None, (wide, None))
    dtypes = reference_trace.dtypes_of_results(narrow)
    try:
        return Program(
            name, with_fp32_products(wide, narrow), dtypes, None, (wide, narrow)
        )
    except DifferentProductsError:
        return Program(name, wide, dtypes, _DIFFERENT, (wide, narrow))


def _closed_over(traced: Any) -> list[Any]:
    """Return the values of surrounding transformations that a traced function reads."""
    return list(traced.closure_convert()[0][len(traced.jaxpr.consts) :])


def _trace_vjp(jaxpr: Any, wanted: Sequence[int], given: Sequence[int]) -> Any:
    count = len(jaxpr.invars)

    def pulled(*operands: Any) -> Any:
        leaves, cotangents = operands[:count], operands[count:]

        def of_wanted(*some: Any) -> list[Any]:
            inputs = list(leaves)
            for i, x in zip(wanted, some, strict=True):
                inputs[i] = x
            out = jax.core.eval_jaxpr(jaxpr, jaxpr.consts, *inputs)
            return [out[i] for i in given]

        _, pullback = jax.vjp(of_wanted, *(leaves[i] for i in wanted))
        return pullback(list(cotangents))

    avals = [jaxpr.out_avals[i].update(weak_type=False) for i in given]
    return trace_of(pulled, [*jaxpr.in_avals, *avals]).jaxpr


def is_float(x: Any) -> bool:
    """Return whether a leaf is an array, or a number, of real floating point."""
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)
