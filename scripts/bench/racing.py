"""Contestants of a benchmark take turns, a few steps each, so that whatever else the
machine does falls on all.

A contestant that is not ours, or that must leave no trace in memory, is a `Worker`: a
process of its own.
"""

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from trainer.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
Contestant = Callable[[int], float]  # takes that many steps; seconds
NO_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "OutOfMemory")


class Failed(UserError):
    """A worker could not do what it was asked to.

    Attributes:
      out_of_memory: whether it, or its device, had too little memory.
      ended: whether the process is no more.
    """

    def __init__(self, why: str, *, ended: bool) -> None:
        super().__init__(why)
        self.out_of_memory, self.ended = any(sign in why for sign in NO_MEMORY), ended


class Worker:
    """A process that answers each line of JSON with one; a context manager, which ends
    it.

    Args:
      command: that starts it; `serve` is its other end.
      environment: variables beside those of this process.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (until `close`)
        paths = os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=os.environ | {"PYTHONPATH": paths} | dict(environment or {}),
        )

    def ask(
        self, message: Mapping[str, Any], seconds: float | None = None
    ) -> dict[str, Any]:
        """Its answer. Raises Failed where there is none, none in so many seconds, or
        one that is an error.
        """
        process, too_late = self._process, threading.Event()
        assert process.stdin is not None
        assert process.stdout is not None

        def give_up() -> None:
            too_late.set()
            process.kill()

        timer = threading.Timer(seconds, give_up) if seconds is not None else None
        if timer is not None:
            timer.start()
        answer = ""
        try:
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps(message), file=process.stdin, flush=True)
                answer = process.stdout.readline()
        finally:
            if timer is not None:
                timer.cancel()
        if not answer:
            process.wait()
            why = (
                f"no answer in {seconds:.0f} s"
                if too_late.is_set()
                else f"ended without an answer: {self.last_line}"
            )
            raise Failed(why, ended=True)
        found = json.loads(answer)
        if "error" in found:
            raise Failed(found["error"], ended=False)
        return found

    @property
    def is_alive(self) -> bool:
        """Return whether the process is there to be asked."""
        return self._process.poll() is None

    @property
    def last_line(self) -> str:
        """What it printed last beside its answers."""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else f"exit code {self._process.returncode}"

    def close(self) -> None:
        """End the process, and wait until it, and what it held, is gone."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]
        self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Be a worker: `answer` each line of standard input. What is printed meanwhile goes
    to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            found = answer(json.loads(line))
        except Exception as error:  # whatever it is, it is this contestant's alone
            first = str(error).strip().partition("\n")[0]
            found = {
                "error": (
                    first
                    if isinstance(error, UserError)
                    else f"{type(error).__name__}: {first[:500]}"
                )
            }
        print(json.dumps(found), file=answers, flush=True)


def torch_worker(python: str) -> Worker:
    """`scripts/bench/torch_peer.py` in an interpreter that has torch, whose own modules
    nothing beside it may hide.
    """
    return Worker([python, "-P", str(Path(__file__).with_name("torch_peer.py"))])


def race(
    contestants: dict[str, Contestant], rounds: int, steps: int
) -> dict[str, list[float]]:
    """Seconds per step of each, one figure a round. Who begins alternates."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(rounds):
        for name in list(contestants)[:: 1 if i % 2 else -1]:
            seconds[name].append(contestants[name](steps) / steps)
    return seconds


def figures(seconds: list[float], tokens: int) -> dict[str, float]:
    """Tokens per second (median, smallest, largest) and milliseconds per step (median)
    from seconds per step.
    """
    return {
        "tokens_per_s": tokens / statistics.median(seconds),
        "tokens_per_s_min": tokens / max(seconds),
        "tokens_per_s_max": tokens / min(seconds),
        "step_ms": 1e3 * statistics.median(seconds),
    }


def torch_interpreter(named: str) -> str | None:
    """The interpreter to use for PyTorch; None: there is none."""
    if named:
        if not Path(named).exists():
            raise UserError(
                f"torch_python={named} does not exist; give the path of an interpreter"
                " that has torch"
            )
        return named
    return sys.executable if importlib.util.find_spec("torch") else None


def taking(
    step: Callable[..., Any], state: Any, batch: Any, hyper: Any
) -> Callable[[int], float]:
    """Seconds that so many further train steps take; the state is donated to the
    first.
    """

    def take(steps: int) -> float:
        nonlocal state
        start = time.perf_counter()
        for _ in range(steps):
            state, metrics = step(state, batch, hyper)
        metrics["loss"].block_until_ready()
        return time.perf_counter() - start

    return take
