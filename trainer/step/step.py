"""The training step, whole: loss, gradients over micro-batches, clip and optimiser,
skip when not finite.

Legend: A micro-batches per step, B sequences per micro-batch, T tokens per sequence.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from scalify_core import lowering, tree, weights
from scalify_core.optim import Largest, largest_of_arrays
from scalify_core.reductions import squares_of_rows, sums_of_squares
from scalify_core.stacks import NONE as NO_STACKS
from scalify_core.stacks import Stacks
from trainer.precision.gradients import Differentiate, ValueAndGrad
from trainer.step.state import TrainState
from trainer.step.state_tree import with_part


class Hyper(NamedTuple):
    """What changes without a recompilation: learning rate (FP32), step number (int32),
    run's seed (uint32), scalars.
    """

    lr: jax.Array | np.floating
    step: jax.Array | np.integer
    seed: jax.Array | np.integer


class Tokens(NamedTuple):
    """A step's input. Segment ids tell packed documents apart; None: sequences attend
    across documents.
    """

    tokens_AxBxT1: jax.Array
    segments_AxBxT1: jax.Array | None


Metrics = dict[str, jax.Array]
StepFn = Callable[[TrainState, Tokens, Hyper], tuple[TrainState, Metrics]]


# (value_and_grad, parameters, scaling, batch, keys [A, B]) -> (loss, gradient, what the
# scaling has seen).
Gradient = Callable[
    [ValueAndGrad, Any, Any, Tokens, jax.Array], tuple[jax.Array, Any, Any]
]


def sequence_keys(key: jax.Array, batch: Tokens) -> jax.Array:
    """Keys [A, B]: of every sequence its own, wherever it is computed."""
    shape = batch.tokens_AxBxT1.shape[:2]
    rows = jnp.arange(math.prod(shape)).reshape(shape)
    return jax.vmap(jax.vmap(lambda row: jax.random.fold_in(key, row)))(rows)


def mean_gradient(
    value_and_grad: ValueAndGrad,
    params: Any,
    scaling: Any,
    batch: Tokens,
    keys_AxB: jax.Array,
) -> tuple[jax.Array, Any, Any]:
    """Loss, gradient and what the scaling has seen; of several micro-batches the mean
    in FP32 and the maximum.
    """
    micro_batches = batch.tokens_AxBxT1.shape[0]

    def of(micro: Tokens, keys_B: jax.Array) -> tuple[jax.Array, Any, Any]:
        return value_and_grad(params, scaling, *micro, keys_B)

    first = jax.tree.map(lambda x: x[0], batch), keys_AxB[0]
    if micro_batches == 1:
        return of(*first)

    def add(total: Any, micro: tuple[Tokens, jax.Array]) -> tuple[Any, None]:
        loss, grads, seen = of(*micro)
        mean = jax.tree.map(
            lambda t, n: t + n / micro_batches, total[:2], weights.wide((loss, grads))
        )
        return (*mean, jax.tree.map(jnp.maximum, total[2], seen)), None

    shapes = jax.eval_shape(lambda: weights.wide(of(*first)))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(add, zero, (batch, keys_AxB))[0]


def first_true(flags: jax.Array) -> jax.Array:
    """Index (int32) of the first true flag; -1: none."""
    return jnp.where(jnp.any(flags), jnp.argmax(flags), -1).astype(jnp.int32)


def squares_of_arrays(grads: Any) -> jax.Array:
    """The sum of squares of each array of a tree, FP32 [number of arrays]."""
    return sums_of_squares(tree.leaves(grads))


def make_train_step(
    differentiate: Differentiate,
    optimizer: Callable[[Any], optax.GradientTransformationExtraArgs],
    *,
    store_gradients: Callable[[Any], Any] = lambda grads: grads,
    rounding: weights.Rounding = "nearest",
    gradient: Gradient = mean_gradient,
    squares_of: Callable[[Any], jax.Array] = squares_of_arrays,
    largest_of: Largest = largest_of_arrays,
    stacks: Stacks = NO_STACKS,
    trained: Callable[[Any], Any] = lambda params: params,
) -> StepFn:
    """The pure function `(state, batch, hyper) -> (state, metrics)`.

    Metrics are device scalars: `loss` (nats per token), `grad_norm` (before the clip),
    `finite`, and `bad_leaf`, the index among the trained parameters of the first
    gradient that is not finite (-1: none).

    Args:
      differentiate: the loss and its gradient in the run's precision.
      optimizer: from the seed of its rounding, to one at a learning rate of one that
        takes plain and scaled gradients, `accept` (false: the state stays as it was),
        `grad_norm` and `largest_of`, such as `scalify_core.optim.scaled_state`.
      store_gradients: brings the gradients to the formats in which the optimiser gets
          them.
      rounding: of narrow weights.
      gradient: of the micro-batches; over several devices see
          `distribute.gradient_over`.
      squares_of: the sum of squares of each gradient, FP32 [number of arrays].
      largest_of: the largest magnitude of each moment; over several devices see
          `distribute.largest_over`.
      stacks: of the small parameters that are updated together; the optimiser is that
          of the gathered parameters.
      trained: the part of the parameters, nested dictionaries, that has a gradient and
        a place in the optimiser. What only the gradient of the others needs is not in
        the compiled step.
    """

    def train_step(
        state: TrainState, batch: Tokens, hyper: Hyper
    ) -> tuple[TrainState, Metrics]:
        keys_AxB = sequence_keys(jax.random.fold_in(state.key, hyper.step), batch)
        loss, grads, seen = gradient(
            differentiate.value_and_grad, state.params, state.scaling, batch, keys_AxB
        )
        grads = store_gradients(trained(grads))
        # Held, or XLA adds up every gradient once more for their sum.
        grads = stacks.gather(grads)
        squares = lowering.held(
            "squares_once",
            stacks.each(weights.wide(grads), squares_of, squares_of_rows),
        )
        grad_norm = jnp.sqrt(jnp.sum(squares))
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

        # What is not finite leaves the state as it was.
        unpacked, before = tree.unpack(state.opt_state), trained(state.params)
        old, inner = (
            stacks.gather(before),
            stacks.numbers(getattr(unpacked, "inner_state", None)),
        )
        updates, opt_state = optimizer(hyper.seed).update(
            grads,
            stacks.gather(unpacked),
            old,
            accept=finite,
            grad_norm=grad_norm,
            largest_of=largest_of,
            numbers=inner,
        )
        opt_state = stacks.scatter(opt_state, unpacked)
        if isinstance(state.opt_state, tree.Packed):
            opt_state = tree.pack(opt_state)
        updates = jax.tree.map(lambda u: hyper.lr * u, weights.wide(updates))
        new, lost = weights.apply_with_lost(
            old,
            updates,
            stacks.gather(state.kahan_compensation),
            rounding=rounding,
            seed=hyper.seed,
            step=hyper.step,
            accept=finite,
            numbers=stacks.numbers(before),
        )
        params = with_part(state.params, stacks.scatter(new, before))
        scaling = differentiate.update(state.scaling, seen, finite)
        new_state = TrainState(
            params,
            opt_state,
            state.key,
            scaling,
            kahan_compensation=stacks.scatter(lost, state.kahan_compensation),
        )
        bad_leaf = first_true(~jnp.isfinite(squares))
        return new_state, {
            "loss": loss,
            "grad_norm": grad_norm,
            "finite": finite,
            "bad_leaf": bad_leaf,
        }

    return train_step
