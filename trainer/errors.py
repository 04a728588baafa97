"""Errors that a user can cause. Each message is one line: what happened, what is valid,
what to do.

`__main__` prints the message without a traceback and exits with `exit_code`; README
lists all codes.
"""

import contextlib
import errno
import logging
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator
from typing import IO, ClassVar, NoReturn

# A full disk, a full quota, and a limit on the size of files.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MAKE_ROOM = "make room, then continue with the same run_dir"  # said of a full disk


class UserError(Exception):
    """A bad configuration, bad data, or a bad environment: exit code 2."""

    exit_code: ClassVar[int] = 2


class Diverged(UserError):
    """The watchdog stopped the run: too many steps in a row were not finite. Exit code
    3.
    """

    exit_code: ClassVar[int] = 3


# What a terminal may obey, except tabs and line breaks, what turns the direction of
# letters, and halves of surrogate pairs, which cannot be encoded.
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Return a text for a terminal: control characters of data are spelled out.

    Example:
      >>> printable("a\\x1b[2J")
      'a\\\\x1b[2J'
    """
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class PrintableRecord(logging.LogRecord):
    """A log record whose message is `printable`.

    Libraries log names that a stranger gave to files, and their handlers print them.
    """

    def getMessage(self) -> str:
        """Return the message."""
        return printable(super().getMessage())


def complain(text: object) -> None:
    """Print an error in one line on standard error.

    A full disk may refuse the line; that must not change the exit code.
    """
    with contextlib.suppress(OSError):
        print(f"error: {printable(str(text))}", file=sys.stderr, flush=True)


def run_and_flush(main: Callable[[], int]) -> int:
    """Return the exit code of `main` after flushing what it printed.

    It is that of a UserError after a line on stderr, as when standard output is a file
    on a full disk. It is 141, without a message, when nobody reads standard output:
    `| head`. Memory that is full is a line, too.
    """
    try:
        with explain_full_output():
            code = main()
            # Flushed here, so that a full disk or a closed pipe is noticed while it can
            # be answered.
            sys.stdout.flush()
    except BrokenPipeError:
        return broken_pipe_code()
    except UserError as error:
        complain(error)
        return error.exit_code
    # After UserError, which is one; all else than full memory is a bug, with its
    # traceback.
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().split("\n")[0]
        complain(
            f"out of memory ({reason or type(error).__name__}); use a smaller batch, a"
            " smaller model or more devices, or stop what else uses this memory"
        )
        return UserError.exit_code
    return code


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that the memory of the host or a device is full."""
    if type(error).__name__ == "JaxRuntimeError":  # this module does not import JAX
        return "RESOURCE_EXHAUSTED" in str(error)
    return isinstance(error, MemoryError)


@contextlib.contextmanager
def explain_full_output() -> Iterator[None]:
    """Turn the error of standard output on a full disk into a UserError.

    It names no file. Errors of files that are written do, see `replaced_atomically`.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL or error.filename is not None:
            raise
        # Otherwise Python would fail at exit, in its last flush, and exit with 120.
        discard(sys.stdout)
        raise UserError(
            f"cannot write to standard output: {error.strerror}; make room, or send it"
            " to another place"
        ) from error


@contextlib.contextmanager
def explain_file_errors(advice: str = "choose another path") -> Iterator[None]:
    """Turn the OSError of a file into a UserError that ends with `advice`.

    Errors of standard output name no file; they stay as they are.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise UserError(
            # A name may be a whole text, given by mistake as a path.
            f"{str(error.filename)[:300]}: {error.strerror}; {advice}"
        ) from error


def discard(stream: IO[str]) -> None:
    """Send what a stream still holds, and all further output, nowhere.

    Python flushes standard output once more at exit.
    """
    devnull = os.open(os.devnull, os.O_WRONLY)
    # The number is replaced, so that every object that writes to it is.
    os.dup2(devnull, stream.fileno())
    os.close(devnull)


def broken_pipe_code() -> int:
    """Return 141 if standard output is the broken pipe; else re-raise the error.

    Call it where BrokenPipeError is handled. What is still printed goes nowhere.
    """
    pipe = select.poll()
    # Without events poll reports errors alone, and does not wait for room.
    pipe.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in pipe.poll(0)):
        raise
    discard(sys.stdout)
    return 128 + signal.SIGPIPE


def exit_at_once(code: int) -> NoReturn:
    """Exit without waiting for threads, exit hooks or other processes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a closed pipe
            stream.flush()
    os._exit(code)


def leave(code: int) -> NoReturn:
    """Exit with this code, also if standard output cannot be written any more.

    Python itself would exit with 120 then.
    """
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except OSError:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 to the end of the process
    sys.exit(code)
