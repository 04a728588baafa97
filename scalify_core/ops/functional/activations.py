"""Activations: FP32 inside, result in the dtype of the input, only the inputs saved for
the backward pass.
"""

import math

import jax
import jax.numpy as jnp

from scalify_core.ops.composite import composite

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def gelu(x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Return the Gaussian error linear unit of `x + bias`, in the tanh form of GPT-2.

    It is `0.5 y (1 + tanh(sqrt(2/pi) (y + 0.044715 y^3)))`.

    Args:
        x: [..., F], any float dtype.
        bias: [F], added to `x` in FP32: `y = x + bias` is never stored. None: `y = x`.

    Returns:
        Array of the shape and dtype of `x`.

    References:
        Hendrycks and Gimpel, 2016 (https://arxiv.org/abs/1606.08415).
    """
    return _gelu(x, bias)


@composite(name="gelu")
def _gelu(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    x32 = _biased(x, bias)
    # Not the equal `y sigmoid(2u)`: XLA writes each product with the gate as a
    # quotient, 1,627 PTX instructions backward in place of 1,527.
    tanh = jnp.tanh(_SQRT_2_OVER_PI * x32 * (1 + _CUBIC * x32 * x32))
    return (0.5 * x32 * (1 + tanh)).astype(x.dtype)


def _gelu_bwd(
    residuals: tuple[jax.Array, jax.Array | None], gradient: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    # tanh is computed again: cheaper to do than to keep, and the input has to be kept
    # in any case.
    x, bias = residuals
    x32 = _biased(x, bias)
    square = x32 * x32
    tanh = jnp.tanh(_SQRT_2_OVER_PI * x32 * (1 + _CUBIC * square))
    slope = 0.5 * (1 + tanh) + 0.5 * x32 * (1 - tanh * tanh) * (
        _SQRT_2_OVER_PI * (1 + 3 * _CUBIC * square)
    )
    dx = (gradient.astype(jnp.float32) * slope).astype(x.dtype)
    if bias is None:
        return dx, None
    return dx, jnp.sum(dx, axis=tuple(range(x.ndim - 1)), dtype=jnp.float32).astype(
        bias.dtype
    )


def _biased(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    x32 = x.astype(jnp.float32)
    if bias is None:
        return x32
    return x32 + bias.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + bias.shape)


@composite
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return `silu(gate) * up`, in the dtype of `gate`.

    References:
        Shazeer, GLU Variants Improve Transformer, 2020
        (https://arxiv.org/abs/2002.05202).
    """
    gate32 = gate.astype(jnp.float32)
    return (gate32 * jax.nn.sigmoid(gate32) * up.astype(jnp.float32)).astype(gate.dtype)


def _swiglu_bwd(
    residuals: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    gate, up = residuals
    gate32, g = gate.astype(jnp.float32), gradient.astype(jnp.float32)
    sigmoid = jax.nn.sigmoid(gate32)
    slope = sigmoid * (1 + gate32 * (1 - sigmoid))
    dgate = g * up.astype(jnp.float32) * slope
    return dgate.astype(gate.dtype), (g * gate32 * sigmoid).astype(up.dtype)


_gelu.defvjp(None, _gelu_bwd)
swiglu.defvjp(None, _swiglu_bwd)
