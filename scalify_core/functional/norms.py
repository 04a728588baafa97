"""Layer norm and RMS norm over the last axis: FP32 inside, hand-written gradients, statistics saved per row.

Shape legend: `...` any leading axes, D model width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from scalify_core.composite import composite


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, eps: float = 1e-5) -> jax.Array:
    """`(x - mean) / sqrt(variance + eps) * weight + bias` over the last axis.

    Args:
        x: [..., D], any float dtype; the arithmetic is FP32.
        weight: [D].
        bias: [D] or None.
        eps: added to the variance of the *logical* value of `x`, with and without `scalify`.

    Returns:
        Array of the shape and dtype of `x`.

    References:
        Ba et al., Layer Normalization, 2016 (https://arxiv.org/abs/1607.06450).
    """
    return _layer_norm(x, weight, bias, eps=float(eps))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float = 1e-6) -> jax.Array:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis; arguments and result as in `layer_norm`.

    References:
        Zhang and Sennrich, Root Mean Square Layer Normalization, 2019 (https://arxiv.org/abs/1910.07467).
    """
    return _rms_norm(x, weight, eps=float(eps))


@composite(name="layer_norm")
def _layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, eps: float) -> jax.Array:
    return _layer_norm_fwd(x, weight, bias, eps=eps)[0]


def _layer_norm_fwd(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, eps: float) -> tuple:
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32, axis=-1, keepdims=True)
    centred = x32 - mean
    # Two passes: E[x^2] - mean^2 cancels when the mean is large, and both read a row that is in cache.
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    y = centred * rstd * _row(weight, x)
    if bias is not None:
        y = y + _row(bias, x)
    return y.astype(x.dtype), (x, mean, rstd, weight, bias)


def _layer_norm_bwd(residuals: tuple, gradient: jax.Array, *, eps: float) -> tuple:
    del eps
    x, mean, rstd, weight, bias = residuals
    g = gradient.astype(jnp.float32)
    normalised = (x.astype(jnp.float32) - mean) * rstd
    gw = g * _row(weight, x)
    dx = rstd * (
        gw - jnp.mean(gw, axis=-1, keepdims=True) - normalised * jnp.mean(gw * normalised, axis=-1, keepdims=True)
    )
    rows = tuple(range(x.ndim - 1))
    dweight = jnp.sum(g * normalised, axis=rows).astype(weight.dtype)
    dbias = None if bias is None else jnp.sum(g, axis=rows).astype(bias.dtype)
    return dx.astype(x.dtype), dweight, dbias


@composite(name="rms_norm")
def _rms_norm(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    return _rms_norm_fwd(x, weight, eps=eps)[0]


def _rms_norm_fwd(x: jax.Array, weight: jax.Array, *, eps: float) -> tuple:
    x32 = x.astype(jnp.float32)
    rrms = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * rrms * _row(weight, x)).astype(x.dtype), (x, rrms, weight)


def _rms_norm_bwd(residuals: tuple, gradient: jax.Array, *, eps: float) -> tuple:
    del eps
    x, rrms, weight = residuals
    g = gradient.astype(jnp.float32)
    normalised = x.astype(jnp.float32) * rrms
    gw = g * _row(weight, x)
    dx = rrms * (gw - normalised * jnp.mean(gw * normalised, axis=-1, keepdims=True))
    dweight = jnp.sum(g * normalised, axis=tuple(range(x.ndim - 1))).astype(weight.dtype)
    return dx.astype(x.dtype), dweight


def _row(weight: jax.Array, x: jax.Array) -> jax.Array:
    """[D] as FP32 [1, ..., D]: ranks are promoted explicitly."""
    return weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)


_layer_norm.defvjp(_layer_norm_fwd, _layer_norm_bwd)
_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)
