"""What a function reads besides its arguments: numbers and arrays that it closes over, or that it names as globals.

A scalified function keeps its traces. Plain JAX that is not jitted reads such variables anew at each call, so a loop
that sets `batch` before it calls the function of `params` alone gets the gradient of that batch; here it must not get
the first one's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import jax
import numpy as np

_NUMBERS = (bool, int, float, complex, str, type(None), np.generic)
_CONTAINERS = (tuple, list, dict)
_MANY = 10_000  # a container of more is one thing: it is not gone through at each call
_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "numpy", "functools", __name__.partition(".")[0]}


def captured(fun: Any) -> list[Any]:
    """The numbers, strings and arrays that `fun` closes over or names as globals, also in functions that it so reaches.

    Functions of other modules are followed where they are closed over or wrapped, their globals where they are no
    library's. Not found are attributes (`self.batch`), and arrays that are changed in place stay the same ones. Values
    of a surrounding transformation are left out: JAX knows of those. What stands in a list of very many is that list.
    """
    return list(_leaves(fun, set()))


class Besides:
    """What a function reads besides its arguments, as it was when the last call of it ended."""

    def __init__(self, fun: Callable) -> None:
        self.fun = fun
        self.last: list[Any] = []

    @contextlib.contextmanager
    def read(self, *, forget: Callable[[], Any]) -> Iterator[None]:
        """Around a call: `forget` is called first where something is another one than then."""
        found = captured(self.fun)
        if len(found) != len(self.last) or not all(map(_is_same, found, self.last)):
            forget()
        yield
        self.last = captured(self.fun)  # now, for a trace may itself change what it reads, as a counter of traces


def _is_same(x: Any, y: Any) -> bool:
    return x is y or (isinstance(x, _NUMBERS) and type(x) is type(y) and bool(x == y))


def _leaves(x: Any, seen: set[int]) -> Iterator[Any]:
    is_array = isinstance(x, (np.ndarray, jax.Array)) and not isinstance(x, jax.core.Tracer)
    if is_array or isinstance(x, _NUMBERS) or (isinstance(x, _CONTAINERS) and len(x) > _MANY):
        yield x
        return
    if id(x) in seen:
        return
    seen.add(id(x))
    for part in _parts(x):
        yield from _leaves(part, seen)


def _parts(x: Any) -> Iterator[Any]:
    """What a container holds, and what a function reads; nothing of other objects."""
    if isinstance(x, _CONTAINERS):
        yield from x.values() if isinstance(x, dict) else x
    elif isinstance(x, functools.partial):
        yield from (x.func, *x.args, *x.keywords.values())
    elif isinstance(x, MethodType):
        yield x.__func__
    elif isinstance(x, FunctionType):
        yield from (cell.cell_contents for cell in x.__closure__ or () if _is_set(cell))
        if x.__module__ is not None and x.__module__.partition(".")[0] not in _LIBRARIES:
            of_module = x.__globals__
            yield from (of_module[name] for name in _names(x.__code__) if name in of_module)
    if callable(x) and hasattr(x, "__wrapped__"):
        yield x.__wrapped__


def _is_set(cell: Any) -> bool:
    """Whether the variable of a closure has a value yet: a recursive function's has not while it is defined."""
    try:
        cell.cell_contents  # noqa: B018 (which raises if it has none)
    except ValueError:
        return False
    return True


@functools.cache
def _names(code: CodeType) -> tuple[str, ...]:
    """The names that code looks up, also that of functions defined in it: globals, and attributes among them."""
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return tuple(dict.fromkeys((*code.co_names, *(name for names in inner for name in names))))
