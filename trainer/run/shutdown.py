"""End a run before its last step: after a signal, or because it hangs.

A thread watches. The main thread may be inside a call that never returns, where Python
runs no signal handler: a collective whose other processes are gone, or a file system
that does not answer. The watching thread prints a line and ends the process without the
main thread.
"""

import contextlib
import faulthandler
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from trainer.files import own_copy, saved_steps

HUNG_EXIT_CODE = 4
SIGNALS = (signal.SIGTERM, signal.SIGINT)
NOTHING_TRAINED = "interrupted before the first step; nothing was trained"
# A signal is answered at once: `select` wakes for it.
POLL = 0.25  # seconds between two checks of the timeouts


class EarlyInterrupt:
    """Records a Ctrl-C before the first step, because libraries may swallow its
    exception; the first `Guard` stops the run.

    Attributes:
      imported: whether JAX is imported. Until then a Ctrl-C ends the process at once: a
        KeyboardInterrupt during the import would abort it with a C++ trace.
      received: whether a Ctrl-C came.
      guard_entered: whether a `Guard` was entered since `install`.
    """

    def __init__(self) -> None:
        self.imported = self.received = self.guard_entered = False

    def install(self) -> None:
        """Catch Ctrl-C from now on, in the main thread of a program."""
        self.received = self.guard_entered = False
        signal.signal(signal.SIGINT, self._caught)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if not self.imported:
            _write_error(NOTHING_TRAINED)
            # `sys.exit` is an exception, too.
            os._exit(128 + number)
        self.received = True
        raise KeyboardInterrupt

    def take(self) -> bool:
        """Return whether a Ctrl-C came, and forget it."""
        self.guard_entered = True
        received, self.received = self.received, False
        return received


EARLY_INTERRUPT = EarlyInterrupt()


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds; 0: none.

    Attributes:
      stop: time from a signal to the end of the process.
      stall: time without progress until a stall is reported.
      hang: time without progress until the process ends.
    """

    stop: float
    stall: float
    hang: float


class Guard:
    """Catches SIGTERM and Ctrl-C, and ends the process if the loop does not; a context
    manager.

    Args:
      timeouts: the timeouts of stops, stalls and hangs.
      run_dir: `hang.txt` in it gets the stack of every thread.
      report: called with a line about a stall or about the end, in another thread.
      announce: called with a line about the first signal, in another thread.
      owns_process: whether the process belongs to the run alone. If not, as in a
        notebook, nothing here ends it: a second Ctrl-C is a KeyboardInterrupt, and a
        run that hangs is only reported. Outside the main thread no signal is caught.

    Attributes:
      signal: the number of the first signal; 0: none came. The loop checks it. A second
        Ctrl-C ends the process at once; a second SIGTERM, which schedulers send,
        changes nothing.
    """

    def __init__(
        self,
        timeouts: Timeouts,
        run_dir: Path,
        report: Callable[[str], None],
        announce: Callable[[str], None],
        *,
        owns_process: bool = True,
    ) -> None:
        # A notebook must survive a cell that hangs, so nothing ends its process.
        self.timeouts = timeouts if owns_process else Timeouts(0, timeouts.stall, 0)
        self.owns_process = owns_process
        self.signal = 0
        self._run_dir = run_dir
        self._report, self._announce = report, announce
        self._done = threading.Event()
        # Monotonic: a change of the system clock is no hang.
        self._last, self._doing = time.monotonic(), "starting"
        self._stop_deadline: float | None = None  # once a signal is announced
        self._stalled = False

    def beat(self, doing: str) -> None:
        """Record progress; `doing` completes messages, such as `in step 3`."""
        self._last, self._doing = time.monotonic(), doing

    def __enter__(self) -> Self:
        # Signals reach the thread as bytes, even if the main thread is in a call.
        self._read, self._write = os.pipe()
        # Required by `set_wakeup_fd`.
        os.set_blocking(self._write, False)
        self._handlers: dict[signal.Signals, Any] = {}
        # Python sets handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._handlers = {
                number: signal.signal(number, self._caught) for number in SIGNALS
            }
            if EARLY_INTERRUPT.take():
                # Through handler and pipe, as if it came now.
                signal.raise_signal(signal.SIGINT)
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._handlers:
            # Before the pipe is closed: a signal must not be written to a closed
            # descriptor.
            signal.set_wakeup_fd(self._wakeup)
        self._done.set()
        # The thread may still wait for the pipe.
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        if number == signal.SIGINT and not self.owns_process:
            # The next one raises KeyboardInterrupt, as a notebook's user expects.
            signal.signal(number, signal.default_int_handler)

    def _watch(self) -> None:
        while not self._done.is_set():
            if select.select([self._read], [], [], POLL)[0]:
                # Each byte is the number of a signal, of any that the process handles.
                for number in os.read(self._read, 64):
                    self._receive(number)
            self._check_timeouts()

    def _receive(self, number: int) -> None:
        """Announce the first signal; end the process at a second Ctrl-C."""
        is_stopping = self._stop_deadline is not None
        if number == signal.SIGINT and is_stopping and self.owns_process:
            _write_error(
                f"second Ctrl-C: process ended {self._doing}; checkpoints of steps:"
                f" {self._checkpoints()}; later steps are lost; re-run the same command"
                " to resume"
            )
            os._exit(128 + number)
        if number in SIGNALS and not is_stopping:
            # The main thread, if it hangs, runs no handler.
            self.signal = self.signal or number
            self._stop_deadline = time.monotonic() + self.timeouts.stop
            # A message may wait for the main thread, which may hold the terminal. In a
            # thread of its own it does not delay this one.
            threading.Thread(
                target=_tell,
                args=(self._announce, self._describe_stop(number)),
                name="announce",
                daemon=True,
            ).start()

    def _check_timeouts(self) -> None:
        """End the process if a stop or hang takes too long; report a stall once."""
        now, timeouts = time.monotonic(), self.timeouts
        idle = now - self._last
        deadline = self._stop_deadline
        if deadline is not None and timeouts.stop and now > deadline:
            self._end(
                128 + self.signal,
                f"not stopped within {timeouts.stop:g} s of the signal; the run was"
                f" still {self._doing}",
            )
        progress = f"no progress for {idle:.0f} s, {self._doing}"
        if timeouts.hang and idle > timeouts.hang:
            self._end(HUNG_EXIT_CODE, progress)
        is_stalled = 0 < timeouts.stall < idle
        # Told once for each stall, not four times a second.
        if is_stalled and not self._stalled:
            _tell(self._report, f"stalled: {progress}")
        self._stalled = is_stalled

    def _describe_stop(self, number: int) -> str:
        """Return a line about the effect of the first signal, and of a second one."""
        name = signal.Signals(number).name
        limit = f" within {self.timeouts.stop:g} s" if self.timeouts.stop else ""
        ends = "ends the process" if self.owns_process else "interrupts the call"
        return (
            f"{name} ({self._doing}): stopping after this step and saving a checkpoint"
            f"{limit}; a second Ctrl-C {ends} at once, without that checkpoint"
        )

    def _checkpoints(self) -> str:
        return ", ".join(map(str, saved_steps(self._run_dir))) or "none"

    def _end(self, code: int, why: str) -> None:
        """End the process without the main thread, which may hold any lock."""
        text = (
            f"{why}; ended; checkpoints: {self._checkpoints()}; re-run the same"
            " command to resume"
        )
        # Standard error first: the run directory may be on the file system that hangs.
        _write_error(text)
        with (
            contextlib.suppress(OSError),
            open(
                self._run_dir / "hang.txt", "w", encoding="utf-8", opener=own_copy
            ) as file,
        ):
            file.write(text + "\n")
            file.flush()
            # It shows the call in which the main thread hangs.
            faulthandler.dump_traceback(file)
        # The report may hang on the same file system: it gets two seconds.
        report_thread = threading.Thread(
            target=_tell, args=(self._report, text), daemon=True
        )
        report_thread.start()
        report_thread.join(2)
        # sys.exit would only end this thread.
        os._exit(code)


def _tell(log: Callable[[str], None], text: str) -> None:
    """Call `log`, and ignore errors: on a full disk the calling thread must go on."""
    with contextlib.suppress(Exception):
        log(text)


def _write_error(text: str) -> None:
    """Write to standard error without Python's locks, which the main thread may
    hold.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"error: {text}\n".encode())


def leave_within(seconds: float, error: BaseException) -> None:
    """End the process if it still runs `seconds` after `error`; 0: never.

    The main thread may wait in a collective for processes that are gone.
    """
    if not seconds:
        return
    why = (str(error).splitlines() or [type(error).__name__])[0]

    def end() -> None:
        time.sleep(seconds)
        _write_error(
            f"{why}; the process did not exit within {seconds:g} s of this error;"
            " re-run the same command to resume"
        )
        os._exit(HUNG_EXIT_CODE)

    threading.Thread(target=end, name="leave", daemon=True).start()
