"""Two measures of the sharpness of the loss, taken together with the numerics.

`sharpness/logits`, in percent: 100 (worst - last) / (1 + last). `last` is the mean loss
of the last tokens, and `worst` the same when each logit z moves by at most
RADIUS (|z| + 1) in the worst direction. It is large for confident, wrong predictions.

`sharpness/critical`, lambda = 2 / eta, in units of one over a learning rate. eta is the
smallest learning rate at which the optimizer's update for this batch raises the loss of
this batch. Multiplied by the current learning rate it is 2 at the edge of stability:
beyond it a step raises the loss of its own batch. Infinite: every rate raises the loss.
If no rate in the search raises the loss, the figure is an upper bound. The batch is
small, so the figure varies from one measurement to the next.

Both use the first micro-batch, in the arithmetic of the run, without dropout. The
gradient is that of the numerics. The extra cost is one optimizer update and up to nine
forward passes, nearly all of them for the line search.

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

from scalify_core import asarray, weights
from trainer.model import Model
from trainer.parallel.distribute import amax_over, loss_over, squared_norms_over
from trainer.parallel.mesh import replicated
from trainer.parallel.sharding import param_specs
from trainer.step.packing import unpack
from trainer.step.state import TrainState
from trainer.step.state_tree import with_subtree
from trainer.step.step import Tokens
from trainer.workload import TrainTask

RADIUS = 5e-4  # half the width of the box for a logit of zero
RATE_TOLERANCE = 0.05  # relative error of the critical rate
MAX_PASSES = 8  # forward passes of a search
GROWTH = 4.0  # factor between rates until the critical rate lies between two of them

# (state, gradients as they are stored, batch, step number for dropout) -> row
Sharpness = Callable[[TrainState, Any, Tokens, int], dict[str, float]]


def worst_logits(
    logits_NxV: jax.Array, targets_N: jax.Array, radius: float
) -> jax.Array:
    """Return the logits in the box |d_i| <= radius (|z_i| + 1) with the largest loss.

    The result is exact. For one token with target t the loss is
    L(z) = log sum_j exp(z_j) - z_t. With p = softmax(z), dL/dz_t = p_t - 1 < 0 and
    dL/dz_j = p_j > 0 for every other j, at every z. So L grows as z_t falls and as each
    z_j rises, whatever the other coordinates are. The maximum over the box is the
    vertex with z_t at its lower end and all others at their upper ends. No two tokens
    share a coordinate, so the sum over tokens is maximal there too.

    Args:
      logits_NxV: FP32.
      targets_N: ids of the targets.
      radius: half the width of the box for a logit of zero.
    """
    column = jax.lax.broadcasted_iota(targets_N.dtype, logits_NxV.shape, 1)
    half_width = radius * (jnp.abs(logits_NxV) + 1)
    is_target = column == targets_N[:, None]
    return logits_NxV + jnp.where(is_target, -half_width, half_width)


def cross_entropies(logits_NxV: jax.Array, targets_N: jax.Array) -> jax.Array:
    """Return the loss of each target in nats, FP32 [N]."""
    chosen_N = jnp.take_along_axis(logits_NxV, targets_N[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits_NxV, axis=-1) - chosen_N


def make_losses(
    model: Model,
) -> Callable[[TrainState, jax.Array, jax.Array | None], jax.Array]:
    """Return a function from state, tokens [N, T+1] and segments to three losses.

    The losses, FP32 [3], are the mean nats of all targets, of the last targets, and of
    the last targets with the worst logits. One forward pass serves all three.
    """
    method = model.policy.method

    def last_logits(
        params: Any,
        tokens: jax.Array,
        segments: jax.Array | None,
        histories: Any = None,
    ) -> jax.Array:
        bound = model.training.bind(params, histories)
        if segments is not None:
            segments = segments[:, :-1]
        return bound.logits(bound.hidden(tokens[:, :-1], segments)[:, -1])

    def losses(
        state: TrainState, tokens: jax.Array, segments: jax.Array | None
    ) -> jax.Array:
        forward = method.transform(last_logits, model.policy)
        logits_NxV = asarray(
            forward(
                state.params, tokens, segments, **method.loss_arguments(state.scaling)
            )
        )
        # In BF16 a logit above 1 would not move: RADIUS is below half its last place.
        logits_NxV = logits_NxV.astype(jnp.float32)
        targets_N = tokens[:, -1]
        last = cross_entropies(logits_NxV, targets_N)
        worst = cross_entropies(worst_logits(logits_NxV, targets_N, RADIUS), targets_N)
        # XLA computes the hidden states of both terms once: the last logits cost 0.5 to
        # 2.5% of the FLOPs of the loss (docs/lab.md).
        return jnp.stack(
            [model.eval_loss(state, tokens, segments), jnp.mean(last), jnp.mean(worst)]
        )

    return losses


def critical_rate(loss_change: Callable[[float], float], start: float) -> float:
    """Return the smallest learning rate at which an update raises the loss.

    The search multiplies or divides by GROWTH until the rate is bracketed, and then
    bisects the bracket on a logarithmic scale. A change that is not finite counts as a
    rise.

    Args:
      loss_change: the change of the loss after an update at a learning rate.
      start: the first guess, above zero.

    Returns:
      the rate, with relative error about RATE_TOLERANCE if it lies within GROWTH**3 of
      `start`; the largest rate tried if MAX_PASSES passes see no rise; 0 if every rate
      raises the loss.
    """
    low = 0.0
    high = math.inf
    eta = start
    for _ in range(MAX_PASSES):
        change = loss_change(eta)
        if math.isfinite(change) and change <= 0:
            low = eta
        else:
            high = eta
        # A search by chords takes three to six passes in place of seven or eight, and
        # far more code (docs/lab.md).
        if math.isinf(high):
            eta = low * GROWTH
        elif low == 0:
            eta = high / GROWTH
        elif high > low * (1 + RATE_TOLERANCE):
            eta = math.sqrt(low * high)
        else:
            break
    if math.isinf(high):
        return low
    # The middle of the bracket on the logarithmic scale, in which it was halved.
    return math.sqrt(low * high)


def make_unit_update(
    task: TrainTask,
) -> Callable[[TrainState, Any], tuple[Any, jax.Array]]:
    """Return `(state, gradients) -> (update, norm)`.

    The update is that of a learning rate of one, in BF16; the norm is the gradients'.
    """
    mesh = task.mesh
    squares_of = squared_norms_over(mesh, task.trained_roles)
    largest_of = amax_over(mesh, task.model.roles)

    def unit_update(state: TrainState, grads: Any) -> tuple[Any, jax.Array]:
        grads = task.select_trained(grads)
        params = task.select_trained(state.params)
        norm = jnp.sqrt(jnp.sum(squares_of(weights.wide(grads))))
        # The new moments are dropped, so it does not matter which random bits round
        # them.
        updates, _ = task.optimizer(0).update(
            grads,
            unpack(state.opt_state),
            params,
            # As in the step, a gradient that is not finite updates nothing.
            accept=jnp.isfinite(norm),
            grad_norm=norm,
            largest_of=largest_of,
        )
        updates = jax.tree.map(lambda u: u.astype(jnp.bfloat16), weights.wide(updates))
        specs = param_specs(params, mesh, task.trained_roles)
        # Without a constraint the compiler may keep whole updates on every device.
        updates = jax.lax.with_sharding_constraint(
            updates, jax.tree.map(functools.partial(NamedSharding, mesh), specs)
        )
        return updates, norm

    return unit_update


def make_sharpness(task: TrainTask, lr: float) -> Sharpness:
    """Return the function that measures the two figures of this module.

    It is compiled at the first call, and again when static scales have changed. It runs
    on any mesh, with the parameters sharded as they are. During the search the update
    takes two bytes a parameter.

    Args:
      task: the model and its training.
      lr: the learning rate at which the search starts, such as the run's peak.
    """
    model = task.model
    mesh = task.mesh
    losses = make_losses(model.on(mesh))
    if mesh.size > 1:
        losses = loss_over(mesh, task.comm, losses)

    def losses_after_update(
        state: TrainState, updates: Any, eta: jax.Array, batch: Tokens, step: jax.Array
    ) -> jax.Array:
        """Return `losses` after the update at rate `eta`, in the weights' format."""
        params, _ = weights.apply_with_compensation(
            task.select_trained(state.params),
            jax.tree.map(lambda u: eta * u.astype(jnp.float32), updates),
            state.kahan_compensation,
            rounding=model.policy.rounding,
            # The same random bits at every rate, so that losses differ by the rate
            # alone.
            seed=np.uint32(0),
            step=step,
        )
        # One micro-batch: the search repeats its forward pass up to MAX_PASSES times.
        micro_batch: Tokens = jax.tree.map(lambda x: x[0], batch)
        return losses(
            dataclasses.replace(state, params=with_subtree(state.params, params)),
            *micro_batch,
        )

    get_unit_update = task.jit(make_unit_update(task))
    get_losses = task.jit(losses_after_update, out_shardings=replicated(mesh))

    def sharpness(
        state: TrainState, grads: Any, batch: Tokens, step: int
    ) -> dict[str, float]:
        updates, norm = get_unit_update(state, grads)

        def losses_at(eta: float) -> list[float]:
            return np.asarray(
                get_losses(state, updates, np.float32(eta), batch, np.int32(step))
            ).tolist()

        # By the same program as at all rates: the difference has no error of another
        # compilation.
        loss, last, worst = losses_at(0.0)
        rate = math.nan
        if math.isfinite(float(norm)):
            # From `lr`, not from the last result, which would make a row depend on
            # where the run was resumed.
            rate = critical_rate(lambda eta: losses_at(eta)[0] - loss, lr)
        return {
            "sharpness/logits": 100 * (worst - last) / (1 + last),
            # A rate of 0 says that every rate raises the loss.
            "sharpness/critical": 2 / rate if rate else math.inf,
        }

    return sharpness
