"""Figures that show whether a format holds an array, and a probe that takes them.

The probe works inside a program whose scales are propagated. The figures are cheap
reductions, safe inside jit.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scalify_core.array.scaled_array import data_of, is_scaled_array, with_scale
from scalify_core.interpreter import value as v
from scalify_core.interpreter.registry import composite_rule
from scalify_core.interpreter.value import Value
from scalify_core.numerics import formats
from scalify_core.numerics.formats import FloatFormat, pow2_floor
from scalify_core.ops.composite import composite
from trainer.observe.records import FIGURE_NAMES


def array_figures(
    x: Any,
    fmt: FloatFormat | None = None,
    uncast: Any = None,
    *,
    count_zeros: bool = True,
) -> jax.Array:
    """Return FIGURE_NAMES of an array, or of a ScaledArray with one scale: FP32 [4].

    - exponent: log2 of the scale; 0 for a plain array.
    - rms: root mean square of the data, without the scale; a narrow format holds most
      numbers where it is about 1.
    - underflow: the share of elements that underflow, see below.
    - saturated: the share of elements at or beyond the largest finite number of the
      format, infinities included.

    Data does not show whether a zero was zero before rounding, so underflow is counted
    in one of three ways:

    - `uncast`, the logical values before the cast (an array or a ScaledArray): the
      elements that are zero although the uncast value is not. Exact.
    - `fmt`, the format that the data is cast to next (E4M3 for the operand of a matrix
      product): the elements that are not zero but will be, and `saturated` counts those
      that the cast will clamp. Exact.
    - neither: an upper bound, the elements that are zero or subnormal in the data's
      format. Only these can have lost bits by rounding; true zeros are counted. A
      tensor that slides out of its format shows subnormals long before it is lost.
      `count_zeros=False`, for tensors whose zeros are known to be true, counts only the
      subnormal ones.

    Data of FP64 counts as FP32.

    Raises:
        ValueError: the dtype has no FloatFormat.
    """
    data, scale = (x.data, x.scale) if is_scaled_array(x) else (jnp.asarray(x), 1.0)
    # There is no FloatFormat of FP64.
    if data.dtype == jnp.float64:
        data = data.astype(jnp.float32)
    data_format = FloatFormat.of(data.dtype)
    data = data.astype(jnp.float32)
    magnitude = jnp.abs(data)
    zero = _is_zero(data)
    saturated = magnitude >= data_format.max
    if uncast is not None:
        lost = zero & ~_is_zero(jnp.asarray(data_of(uncast)).astype(jnp.float32))
    elif fmt is not None:
        lost = ~zero & _is_zero(fmt.quantize(data))
        # The largest number of the format itself is not clamped. In stored data it may
        # have been, so `>=` stands above.
        saturated = magnitude > fmt.max
    else:
        lost = (magnitude < data_format.min_normal) & (count_zeros | ~zero)
    # From the bits, which is exact; scales are positive powers of two, so the mantissa
    # is zero.
    bits = lax.bitcast_convert_type(jnp.asarray(scale, jnp.float32), jnp.int32)
    exponent = ((bits >> 23) - 127).astype(jnp.float32)
    underflow = jnp.mean(lost, dtype=jnp.float32)
    share = jnp.mean(saturated, dtype=jnp.float32)
    return jnp.stack([exponent, _rms(magnitude), underflow, share])


def _is_zero(x: jax.Array) -> jax.Array:
    """Return where FP32 numbers are zero, by their bits.

    A comparison takes subnormal numbers for zero where they are flushed.
    """
    return lax.bitcast_convert_type(x, jnp.uint32) << 1 == 0


def _rms(magnitude: jax.Array) -> jax.Array:
    """Return the root mean square of FP32 numbers of any size.

    Their squares may overflow FP32.
    """
    unit = pow2_floor(jnp.max(magnitude, initial=0.0))
    # The reciprocal of a power of two is exact.
    return jnp.sqrt(jnp.mean(jnp.square(magnitude * (1 / unit)))) * unit


SLOT_SHAPE = (2, len(FIGURE_NAMES))  # row 0: the array; row 1: its gradient
Measure = Callable[[Any], jax.Array]  # of an array or a ScaledArray: FP32 [figures]


# `composite` keeps the probe one call under `scalify`, so that its rules below see the
# data and the scale instead of FP32 values.
@composite(name="probe")
def probe(
    x: jax.Array, slot: jax.Array, *, forward: Measure, backward: Measure
) -> jax.Array:
    """Return `x`; the gradient of `slot` becomes the figures of `x` and its gradient.

    So figures come out of any differentiated function as gradients do, through scan
    (stacked over its steps), remat and `scalify`, by
    `jax.grad(loss, (0, 1))(params, jnp.zeros(SLOT_SHAPE))`. Results do not change.
    Under `scalify` they are figures of the data, in its format, and of the scale.

    Args:
        x: float array; a ScaledArray under `scalify`.
        slot: FP32 zeros of the shape SLOT_SHAPE, which are not read; with more columns
            if a measure returns more figures. A shorter row then ends in NaN. Use a
            slot in one probe only: the figures of two would be added.
        forward: measures `x`, such as `array_figures`.
        backward: measures the gradient of `x`.
    """
    del slot, forward, backward
    return x


def fwd(
    x: Any, slot: Any, *, forward: Measure, backward: Measure
) -> tuple[Any, jax.Array]:
    """Return the array, and its figures as the residual."""
    del slot, backward
    return x, forward(x)


def bwd(
    forward_row: jax.Array, gradient: Any, *, forward: Measure, backward: Measure
) -> tuple[Any, jax.Array]:
    """Return the gradient, and the slot's: figures of the array and of the gradient."""
    del forward
    rows = forward_row, backward(gradient)
    length = max(map(len, rows))
    # Padded with NaN, which `figure_row` leaves out; a zero would look like a
    # measurement.
    return gradient, jnp.stack(
        [jnp.pad(x, (0, length - len(x)), constant_values=jnp.nan) for x in rows]
    )


probe.defvjp(fwd, bwd)


def _storage_form(x: Any) -> Any:
    """Return the array in storage form, rounded to its format.

    The program continues with the unrounded array.
    """
    if not isinstance(x, Value):
        return formats.materialize(x)
    # One scale for the array: figures are those of a single format and scale.
    x = v.scalar_scale(v.narrow(x))
    return with_scale(x.data, x.scale)


# `passes` and `wide`: the array goes on as it was, in FP32 if it is, so that the
# results of the program do not change.
@composite_rule("probe", wide=True, passes=(0, 0))
def _(call: Any, x: Any, slot: Any) -> Any:
    return x


@composite_rule("probe.fwd", wide=True, passes=(0, 0))
def _(call: Any, x: Any, slot: Any) -> tuple[Any, jax.Array]:
    return x, fwd(_storage_form(x), slot, **call.settings)[1]


@composite_rule("probe.bwd", wide=True, passes=(1, 0))
def _(call: Any, forward_row: jax.Array, gradient: Any) -> tuple[Any, jax.Array]:
    return gradient, bwd(forward_row, _storage_form(gradient), **call.settings)[1]
