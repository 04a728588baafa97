"""Plain arrays: their formats, and what a compiler is told of how to keep them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from scalify_core import watch
from scalify_core.formats import FloatFormat

_F32 = np.dtype(np.float32)


def materialise(x: Any) -> Any:
    """A plain operand for `bind`: a uniform constant becomes a broadcast, not an array of constants."""
    if isinstance(x, np.ndarray) and x.ndim and not any(x.strides):
        return lax.full(x.shape, x[(0,) * x.ndim] if x.size else 0, x.dtype)
    return x


def as_float32(x: Any) -> Any:
    """`x` in FP32 (no operation where it is)."""
    x = materialise(x)
    return x if getattr(x, "dtype", None) == _F32 else lax.convert_element_type(x, _F32)


def saturating_cast(x: Any, dtype: Any, *, meant: bool = False) -> Any:
    """`x` in `dtype`; finite numbers beyond its largest become that, what is not finite stays not finite.

    `meant`: that numbers saturate is intended, as of a mask's -1e9, and nothing to report.
    """
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    if float(jnp.finfo(dtype).max) >= float(jnp.finfo(x.dtype).max):
        return lax.convert_element_type(x, dtype)
    out = _saturating_cast(x, dtype)
    return out if meant else watch.rounded(x, out)


def fp8_cast(x: Any, fmt: FloatFormat) -> Any:
    """`x` in an 8-bit format, see `FloatFormat.cast_or_nan`."""
    return watch.rounded(x, fmt.cast_or_nan(x))


@functools.partial(jax.jit, static_argnums=1)
def _saturating_cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    x = as_float32(x)
    limit = np.float32(FloatFormat.of(dtype).max)
    # Not `is_finite`, which XLA's kernels for norms on GPUs (Triton) do not have: a cast would be a kernel of its own.
    finite = lax.lt(lax.abs(x), np.float32(np.inf))
    return lax.convert_element_type(lax.select(finite, lax.clamp(-limit, x, limit), x), dtype)


def stored(x: jax.Array) -> jax.Array:
    """`x`. Compiled for CUDA, what computes it writes it in its own format, and what reads it reads that.

    A compiler may otherwise write what `x` is rounded from, if several operations begin by rounding it.
    """
    return lax.platform_dependent(x, cuda=lax.optimization_barrier, default=lambda x: x)


def row_major(x: jax.Array) -> jax.Array:
    """`x`. Compiled for CUDA, elements that are neighbours on the last axis are neighbours in memory."""
    return lax.platform_dependent(x, cuda=_row_major, default=lambda x: x)


def stored_both_ways(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A matrix, twice. Compiled for CUDA, what computes it writes both, the second with its columns in one piece."""

    def cuda(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = _row_major(x)  # or the order of the other would spread to what `x` is computed from
        rows, columns = lax.optimization_barrier((x, _row_major(x.T)))
        return rows, columns.T

    return lax.platform_dependent(x, cuda=cuda, default=lambda x: (x, x))


def _row_major(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def together(*scalars: jax.Array) -> tuple[jax.Array, ...]:
    """FP32 scalars. Compiled for CUDA, one kernel computes them; it would be one for each that a large kernel reads."""

    def cuda(*scalars: jax.Array) -> tuple[jax.Array, ...]:
        stacked = lax.optimization_barrier(jnp.stack(scalars))
        return tuple(stacked[i] for i in range(len(scalars)))

    return lax.platform_dependent(*scalars, cuda=cuda, default=lambda *scalars: scalars)


def once(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays. Compiled for CPU, they are computed once, and what reads them reads the result.

    XLA repeats what is elementwise in every kernel that reads it, with all it is computed from: of the scales of a sum
    of many terms, each of which follows from that before, more than a machine compiles.
    """
    return lax.platform_dependent(
        *arrays, cpu=lambda *arrays: lax.optimization_barrier(arrays), default=lambda *arrays: arrays
    )
