"""Logs of operations that take long, such as compilations."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 2.0  # operations that take longer are logged


@contextmanager
def log_duration(operation: str, say: Callable[[str], None]) -> Iterator[None]:
    """Log an operation that takes longer than `SECONDS`.

    One message says that the operation runs, and another at its end how long it took.
    `operation` names it, such as `compiling the training step`; `say` prints a message.
    """
    start = time.monotonic()
    is_done = False
    lock = threading.Lock()

    def begin() -> None:
        # The lock keeps this message from following that of the end: `cancel` does not
        # stop a function that has begun.
        with lock:
            if not is_done:
                say(f"{operation} ...")

    timer = threading.Timer(SECONDS, begin)
    # A thread that is no daemon would hold up the exit of an interrupted process.
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            is_done = True
        duration = time.monotonic() - start
        # The same limit as the timer's: who read the first message gets the second.
        if duration >= SECONDS:
            say(f"{operation}: {duration:.0f} s")


def log_first_duration[**P, R](
    fn: Callable[P, R], operation: str, say: Callable[[str], None]
) -> Callable[P, R]:
    """Wrap `fn` so that `log_duration` logs its first call, in which it is compiled."""
    called = False

    @functools.wraps(fn)
    def logged(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal called
        if called:
            return fn(*args, **kwargs)
        called = True
        with log_duration(operation, say):
            return fn(*args, **kwargs)

    return logged
