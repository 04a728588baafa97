"""Where a run starts: at its own newest checkpoint, at another run's, from given weights, or from nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from trainer.checkpoint import Checkpointer, Restored
from trainer.errors import UserError
from trainer.huggingface import load_gpt2
from trainer.model import GPT2Spec, Params, stack_layers
from trainer.state import TrainState


def starting_point(
    source: str, run_dir: Path, own: Checkpointer, target: TrainState, first: Callable[[], TrainState]
) -> Restored:
    """State, steps taken and meta to start from.

    Args:
      source: `auto` continues `run_dir` where it holds a checkpoint; `none` refuses to; anything else is a run
        directory, from whose newest checkpoint a `run_dir` without one starts.
      own: the checkpoints of `run_dir`.
      target: shapes, dtypes and shardings of the state.
      first: makes the state before step 0.

    Raises:
      UserError: `none` but there are checkpoints, no such run directory, or a state of another shape.
    """
    if own.steps():
        if source == "none":
            raise UserError(
                f"run_dir={run_dir} holds checkpoints of steps {own.steps()} and resume=none; "
                "choose another run_dir, or resume=auto to continue"
            )
        return own.restore(target)
    if source in ("auto", "none"):
        return Restored(0, first(), {})
    found = restore_from(Path(source), target, f"resume={source}; valid: auto, none, or a run directory")
    return Restored(found.step, found.state, {k: v for k, v in found.meta.items() if k != "tracker_id"})


def restore_from(run_dir: Path, target: Any, asked: str, *, partial: bool = False) -> Restored:
    """The newest checkpoint of a run that is not this one. `asked` says in an error who wanted it."""
    path = run_dir / "checkpoints"
    if not path.is_dir():
        raise UserError(f"{run_dir} has no checkpoints ({asked})")
    with Checkpointer.reading(path) as checkpointer:
        return checkpointer.restore(target, partial=partial)


def initial_weights(source: Path, spec: GPT2Spec, like: Params) -> Params:
    """Parameters from a run, a Hugging Face GPT-2 directory or a safetensors file, placed and typed as `like`."""
    if not source.exists():
        raise UserError(
            f"init_from={source} does not exist; "
            "valid: a run directory, a Hugging Face GPT-2 directory, or a .safetensors file"
        )
    if (source / "checkpoints").is_dir():
        return restore_from(source, {"params": like}, f"init_from={source}", partial=True).state["params"]
    found, params = load_gpt2(source, n_head=spec.n_head)
    for field in ("vocab_size", "context", "n_layer", "n_head", "d_model"):
        theirs, ours = getattr(found, field), getattr(spec, field)
        if theirs != ours:
            raise UserError(f"init_from={source} has {field}={theirs}, the model {ours}; set model.{field}={theirs}")
    if spec.scan_layers:
        params = stack_layers(params)
    return jax.tree.map(lambda new, old: jax.device_put(new.astype(old.dtype), old.sharding), params, like)


def check_same_run(found: Restored, steps: int, data: str) -> None:
    """Refuse to go on where the same run could not: other data, or fewer steps in all than were taken already."""
    if found.step > steps:
        raise UserError(f"train.steps={steps}, but the checkpoint has {found.step}; valid: {found.step} or more")
    before = found.meta.get("data", data)
    if before != data:
        raise UserError(
            f"the checkpoint was trained on data {before}, this is {data}: not the same run; "
            "bring back the data, or start a new run with init_from"
        )
