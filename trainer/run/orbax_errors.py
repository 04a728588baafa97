"""Errors of Orbax: damage that it finds when it is asked, tracebacks that it prints."""

import asyncio
import inspect
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

ORBAX = str(Path(ocp.__file__).parent)


def hide_orbax_tracebacks() -> None:
    """Hide the errors of pending reads and writes after a failed save or restore.

    Nobody awaits these, and the caller has got the first error. Tracebacks reach
    `sys.unraisablehook` in two ways: from TensorStore, which reports to Orbax's closed
    event loop without Python code in between; and from discarded coroutines of Orbax.
    Others reach asyncio's log, from its futures.
    """
    # Each Checkpointer calls this: a hook around a hook would grow with every one.
    default_hook = sys.unraisablehook
    if getattr(default_hook, "hides_orbax_tracebacks", False):
        return

    def hook(report: Any) -> None:
        # Python may report an error without a traceback.
        outermost = (
            report.exc_traceback.tb_frame.f_code if report.exc_traceback else None
        )
        from_event_loop = (
            outermost is asyncio.BaseEventLoop.call_soon_threadsafe.__code__
            and report.exc_type is RuntimeError
        )
        discarded_coroutine = inspect.iscoroutine(
            report.object
        ) and report.object.cr_code.co_filename.startswith(ORBAX)
        # A Ctrl-C in a library's callback: `EarlyInterrupt` has recorded it, and the
        # first `Guard` stops the run.
        interrupted = report.exc_type is KeyboardInterrupt
        if not (from_event_loop or discarded_coroutine or interrupted):
            default_hook(report)

    # The mark is on the function, so that a hook that replaces this one is wrapped
    # again.
    hook.hides_orbax_tracebacks = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(_is_not_from_orbax)
    warnings.filterwarnings(
        "ignore", "coroutine 'async_serialize.* was never awaited", RuntimeWarning
    )


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    """Return whether a record's exception was raised outside of Orbax."""
    trace = record.exc_info[2] if isinstance(record.exc_info, tuple) else None
    return trace is None or not trace.tb_frame.f_code.co_filename.startswith(ORBAX)


def has_commit_time(folder: Path) -> bool:
    """Return whether Orbax can read the time, as it does of every checkpoint."""
    try:
        step = ocp.path.step.Metadata(int(folder.name), epath.Path(folder))
        return step.commit_timestamp is not None
    except ImportError:
        raise
    except Exception:  # a damaged file can raise anything
        return False
