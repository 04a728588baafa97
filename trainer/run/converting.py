"""A state of one precision, as that of another."""

import jax
import jax.numpy as jnp

from scalify_core import weights
from trainer.models.functional import Params
from trainer.parallel.sharding import shardings
from trainer.precision.arrays import first_lost, store_weights
from trainer.precision.policy import Policy
from trainer.step.moments import convert_moments
from trainer.step.state import TrainState
from trainer.step.state_tree import part_of, with_part
from trainer.workload import TrainTask


def convert_state(
    task: TrainTask, state: TrainState, source: Policy, seed: int
) -> TrainState:
    """A state that was stored for the precision `source`, for that of the task; every
    value is rounded once.
    """
    policy = task.model.policy
    exact = exact_weights(state)
    params = store_weights(exact, policy)
    lost = first_lost(task.trained(exact), task.trained(params), policy)
    opt_state = jax.jit(
        lambda s: convert_moments(s, task.optimizer_name, source, policy, seed)
    )(state.opt_state)
    converted = TrainState(
        params,
        opt_state,
        state.key,
        task.model.differentiate().init(),
        kahan_compensation=lost,
    )
    return jax.device_put(converted, shardings(converted, task.mesh, task.model.roles))


def exact_weights(state: TrainState) -> Params:
    """The weights of a state in FP32, with what rounding has lost of them, where that
    is kept.
    """
    params: Params = weights.wide(state.params)
    if state.kahan_compensation == ():
        return params
    kept = part_of(params, state.kahan_compensation)
    return with_part(
        params,
        jax.tree.map(
            lambda p, rest: p + rest.astype(jnp.float32), kept, state.kahan_compensation
        ),
    )
