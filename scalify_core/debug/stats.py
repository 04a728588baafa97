"""Figures that tell whether a format holds the arrays of a tree.

They are cheap reductions, safe inside jit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.numerics.formats import FloatFormat, pow2_floor


class Summary(NamedTuple):
    """Figures of one tensor: scalars, or arrays of shape (L,) for L layers with scales.

    Attributes:
        exponent: log2 of the scale (int32); 0 for a plain array.
        rms: root mean square of the data, without the scale; a narrow format holds most
            numbers where it is about 1.
        zeros: the share of elements that are zero, for any reason (a mask, a row never
            seen, underflow).
        underflow: the share of elements that underflow, as `summarize` counts them.
        saturated: the share of elements at or beyond the largest finite number of the
            format, infinities included.
    """

    exponent: jax.Array
    rms: jax.Array
    zeros: jax.Array
    underflow: jax.Array
    saturated: jax.Array


def summarize(
    tree: Any, *, fmt: FloatFormat | None = None, exact: Any = None, zeros: bool = True
) -> Any:
    """Return a `Summary` of each floating-point array and ScaledArray of a tree.

    Other leaves become None. Data does not tell whether a zero was zero before
    rounding, so underflow is counted in one of three ways:

    - `exact`, a tree of the same structure with the unrounded logical values (arrays or
      ScaledArrays): the elements that are zero although the exact value is not. Exact.
    - `fmt`, the format that the data is cast to next (E4M3 for the operand of a matrix
      product): the elements that are not zero but will be, and `saturated` counts those
      that the cast will clamp. Exact.
    - neither: an upper bound, the elements that are zero or subnormal in the data's own
      format. Only these can have lost bits by rounding; true zeros are counted (compare
      with `zeros`). A tensor that slides out of its format shows subnormals long before
      it is lost. With `zeros=False`, for tensors whose zeros are known to be true, the
      subnormal ones alone.

    The figures mean the same for plain arrays, whose scale is 1. Data of FP64 is
    summarized as FP32.

    Raises:
        ValueError: `fmt` and `exact` are both given, or a leaf's dtype has no
            FloatFormat.
    """
    if fmt is not None and exact is not None:
        raise ValueError(
            "summarize: give fmt (the cast to come) or exact (the values before the"
            " last cast), not both"
        )
    if exact is None:
        return jax.tree.map(
            lambda x: _summary(x, fmt, None, zeros), tree, is_leaf=is_scaled_array
        )
    return jax.tree.map(
        lambda x, e: _summary(x, None, e, zeros), tree, exact, is_leaf=is_scaled_array
    )


def _summary(
    x: Any, fmt: FloatFormat | None, exact: Any, zeros: bool
) -> Summary | None:
    data, scale = (x.data, x.scale) if is_scaled_array(x) else (jnp.asarray(x), 1.0)
    if not jnp.issubdtype(data.dtype, jnp.floating):
        return None
    if data.dtype == jnp.float64:
        data = data.astype(jnp.float32)
    data_format = FloatFormat.of(data.dtype)
    scale = jnp.asarray(scale, jnp.float32)
    scale = (
        scale.reshape(scale.shape + (1,) * (data.ndim - scale.ndim))
        if scale.ndim
        else scale
    )
    axes = tuple(i for i in range(data.ndim) if scale.ndim == 0 or scale.shape[i] == 1)
    shape = tuple(n for i, n in enumerate(data.shape) if i not in axes)

    data = data.astype(jnp.float32)
    magnitude = jnp.abs(data)
    zero = _is_zero(data)
    if exact is not None:
        reference = exact.data if is_scaled_array(exact) else jnp.asarray(exact)
        lost = zero & ~_is_zero(reference.astype(jnp.float32))
    elif fmt is not None:
        lost = ~zero & _is_zero(fmt.quantise(data))
    else:
        lost = (magnitude < data_format.min_normal) & (zeros | ~zero)

    def share(condition: jax.Array) -> jax.Array:
        return jnp.mean(condition, axes, dtype=jnp.float32)

    return Summary(
        exponent=((lax.bitcast_convert_type(scale, jnp.int32) >> 23) - 127).reshape(
            shape
        ),
        rms=_rms(magnitude, axes),
        zeros=share(zero),
        underflow=share(lost),
        saturated=share(
            magnitude >= data_format.max if fmt is None else magnitude > fmt.max
        ),
    )


def _is_zero(x: jax.Array) -> jax.Array:
    """Return where FP32 numbers are zero, by their bits.

    A comparison takes subnormal numbers for zero where they are flushed.
    """
    return lax.bitcast_convert_type(x, jnp.uint32) << 1 == 0


def _rms(magnitude: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the root mean square along axes, for FP32 numbers of any size.

    Their squares may overflow FP32.
    """
    unit = pow2_floor(jnp.max(magnitude, axes, keepdims=True, initial=0.0))
    rms = jnp.sqrt(jnp.mean(jnp.square(magnitude * (1 / unit)), axes))
    return rms * unit.reshape(rms.shape)
