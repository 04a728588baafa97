"""The phases of a training: which steps each has, and the configuration that holds in
them.
"""

import dataclasses
from typing import NamedTuple

from trainer.config.schema import Config
from trainer.errors import UserError


class PhaseConfig(NamedTuple):
    """A phase of the training and its configuration.

    Attributes:
      start: steps taken before its first one.
      until: steps taken after its last one.
      config: the configuration with the phase's settings, without phases; schedules are
          over its steps alone.
    """

    start: int
    until: int
    config: Config


def phases_of(c: Config) -> list[PhaseConfig]:
    """The phases in their order; one without `train.phases`. UserError where their
    borders are no order of steps.
    """
    if c.train.phases is None:
        return [PhaseConfig(0, c.train.steps, c)]
    if not c.train.phases:
        raise UserError(
            "train.phases=[]: expected a phase or more, such as"
            " [{until:300,trainable:[embeddings]},{}]"
        )
    if c.train.trainable is not None:
        raise UserError(
            "train.trainable and train.phases: say in each phase what is trained,"
            " trainable:[...]"
        )
    found: list[PhaseConfig] = []
    for i, phase in enumerate(c.train.phases):
        key, start, last = (
            f"train.phases[{i}].until",
            found[-1].until if found else 0,
            i + 1 == len(c.train.phases),
        )
        until = c.train.steps if last and phase.until is None else phase.until
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
            raise UserError(f"{key}={until} comes after {start}; give rising steps")
        if last and until < c.train.steps:
            raise UserError(
                f"{key}={until}, but train.steps={c.train.steps}; leave it out, or add"
                " a phase behind it"
            )
        ratios = {
            name: getattr(phase, name)
            for name in ("warmup_fraction", "min_ratio", "decay_fraction")
        }
        schedule = {"name": phase.schedule, **ratios}
        config = dataclasses.replace(
            c,
            train=dataclasses.replace(c.train, trainable=phase.trainable, phases=None),
            schedule=dataclasses.replace(
                c.schedule, **{k: v for k, v in schedule.items() if v is not None}
            ),
            optimizer=(
                c.optimizer
                if phase.lr is None
                else dataclasses.replace(c.optimizer, lr=phase.lr)
            ),
            precision=phase.precision or c.precision,
        )
        found.append(PhaseConfig(start, until, config))
    return found


def phase_at(c: Config, step: int) -> Config:
    """The configuration of the phase that step `step` is of, counted from 1; of the
    last one for what is beyond it.
    """
    phases = phases_of(c)
    return next(
        (phase.config for phase in phases if step <= phase.until), phases[-1].config
    )
