"""The phases of a run, and the conversion of a state from one to the next.

Before a phase's first step the state is converted, by a function of the state and the
seed alone. So a run that is killed between two phases repeats it bit-exactly. A
checkpoint has the form of the phase of its last step, which its meta names.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from trainer.config.schema import Config
from trainer.parallel.sharding import shardings
from trainer.run.checkpoint import Restored
from trainer.run.converting import convert_state, exact_weights, rounded_weights
from trainer.run.metadata import saved_policy, saved_trainable
from trainer.step.state import TrainState, from_checkpoint_form
from trainer.workload import TrainTask, Workload


class TrainingPhase(NamedTuple):
    """A phase of a run: steps `start` + 1 to `until`, and how they are trained."""

    start: int
    until: int
    workload: Workload
    config: Config

    @property
    def task(self) -> TrainTask:
        """The task of the workload."""
        return self.workload.task


class Phases(NamedTuple):
    """All phases of a run in order, at least one; they share data, mesh and seed."""

    all: tuple[TrainingPhase, ...]

    @property
    def first(self) -> TrainingPhase:
        """The phase of the first step."""
        return self.all[0]

    def containing(self, step: int) -> TrainingPhase:
        """Return the phase of a step, which decides the form of the state after it.

        Step 0 belongs to the first phase.
        """
        # A checkpoint of a phase's last step has the form of that phase.
        return next((phase for phase in self.all if step <= phase.until), self.all[-1])

    def phase_after(self, checkpoint: Restored) -> TrainingPhase:
        """Return the phase that continues a checkpoint.

        It is the phase of the next step; the last phase at the run's end. If the
        callbacks of the checkpoint's step were interrupted, it is that step's phase.
        """
        # The callbacks of the step still need the state in the form of its phase.
        if checkpoint.meta.get("unfinished") is not None:
            return self.containing(checkpoint.step)
        return self.containing(checkpoint.step + 1)


def saved_task(meta: Mapping[str, Any], task: TrainTask) -> TrainTask:
    """Return a task with the precision and the trained parameters of a checkpoint."""
    policy = saved_policy(meta)
    task = task._replace(trainable=saved_trainable(meta))
    if policy == task.model.policy:
        return task
    return task.in_precision(policy)


def training_state(checkpoint: Restored, task: TrainTask, seed: int) -> TrainState:
    """Return a checkpoint's state in the form in which a task trains it.

    `seed`: see `enter_phase`.
    """
    # Before the first step there is no meta, and the state is the task's own.
    source_task = saved_task(checkpoint.meta, task) if checkpoint.step else task
    return from_checkpoint_form(enter_phase(task, checkpoint.state, source_task, seed))


def enter_phase(
    task: TrainTask, state: TrainState, source_task: TrainTask, seed: int
) -> TrainState:
    """Convert a stored state of `source_task` to the form of `task`.

    Weights keep their values, rounded once where their storage changes. Moments do too
    if the same parameters are trained; else the optimizer starts anew at step 0. The
    Kahan compensation is kept where a weight is trained further.

    Args:
      task: the task of the phase that begins.
      state: the state in its stored form.
      source_task: the task of the state, with the same model.
      seed: seed of the rounding of moments.
    """
    same_policy = source_task.model.policy == task.model.policy
    if source_task.trained_roles == task.trained_roles:
        if same_policy:
            return state
        return convert_state(task, state, source_task.model.policy, seed)
    if not same_policy or task.model.policy.keeps_kahan_compensation:
        # Frozen parameters drop their Kahan compensation: an error of half an ulp,
        # once. Keeping it costs two bytes a parameter for the whole phase.
        params, compensation = rounded_weights(task, exact_weights(state))
        # A loss scale or an amax history is of one method.
        scaling = state.scaling if same_policy else task.model.differentiate().init()
        state = dataclasses.replace(
            state, params=params, scaling=scaling, kahan_compensation=compensation
        )
    # Parameters that were frozen have no moments, and Adam's bias correction has one
    # count of steps for all.
    initial_opt_state = task.optimizer().init(task.select_trained(state.params))
    state = dataclasses.replace(state, opt_state=initial_opt_state)
    return jax.device_put(state, shardings(state, task.mesh, task.model.roles))
