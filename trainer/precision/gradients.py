"""Ways to differentiate a loss: stateless, scale-propagated, loss-scaled, or with amax
histories.

`trainer.precision.methods` says which method uses which. Scale propagation is `scalify`
of the very function that the others differentiate.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import fm32

from scalify_core import asarray, scalify
from scalify_core.array.tree import map_arrays
from trainer.precision.fields import DTYPES, PrecisionFields

# (parameters, tokens, segments, keys) -> nats; with amax histories they are
# `parameters, histories`.
LossFn = Callable[..., jax.Array]
ValueAndGrad = Callable[..., tuple[jax.Array, Any, Any]]

FIRST_LOSS_SCALE = 2.0**15
GROWTH_STEPS = 2000  # `growth_interval` of PyTorch's GradScaler


class LossGradient(NamedTuple):
    """A loss and its gradient in a precision.

    Attributes:
      init: makes the first state of the scaling: a loss scale, amax histories, or ().
      value_and_grad: (parameters, scaling, tokens, segments, keys) -> (loss, gradients,
        statistics). There is a key for each sequence. The loss is FP32; gradients are
        plain or scaled arrays. `next_scaling` needs the statistics; over several
        micro-batches they are maxima.
      next_scaling: (scaling, statistics, whether the step was finite) -> the scaling of
        the next step.
    """

    init: Callable[[], Any]
    value_and_grad: ValueAndGrad
    next_scaling: Callable[[Any, Any, jax.Array], Any]


def stateless(value_and_grad: Callable[..., tuple[jax.Array, Any]]) -> LossGradient:
    """Return the `LossGradient` of a method without state."""

    def call(params: Any, scaling: Any, *batch: Any) -> tuple[jax.Array, Any, Any]:
        loss, grads = value_and_grad(params, *batch)
        return loss, grads, ()

    return LossGradient(tuple, call, lambda scaling, statistics, finite: scaling)


def propagated(loss_fn: LossFn, policy: PrecisionFields) -> LossGradient:
    """Return loss and gradient on scaled arrays; all data is in the compute dtype."""
    # Differentiated inside `scalify`, so that scales propagate in the backward pass,
    # too.
    scaled = scalified(jax.value_and_grad(loss_fn), policy)

    def value_and_grad(params: Any, *batch: Any) -> tuple[jax.Array, Any]:
        loss, grads = scaled(params, *batch)
        return asarray(loss), grads

    return stateless(value_and_grad)


def scalified(fun: Callable[..., Any], policy: PrecisionFields) -> Callable[..., Any]:
    """Return `fun(parameters, ...)` under scale propagation.

    The parameters' data is cast to the compute dtype first.
    """
    scaled: Callable[..., Any] = scalify(fun, scales="static")
    dtype = DTYPES[policy.compute]

    def call(params: Any, *rest: Any) -> Any:
        return scaled(map_arrays(lambda p: p.astype(dtype), params), *rest)

    return call


class LossScale(NamedTuple):
    """State of dynamic loss scaling: the loss scale (FP32), and the finite steps since
    it changed (int32).
    """

    value: jax.Array
    finite_steps: jax.Array


def first_loss_scale() -> LossScale:
    """Return the loss scale before step 0."""
    return LossScale(jnp.float32(FIRST_LOSS_SCALE), jnp.int32(0))


def loss_scaled(loss_fn: LossFn) -> ValueAndGrad:
    """Return the gradient of the loss times its scale, divided by it in FP32."""

    def call(
        params: Any, scaling: LossScale, *batch: Any
    ) -> tuple[jax.Array, Any, Any]:
        def scaled_loss(params: Any) -> tuple[jax.Array, jax.Array]:
            # The unscaled loss is an auxiliary result, so that logs have it without a
            # division.
            loss = loss_fn(params, *batch)
            return loss * scaling.value, loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(params)
        return loss, unscale(grads, scaling.value), ()

    return call


def unscale(grads: Any, loss_scale: jax.Array) -> Any:
    """Return the gradients in FP32, divided by the loss scale."""
    return jax.tree.map(lambda g: g.astype(jnp.float32) / loss_scale, grads)


def next_loss_scale(
    scaling: LossScale, statistics: Any, finite: jax.Array
) -> LossScale:
    """Halve the loss scale after a step that was not finite; double it after
    GROWTH_STEPS finite steps.

    Reference: Micikevicius et al. 2018, "Mixed Precision Training",
    https://arxiv.org/abs/1710.03740.
    """
    # Selected, not branched on: whether the step was finite is known on the device
    # alone, and the host does not wait for it.
    steps = jnp.where(finite, scaling.finite_steps + 1, 0)
    grown = steps == GROWTH_STEPS
    value = jnp.where(
        finite, jnp.where(grown, scaling.value * 2, scaling.value), scaling.value / 2
    )
    return LossScale(jnp.clip(value, 1.0, 2.0**24), jnp.where(grown, 0, steps))


def with_histories(loss_fn: LossFn) -> ValueAndGrad:
    """Return the gradient of a loss whose products have amax histories.

    The "gradient" of a history is its next value. Flax's type `fm32` makes it the
    maximum where a history is used twice.
    """

    def call(params: Any, scaling: Any, *batch: Any) -> tuple[jax.Array, Any, Any]:
        def loss_of(params: Any, histories: Any) -> jax.Array:
            return loss_fn(params, *batch, histories=histories)

        # Gradients of an array that is used twice are added; of the type fm32 their
        # maximum is taken, which is what an amax needs.
        as_fm32 = jax.tree.map(lambda x: jax.lax.convert_element_type(x, fm32), scaling)
        # jax.grad refuses the type fm32.
        loss, pullback = jax.vjp(loss_of, params, as_fm32)
        grads, statistics = pullback(jnp.float32(1))
        statistics = jax.tree.map(
            lambda x: jax.lax.convert_element_type(x, jnp.float32), statistics
        )
        return loss, grads, statistics

    return call


def next_histories(scaling: Any, statistics: Any, finite: jax.Array) -> Any:
    """Return the histories that the step has observed; a step that was not finite
    leaves them unchanged.
    """
    # An infinite amax would stay in the history, and Flax changes no scale while the
    # largest amax of a history is not finite.
    return jax.tree.map(
        lambda old, new: jnp.where(finite, new, old), scaling, statistics
    )
