"""The phases of a run, and a state's way from one to the next.

Before a phase's first step, the state is brought into its form, by a function of the
state and the seed alone: a run that is killed between two phases does so again, to the
bit. A checkpoint has the form of the phase that its last step was of; its meta says
which.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from trainer.config.schema import Config
from trainer.parallel.sharding import shardings
from trainer.precision.arrays import first_lost, store_weights
from trainer.precision.policy import Policy
from trainer.run.converting import convert_state, exact_weights
from trainer.step.state import TrainState
from trainer.workload import TrainTask


class Stage(NamedTuple):
    """A phase: steps `start` + 1 to `until`, counted from 1, what is trained in them,
    and the settings of it.
    """

    start: int
    until: int
    task: TrainTask
    config: Config


class Phases(NamedTuple):
    """The phases of a run in their order, at least one, and its seed."""

    stages: tuple[Stage, ...]
    seed: int

    def before(self, step: int) -> Stage:
        """The phase that step `step` is of: the state after it has its form. The first
        one's before any step.
        """
        return next(
            (stage for stage in self.stages if step <= stage.until), self.stages[-1]
        )

    def after(self, step: int) -> Stage:
        """The phase that goes on after `step` steps; the last one at its end."""
        return next(
            (stage for stage in self.stages if step < stage.until), self.stages[-1]
        )


def policy_of(meta: Mapping[str, Any]) -> Policy:
    """The precision that a checkpoint was made in."""
    fields: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in meta["precision"].items()
    }
    return Policy(**fields)


def task_of(meta: Mapping[str, Any], task: TrainTask) -> TrainTask:
    """The task, in the precision and with the trained part that a checkpoint was made
    with.
    """
    policy = policy_of(meta)
    task = task._replace(trainable=trainable_of(meta))
    return task if policy == task.model.policy else task.in_precision(policy)


def trainable_of(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """What was trained when a checkpoint was made, as the key of that name has it;
    empty: all.
    """
    return tuple(meta.get("trainable", meta["config"]["train"].get("trainable")) or ())


def enter_phase(
    task: TrainTask, state: TrainState, before: TrainTask, seed: int
) -> TrainState:
    """A state of the task `before`, as it is stored, as the task `task` of the same
    model goes on with it.

    Weights keep their values, rounded once where they are stored otherwise. The moments
    do so too where the same part is trained; else the optimiser starts anew, with no
    step counted. What rounding has lost (`kahan`) goes on where a weight is trained
    further. A part that is frozen gives it up, as it does its moments: half of a last
    digit at most, once, for two bytes of each frozen parameter through the whole phase.
    """
    same = before.trained_roles == task.trained_roles
    if same and before.model.policy == task.model.policy:
        return state
    if same:
        return convert_state(task, state, before.model.policy, seed)
    kept = before.model.policy == task.model.policy
    if kept and not task.model.policy.keeps_lost:
        return started_anew(task, state)
    exact = exact_weights(state)
    params = store_weights(exact, task.model.policy)
    lost = first_lost(task.trained(exact), task.trained(params), task.model.policy)
    scaling = state.scaling if kept else task.model.differentiate().init()
    return started_anew(
        task,
        dataclasses.replace(
            state, params=params, scaling=scaling, kahan_compensation=lost
        ),
    )


def started_anew(task: TrainTask, state: TrainState) -> TrainState:
    """The state, with first moments of what the task trains."""
    fresh = dataclasses.replace(
        state, opt_state=task.optimizer().init(task.trained(state.params))
    )
    return jax.device_put(fresh, shardings(fresh, task.mesh, task.model.roles))
