"""The training step: loss, gradients over micro-batches, clip, optimizer; skipped if
not finite.

Legend: A micro-batches per step, B sequences per micro-batch, T tokens per sequence.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from scalify_core import tree, weights
from scalify_core.numerics import compiler_hints
from scalify_core.numerics.amax import squares_of_rows, sums_of_squares
from scalify_core.optim import AmaxFn
from trainer.precision.gradients import LossGradient, ValueAndGrad
from trainer.step.packing import Packed, pack, unpack
from trainer.step.stacking import Stacks
from trainer.step.state import TrainState
from trainer.step.state_tree import with_subtree


class StepInputs(NamedTuple):
    """Scalar inputs of a step, which change without recompilation.

    Attributes:
      lr: learning rate, FP32.
      step: step number, int32, counted from 0 as in every compiled function. The loop
        and its messages count from 1.
      seed: the run's seed, uint32, for stochastic rounding. Dropout uses
        `TrainState.key`.
    """

    lr: jax.Array | np.floating
    step: jax.Array | np.integer
    seed: jax.Array | np.integer


class Tokens(NamedTuple):
    """The batch of a step.

    Segment ids separate packed documents; None: tokens attend across documents.
    """

    tokens_AxBxT1: jax.Array
    segments_AxBxT1: jax.Array | None


Metrics = dict[str, jax.Array]
StepFn = Callable[[TrainState, Tokens, StepInputs], tuple[TrainState, Metrics]]


# (value_and_grad, parameters, scaling, batch, keys [A, B]) -> (loss, gradient, the
# statistics that the scaling method collected).
GradientFn = Callable[
    [ValueAndGrad, Any, Any, Tokens, jax.Array], tuple[jax.Array, Any, Any]
]


def sequence_keys(key: jax.Array, batch: Tokens) -> jax.Array:
    """Return a key for every sequence, [A, B], the same on every mesh."""
    shape = batch.tokens_AxBxT1.shape[:2]
    # The number of a sequence in the whole batch, not on its device.
    rows = jnp.arange(math.prod(shape)).reshape(shape)
    return jax.vmap(jax.vmap(lambda row: jax.random.fold_in(key, row)))(rows)


def mean_gradient(
    value_and_grad: ValueAndGrad,
    params: Any,
    scaling: Any,
    batch: Tokens,
    keys_AxB: jax.Array,
) -> tuple[jax.Array, Any, Any]:
    """Return loss, gradient and the statistics that the scaling method collected.

    Over several micro-batches loss and gradient are means in FP32, and the statistics
    are maxima.
    """
    micro_batches = batch.tokens_AxBxT1.shape[0]

    def micro_gradient(
        micro_and_keys: tuple[Tokens, jax.Array],
    ) -> tuple[jax.Array, Any, Any]:
        micro, keys_B = micro_and_keys
        return value_and_grad(params, scaling, *micro, keys_B)

    first = jax.tree.map(lambda x: x[0], (batch, keys_AxB))
    # Without a sum nothing is widened: gradients stay in the formats of their products.
    if micro_batches == 1:
        return micro_gradient(first)

    def add(total: Any, micro_and_keys: tuple[Tokens, jax.Array]) -> tuple[Any, None]:
        loss, grads, statistics = micro_gradient(micro_and_keys)
        # In FP32: in 16 or 8 bits a sum over many micro-batches would lose small terms.
        mean = jax.tree.map(
            lambda t, n: t + n / micro_batches, total[:2], weights.wide((loss, grads))
        )
        return (*mean, jax.tree.map(jnp.maximum, total[2], statistics)), None

    shapes = jax.eval_shape(lambda: weights.wide(micro_gradient(first)))
    # Maxima begin at zero, too, so no statistic may be negative.
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    # A scan holds the activations of one micro-batch at a time.
    return jax.lax.scan(add, zero, (batch, keys_AxB))[0]


def first_true(flags: jax.Array) -> jax.Array:
    """Return the index of the first true flag, int32; -1 if there is none."""
    # `argmax` of flags that are all false is 0, too.
    return jnp.where(jnp.any(flags), jnp.argmax(flags), -1).astype(jnp.int32)


def squared_norms_of_arrays(grads: Any) -> jax.Array:
    """Return the squared norm of each array of a tree, FP32 [number of arrays]."""
    return sums_of_squares(tree.leaves(grads))


class OptimizerSetup(NamedTuple):
    """The optimizer, the parameters that it updates, and their rounding.

    Attributes:
      make_optimizer: takes the seed of stochastic rounding, and returns an optimizer at
        a learning rate of 1, such as `scalify_core.optim.scaled_state`. Its `update`
        takes plain and scaled gradients, `accept` (false: the state stays unchanged),
        `grad_norm`, `largest_of` and `leaf_indices`.
      select_trained: selects the trained parameters, in nested dictionaries.
      store_gradients: casts gradients to the formats in which the optimizer gets them.
      rounding: rounding of narrow weights.
      stacks: small parameters that are updated together. The optimizer updates the
        stacked parameters.
    """

    make_optimizer: Callable[[Any], optax.GradientTransformationExtraArgs]
    select_trained: Callable[[Any], Any]
    store_gradients: Callable[[Any], Any]
    rounding: weights.Rounding
    stacks: Stacks


def make_train_step(
    loss_gradient: LossGradient,
    setup: OptimizerSetup,
    *,
    accumulate_gradients: GradientFn,
    squared_norms: Callable[[Any], jax.Array],
    amax: AmaxFn,
) -> StepFn:
    """Return the pure function `(state, batch, inputs) -> (state, metrics)`.

    Metrics are device scalars: `loss` (nats per token), `grad_norm` (before the clip),
    `finite`, and `bad_leaf`: the index among the trained parameters of the first
    gradient that is not finite (-1: none). A step whose loss or gradient is not finite
    leaves the state unchanged.

    Args:
      loss_gradient: the loss and its gradient in the run's precision.
      setup: the optimizer, the parameters that it updates, and their rounding.
      accumulate_gradients: returns means over micro-batches and devices, such as
        `mean_gradient`.
      squared_norms: the squared norm of each gradient, FP32 [number of arrays], such as
        `squared_norms_of_arrays`.
      amax: the largest magnitude of each moment, such as `optim.largest_of_arrays`.
    """
    stacks, select_trained = setup.stacks, setup.select_trained

    def train_step(
        state: TrainState, batch: Tokens, inputs: StepInputs
    ) -> tuple[TrainState, Metrics]:
        # Keys depend on the step number alone: a resumed run has the same dropout.
        keys_AxB = sequence_keys(jax.random.fold_in(state.key, inputs.step), batch)
        loss, grads, statistics = accumulate_gradients(
            loss_gradient.value_and_grad, state.params, state.scaling, batch, keys_AxB
        )
        grads = stacks.stack(setup.store_gradients(select_trained(grads)))
        # Without the barrier XLA computes every gradient again for its square.
        squares = compiler_hints.barrier(
            stacks.each(
                weights.wide(grads),
                of_arrays=squared_norms,
                of_rows=squares_of_rows,
            )
        )
        grad_norm = jnp.sqrt(jnp.sum(squares))
        # One gradient that is not finite makes the norm so, too.
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

        opt_state = unpack(state.opt_state)
        params = select_trained(state.params)
        stacked_params = stacks.stack(params)
        updates, new_opt_state = setup.make_optimizer(inputs.seed).update(
            grads,
            stacks.stack(opt_state),
            stacked_params,
            accept=finite,
            grad_norm=grad_norm,
            largest_of=amax,
            # Random bits depend on a leaf's index. A row of a stack gets the index that
            # its leaf has without stacks. The moments are in `inner_state` of the state
            # of `scaled_state`.
            leaf_indices=stacks.leaf_indices(getattr(opt_state, "inner_state", None)),
        )
        new_opt_state = stacks.unstack(new_opt_state, opt_state)
        # The state must come back in the form in which it was given: it is donated, and
        # the next call takes it without a new compilation.
        if isinstance(state.opt_state, Packed):
            new_opt_state = pack(new_opt_state)
        # The rate is an input of the program, so that a schedule does not recompile it.
        # In FP32, because rate times update may lie below what FP16 holds.
        updates = jax.tree.map(lambda u: inputs.lr * u, weights.wide(updates))
        new_params, compensation = weights.apply_with_compensation(
            stacked_params,
            updates,
            stacks.stack(state.kahan_compensation),
            rounding=setup.rounding,
            seed=inputs.seed,
            step=inputs.step,
            accept=finite,
            leaf_indices=stacks.leaf_indices(params),
        )
        new_state = TrainState(
            with_subtree(state.params, stacks.unstack(new_params, params)),
            new_opt_state,
            state.key,
            loss_gradient.next_scaling(state.scaling, statistics, finite),
            kahan_compensation=stacks.unstack(compensation, state.kahan_compensation),
        )
        return new_state, {
            "loss": loss,
            "grad_norm": grad_norm,
            "finite": finite,
            "bad_leaf": first_true(~jnp.isfinite(squares)),
        }

    return train_step
