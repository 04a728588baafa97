"""What a function reads besides its arguments: what it closes over, what it names as globals, its default values.

A scalified function keeps its traces. Plain JAX that is not jitted reads such variables anew at each call, so a loop
that sets `batch` before it calls the function of `params` alone gets the gradient of that batch; here it must not get
the first one's.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import jax
import numpy as np

_NUMBERS = (bool, int, float, complex, str, np.generic)
_EQUAL = (slice, range, np.dtype, frozenset)  # two of them that are equal are one
_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "numpy", __name__.partition(".")[0]} | sys.stdlib_module_names
_MANY = 10_000  # a container of more is one thing, and not gone through at each call


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
    """What `fun` reads besides its arguments, also in the functions that it so reaches: arrays, numbers, objects.

    They stand in trees (lists, dictionaries, ScaledArrays) or alone. Functions are followed where they are closed over,
    wrapped, named, or methods of what is; for globals, those of libraries are not. Of an attribute (`self.batch`), of
    an array that is changed in place, and in a container of very many no change is found.
    """
    return list(_found(fun, set()))


def _is_same(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    # repr: 0.0 and -0.0 are equal, and differ.
    return repr(x) == repr(y) if isinstance(x, _NUMBERS) else isinstance(x, _EQUAL) and bool(x == y)


def _found(x: Any, seen: set[int]) -> Iterator[Any]:
    if id(x) in seen and not isinstance(x, _NUMBERS):
        return
    seen.add(id(x))
    parts = None if isinstance(x, (*_NUMBERS, np.ndarray, jax.Array)) else _parts(x)
    if parts is None or not isinstance(x, (list, tuple, dict)):
        yield x
    for part in parts or ():
        yield from _found(part, seen)


def _parts(x: Any) -> list[Any] | None:
    """What a container holds and what a function reads; None of what is one thing."""
    if isinstance(x, dict):
        return None if len(x) > _MANY else [part for item in list(x.items()) for part in item]
    if isinstance(x, (list, tuple)):
        return None if len(x) > _MANY else list(x)
    if isinstance(x, functools.partial):
        return [x.func, *x.args, x.keywords]
    if isinstance(x, MethodType):
        return [x.__func__]
    if isinstance(x, FunctionType):
        return list(_read(x))
    if isinstance(x, (jax.custom_vjp, jax.custom_jvp)):
        return list(vars(x).values())
    if isinstance(x, jax.stages.Wrapped):
        return [getattr(x, "__wrapped__", None)]
    methods = list(_methods(x if isinstance(x, type) else type(x)))
    try:
        return methods + list(jax.tree_util.default_registry.flatten_one_level(x)[0])  # of another kind of tree
    except Exception:  # what is no tree, or cannot be taken apart, which its own user will be told
        return methods


def _methods(kind: type) -> Iterator[Any]:
    """The functions of a class that is no library's."""
    for base in kind.__mro__:
        if not _is_librarys(base.__module__):
            for x in list(vars(base).values()):
                if isinstance(x, (FunctionType, staticmethod, classmethod)):
                    yield getattr(x, "__func__", x)


def _is_librarys(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _read(fun: FunctionType) -> Iterator[Any]:
    yield from (cell.cell_contents for cell in fun.__closure__ or () if _is_set(cell))
    yield from (fun.__defaults__, fun.__kwdefaults__, vars(fun).get("__wrapped__"))
    if not _is_librarys(fun.__module__):
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
