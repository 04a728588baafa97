"""Train with faults: as `python -m trainer key=value ...` would, but for what the file FAULTS says.

python -m scripts.faulty FAULTS key=value ...

FAULTS is JSON with any of these; steps count from 1:
  nan         steps whose batches hold an id that no token has
  corrupt     steps before which all weights become 4 times as large, as broken memory might make them
  hang        a step whose batch never comes; once: from then on the file FAULTS.hung exists
  validation  seconds that each batch of a validation takes longer
  terminate   true: SIGTERM in the final validation
  clock       seed of a wall clock that jumps by up to a day, to and fro, at every look at it
"""

import dataclasses
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trainer import __main__ as command
from trainer import build, loop
from trainer.data import Batch
from trainer.evaluate import Evaluation
from trainer.state import TrainState
from trainer.step import Hyper, Metrics, StepFn, Tokens

NO_TOKEN = 2**30
ENLARGED = 4.0


def with_batches(
    batches: Callable[[int], Iterator[tuple[int, Batch]]], nan: set[int], hang: int, hung: Path
) -> Callable[[int], Iterator[tuple[int, Batch]]]:
    """Batches of which some are bad, and one does not come."""

    def faulty(start: int) -> Iterator[tuple[int, Batch]]:
        for step, batch in batches(start):
            if step + 1 == hang and not hung.exists():
                hung.touch()
                time.sleep(1e6)
            bad = np.full_like(batch.tokens, NO_TOKEN)
            yield step, batch._replace(tokens=bad) if step + 1 in nan else batch

    return faulty


def with_corruption(train_step: StepFn, corrupt: set[int]) -> StepFn:
    """The step, on other weights than it was given when it is one of `corrupt`."""

    def faulty(state: TrainState, tokens: Tokens, hyper: Hyper) -> tuple[TrainState, Metrics]:
        if int(hyper.step) + 1 in corrupt:
            state = dataclasses.replace(state, params=jax.tree.map(lambda x: x * ENLARGED, state.params))
        return train_step(state, tokens, hyper)

    return faulty


def jumping(seed: int) -> Callable[[], float]:
    """A wall clock."""
    rng, now = random.Random(seed), time.time
    return lambda: now() + rng.uniform(-86400, 86400)


def main(file: Path, overrides: list[str]) -> int:
    """The trainer's exit code."""
    faults: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if "clock" in faults:
        time.time = jumping(faults["clock"])

    def train(run: loop.Run) -> int:
        hung = file.with_name(file.name + ".hung")
        run.batches = with_batches(run.batches, set(faults.get("nan", [])), faults.get("hang", 0), hung)
        run.train_step = with_corruption(run.train_step, set(faults.get("corrupt", [])))
        evaluate = run.evaluate

        def slowly(state: TrainState, last: bool, broken_off: Callable[[], bool]) -> Evaluation | None:
            def wait() -> bool:
                time.sleep(faults.get("validation", 0))
                return broken_off()

            if last and faults.get("terminate", False):
                os.kill(os.getpid(), signal.SIGTERM)
            return evaluate(state, last, wait)

        run.evaluate = slowly
        return loop.train(run)

    build.train = train
    return command.main(overrides)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
