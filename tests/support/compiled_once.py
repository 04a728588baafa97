"""What a worker has compiled for a task is what later runs of the same task take:
tracing it again is half of a short run."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import pytest

from trainer.assembly import callbacks, training
from trainer.workload import TrainTask

DERIVED = ("training", "sampling")  # functions, which follow from the other fields


def _frozen(value: Any) -> Hashable:
    if isinstance(value, list):
        return tuple(value)
    return tuple(value.items()) if isinstance(value, dict) else value


def _form(tree: Any) -> Hashable:
    """The structure of a tree, with the scales that are constants of a program, and
    the kind of each array."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((x.shape, x.dtype, x.sharding) for x in leaves)


def key_of(task: TrainTask, *trees: Any) -> Hashable:
    """Return all that a compiled program of a task depends on."""
    model = task.model._asdict()
    fields = tuple(_frozen(v) for name, v in model.items() if name not in DERIVED)
    return fields, task._replace(model=None), *map(_form, trees)


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that remembers what `make` returned."""
    made: dict[Hashable, Any] = {}

    def made_once(task: TrainTask, *trees: Any) -> Any:
        key = key_of(task, *trees)
        if key not in made:
            made[key] = make(task, *trees)
        return made[key]

    return made_once


_compile_step = once(training.compile_step)
_jitted_eval_step = once(callbacks.jitted_eval_step)


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the runs of a test take what others have compiled."""
    monkeypatch.setattr(training, "compile_step", _compile_step)
    monkeypatch.setattr(callbacks, "jitted_eval_step", _jitted_eval_step)
