"""Train like `python -m trainer key=value ...`, with the faults of a file.

    python -m scripts.faults.faulty FAULTS key=value ...

FAULTS is JSON with any of these keys; steps count from 1:

  nan         steps whose batches have an invalid id
  corrupt     steps before which all weights become 4 times as large, as if memory broke
  hang        a step whose batch never comes, once: then the file FAULTS.hung exists
  validation  seconds that each batch of a validation takes longer
  terminate   true: SIGTERM in the final validation
  clock       steps before which the wall clock jumps by a day, forth and back in turns
"""

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trainer.assembly import training as build
from trainer.cli import train as command
from trainer.data import Batch
from trainer.run.callbacks import Callback, StepContext
from trainer.run.loop import train as train_phase
from trainer.run.session import TrainLoop

NO_TOKEN = 2**30
ENLARGED = 4.0
HAPPENED = "faults.txt"  # in the run directory: a line for each fault that happened


class Clock:
    """A wall clock that can be wrong."""

    def __init__(self) -> None:
        self._now, self._wrong = time.time, 0

    def __call__(self) -> float:
        return self._now() + self._wrong

    def jump(self) -> None:
        """Jump a day forth, or back again."""
        self._wrong = 86400 - self._wrong


def with_faults(
    loop: TrainLoop, faults: dict[str, Any], hung: Path
) -> Callable[[int], Iterator[tuple[int, Batch]]]:
    """Return the run's batches with faults.

    Weights are replaced here, between two steps, because a recompiled step would lose
    the fault. `HAPPENED` in the run directory lists the faults.
    """
    batches, clock = loop.data.batches, Clock()
    time.time = clock

    def faulty(start: int) -> Iterator[tuple[int, Batch]]:
        for step, batch in batches(start):
            if step + 1 in faults.get("clock", ()):
                clock.jump()
            if step + 1 == faults.get("hang") and not hung.exists():
                hung.touch()
                time.sleep(1e6)
            if step + 1 in faults.get("corrupt", ()):
                larger = jax.tree.map(lambda x: x * ENLARGED, loop.state.params)
                loop.state = dataclasses.replace(loop.state, params=larger)
                note(loop, f"corrupt {step + 1}")
            if step + 1 in faults.get("nan", ()):
                batch = batch._replace(tokens=np.full_like(batch.tokens, NO_TOKEN))
                note(loop, f"nan {step + 1}")
            yield step, batch

    return faulty


def note(loop: TrainLoop, fault: str) -> None:
    """Record that a fault happened."""
    with (loop.session.run_dir / HAPPENED).open("a", encoding="utf-8") as file:
        print(fault, file=file)


def with_slow_batches(evaluation: Callback, faults: dict[str, Any]) -> Callback:
    """Return the validation with slow batches, and a signal in the final one."""

    def slowly(context: StepContext) -> Mapping[str, float] | None:
        should_stop = context.should_stop

        def wait(doing: str) -> bool:
            time.sleep(faults.get("validation", 0))
            return should_stop(doing)

        if context.last and faults.get("terminate", False):
            os.kill(os.getpid(), signal.SIGTERM)
        context.should_stop = wait
        try:
            return evaluation.run(context)
        finally:
            context.should_stop = should_stop

    return dataclasses.replace(evaluation, run=slowly)


def inject(file: Path) -> None:
    """Let training in this process have the faults of a file."""
    faults: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))

    def train(loop: TrainLoop) -> int:
        hung = file.with_name(file.name + ".hung")
        loop.data = loop.data._replace(batches=with_faults(loop, faults, hung))
        loop.callbacks = [
            (
                with_slow_batches(callback, faults)
                if callback.name == "evaluation"
                else callback
            )
            for callback in loop.callbacks
        ]
        return train_phase(loop)

    build.train = train


def main(file: Path, overrides: list[str]) -> int:
    """Train with faults, and return the exit code."""
    inject(file)
    return command.main(overrides)


if __name__ == "__main__":
    inject(Path(sys.argv.pop(1)))
    command.command(sys.argv[1:])
