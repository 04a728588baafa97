"""What a function reads besides its arguments: what it closes over, what it names as globals, its default values.

A scalified function keeps its traces. Plain JAX that is not jitted reads such variables anew at each call, so a loop
that sets `batch` before it calls the function of `params` alone gets the gradient of that batch; here it must not get
the first one's.
"""

from __future__ import annotations

import contextlib
import dis
import functools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import jax
import numpy as np

_NUMBERS = (bool, int, float, complex, str, np.generic)
_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "numpy", "functools", __name__.partition(".")[0]}
_MANY = 1_000  # leaves of a tree; one of more is one thing, and not gone through at each call


class Besides:
    """What a function reads besides its arguments, as it was when the last call of it ended."""

    def __init__(self, fun: Callable) -> None:
        self.fun = fun
        self.last: list[Any] = []

    @contextlib.contextmanager
    def read(self, *, forget: Callable[[], Any]) -> Iterator[None]:
        """Around a call: `forget` is called first where something is another one than then.

        Values of a surrounding transformation are always others: they are gone with it, and not to be kept.
        """
        found = captured(self.fun)
        traced = any(isinstance(x, jax.core.Tracer) for x in found)
        if traced or len(found) != len(self.last) or not all(map(_is_same, found, self.last)):
            forget()
        self.last = [] if traced else found  # also where the call fails
        yield
        if not traced:
            self.last = captured(self.fun)  # now, for a trace may itself change what it reads, as a counter of traces


def captured(fun: Any) -> list[Any]:
    """The arrays, numbers, strings and functions that `fun` reads besides its arguments, also in those functions.

    They stand in trees (lists, dictionaries, ScaledArrays) or alone. Functions are followed where they are closed over,
    wrapped or named; for globals, those of libraries are not. Not found are attributes of objects (`self.batch`), and
    arrays that are changed in place stay the same ones. A tree of very many leaves is itself what is found.
    """
    return list(_leaves(fun, set()))


def _is_same(x: Any, y: Any) -> bool:
    # repr: 0.0 and -0.0 are equal, and differ.
    return x is y or (isinstance(x, _NUMBERS) and type(x) is type(y) and repr(x) == repr(y))


def _leaves(x: Any, seen: set[int]) -> Iterator[Any]:
    leaves, structure = jax.tree.flatten(x)
    if len(leaves) > _MANY:
        yield x
        return
    if not jax.tree_util.treedef_is_leaf(structure):
        yield str(structure)  # whose keys may have changed places
    for leaf in leaves:
        if isinstance(leaf, (*_NUMBERS, np.ndarray, jax.Array)):
            yield leaf
        elif id(leaf) not in seen:
            seen.add(id(leaf))
            if isinstance(leaf, FunctionType):
                yield leaf
            for part in _read(leaf):
                yield from _leaves(part, seen)


def _read(fun: Any) -> Iterator[Any]:
    """What a function reads; nothing of other objects."""
    if isinstance(fun, functools.partial):
        yield from (fun.func, fun.args, fun.keywords)
    elif isinstance(fun, MethodType):
        yield fun.__func__
    elif isinstance(fun, jax.stages.Wrapped):
        yield getattr(fun, "__wrapped__", None)
    elif isinstance(fun, FunctionType):
        yield from (cell.cell_contents for cell in fun.__closure__ or () if _is_set(cell))
        yield from (fun.__defaults__, fun.__kwdefaults__, vars(fun).get("__wrapped__"))
        if (fun.__module__ or "").partition(".")[0] not in _LIBRARIES:
            yield from (fun.__globals__[name] for name in _names(fun.__code__) if name in fun.__globals__)


def _is_set(cell: Any) -> bool:
    """Whether the variable of a closure has a value yet: a recursive function's has not while it is defined."""
    try:
        cell.cell_contents  # noqa: B018 (which raises if it has none)
    except ValueError:
        return False
    return True


@functools.cache
def _names(code: CodeType) -> tuple[str, ...]:
    """The globals that code reads, also in functions that are defined in it."""
    own = [step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return tuple(dict.fromkeys((*own, *(name for names in inner for name in names))))
