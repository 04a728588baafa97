"""Conversion of a state from one precision to another."""

from typing import Any

import jax
import jax.numpy as jnp

from scalify_core import weights
from trainer.models.model_functions import Params
from trainer.parallel.sharding import shardings
from trainer.precision.arrays import kahan_compensation, store_weights
from trainer.precision.policy import Policy
from trainer.step.moments import convert_moments
from trainer.step.state import TrainState
from trainer.step.state_tree import subtree_like, with_subtree
from trainer.workload import TrainTask


def convert_state(
    task: TrainTask, state: TrainState, source_policy: Policy, seed: int
) -> TrainState:
    """Convert a stored state from the precision `source_policy` to the task's.

    Every value is rounded once; `seed` is that of stochastic rounding.
    """
    params, compensation = rounded_weights(task, exact_weights(state))
    optimizer, policy = task.optimizer_settings.name, task.model.policy
    # Compiled as one program, which need not hold all moments in FP32 at once.
    opt_state = jax.jit(
        lambda moments: convert_moments(moments, optimizer, source_policy, policy, seed)
    )(state.opt_state)
    converted = TrainState(
        params,
        opt_state,
        state.key,
        # A loss scale or amax history of one method means nothing to another.
        task.model.differentiate().init(),
        kahan_compensation=compensation,
    )
    # Without `out_shardings` the compiler chose where the results lie.
    return jax.device_put(converted, shardings(converted, task.mesh, task.model.roles))


def exact_weights(state: TrainState) -> Params:
    """Return the weights of a state in FP32, with their Kahan compensation added."""
    params: Params = weights.wide(state.params)
    compensation = state.kahan_compensation
    if compensation == ():
        return params
    compensated = jax.tree.map(
        lambda p, c: p + c.astype(jnp.float32),
        subtree_like(params, compensation),
        compensation,
    )
    return with_subtree(params, compensated)


def rounded_weights(task: TrainTask, exact: Params) -> tuple[Params, Any]:
    """Return FP32 weights as the task stores them, and their Kahan compensation."""
    params = store_weights(exact, task.model.policy)
    compensation = kahan_compensation(
        task.select_trained(exact), task.select_trained(params), task.model.policy
    )
    return params, compensation
