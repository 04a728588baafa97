"""The trace of a function as plain code has it: with narrow arrays where `scalify` shows it FP32 ones."""

from __future__ import annotations

import dataclasses
import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core.array import is_scaled_array
from scalify_core.measured import asked, promoted
from scalify_core.measured.evaluate import format_of
from scalify_core.measured.plan import plan_of
from scalify_core.measured.promoted import Promoted
from scalify_core.measured.residuals import Logical
from scalify_core.watch import PrecisionWarning


class Narrow(NamedTuple):
    """The trace of a function in the formats of its data.

    Attributes:
        traced: what `jax.jit(...).trace` gives.
        given: how the last arguments came to be FP32.
    """

    traced: Any
    given: tuple[asked.Level, ...]

    def in_full(self, jaxpr: Any) -> Any:
        """The jaxpr of the same function of FP32 arrays, with the products in full that are FP32 here on request."""
        return asked.in_full(jaxpr, self.traced.jaxpr, self.given)

    def dtypes(self, count: int, leaves: Sequence[Any]) -> tuple[np.dtype | None, ...]:
        """In which the first `count` results are stored: as in plain code. None: in the format of their data.

        So is what is FP32 there by promotion alone: no rate or table makes a parameter FP32. But scalars cost nothing,
        and what has the shape of a plain FP32 array is one: the state of an optimiser, the gradient of an adapter.
        """
        avals = self.traced.jaxpr.out_avals[:count]
        if len(avals) < count:
            return (None,) * count
        plain = [aval_of(x) for x in leaves if not _has_format(x)]
        shapes = {(), *(aval.shape for aval in plain if asked.is_wide(aval))}
        return tuple(
            np.dtype(aval.dtype) if asked.is_on_request(aval, level) or aval.shape in shapes else None
            for aval, level in zip(avals, self.of_results(), strict=False)
        )

    def promoted(self, jaxpr: Any, leaves: Sequence[Any]) -> list[Promoted]:
        """The products of a jaxpr as it is evaluated that are narrow here, though plain code has an operand in FP32."""
        levels = asked.promoted(jaxpr, self.traced.jaxpr, self.given)
        return promoted.found(jaxpr, tuple(map(format_of, leaves)), levels) if levels else []

    def promoted_results(self, jaxpr: Any, leaves: Sequence[Any], count: int) -> list[Promoted]:
        """The first `count` results that are narrow as the jaxpr is evaluated, though plain code has them in FP32."""
        dtypes = self.dtypes(count, leaves)
        if all(dtypes):
            return []
        formats = plan_of(jaxpr, tuple(map(format_of, leaves))).out_formats
        return promoted.of_results(self.traced.jaxpr, self.of_results(), dtypes, formats)

    def of_results(self) -> tuple[asked.Level, ...]:
        """How the results came to be FP32."""
        return asked.of_plain(self.traced.jaxpr, self.given)[1]


@dataclasses.dataclass(frozen=True)
class Plain:
    """How a function of leaves is traced as plain code.

    Attributes:
        fun: the function.
        avals: of its leaves; None: they have the formats of the data that they are given for.
        given: see `Narrow`.
        check: whether it is said (`PrecisionWarning`) that there is no trace.
    """

    fun: Callable
    avals: tuple[Any, ...] | None = None
    given: tuple[asked.Level, ...] = ()
    check: bool = False

    def traced(self, avals: Sequence[Any]) -> Narrow | None:
        """The trace of leaves that look so; None: it fails, as of a program that needs more than a format has."""
        try:
            # What is narrow only here is nothing to warn of.
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                traced = trace_of(self.fun, avals if self.avals is None else self.avals)
        except Exception as error:  # whatever the function raises where it is given another dtype
            if self.check:
                warnings.warn(_without_trace(self.fun, error), PrecisionWarning, stacklevel=2)
            return None
        return Narrow(traced, self.given)

    def of(self, made: Callable[[Callable], Callable]) -> Plain | None:
        """How what is made of the function is traced, of leaves of the same formats; None: the leaves are its own."""
        return Plain(made(self.fun), check=self.check) if self.avals is None else None


def _without_trace(fun: Callable, error: Exception) -> str:
    """What is said of a function that cannot be traced as plain code: where, and why."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if not _is_of_library(frame.f_code)]
    place = f"{os.path.basename(frames[-1].f_code.co_filename)}:{frames[-1].f_lineno} " if frames else ""
    reason = str(error).strip().partition("\n")[0]
    return (
        f"{place}{getattr(fun, '__name__', 'scalified')}: with arrays of the formats of its data it cannot be traced "
        f'({type(error).__name__}: {reason}), so what it casts to FP32 is read as narrow; precision="highest" is not'
    )


def _is_of_library(code: Any) -> bool:
    return code.co_filename.startswith((os.path.dirname(jax.__file__), os.path.dirname(__file__)))


def trace_of(fun: Callable, avals: Sequence[Any]) -> Any:
    """The trace of `fun` of arrays like these; JAX takes the gradient of integers as an array only."""
    is_none = [getattr(x, "dtype", None) == jax.dtypes.float0 for x in avals]
    return jax.jit(fun).trace(*(np.zeros(x.shape, x.dtype) if no else x for x, no in zip(avals, is_none, strict=True)))


def traced_in_float32(fun: Callable, leaves: Sequence[Any]) -> Any:
    """The trace of `fun` of the leaves, of which those that are scaled are float32 arrays to it."""
    return jax.jit(fun).trace(*map(aval_of, leaves))


def narrow_trace(plain: Plain | None, leaves: Sequence[Any]) -> Narrow | None:
    """The trace of plain code of a function of the leaves, if there is narrow data, which it may tell something of."""
    if plain is None or not _is_any_narrow(leaves):
        return None
    return plain.traced(list(map(aval_in_format, leaves)))


def _is_any_narrow(leaves: Sequence[Any]) -> bool:
    return any(_has_format(x) and _is_narrow(x.dtype) for x in leaves)


class InFull(NamedTuple):
    """A program as it is evaluated, and what of plain code's FP32 it may not have.

    Attributes:
        jaxpr: of FP32 arrays, with the products in full that are asked to be.
        dtypes: of its results in plain code; None: not known.
        unknown: why it is not known which FP32 the program asks for, or None.
        promoted: the products that are narrow here, and that plain code has in FP32 by promotion; and
        results: that are so.
    """

    jaxpr: Any
    dtypes: tuple[np.dtype | None, ...]
    unknown: str | None = None
    promoted: Sequence[Promoted] = ()
    results: Sequence[Promoted] = ()


def in_full(fun: Callable, jaxpr: Any, leaves: Sequence[Any]) -> InFull:
    """The trace of `fun` in FP32 as `scalify` evaluates it."""
    count = len(jaxpr.outvars)
    if not _is_any_narrow(leaves):
        return InFull(jaxpr, (None,) * count)
    narrow = Plain(fun).traced(list(map(aval_in_format, leaves)))
    if narrow is None:
        reason = "it cannot be traced with arrays of the formats of its data" if asked.has_products(jaxpr) else None
        return InFull(jaxpr, (None,) * count, reason)
    known = asked.has_same_products(jaxpr, narrow.traced.jaxpr)
    unknown = None if known else "traced with arrays of the formats of its data it is another one"
    full = narrow.in_full(jaxpr)
    of_products, of_results = narrow.promoted(full, leaves), narrow.promoted_results(full, leaves, count)
    return InFull(full, narrow.dtypes(count, leaves), unknown, of_products, of_results)


def say_promoted(fun: Callable, jaxpr: Any, narrow: Narrow, leaves: Sequence[Any]) -> None:
    """Warn (`PrecisionWarning`) of products of a jaxpr as it is evaluated that plain code has in FP32.

    Not of what is promoted in a library: layers of Flax do so without being told, and nothing is meant by it.
    """
    if asked.is_unknown(jaxpr, narrow.traced.jaxpr, narrow.given):
        text = (
            f"{getattr(fun, '__name__', 'scalified')}: with arrays of the formats of its data it is another program, "
            f'so some of what it casts to FP32 is read as narrow; precision="highest" is not'
        )
        warnings.warn(text, PrecisionWarning, stacklevel=2)
    for found in narrow.promoted(jaxpr, leaves):
        if found.level == asked.PROMOTED:
            text = f"{found}: {promoted.text_of(found.dtype)}"
            warnings.warn_explicit(text, PrecisionWarning, found.place.file or "scalify", found.place.line)


def opened(traced: Any) -> tuple[list[Any], Callable]:
    """The values that a traced function closes over, and the function of them and the leaves: they have gradients."""
    jaxpr, tree = traced.jaxpr, jax.tree.structure(traced.out_info)
    closed_over = traced.closure_convert()[0][len(jaxpr.consts) :]
    return closed_over, lambda *xs: jax.tree.unflatten(tree, jax.core.eval_jaxpr(jaxpr, jaxpr.consts, *xs))


def opened_plain(plain: Plain, leaves: Sequence[Any], closed_over: Sequence[Any]) -> Plain | None:
    """How `opened` of a function is traced as plain code; None: not, or other values are closed over there."""
    narrow = narrow_trace(plain, leaves)
    if narrow is None:
        return None
    found, of_all = opened(narrow.traced)
    return Plain(of_all, check=plain.check) if list(map(id, found)) == list(map(id, closed_over)) else None


def aval_of(x: Any) -> Any:
    """What the function that is traced in FP32 sees of a leaf."""
    if is_scaled_array(x):
        return jax.typeof(x.data).update(dtype=np.dtype(np.float32), weak_type=False)
    x = logical(x)
    return x if isinstance(x, jax.typing.ArrayLike) and not hasattr(x, "dtype") else jax.typeof(x)


def logical(x: Any) -> Any:
    """A leaf, the value of one that is stored nowhere."""
    return x.value if type(x) is Logical else x


def _has_format(x: Any) -> bool:
    return is_scaled_array(x) or type(x) is Logical


def aval_in_format(x: Any) -> Any:
    """What plain code sees of a leaf; JAX has no arithmetic in 8 bits, which count as FP16."""
    if not _has_format(x):
        return aval_of(x)
    return aval_of(x).update(dtype=np.dtype(np.float16) if np.dtype(x.dtype).itemsize == 1 else np.dtype(x.dtype))


def _is_narrow(dtype: Any) -> bool:
    return np.dtype(dtype).itemsize < 4 and jnp.issubdtype(dtype, jnp.floating)
