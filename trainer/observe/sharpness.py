"""How sharp the loss is where a run stands: two figures of a row, taken with the
numerics.

`sharpness/logits`, in percent: how far the loss of the last tokens rises at most when
every logit moves by RADIUS of its own size plus one, relative to one plus that loss. It
is large where a model is sure, and wrong.

`sharpness/critical`, lambda = 2 / eta, of the same unit as one over a learning rate:
eta is the smallest learning rate at which the update that the optimizer would make of
this batch raises the loss of this batch. Times the learning rate in use it is 2 at the
edge: beyond it a step makes its own batch worse. Infinite: the loss rises from the
first. Where no rate within the search raises the loss it is what it is at most. Of one
small batch it changes from look to look.

Both are of the first micro-batch, in the run's own arithmetic, without dropout. The
gradient is that of the numerics; besides it there is an update of the optimizer and
about five forward passes, nearly all of them the line search's.

Legend: N sequences, V vocabulary.

References: Lee et al. 2024, "To FP8 and Back Again", arXiv 2405.18710 (logits; its box
is that of Keskar et al. 2017, arXiv 1609.04836); Kalra et al. 2026, "A Scalable Measure
of Loss Landscape Curvature", arXiv 2601.16979 (critical).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from scalify_core import asarray, tree, weights
from trainer.parallel.distribute import largest_over, loss_over, squares_over
from trainer.parallel.mesh import replicated
from trainer.parallel.sharding import of_parameters
from trainer.step.state import TrainState
from trainer.step.state_tree import with_part
from trainer.step.step import Tokens
from trainer.workload import Model, TrainTask, comm_config_of

RADIUS = 5e-4  # half the width of the box, of a logit of size zero
# relative distance of two guesses of the critical rate at which the search ends
CLOSE = 0.05
MOST = 8  # forward passes that it takes at most
# at most, of a rate that does not raise the loss, from one pass to the next
GROWTH = 8.0

# (state, gradients as they are stored, batch, the number that dropout gets) -> figures
# of a row
Sharpness = Callable[[TrainState, Any, Tokens, int], dict[str, float]]


def worst_logits(
    logits_NxV: jax.Array, targets_N: jax.Array, radius: float
) -> jax.Array:
    """The logits within |d_i| <= radius (|z_i| + 1) of `logits_NxV` at which the
    cross-entropy is largest; exact.

    Of one token with target t it is L(z) = log sum_j exp(z_j) - z_t. With p =
    softmax(z), dL/dz_t = p_t - 1 < 0 and dL/dz_j = p_j > 0 for every other j, at every
    z. So whatever the other coordinates are, L grows as z_t falls and as each z_j
    rises: no point of the box is above the vertex that has z_t at its lower end and all
    others at their upper ends. The sum over tokens has each token's own coordinates, so
    its maximum is where each token's is.
    """
    column = jax.lax.broadcasted_iota(targets_N.dtype, logits_NxV.shape, 1)
    room = radius * (jnp.abs(logits_NxV) + 1)
    return logits_NxV + jnp.where(column == targets_N[:, None], -room, room)


def cross_entropies(logits_NxV: jax.Array, targets_N: jax.Array) -> jax.Array:
    """Nats of each target, FP32 [N]."""
    chosen_N = jnp.take_along_axis(logits_NxV, targets_N[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits_NxV, axis=-1) - chosen_N


def losses_of(
    model: Model,
) -> Callable[[TrainState, jax.Array, jax.Array | None], jax.Array]:
    """From a state, tokens [N, T+1] and segments to FP32 [3]: mean nats of all targets,
    of the last, of those at worst.

    The compiler finds that the logits of the last token come from hidden states that
    the loss has as well.
    """
    method = model.policy.method

    def last_logits(
        params: Any,
        tokens: jax.Array,
        segments: jax.Array | None,
        histories: Any = None,
    ) -> jax.Array:
        bound = model.training.bind(params, histories)
        return bound.last_logits(
            tokens[:, :-1], None if segments is None else segments[:, :-1]
        )

    def losses(
        state: TrainState, tokens: jax.Array, segments: jax.Array | None
    ) -> jax.Array:
        of_last = method.through(last_logits, model.policy)
        logits_NxV = asarray(
            of_last(state.params, tokens, segments, **method.arguments(state.scaling))
        )
        logits_NxV, targets_N = logits_NxV.astype(jnp.float32), tokens[:, -1]
        last = cross_entropies(logits_NxV, targets_N)
        worst = cross_entropies(worst_logits(logits_NxV, targets_N, RADIUS), targets_N)
        return jnp.stack(
            [model.eval_loss(state, tokens, segments), jnp.mean(last), jnp.mean(worst)]
        )

    return losses


def critical_rate(rise: Callable[[float], float], slope: float, start: float) -> float:
    """The learning rate at which an update begins to raise the loss; 0: it does from
    the first, NaN: not known.

    `rise(eta) / eta` is a line for a quadratic loss, begins at `slope`, and is zero at
    the rate that is sought: the search follows chords of it, from a bracket's ends once
    there is one. A value that is not finite counts as a rise.

    Args:
      rise: from a learning rate to the loss at it minus that at rate zero.
      slope: the derivative of `rise` at zero.
      start: the first guess, above zero.

    Returns:
      the rate, to about CLOSE for a smooth loss; where MOST passes see no rise, the
      largest rate that was tried.
    """
    if not math.isfinite(slope):
        return math.nan
    lower, upper, eta = (0.0, slope), (math.inf, math.inf), start
    for _ in range(MOST):
        change = rise(eta)
        chord = change / eta if math.isfinite(change) else math.inf
        before, tried = upper, eta
        if chord > 0:
            upper = (eta, chord)
        else:
            lower = (eta, chord)
        if math.isinf(upper[0]):
            # Rather a little too far than a little too short: what is sought has to be
            # between two rates.
            straight = (
                1.1 * slope / (slope - chord) if chord > slope and slope < 0 else GROWTH
            )
            eta *= min(max(straight, 2.0), GROWTH)
            continue
        root = chord_root(lower, upper)
        # Far away the loss is as good as flat, and chords grow on the way down; near
        # the root they fall.
        twice = lower[0] == 0 and before[0] < math.inf
        near = lower[0] > 0 or (twice and upper[1] < before[1] / 2)
        if near and abs(root - eta) <= CLOSE * eta:
            return root
        margin = 0.1 * (upper[0] - lower[0])  # or one end would stay where it is
        eta = min(max(root, lower[0] + margin), upper[0] - margin)
        if twice and not near:
            eta = min(eta, upper[0] / GROWTH)
    if math.isinf(upper[0]):
        return tried
    return 0.0 if lower[1] > 0 else eta


def chord_root(lower: tuple[float, float], upper: tuple[float, float]) -> float:
    """Where the line through both points is zero; what it is where a point is infinite,
    or both are above, is guessed.

    Without a fall, not even of the derivative, it is the GROWTH-th part of the upper
    one.
    """
    (low, below), (high, above) = lower, upper
    if below > 0:
        return high / GROWTH
    return (
        (low + high) / 2
        if math.isinf(above)
        else low - below * (high - low) / (above - below)
    )


def make_sharpness(task: TrainTask, lr: float) -> Sharpness:
    """The figures of a state; for their names and meanings see the module.

    Compiled at the first call, and again when static scales have changed; on any mesh,
    the parameters split as they are. The update takes two bytes a parameter while it is
    looked at.

    Args:
      task: what is trained.
      lr: the learning rate at which the search begins, such as the peak of the run's.
    """
    model, mesh = task.model, task.mesh
    squares_of, largest_of = (
        squares_over(mesh, task.trained_roles),
        largest_over(mesh, model.roles),
    )
    losses = losses_of(model.on(mesh))
    if mesh.size > 1:
        losses = loss_over(mesh, comm_config_of(task), losses)

    def direction(state: TrainState, grads: Any) -> tuple[Any, jax.Array]:
        """The update at a learning rate of one, BF16, and the slope of the loss along
        it.
        """
        grads, params = task.trained(grads), task.trained(state.params)
        norm = jnp.sqrt(jnp.sum(squares_of(weights.wide(grads))))
        updates, _ = task.optimizer(0).update(
            grads,
            tree.unpack(state.opt_state),
            params,
            accept=jnp.isfinite(norm),
            grad_norm=norm,
            largest_of=largest_of,
        )
        updates = jax.tree.map(lambda u: u.astype(jnp.bfloat16), weights.wide(updates))
        specs = of_parameters(params, mesh, task.trained_roles)
        updates = jax.lax.with_sharding_constraint(
            updates, jax.tree.map(functools.partial(NamedSharding, mesh), specs)
        )
        products = jax.tree.map(
            lambda g, u: jnp.sum(g * u.astype(jnp.float32)),
            weights.wide(grads),
            updates,
        )
        return updates, jnp.sum(jnp.stack(jax.tree.leaves(products)))

    def moved(
        state: TrainState, updates: Any, eta: jax.Array, batch: Tokens, step: jax.Array
    ) -> jax.Array:
        """`losses` after the update at the rate `eta`, the weights stored as the run
        stores them.
        """
        params, _ = weights.apply_with_lost(
            task.trained(state.params),
            jax.tree.map(lambda u: eta * u.astype(jnp.float32), updates),
            state.kahan_compensation,
            rounding=model.policy.rounding,
            seed=np.uint32(0),
            step=step,
        )
        first: Tokens = jax.tree.map(lambda x: x[0], batch)
        return losses(
            dataclasses.replace(state, params=with_part(state.params, params)), *first
        )

    toward = task.jit(direction)
    after = task.jit(moved, out_shardings=replicated(mesh))

    def sharpness(
        state: TrainState, grads: Any, batch: Tokens, step: int
    ) -> dict[str, float]:
        updates, slope = toward(state, grads)

        def at(eta: float) -> list[float]:
            found: list[float] = np.asarray(
                after(state, updates, np.float32(eta), batch, np.int32(step))
            ).tolist()
            return found

        loss, last, worst = at(0.0)
        rate = critical_rate(lambda eta: at(eta)[0] - loss, float(slope), lr)
        return {
            "sharpness/logits": 100 * (worst - last) / (1 + last),
            "sharpness/critical": 2 / rate if rate else math.inf,
        }

    return sharpness
