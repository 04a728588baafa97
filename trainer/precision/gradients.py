"""Ways to differentiate a loss: plain, scale-propagated, loss-scaled, or with amax
histories.

`trainer.precision.methods` says which method takes which. Scale propagation is one line
of it: `scalify` of the very function that the others differentiate.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import fm32

from scalify_core import FloatFormat, as_scaled_array, asarray, scalify
from scalify_core.array import is_scaled_array
from scalify_core.tree import map_arrays
from trainer.precision.policy import DTYPES, Policy

# (parameters, tokens, segments, keys) -> nats; with amax histories they are
# `parameters, histories`.
LossFn = Callable[..., jax.Array]
ValueAndGrad = Callable[..., tuple[jax.Array, Any, Any]]

FIRST_LOSS_SCALE = 2.0**15
# finite steps after which the loss scale doubles; a step that is not finite halves it
GROWTH_STEPS = 2000


class Differentiate(NamedTuple):
    """The loss and its gradient in a precision.

    Attributes:
      init: makes the first state of the scaling: a loss scale, amax histories, or ().
      value_and_grad: (parameters, scaling, tokens, segments, keys) -> (loss, gradients,
        seen), the keys one for each sequence. The loss is FP32;
        gradients are plain or scaled arrays. `seen` is what `update` needs of the pass;
        that of several micro-batches is combined by the maximum.
      update: (scaling, seen, whether the step was finite) -> the scaling of the next
          step.
    """

    init: Callable[[], Any]
    value_and_grad: ValueAndGrad
    update: Callable[[Any, Any, jax.Array], Any]


def plain(loss_fn: LossFn) -> Differentiate:
    """The gradient of the function as it is written, without scales."""
    return Differentiate(
        tuple,
        stateless(jax.value_and_grad(loss_fn)),
        lambda scaling, seen, finite: scaling,
    )


def stateless(value_and_grad: Callable[..., tuple[jax.Array, Any]]) -> ValueAndGrad:
    """The function in the form of `Differentiate.value_and_grad`, for methods that
    carry nothing along.
    """

    def call(params: Any, scaling: Any, *batch: Any) -> tuple[jax.Array, Any, Any]:
        loss, grads = value_and_grad(params, *batch)
        return loss, grads, ()

    return call


def propagated(loss_fn: LossFn, policy: Policy) -> Callable[..., tuple[jax.Array, Any]]:
    """Loss and gradient on scaled arrays whose data is in the compute dtype, as all
    that is computed from them.
    """
    scaled = scalified(jax.value_and_grad(loss_fn), policy)

    def value_and_grad(params: Any, *batch: Any) -> tuple[jax.Array, Any]:
        loss, grads = scaled(params, *batch)
        return asarray(loss), grads

    return value_and_grad


def scalified(fun: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """`fun(parameters, ...)` under scale propagation, the parameters' data cast to the
    compute dtype first.
    """
    scaled: Callable[..., Any] = scalify(fun, scales="static")
    dtype = DTYPES[policy.compute]
    return lambda params, *rest: scaled(
        map_arrays(lambda p: p.astype(dtype), params), *rest
    )


class LossScale(NamedTuple):
    """State of dynamic loss scaling: the factor (FP32), and the finite steps since it
    changed (int32).
    """

    value: jax.Array
    finite_steps: jax.Array


def first_loss_scale() -> LossScale:
    """The loss scale before step 0."""
    return LossScale(jnp.float32(FIRST_LOSS_SCALE), jnp.int32(0))


def loss_scaled(loss_fn: LossFn) -> ValueAndGrad:
    """The gradient of the loss times the factor, divided by it in FP32."""

    def call(
        params: Any, scaling: LossScale, *batch: Any
    ) -> tuple[jax.Array, Any, Any]:
        def scaled_loss(params: Any) -> tuple[jax.Array, jax.Array]:
            loss = loss_fn(params, *batch)
            return loss * scaling.value, loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(params)
        return loss, divided(grads, scaling.value), ()

    return call


def divided(grads: Any, factor: jax.Array) -> Any:
    """The gradients in FP32, divided by the factor of the loss."""
    return jax.tree.map(lambda g: g.astype(jnp.float32) / factor, grads)


def next_loss_scale(scaling: LossScale, seen: Any, finite: jax.Array) -> LossScale:
    """Halved by a step that was not finite, doubled after enough that were. Reference:
    Micikevicius et al. 2018.
    """
    steps = jnp.where(finite, scaling.finite_steps + 1, 0)
    grown = steps == GROWTH_STEPS
    value = jnp.where(
        finite, jnp.where(grown, scaling.value * 2, scaling.value), scaling.value / 2
    )
    return LossScale(jnp.clip(value, 1.0, 2.0**24), jnp.where(grown, 0, steps))


def with_histories(loss_fn: LossFn) -> ValueAndGrad:
    """The "gradient" of amax histories is their next value; where one is used twice,
    the larger (Flax's `fm32`).
    """

    def call(params: Any, scaling: Any, *batch: Any) -> tuple[jax.Array, Any, Any]:
        def loss_of(params: Any, histories: Any) -> jax.Array:
            return loss_fn(params, *batch, histories=histories)

        as_fm32 = jax.tree.map(lambda x: jax.lax.convert_element_type(x, fm32), scaling)
        loss, pullback = jax.vjp(loss_of, params, as_fm32)  # `grad` refuses the type
        grads, seen = pullback(jnp.float32(1))
        return (
            loss,
            grads,
            jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.float32), seen),
        )

    return call


def next_histories(scaling: Any, seen: Any, finite: jax.Array) -> Any:
    """The histories that the step has seen; a step that was not finite leaves them as
    they were.
    """
    return jax.tree.map(lambda old, new: jnp.where(finite, new, old), scaling, seen)


def store_gradients(grads: Any, policy: Policy, narrow: Callable[[Any], bool]) -> Any:
    """The gradients as they go to the optimiser: those of the chosen matmuls' kernels
    in `policy.weight_grad`.

    Args:
      narrow: whether the parameter at a path of keys is such a kernel.
    """
    if policy.forward is None or policy.weight_grad == "fp32":
        return grads
    fmt = FloatFormat.parse(policy.weight_grad)

    def store(path: Any, grad: Any) -> Any:
        if not narrow(path):
            return grad
        # at the scale that it was expected to have, which it misses by a few octaves at
        # most
        if is_scaled_array(grad):
            return grad.astype(fmt.dtype)
        if policy.scaled:  # a mean over micro-batches
            return as_scaled_array(grad, dtype=fmt.dtype)
        return fmt.cast(grad)  # of FP32's range

    return jax.tree_util.tree_map_with_path(store, grads, is_leaf=is_scaled_array)
