"""The trace of a function as plain code has it: with narrow arrays where `scalify` shows it FP32 ones."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core.measured import asked


class Narrow(NamedTuple):
    """The trace of a function in the formats of its data.

    Attributes:
        traced: what `jax.jit(...).trace` gives.
        given: which of the last arguments are FP32 because the program asked for it.
    """

    traced: Any
    given: tuple[bool, ...]

    def in_full(self, jaxpr: Any) -> Any:
        """The jaxpr of the same function of FP32 arrays, with the products in full that are FP32 here on request."""
        return asked.in_full(jaxpr, self.traced.jaxpr, self.given)

    def results_asked(self) -> tuple[bool, ...]:
        """Which results are FP32 because the program asked for it."""
        return asked.of_plain(self.traced.jaxpr, self.given)[1]


@dataclasses.dataclass(frozen=True)
class Plain:
    """How a function of leaves is traced as plain code.

    Attributes:
        fun: the function.
        avals: of its leaves; None: they have the formats of the data that they are given for.
        given: see `Narrow`.
    """

    fun: Callable
    avals: tuple[Any, ...] | None = None
    given: tuple[bool, ...] = ()

    def traced(self, leaves: Sequence[Any]) -> Narrow | None:
        """The trace; None: it fails, as of a program that needs more than a narrow format has."""
        avals = tuple(leaves) if self.avals is None else self.avals
        try:
            # What is narrow only here is nothing to warn of.
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                traced = jax.jit(self.fun).trace(*avals)
        except Exception:  # whatever the function raises where it is given another dtype
            return None
        return Narrow(traced, self.given)

    def of(self, made: Callable[[Callable], Callable]) -> Plain | None:
        """How what is made of the function is traced, of leaves of the same formats; None: the leaves are its own."""
        return Plain(made(self.fun)) if self.avals is None else None


def narrow_aval(aval: Any, dtype: np.dtype) -> Any:
    """What plain code sees of data of this format; JAX has no arithmetic in 8 bits, which count as FP16."""
    return aval.update(dtype=np.dtype(np.float16) if np.dtype(dtype).itemsize == 1 else np.dtype(dtype))


def is_narrow(dtype: Any) -> bool:
    """Whether a format has less than 32 bits."""
    return np.dtype(dtype).itemsize < 4 and jnp.issubdtype(dtype, jnp.floating)
