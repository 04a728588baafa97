"""A result of the library is a line, and a curve in a notebook."""

import signal
from pathlib import Path

import jax
import jax.numpy as jnp
from histories import FALLING, rows

from trainer.assembly.library import Result
from trainer.step.state import TrainState


def result(logged, stopped_by=None):
    params = {"w": jnp.ones(2)}
    state = TrainState(params, params, jax.random.key(0))
    return Result(state, 100, logged, Path("runs/mine"), stopped_by)


def test_a_result_is_a_line():
    assert repr(result([])) == "Result(step=100, run_dir=runs/mine)"
    actual = repr(result(rows(FALLING, {99: 1.75}), signal.SIGINT))
    assert actual == (
        "Result(step=100, train/loss=1.5400, val/loss=1.7500, run_dir=runs/mine,"
        " stopped_by=SIGINT)"
    )
