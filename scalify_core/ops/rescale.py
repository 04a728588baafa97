"""Functions that act on scales. Without `scalify` each is the identity (the casts
round, as they say).

A user places them in a model or an optimizer; under `scalify` they move powers of two
between data and scale, or take statistics of the data at run time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from scalify_core.numerics.formats import FloatFormat, pow2_round
from scalify_core.ops.composite import composite


def _identity(x: jax.Array, **_: Any) -> jax.Array:
    return x


def _acting(
    fun: Callable, name: str | None = None, cotangent: Callable = _identity
) -> Any:
    """Return a composite of one array that acts by `fun`, and by `cotangent` on its
    gradient.
    """
    made = composite(fun, name=name)
    made.defvjp(
        # `fun(x)` and not `x`: otherwise a cast would do nothing in every function that
        # is differentiated.
        lambda x, **static: (fun(x, **static), None),
        lambda _, g, **static: (cotangent(g, **static),),
    )
    return made


def set_scaling(x: jax.Array, scale: float) -> jax.Array:
    """Return `x`; under `scalify`, its data rescaled to this static scale, saturating.

    Raises:
        ValueError: the scale is not a power of two in [2^-126, 2^126].
    """
    return _set_scaling(x, scale=_power_of_two("set_scaling", scale))


def get_data_scale(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `(x, 1)`; with static scales, the data and the scale as plain FP32 arrays,
    for statistics. Not differentiable.
    """
    # Neither data nor scale alone has a gradient that means anything.
    return _get_data_scale(jax.lax.stop_gradient(x))


def rebalance(x: jax.Array, factor: float) -> jax.Array:
    """Return `x`; under `scalify`, data divided and scale multiplied by `factor`.

    Raises:
        ValueError: the factor is not a power of two in [2^-126, 2^126].
    """
    return _rebalance(x, factor=_power_of_two("rebalance", factor))


def rebalance_grad(x: jax.Array, factor: float) -> jax.Array:
    """Return `x`; under `scalify`, its *gradient* is rebalanced as by `rebalance`."""
    return _rebalance_grad(x, factor=_power_of_two("rebalance_grad", factor))


def cast_on_forward(x: jax.Array, fmt: FloatFormat) -> jax.Array:
    """Return `x` rounded to the numbers of `fmt`, saturating; the gradient is
    unchanged.

    Under `scalify` the data is rounded. The differentiated function rounds, too, by
    integer operations, which no compiler removes. The dtype of `x` stays.
    """
    return _cast_on_forward(x, fmt=fmt)


def cast_on_backward(x: jax.Array, fmt: FloatFormat) -> jax.Array:
    """Return `x`; its *gradient* is rounded to the numbers of `fmt`, saturating (under
    `scalify` the gradient's data).
    """
    return _cast_on_backward(x, fmt=fmt)


@_acting
def dynamic_rescale_rms(x: jax.Array) -> jax.Array:
    """Return `x`; under `scalify`, its scale becomes the power of two nearest to its
    RMS, measured at run time in FP32.

    A tensor that is all zero or not finite keeps its scale, as does data with an RMS
    beyond 2^63 or below 2^-63: its squares leave FP32. The result's scale is dynamic.
    """
    return x


@_acting
def dynamic_rescale_max(x: jax.Array) -> jax.Array:
    """Return `x`; under `scalify`, its scale follows its largest magnitude.

    It is measured at run time, as in `dynamic_rescale_rms`, and may be of any size.
    """
    return x


@_acting
def dynamic_rescale_rms_grad(x: jax.Array) -> jax.Array:
    """Return `x`; under `scalify`, its *gradient* is rescaled as by
    `dynamic_rescale_rms`.
    """
    return x


@_acting
def dynamic_rescale_max_grad(x: jax.Array) -> jax.Array:
    """Return `x`; under `scalify`, its *gradient* is rescaled as by
    `dynamic_rescale_max`.
    """
    return x


def _power_of_two(name: str, number: float) -> float:
    number = float(number)
    # Any other factor would round the data, where a change of scale is exact.
    if not number > 0 or pow2_round(number) != number:
        raise ValueError(f"{name}: {number} is no power of two in [2^-126, 2^126]")
    return number


def _quantized(x: jax.Array, *, fmt: FloatFormat) -> jax.Array:
    # Not by a cast and its inverse: XLA removes both on GPUs, while tests on a CPU
    # pass.
    return fmt.quantize(x).astype(x.dtype)


_set_scaling = _acting(_identity, "set_scaling")
_rebalance = _acting(_identity, "rebalance")
_rebalance_grad = _acting(_identity, "rebalance_grad")
_cast_on_forward = _acting(_quantized, "cast_on_forward")
_cast_on_backward = _acting(_identity, "cast_on_backward", _quantized)
_get_data_scale = composite(
    lambda x: (x, jnp.ones((), jnp.float32)), name="get_data_scale"
)
