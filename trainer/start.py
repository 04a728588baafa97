"""Where a run starts: at its own newest checkpoint, at another run's, from given weights, or from nothing."""

import dataclasses
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
from trainer.workload import Workload, abstract_state, convert_state


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
    w: Workload,
    first: Callable[[], TrainState],
    *,
    convert: bool,
) -> Restored:
    """State, steps taken and meta to start from.

    Args:
      source: `auto` continues `run_dir` where it holds a checkpoint; `none` refuses to; anything else is a run
        directory, from whose newest checkpoint a `run_dir` without one starts.
      own: the checkpoints of `run_dir`.
      w: what is trained, in its precision.
      first: makes the state before step 0.
      convert: whether another run's state may be in another precision; it is then converted.

    Raises:
      UserError: `none` but there are checkpoints, no such run directory, or another model's state.
    """
    if own.steps():
        if source == "none":
            raise UserError(
                f"run_dir={run_dir} holds checkpoints of steps {own.steps()} and resume=none; "
                "choose another run_dir, or resume=auto to continue"
            )
        check_same_precision(f"run_dir={run_dir}", policy_of(own.meta()), w.model.policy)
        return own.restore(abstract_state(w))
    if source in ("auto", "none"):
        return Restored(0, first(), {})
    if not (Path(source) / "checkpoints").is_dir():
        raise UserError(f"resume={source} has no checkpoints; valid: auto, none, or a run directory")
    with Checkpointer.reading(Path(source) / "checkpoints") as theirs:
        meta = theirs.meta()
        check_same_model(f"resume={source}", meta["model"], w.model.spec)
        policy, trained = policy_of(meta), meta["config"]["optimizer"]["name"]
        if trained != w.optimizer_name:
            raise UserError(
                f"resume={source} was trained with optimizer={trained}, whose state is not that of {w.optimizer_name}; "
                f"set optimizer={trained}, or take its weights alone: init_from={source}"
            )
        if not convert:
            check_same_precision(f"resume={source}", policy, w.model.policy, "resume.convert=true converts it")
        found = theirs.restore(abstract_state(w.in_precision(policy)))
    state = found.state if policy == w.model.policy else convert_state(w, found.state, policy)
    return Restored(found.step, state, {k: v for k, v in found.meta.items() if k != "tracker_id"})


def policy_of(meta: Mapping[str, Any]) -> Policy:
    """The precision that a checkpoint was made in."""
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in meta["precision"].items()}
    return Policy(**fields)


def check_same_precision(source: str, theirs: Policy, ours: Policy, otherwise: str = "") -> None:
    """Refuse a state that was trained in another precision."""
    before, now = dataclasses.asdict(theirs), dataclasses.asdict(ours)
    different = [f"precision.{name}={before[name]} (now {now[name]})" for name in now if before[name] != now[name]]
    if different:
        raise UserError(
            f"{source} was trained with {', '.join(different)}: not the same run; choose its precision, or a run_dir "
            f"of its own; {otherwise or 'there, resume=RUN resume.convert=true converts its state'}"
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
