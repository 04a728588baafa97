"""Check that a saved state or saved weights fit the run that loads them.

A start checks in this order, each time before what takes longer:

1. `RunDir.check`: the configuration is that of the directory's config.yaml.
2. `start.check_start`: there is a checkpoint, a run or weights to start from.
3. `inputs.check_same_inputs`: all processes read the same data, weights and checkpoint.
4. `start.check_fork`: the run in the directory is a fork of `resume`.
5. `check_same_model`, `check_same_trainable`, `check_same_precision`,
   `check_no_replicas`: the saved state fits this run's model and optimizer.
6. `check_same_run`: the data are those of the checkpoint, and steps are left.
7. `check_trained_with`, `RunDir.check_no_effect_after_end`: the checkpoint was
   trained with config.yaml, and changed keys have an effect.
"""

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

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


class TokenizerMismatch(NamedTuple):
    """The difference of two tokenizers, and advice about it, for a message."""

    problem: str
    advice: str


def architecture(spec: Spec) -> dict[str, Any]:
    """Return the settings that determine what the model computes: the family and
    `Spec.architecture`, as JSON values.
    """
    # Families may have the same sizes and compute something else.
    return {"family": family_of(spec).name} | spec.architecture()


def check_same_model(
    source: str,
    saved: Mapping[str, Any],
    spec: Spec,
    alternative: str = "",
    mismatch: TokenizerMismatch | None = None,
) -> None:
    """Raise UserError for weights of another architecture or for another tokenizer.

    Args:
      source: the weights, as the user named them.
      saved: their `architecture`.
      spec: the model that loads them.
      alternative: the end of the message about another architecture: what else to do.
      mismatch: how the tokenizers differ; None: they are the same.

    Raises:
      UserError: all differences, in one message.
    """
    expected = spec.architecture()
    family = family_of(spec).name
    if saved["family"] != family:
        raise UserError(
            f"{source} has a {saved['family']}, the model is a {family}; choose another"
            f" model{alternative}"
        )
    if mismatch is not None:
        del expected["vocab_size"]  # follows from the tokenizer
    # The spec decides: a setting may differ without changing what the model computes.
    different = [name for name in expected if not spec.is_compatible(name, saved[name])]
    if not different and mismatch is None:
        return
    # All differences at once, so that one change of the command mends them.
    problems = [
        f"has {name}={saved[name]} (the model {expected[name]})" for name in different
    ]
    advice = []
    if different:
        sizes = " ".join(f"model.{name}={saved[name]}" for name in different)
        advice.append(f"set {sizes}{alternative}")
    if mismatch is not None:
        problems.append(mismatch.problem)
        advice.append(mismatch.advice)
    raise UserError(f"{source} {', '.join(problems)}; {'; '.join(advice)}")


def check_same_precision(
    source: str, saved: Policy, policy: Policy, alternative: str
) -> None:
    """Raise UserError for a state that was trained in another precision.

    `alternative` is the end of the message: what to do instead of setting the old
    values.
    """
    # Every field counts, also those that change no stored dtype: otherwise the state
    # would go on with other roundings.
    old = dataclasses.asdict(saved)
    new = dataclasses.asdict(policy)
    different = [
        # Values may be lists, whose brackets a shell would expand.
        f"{shlex.quote(f'precision.{name}={old[name]}')} (now {new[name]})"
        for name in new
        if old[name] != new[name]
    ]
    if different:
        raise UserError(
            f"{source} was trained with {', '.join(different)}; set the old values, or"
            f" {alternative}"
        )


def check_same_trainable(source: str, meta: Mapping[str, Any], task: TrainTask) -> None:
    """Raise UserError for a state of another run with moments of other parameters."""

    def override_of(names: tuple[str, ...]) -> str:
        return shlex.quote(f"train.trainable=[{','.join(names)}]")

    saved = saved_trainable(meta)
    # Other patterns may select the same parameters.
    if task._replace(trainable=saved).trained_roles != task.trained_roles:
        raise UserError(
            f"resume={source} was trained with {override_of(saved)}, this is"
            f" {override_of(task.trainable)}: its optimizer has moments of other"
            f" parameters; set {override_of(saved)}, or take the weights alone:"
            f" {override('init_from', source)}"
        )


def check_no_replicas(source: str, meta: Mapping[str, Any]) -> None:
    """Raise UserError for a state of DiLoCo replicas for a run without them."""
    count = saved_config(meta).diloco.replicas
    if count is not None:
        raise UserError(
            f"{source} was trained with diloco.replicas={count} replicas, each with an"
            " optimizer state, which a run without replicas cannot take; set"
            " parallel=diloco diloco.replicas=1, or take its weights alone,"
            " init_from=RUN"
        )


def data_difference(meta: Mapping[str, Any], manifest: Manifest) -> str | None:
    """Return how the data differ from a checkpoint's; None: they are the same.

    A data set of the Hub may change and keep its name, and so its fingerprint.
    Therefore the content is compared too. Checkpoints of earlier versions lack it, or
    have that of the tokens alone.
    """
    if meta["data"] != manifest.fingerprint:
        return f"trained on data {meta['data']}, this is {manifest.fingerprint}"
    contents = (manifest.content, *manifest.earlier_contents)
    if meta.get("data_content", manifest.content) not in contents:
        return (
            f"trained on other tokens than {manifest.directory} has now, or on tokens"
            " of a text of another size"
        )
    return None


def check_same_run(checkpoint: Restored, steps: int, manifest: Manifest) -> None:
    """Check that a run continues on the same data, with at least the steps taken.

    Args:
      checkpoint: the state from which the run continues.
      steps: number of steps of the whole run.
      manifest: describes the run's data.
    """
    # A fork must take a step: without one it would leave no checkpoint in its run_dir.
    least = checkpoint.step + 1 if checkpoint.is_fork else checkpoint.step
    if steps < least:
        raise UserError(
            f"train.steps={steps}, but the checkpoint has {checkpoint.step}; valid:"
            f" {least} or more"
        )
    if checkpoint.step == 0:  # no checkpoint: no data was read
        return
    difference = data_difference(checkpoint.meta, manifest)
    if difference is not None:
        raise UserError(
            f"the checkpoint was {difference}: not the same run; restore the data, or"
            " start a new run with init_from"
        )
