"""Numbers that tell the operations of one function apart, such as those that draw random words.

They are counted while the function is evaluated, so the same function gets the same numbers however often it is traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax

_drawn: ContextVar[int | None] = ContextVar("drawn", default=None)  # numbers, while a function is evaluated


@contextlib.contextmanager
def numbered() -> Iterator[None]:
    """Inside, `serial` counts from 0; inside another, it goes on."""
    token = _drawn.set(0) if _drawn.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _drawn.reset(token)


@contextlib.contextmanager
def numbers_returned() -> Iterator[None]:
    """What is drawn inside is drawn again: the program inside is only looked at."""
    token = _drawn.set(_drawn.get())
    try:
        yield
    finally:
        _drawn.reset(token)


def serial() -> int:
    """A number that no other call gets while one function is evaluated: what tells equal operations apart."""
    number = drawn()
    _continue_at(number + 1)
    return number


def drawn() -> int:
    """How many numbers have been drawn, which is the next one."""
    return _drawn.get() or 0


def _continue_at(number: int) -> None:
    if _drawn.get() is not None:
        _drawn.set(number)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Count:
    """Of the numbers that a trace drew: part of its result, so who is given the same trace again finds it."""

    count: int


def counting(fun: Callable) -> Callable:
    """`fun` for traces that are kept: its result and how many numbers it drew, which `take` takes apart."""

    @functools.wraps(fun)
    def counted(*args: Any) -> tuple[Any, _Count]:
        first = drawn()
        return fun(*args), _Count(drawn() - first)

    return counted


def take(result: tuple[Any, _Count], first: int) -> Any:
    """The result of a counting function, traced now or before: from `first` on its numbers are taken either way."""
    out, numbers = result
    _continue_at(first + numbers.count)
    return out
