"""Errors that a user can cause. Each is one line: what was found, what is valid, what
to do next.

`__main__` prints the message without a traceback and exits with `exit_code`; README
lists all codes.
"""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import ClassVar, NoReturn

MAKE_ROOM = "make room, then continue with the same run_dir"  # said of a full disk


class UserError(Exception):
    """Bad configuration, data, or environment. Exit code 2."""

    exit_code: ClassVar[int] = 2


class Diverged(UserError):
    """The watchdog stopped the run: too many steps in a row were not finite. Exit code
    3.
    """

    exit_code: ClassVar[int] = 3


def complain(text: object) -> None:
    """A line on standard error, if that takes one: on a full disk it does not, which
    must not change the exit code.
    """
    with contextlib.suppress(OSError):
        print(f"error: {text}", file=sys.stderr, flush=True)


def to_readers(main: Callable[[], int]) -> int:
    """The exit code of `main`, with all that it printed; 141, without a word, as of
    `cat`, if nobody reads on.

    So it is with `| head`. A pipe of its own that breaks is an error as any other.
    """
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        pipe = select.poll()
        pipe.register(sys.stdout.fileno(), 0)
        if not any(what & select.POLLERR for _, what in pipe.poll(0)):
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # for what is still to be written
        os.close(nowhere)
        return 128 + signal.SIGPIPE
    return code


def leave(code: int) -> NoReturn:
    """End with this exit code, also where what standard output still holds cannot be
    written: Python makes that 120.
    """
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except OSError:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 to the end of the process
    sys.exit(code)
