"""Interleaved timing: a few steps of each in turn, so that other load affects all.

A `Worker` is a process of its own, for code that is not ours or must free its memory.
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
TakeSteps = Callable[[int], float]  # takes that many steps; returns seconds
NO_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "OutOfMemory")


class Failed(UserError):
    """The error of a worker that could not do what it was asked.

    Attributes:
      out_of_memory: whether it, or its device, had too little memory.
      ended: whether its process has ended.
    """

    def __init__(self, why: str, *, ended: bool) -> None:
        super().__init__(why)
        self.out_of_memory, self.ended = any(sign in why for sign in NO_MEMORY), ended


class Worker:
    """A process that answers each line of JSON with one; as a context manager it ends.

    Args:
      command: starts it; it calls `serve`.
      environment: variables in addition to those of this process.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (until `close`)
        paths = os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=os.environ | {"PYTHONPATH": paths} | dict(environment or {}),
        )

    def ask(
        self, message: Mapping[str, Any], seconds: float | None = None
    ) -> dict[str, Any]:
        """Return the answer to a message.

        Raises:
          Failed: no answer, none within `seconds`, or an error.
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
            why = f"ended without an answer: {self.last_line}"
            if too_late.is_set():
                why = f"no answer in {seconds:.0f} s"
            raise Failed(why, ended=True)
        result = json.loads(answer)
        if "error" in result:
            raise Failed(result["error"], ended=False)
        return result

    @property
    def is_alive(self) -> bool:
        """Return whether the process is running."""
        return self._process.poll() is None

    @property
    def last_line(self) -> str:
        """The last line that it printed to standard error."""
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else f"exit code {self._process.returncode}"

    def close(self) -> None:
        """End the process, and wait until it and its memory are gone."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Serve as a worker: `answer` each line of standard input.

    Other output goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            result = answer(json.loads(line))
        except Exception as error:  # any error must only fail this case
            text = str(error).strip().partition("\n")[0]
            if not isinstance(error, UserError):
                text = f"{type(error).__name__}: {text[:500]}"
            result = {"error": text}
        print(json.dumps(result), file=answers, flush=True)


def torch_worker(python: str) -> Worker:
    """Start `torch_peer.py` in an interpreter with torch, isolated from our modules."""
    return Worker([python, "-P", str(Path(__file__).with_name("torch_peer.py"))])


def interleave(
    takes: dict[str, TakeSteps], rounds: int, steps: int
) -> dict[str, list[float]]:
    """Return seconds per step of each, one figure a round; the first one alternates."""
    seconds: dict[str, list[float]] = {name: [] for name in takes}
    for i in range(rounds):
        for name in list(takes)[:: 1 if i % 2 else -1]:
            seconds[name].append(takes[name](steps) / steps)
    return seconds


def figures(seconds: list[float], tokens: int) -> dict[str, float]:
    """Return tokens per second (median and extremes) and milliseconds per step."""
    return {
        "tokens_per_s": tokens / statistics.median(seconds),
        "tokens_per_s_min": tokens / max(seconds),
        "tokens_per_s_max": tokens / min(seconds),
        "step_ms": 1e3 * statistics.median(seconds),
    }


def torch_interpreter(named: str) -> str | None:
    """Return the interpreter with PyTorch, or None."""
    if named:
        if not Path(named).exists():
            raise UserError(
                f"torch_python={named} does not exist; give the path of an interpreter"
                " that has torch"
            )
        return named
    return sys.executable if importlib.util.find_spec("torch") else None


def make_take(
    step: Callable[..., Any], state: Any, batch: Any, step_inputs: Any
) -> TakeSteps:
    """Return a function that takes further train steps and returns their seconds.

    The state is donated to the first step.
    """

    def take(steps: int) -> float:
        nonlocal state
        start = time.perf_counter()
        for _ in range(steps):
            state, metrics = step(state, batch, step_inputs)
        metrics["loss"].block_until_ready()
        return time.perf_counter() - start

    return take
