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

    def promoted(self, jaxpr: Any, leaves: Sequence[Any]) -> list[promoted.Promoted]:
        """The products of a jaxpr as it is evaluated that are narrow here, though plain code has an operand in FP32."""
        levels = asked.promoted(jaxpr, self.traced.jaxpr, self.given)
        return promoted.found(jaxpr, tuple(map(format_of, leaves)), levels) if levels else []

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


def narrow_trace(plain: Plain | None, jaxpr: Any, leaves: Sequence[Any]) -> Narrow | None:
    """The trace of plain code of a function of the leaves, if that may tell anything of the products of its jaxpr."""
    if plain is None or not _may_ask(jaxpr, leaves):
        return None
    return plain.traced(list(map(_aval_in_format, leaves)))


def _may_ask(jaxpr: Any, leaves: Sequence[Any]) -> bool:
    """Whether there are products, and narrow data."""
    return any(_has_format(x) and _is_narrow(x.dtype) for x in leaves) and asked.has_products(jaxpr)


def in_full(fun: Callable, jaxpr: Any, leaves: Sequence[Any]) -> tuple[Any, str | None, Sequence[promoted.Promoted]]:
    """The trace of `fun` in FP32 as it is evaluated, and what of plain code's FP32 it may not have.

    That is why it is not known which FP32 the program asks for, or None; and the products that are narrow here.
    """
    if not _may_ask(jaxpr, leaves):
        return jaxpr, None, []
    narrow = Plain(fun).traced(list(map(_aval_in_format, leaves)))
    if narrow is None:
        return jaxpr, "it cannot be traced with arrays of the formats of its data", []
    known = asked.has_same_products(jaxpr, narrow.traced.jaxpr)
    unknown = None if known else "traced with arrays of the formats of its data it is another one"
    full = narrow.in_full(jaxpr)
    return full, unknown, narrow.promoted(full, leaves)


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


def _aval_in_format(x: Any) -> Any:
    """What plain code sees of a leaf; JAX has no arithmetic in 8 bits, which count as FP16."""
    if not _has_format(x):
        return aval_of(x)
    return aval_of(x).update(dtype=np.dtype(np.float16) if np.dtype(x.dtype).itemsize == 1 else np.dtype(x.dtype))


def _is_narrow(dtype: Any) -> bool:
    return np.dtype(dtype).itemsize < 4 and jnp.issubdtype(dtype, jnp.floating)
