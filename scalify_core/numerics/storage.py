"""Plain arrays and their formats: casts that saturate, and uniform constants."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalify_core.numerics import precision_warnings
from scalify_core.numerics.formats import FloatFormat

_F32 = np.dtype(np.float32)


def materialise(x: Any) -> Any:
    """Return a plain operand for `bind`.

    A uniform constant becomes a broadcast, not an array of constants.
    """
    if isinstance(x, np.ndarray) and x.ndim and not any(x.strides):
        return lax.full(x.shape, x[(0,) * x.ndim] if x.size else 0, x.dtype)
    return x


def as_float32(x: Any) -> Any:
    """Return `x` in FP32 (no operation if it already is)."""
    x = materialise(x)
    return x if getattr(x, "dtype", None) == _F32 else lax.convert_element_type(x, _F32)


def at_least_float32(x: Any) -> Any:
    """Return `x` in FP32 if it is a narrower float, else as it is."""
    dtype = jnp.result_type(x)
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return as_float32(x) if is_narrow else x


def saturating_cast(x: Any, dtype: Any, *, meant: bool = False) -> Any:
    """Return `x` in `dtype`, saturating; infinities and NaN stay not finite.

    `meant`: saturation is intended, as of a mask's -1e9, and not reported.
    """
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    if float(jnp.finfo(dtype).max) >= float(jnp.finfo(x.dtype).max):
        return lax.convert_element_type(x, dtype)
    out = _saturating_cast(x, dtype)
    return out if meant else precision_warnings.rounded(x, out)


def fp8_cast(x: Any, fmt: FloatFormat) -> Any:
    """Return `x` in an 8-bit format, see `FloatFormat.cast_or_nan`."""
    return precision_warnings.rounded(x, fmt.cast_or_nan(x))


@functools.partial(jax.jit, static_argnums=1)
def _saturating_cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    x = as_float32(x)
    limit = np.float32(FloatFormat.of(dtype).max)
    # Not `is_finite`, which XLA's kernels for norms on GPUs (Triton) do not have: a
    # cast would be a kernel of its own.
    finite = lax.lt(lax.abs(x), np.float32(np.inf))
    return lax.convert_element_type(
        lax.select(finite, lax.clamp(-limit, x, limit), x), dtype
    )
