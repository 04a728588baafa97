"""Layer norm and RMS norm over the last axis: FP32 inside, hand-written gradients,
statistics saved per row.

Shape legend: `...` any leading axes, D model width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core.numerics import compiler_hints
from scalify_core.numerics.amax import sums_at_once
from scalify_core.ops.composite import composite


def layer_norm(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, eps: float = 1e-5
) -> jax.Array:
    """Return `(x - mean) / sqrt(variance + eps) * weight + bias` over the last axis.

    Args:
        x: [..., D], any float dtype; the arithmetic is FP32.
        weight: [D].
        bias: [D] or None.
        eps: added to the variance of the *logical* value of `x`, with and without
            `scalify`.

    Returns:
        Array of the shape and dtype of `x`.

    References:
        Ba et al., Layer Normalization, 2016 (https://arxiv.org/abs/1607.06450).
    """
    return _layer_norm(x, weight, bias, eps=float(eps))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last axis; arguments and
    result as in `layer_norm`.

    References:
        Zhang and Sennrich, Root Mean Square Layer Normalization, 2019
        (https://arxiv.org/abs/1910.07467).
    """
    return _rms_norm(x, weight, eps=float(eps))


@composite(name="layer_norm")
def _layer_norm(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, eps: float
) -> jax.Array:
    return _layer_norm_fwd(x, weight, bias, eps=eps)[0]


def _layer_norm_fwd(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, eps: float
) -> tuple:
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32, axis=-1, keepdims=True)
    # Two passes: E[x^2] - mean^2 cancels when the mean is large, and both read a row
    # that is in cache.
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(x32 - mean), axis=-1, keepdims=True) + eps)
    return _affine(x, mean, rstd, weight, bias), (x, mean, rstd, weight, bias)


def _layer_norm_fwd_cuda(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, eps: float
) -> tuple:
    """Return the same, with each statistic stored by a kernel of its own.

    Otherwise XLA computes the mean again in every kernel that reads a row, as a Triton
    kernel for norms. Such a kernel writes one array, not transposed; the products that
    are summed to the gain's gradient are then stored in FP32.

    A reduction's kernel includes later operations only if they have one operand, so all
    factors come before it. The mean is kept times `_width`: a sum times a power of two
    is exact for equal 16-bit elements.
    """
    size = x.shape[-1]
    # As a sum of elements over 768, each rounded, the mean normalizes a row of equal
    # elements to 0.84 at 1e4, and to 0.015 at 100.
    width, x32 = _width(size), x.astype(jnp.float32)
    mean = compiler_hints.barrier(
        jnp.sum(x32 * np.float32(width / size), axis=-1, keepdims=True),
    )
    # Each element adds its share: below FP32's normal numbers a device would flush it.
    eps = eps and max(eps * width**2, float(jnp.finfo(jnp.float32).tiny) * size)
    spread = (
        jnp.square(x32 * np.float32(width) - mean) + np.float32(eps)
    ) * np.float32(1 / size)
    # For both statistics: three layers of 124M take 405 kernels in place of 414, and
    # 0.34 GiB less traffic.
    rstd = compiler_hints.barrier(
        jax.lax.rsqrt(jnp.sum(spread, axis=-1, keepdims=True))
    )
    return _affine(x, mean, rstd, weight, bias, width), (x, mean, rstd, weight, bias)


def _width(size: int) -> float:
    """Return the size of a row over the next power of two."""
    return size / 2.0 ** (size - 1).bit_length()


def _affine(
    x: jax.Array,
    mean: jax.Array,
    rstd: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    width: float = 1.0,
) -> jax.Array:
    y = (x.astype(jnp.float32) * np.float32(width) - mean) * rstd * _row(weight, x)
    return (y if bias is None else y + _row(bias, x)).astype(x.dtype)


def _sums(arrays: Sequence[jax.Array], axes: tuple[int, ...]) -> Sequence[jax.Array]:
    return [jnp.sum(x, axis=axes) for x in arrays]


def _layer_norm_bwd(
    residuals: tuple,
    gradient: jax.Array,
    *,
    width: float = 1.0,
    sums: Callable[..., Any] = _sums,
    **_: Any,
) -> tuple:
    """Return the gradients of the arguments.

    `width`: the mean was multiplied by it, the reciprocal standard deviation divided.
    """
    x, mean, rstd, weight, bias = residuals
    g = gradient.astype(jnp.float32)
    normalized = (x.astype(jnp.float32) * np.float32(width) - mean) * rstd
    gw = g * _row(weight, x)
    dx = (rstd * np.float32(width)) * (
        gw
        - jnp.mean(gw, axis=-1, keepdims=True)
        - normalized * jnp.mean(gw * normalized, axis=-1, keepdims=True)
    )
    # On a GPU in one reduction: separate sums are a kernel each in the second of XLA's
    # two steps. Of 4096 rows or fewer it makes one step (compiled for an H200), and
    # stores the terms in FP32 first.
    dweight, dbias = sums((g * normalized, g), tuple(range(x.ndim - 1)))
    return (
        dx.astype(x.dtype),
        dweight.astype(weight.dtype),
        None if bias is None else dbias.astype(bias.dtype),
    )


def _layer_norm_bwd_cuda(residuals: tuple, gradient: jax.Array, **_: Any) -> tuple:
    width = _width(residuals[0].shape[-1])
    # The statistics of the CUDA pass are those of `x` times the width.
    return _layer_norm_bwd(residuals, gradient, width=width, sums=sums_at_once)


@composite(name="rms_norm")
def _rms_norm(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    return _rms_norm_fwd(x, weight, eps=eps)[0]


def _rms_norm_fwd(x: jax.Array, weight: jax.Array, *, eps: float) -> tuple:
    x32 = x.astype(jnp.float32)
    # One function for all platforms: with a barrier, as the statistics of a layer norm
    # have one, the program for an H200 has the same kernels.
    rrms = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * rrms * _row(weight, x)).astype(x.dtype), (x, rrms, weight)


def _rms_norm_bwd(residuals: tuple, gradient: jax.Array, **_: Any) -> tuple:
    x, rrms, weight = residuals
    g = gradient.astype(jnp.float32)
    normalized = x.astype(jnp.float32) * rrms
    gw = g * _row(weight, x)
    dx = rrms * (gw - normalized * jnp.mean(gw * normalized, axis=-1, keepdims=True))
    dweight = jnp.sum(g * normalized, axis=tuple(range(x.ndim - 1))).astype(
        weight.dtype
    )
    return dx.astype(x.dtype), dweight


def _row(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Return [D] as FP32 [1, ..., D]: ranks are promoted explicitly."""
    return weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)


_layer_norm.defvjp(
    _layer_norm_fwd,
    _layer_norm_bwd,
    cuda=(None, _layer_norm_fwd_cuda, _layer_norm_bwd_cuda),
)
_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)
