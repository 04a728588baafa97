"""Contestants of a benchmark take turns, a few steps each, so that whatever else the machine does falls on all."""

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.errors import UserError

Contestant = Callable[[int], float]  # takes that many steps; seconds


def worker(python: str) -> Callable[[Any], str]:
    """Starts `scripts/bench/torch.py`; what is returned asks it, and waits for its answer."""
    script = Path(__file__).with_name("torch.py")
    process = subprocess.Popen([python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(message: Any) -> str:
        print(json.dumps(message), file=process.stdin, flush=True)
        answer = process.stdout.readline()  # type: ignore[union-attr]
        if not answer:
            raise UserError(f"{python} {script.name} ended without an answer; its own message stands above")
        return answer

    return ask


def race(contestants: dict[str, Contestant], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step of each, one figure a round. Who begins alternates."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(rounds):
        for name in list(contestants)[:: 1 if i % 2 else -1]:
            seconds[name].append(contestants[name](steps) / steps)
    return seconds


def figures(seconds: list[float], tokens: int) -> dict[str, float]:
    """Tokens per second (median, smallest, largest) and milliseconds per step (median) from seconds per step."""
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
            raise UserError(f"torch_python={named} does not exist; give the path of an interpreter that has torch")
        return named
    return sys.executable if importlib.util.find_spec("torch") else None


def taking(step: Callable[..., Any], state: Any, batch: Any, hyper: Any) -> Callable[[int], float]:
    """Seconds that so many further train steps take; the state is donated to the first."""

    def take(steps: int) -> float:
        nonlocal state
        start = time.perf_counter()
        for _ in range(steps):
            state, metrics = step(state, batch, hyper)
        metrics["loss"].block_until_ready()
        return time.perf_counter() - start

    return take
