"""Checks that saved state or weights fit the run that is to take them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.data import Manifest
from trainer.errors import UserError
from trainer.models.family import Spec
from trainer.models.registry import family_of
from trainer.precision.policy import Policy
from trainer.run.checkpoint import Restored
from trainer.run.metadata import saved_config, saved_trainable
from trainer.text import override
from trainer.workload import TrainTask

FROM_INIT = ", or model=from_init, which takes all sizes from there"


def architecture(spec: Spec) -> dict[str, Any]:
    """Return what decides which function the parameters stand for, as JSON values.

    That is the family and `Spec.architecture`.
    """
    return {"family": family_of(spec).name} | spec.architecture()


def check_same_model(
    source: str,
    saved: Mapping[str, Any],
    spec: Spec,
    alternative: str = "",
    tokenizer: Sequence[str] = (),
) -> None:
    """Refuse weights of another architecture or for another tokenizer.

    Args:
      source: where they are, as the user named it.
      saved: their `architecture`.
      spec: of the model that is to take them.
      alternative: what else could be done about another architecture.
      tokenizer: how the tokenizers differ, and what to do about it; empty: they are the
        same.

    Raises:
      UserError: with all differences in one message.
    """
    wanted, family = spec.architecture(), family_of(spec).name
    if saved["family"] != family:
        raise UserError(
            f"{source} has a {saved['family']}, the model is a {family}; choose another"
            f" model{alternative}"
        )
    if tokenizer:
        del wanted["vocab_size"]  # follows from the tokenizer
    different = [name for name in wanted if not spec.is_compatible(name, saved[name])]
    if not different and not tokenizer:
        return
    problems = [
        f"has {name}={saved[name]} (the model {wanted[name]})" for name in different
    ]
    advice = []
    if different:
        sizes = " ".join(f"model.{name}={saved[name]}" for name in different)
        advice.append(f"set {sizes}{alternative}")
    raise UserError(
        f"{source} {', '.join([*problems, *tokenizer[:1]])};"
        f" {'; '.join([*advice, *tokenizer[1:]])}"
    )


def check_same_precision(
    source: str, saved: Policy, policy: Policy, alternative: str
) -> None:
    """Raise UserError for a state that was trained in another precision.

    `alternative`: what to do instead of setting the old values.
    """
    old, new = dataclasses.asdict(saved), dataclasses.asdict(policy)
    different = [
        f"precision.{name}={old[name]} (now {new[name]})"
        for name in new
        if old[name] != new[name]
    ]
    if different:
        raise UserError(
            f"{source} was trained with {', '.join(different)}; set the old values, or"
            f" {alternative}"
        )


def check_same_trainable(source: str, meta: Mapping[str, Any], task: TrainTask) -> None:
    """Refuse the state of another run that has moments of other parameters."""
    saved = saved_trainable(meta)
    if task._replace(trainable=saved).trained_roles != task.trained_roles:
        saved_key, key = (
            f"train.trainable=[{','.join(names)}]" for names in (saved, task.trainable)
        )
        raise UserError(
            f"resume={source} was trained with {saved_key}, this is {key}: its"
            f" optimizer has moments of other parameters; set {saved_key}, or take the"
            f" weights alone: {override('init_from', source)}"
        )


def check_no_replicas(source: str, meta: Mapping[str, Any]) -> None:
    """Refuse a state of DiLoCo replicas for a run without them."""
    count = saved_config(meta).diloco.replicas
    if count is not None:
        raise UserError(
            f"{source} was trained with diloco.replicas={count} replicas, each with an"
            " optimizer state, which a run without replicas cannot take; set"
            " parallel=diloco diloco.replicas=1, or take its weights alone,"
            " init_from=RUN"
        )


def data_difference(meta: Mapping[str, Any], manifest: Manifest) -> str | None:
    """Return in what data differ from those of a checkpoint; None: they are the same.

    A data set of the hub may change under its name, and so under its fingerprint.
    Checkpoints of earlier versions do not know the content.
    """
    if meta["data"] != manifest.fingerprint:
        return f"trained on data {meta['data']}, this is {manifest.fingerprint}"
    if meta.get("data_content", manifest.content) != manifest.content:
        return f"trained on other tokens than {manifest.directory} has now"
    return None


def check_same_run(checkpoint: Restored, steps: int, manifest: Manifest) -> None:
    """Refuse to continue on other data, or with fewer steps than were taken.

    Args:
      checkpoint: to continue from.
      steps: of the whole run.
      manifest: of its data.
    """
    # A fork has a directory of its own, in which it leaves no checkpoint unless it
    # takes a step.
    least = checkpoint.step + checkpoint.is_fork
    if steps < least:
        raise UserError(
            f"train.steps={steps}, but the checkpoint has {checkpoint.step}; valid:"
            f" {least} or more"
        )
    difference = checkpoint.step and data_difference(checkpoint.meta, manifest)
    if difference:
        raise UserError(
            f"the checkpoint was {difference}: not the same run; restore the data, or"
            " start a new run with init_from"
        )
