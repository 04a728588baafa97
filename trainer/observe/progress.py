"""What takes long before anything is seen, compilations above all: said while it lasts, and how long it took."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 2.0  # from which on something takes long


@contextmanager
def said(what: str, say: Callable[[str], None], seconds: float = SECONDS) -> Iterator[None]:
    """Says what is being done once it has taken so many seconds, and how long it took in all; nothing of what is quick.

    `what` is a noun, such as `compiling the training step`.
    """
    start, done, lock = time.monotonic(), False, threading.Lock()

    def begin() -> None:
        with lock:
            if not done:
                say(f"{what} ...")

    timer = threading.Timer(seconds, begin)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            done = True
        took = time.monotonic() - start
        if took >= seconds:
            say(f"{what}: {took:.0f} s")


def first_said[**P, R](fn: Callable[P, R], what: str, say: Callable[[str], None]) -> Callable[P, R]:
    """`fn`, whose first call, in which it is compiled, is `said`."""
    called = False

    @functools.wraps(fn)
    def calling(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal called
        if called:
            return fn(*args, **kwargs)
        called = True
        with said(what, say):
            return fn(*args, **kwargs)

    return calling
