"""Where a run starts: at its own newest checkpoint, at another run's, from given weights, or from nothing."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from scalify_core import weights
from trainer.checkpoint import Checkpointer, Restored
from trainer.errors import UserError
from trainer.huggingface import load_gpt2
from trainer.leaves import as_saved
from trainer.model import Params, stack_layers
from trainer.precision import Policy
from trainer.spec import GPT2Spec
from trainer.state import TrainState
from trainer.workload import Model


def architecture(spec: GPT2Spec) -> dict[str, Any]:
    """What decides which function parameters stand for, as JSON values; not all of it shows in their shapes."""
    sizes = ("vocab_size", "context", "n_layer", "n_head", "d_model", "mlp")
    return {name: getattr(spec, name) for name in sizes} | {"d_mlp": spec.mlp_width}


def check_same_model(source: str, theirs: Mapping[str, Any], spec: GPT2Spec) -> None:
    """Refuse weights of another architecture. `source` names where they are, as the user did."""
    for name, ours in architecture(spec).items():
        if theirs[name] != ours:
            raise UserError(f"{source} has {name}={theirs[name]}, the model {ours}; set model.{name}={theirs[name]}")


def starting_point(
    source: str,
    run_dir: Path,
    own: Checkpointer,
    model: Model,
    target: TrainState,
    first: Callable[[], TrainState],
) -> Restored:
    """State, steps taken and meta to start from.

    Args:
      source: `auto` continues `run_dir` where it holds a checkpoint; `none` refuses to; anything else is a run
        directory, from whose newest checkpoint a `run_dir` without one starts.
      own: the checkpoints of `run_dir`.
      model: what is trained, in its precision.
      target: shapes, dtypes and shardings of the state.
      first: makes the state before step 0.

    Raises:
      UserError: `none` but there are checkpoints, no such run directory, or another model's state.
    """
    if own.steps():
        if source == "none":
            raise UserError(
                f"run_dir={run_dir} holds checkpoints of steps {own.steps()} and resume=none; "
                "choose another run_dir, or resume=auto to continue"
            )
        check_same_precision(f"run_dir={run_dir}", own.meta()["precision"], model.policy)
        return own.restore(target)
    if source in ("auto", "none"):
        return Restored(0, first(), {})
    if not (Path(source) / "checkpoints").is_dir():
        raise UserError(f"resume={source} has no checkpoints; valid: auto, none, or a run directory")
    with Checkpointer.reading(Path(source) / "checkpoints") as theirs:
        meta = theirs.meta()
        check_same_model(f"resume={source}", meta["model"], model.spec)
        check_same_precision(f"resume={source}", meta["precision"], model.policy)
        found = theirs.restore(target)
    return Restored(found.step, found.state, {k: v for k, v in found.meta.items() if k != "tracker_id"})


def check_same_precision(source: str, theirs: Mapping[str, Any], policy: Policy) -> None:
    """Refuse a state that was trained in another precision."""
    ours = json.loads(json.dumps(dataclasses.asdict(policy)))
    different = [name for name in ours if theirs.get(name) != ours[name]]
    if different:
        listed = ", ".join(f"precision.{name}={theirs.get(name)} (here {ours[name]})" for name in different)
        raise UserError(
            f"{source} was trained with {listed}: not the same run; choose its precision, "
            "or take its weights into a new run with init_from"
        )


def restore_logical(checkpointer: Checkpointer, like: Params) -> Params:
    """FP32 parameters of the newest checkpoint, whatever they were stored as, placed as `like`."""
    target = as_saved({"params": like}, checkpointer.described())
    return weights.wide(checkpointer.restore(target, partial=True).state["params"])


def initial_weights(source: Path, spec: GPT2Spec, like: Params) -> Params:
    """Parameters from a run, a Hugging Face GPT-2 directory or a safetensors file, placed and typed as `like`."""
    if not source.exists():
        raise UserError(
            f"init_from={source} does not exist; "
            "valid: a run directory, a Hugging Face GPT-2 directory, or a .safetensors file"
        )
    if (source / "checkpoints").is_dir():
        with Checkpointer.reading(source / "checkpoints") as checkpointer:
            check_same_model(f"init_from={source}", checkpointer.meta()["model"], spec)
            return restore_logical(checkpointer, like)
    found, params = load_gpt2(source, n_head=spec.n_head)
    check_same_model(f"init_from={source}", architecture(found), spec)
    if spec.scan_layers:
        params = stack_layers(params)
    return jax.tree.map(lambda new, old: jax.device_put(new.astype(old.dtype), old.sharding), params, like)


def check_same_run(found: Restored, steps: int, data: str, *, fork: bool) -> None:
    """Refuse to go on where the same run could not: other data, or fewer steps in all than were taken already.

    A `fork`, in a directory of its own, takes a step at least: it would be left without a checkpoint.
    """
    if steps < found.step + fork:
        raise UserError(f"train.steps={steps}, but the checkpoint has {found.step}; valid: {found.step + fork} or more")
    before = found.meta.get("data", data)
    if before != data:
        raise UserError(
            f"the checkpoint was trained on data {before}, this is {data}: not the same run; "
            "bring back the data, or start a new run with init_from"
        )
