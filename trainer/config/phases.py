"""The phases of a training: the steps and the configuration of each."""

import dataclasses
from typing import Any, NamedTuple

from trainer.config.schema import Config, TrainPhase
from trainer.errors import UserError


class PhaseConfig(NamedTuple):
    """A phase of the training and its configuration.

    Attributes:
      start: number of steps of the run before the phase.
      until: number of the last step of the phase.
      config: the configuration of the phase, without phases; its schedule spans the
        phase's own steps.
    """

    start: int
    until: int
    config: Config


def phases_of(c: Config) -> list[PhaseConfig]:
    """Return the phases in order; without `train.phases` the whole run is one phase.

    Raises:
      UserError: a phase does not end later than the one before it, or not at a step of
        the run.
    """
    if c.train.phases is None:
        return [PhaseConfig(0, c.train.steps, c)]
    if not c.train.phases:
        raise UserError(
            "train.phases=[]: expected a phase or more, such as"
            " [{until:300,trainable:[embeddings]},{}]"
        )
    # A phase without `trainable` trains everything, so the run's key would be ignored.
    if c.train.trainable is not None:
        raise UserError(
            "train.trainable cannot be set together with train.phases; set"
            " trainable:[...] in each phase"
        )
    phases: list[PhaseConfig] = []
    for i, phase in enumerate(c.train.phases):
        key = f"train.phases[{i}].until"
        start = phases[-1].until if phases else 0
        # Only the last may leave `until` out, so that a longer run extends it by
        # train.steps alone.
        is_last = i + 1 == len(c.train.phases)
        until = phase.until
        if until is None and is_last:
            until = c.train.steps
        if until is None:
            raise UserError(
                f"{key} is missing: only the last phase goes on to train.steps; give"
                " the others a step"
            )
        if until > c.train.steps:
            raise UserError(
                f"{key}={until} is beyond train.steps={c.train.steps}; give an earlier"
                " one, or more steps"
            )
        if until <= start:
            raise UserError(
                f"{key}={until}, but the phase before it ends at step {start}; give"
                " rising steps"
            )
        # Otherwise the steps behind it would have no settings.
        if is_last and until < c.train.steps:
            raise UserError(
                f"{key}={until}, but train.steps={c.train.steps}; leave it out, or add"
                " a phase behind it"
            )
        phases.append(PhaseConfig(start, until, _phase_config(c, phase)))
    return phases


def _phase_config(c: Config, phase: TrainPhase) -> Config:
    settings: dict[str, Any] = {
        "name": phase.schedule,
        "warmup_fraction": phase.warmup_fraction,
        "min_ratio": phase.min_ratio,
        "decay_fraction": phase.decay_fraction,
    }
    # Null keeps the run's value, also inside the schedule.
    changes = {key: value for key, value in settings.items() if value is not None}
    optimizer = c.optimizer
    if phase.lr is not None:
        optimizer = dataclasses.replace(optimizer, lr=phase.lr)
    return dataclasses.replace(
        c,
        # Without phases: `phases_of` of a phase is the phase, and `validate` takes it.
        train=dataclasses.replace(c.train, trainable=phase.trainable, phases=None),
        schedule=dataclasses.replace(c.schedule, **changes),
        optimizer=optimizer,
        precision=phase.precision or c.precision,
    )


def precisions_until(c: Config, step: int) -> list[str]:
    """Return the names of the precisions that trained the first `step` steps."""
    names = [
        phase.config.precision.name for phase in phases_of(c) if phase.start < step
    ]
    # Each once, in the order of training, for model cards.
    return list(dict.fromkeys(names))


def phase_at(c: Config, step: int) -> Config:
    """Return the configuration of the phase of step `step`, counted from 1.

    Steps beyond the end have the last phase's.
    """
    phases = phases_of(c)
    return next(
        (phase.config for phase in phases if step <= phase.until), phases[-1].config
    )
