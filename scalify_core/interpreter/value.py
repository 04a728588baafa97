"""What the interpreter computes with: data, scale and the RMS that the data is expected
to have.

The logical value is `data * factor * scale`.

Of scales, see `scales`.

`factor` is a number that has not been multiplied into the data yet, nearly always 1.
The next operation that multiplies the data anyway takes it along, so constants and
changes of scale cost one multiplication in all, or none.

`rho` is the RMS that the rules expect of the data, about 1. Rules work on `scale * rho`
unrounded and only round the scale that comes out, so roundings do not accumulate along
a chain of operations. Beside a run-time scale, what a sum leaves of its expected RMS is
known at run time only: it is `excess`, an FP32 scalar, and counts in the next sum.

Elementwise rules compute in FP32 and leave their result *wide*: `data` is FP32 while
`dtype`, the format of the value, may be narrower. A chain of elementwise operations is
rounded once, where its result is stored or enters a matrix product; the compiler fuses
the chain, so nothing is held in FP32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalify_core.numerics.compiler_hints import column_sums, once, stored, together
from scalify_core.numerics.formats import pow2_round
from scalify_core.numerics.reductions import sums_at_once
from scalify_core.numerics.scales import (
    MAX_SCALE,
    MIN_SCALE,
    Multiple,
    Scale,
    as_number,
    broadcast_scale,
    is_static,
    largest,
    number_and_rest,
    of_one_base,
    product,
    ratio,
    rounded,
    smallest,
    times,
    unless_of_zeros,
)
from scalify_core.numerics.storage import as_float32, materialise, saturating_cast

_F32 = np.dtype(np.float32)


# Into how many pieces each axis is cut that have a scale of their own.
Parts = tuple[int, ...]
UNKNOWN = 0.0  # the expected RMS where scales are measured


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "dynamic", "excess", "before", "copies"],
    meta_fields=["static", "rho", "dtype", "factor", "guard", "by"],
)
@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """A scaled value inside the interpreter; a pytree whose static scale, rho and dtype
    are part of its structure.
    """

    data: Any
    dynamic: Any
    static: float | None
    rho: float  # of data * factor
    dtype: np.dtype
    factor: float
    excess: Any = None  # further factor of the expected RMS; None: 1
    # whether it holds a constant that its format does not (as in `maximum(x, 1e-12)`):
    # stays wide
    guard: bool = False
    by: float = 1.0  # the scale is `dynamic` times this
    before: Any = None  # `Before`: what this value was rescaled from; None: it was not
    # what was stored of it for products, by format, where scales are measured
    copies: dict[tuple[str, Parts], Any] = dataclasses.field(default_factory=dict)

    @property
    def scale(self) -> Scale:
        """A float where static, else an FP32 array."""
        return as_number(self.multiple)

    @property
    def multiple(self) -> Scale | Multiple:
        """The scale as `Multiple`, where it is one: for what multiplies it on, or
        multiplies data by it.
        """
        if self.static is not None:
            return self.static
        return self.dynamic if self.by == 1.0 else Multiple(self.dynamic, self.by)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the data."""
        return self.data.shape

    @property
    def size(self) -> Scale:
        """The expected RMS of the logical value, unrounded."""
        if self.static is not None:
            return self.static * self.rho
        # Within the range of scales, so that the sizes of zeros are not zeros: a sum
        # divides one by the other.
        size = as_number(Multiple(self.dynamic, self.by * self.rho))
        return size if self.excess is None else product(size, self.excess)


def value(
    data: Any,
    scale: Scale | Multiple,
    rho: float = 1.0,
    dtype: Any = None,
    factor: float = 1.0,
    excess: Any = None,
    guard: bool = False,
) -> Value:
    """`Value` of this data and scale; its format is the data's dtype if not given."""
    dtype = np.dtype(data.dtype if dtype is None else dtype)
    if type(scale) is float:
        return Value(data, None, scale, rho, dtype, factor, None, guard)
    base, by = scale if isinstance(scale, Multiple) else (scale, 1.0)
    return Value(data, base, None, rho, dtype, factor, excess, guard, by)


def uniform(x: Any) -> float | None:
    """The number that all elements of a plain constant are known to be, or None."""
    if type(x) is Value or isinstance(x, jax.core.Tracer):  # nearly always
        return None
    if isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind == "c":
        return None
    if isinstance(x, (float, int, np.generic)):
        return float(x)
    if (
        isinstance(x, np.ndarray)
        and (x.ndim == 0 or not any(x.strides))
        and x.size
        and x.dtype != bool
    ):
        return float(x[(0,) * x.ndim])
    return None


def lift(x: Any, dtype: np.dtype) -> Value:
    """A plain operand as a value of format `dtype`: an array has scale 1, a uniform
    constant is split exactly.

    Zero, infinities and NaN have any scale: the smallest, which does not count beside
    another.
    """
    constant = uniform(x)
    if constant is None:
        return value(as_float32(x), 1.0, 1.0, dtype)
    any_scale = constant == 0 or not math.isfinite(constant)
    scale = MIN_SCALE if any_scale else pow2_round(constant)
    number = np.float32(constant if any_scale else constant / scale)
    data = lax.full(np.shape(x), number, _F32) if np.shape(x) else number
    return value(data, scale, 1.0 if any_scale else abs(float(number)), dtype)


def wide(v: Value) -> Any:
    """The data in FP32, without the factor."""
    return as_float32(v.data)


def settle(v: Value) -> Value:
    """The value with its factor multiplied into the data."""
    if v.factor == 1.0:
        return v
    return value(
        times(v.data, v.factor), v.multiple, v.rho, v.dtype, 1.0, v.excess, v.guard
    )


def exact(v: Value) -> Value:
    """The value with its scale multiplied out; what that leaves of a product beyond the
    range of scales is in the data.

    For who goes on with the scale as a number: `Value.scale` alone saturates.
    """
    if v.by == 1.0:
        return v
    scale, rest = number_and_rest(v.multiple)
    return value(
        times(wide(v), rest), scale, v.rho, v.dtype, v.factor, v.excess, v.guard
    )


def narrow(v: Value) -> Value:
    """The value with its data in its format, saturating (NaN and infinities stay), and
    the factor in it.
    """
    if v.data.dtype == v.dtype and v.factor == 1.0:
        return v
    return value(
        saturating_cast(times(v.data, v.factor), v.dtype, meant=v.guard),
        v.multiple,
        v.rho,
        v.dtype,
        1.0,
        v.excess,
    )


def in_format(v: Value) -> Value:
    """The value with its data in its format, as `narrow`; data that is so already keeps
    its factor beside it.
    """
    return (
        v
        if v.data.dtype == v.dtype
        else dataclasses.replace(narrow(v), before=v.before)
    )


def unscaled(v: Any, dtype: Any = _F32) -> Any:
    """The logical value as a plain array of `dtype`; plain operands are
    materialised.
    """
    if not isinstance(v, Value):
        return materialise(v)
    x = wide_at(v, 1.0)
    return x if x.dtype == dtype else saturating_cast(x, dtype)


def at_scale(v: Value, scale: Scale) -> Any:
    """The data of `v` if its scale were `scale`."""
    return _at_scale(v.data, v, scale)


def wide_at(v: Value, scale: Scale) -> Any:
    """As `at_scale`, in FP32."""
    return _at_scale(as_float32(v.data), v, scale)


def _at_scale(data: Any, v: Value, scale: Scale) -> Any:
    if is_static(v.scale) and is_static(scale):
        return times(data, v.factor * (v.scale / scale))
    return times(times(data, v.factor), ratio(v.multiple, scale))


def as_divisor(v: Value) -> Value:
    """The value at scale 1 if its run-time scale is that of zeros: a quotient must not
    get the largest scale of all.
    """
    if v.static is not None:
        return v
    v = exact(v)
    scale = unless_of_zeros(v.scale, 1.0)
    return value(times(wide(v), ratio(v.scale, scale)), scale, v.rho, v.dtype, v.factor)


def hypot(a: Value, b: Value) -> tuple[Scale, float, Any]:
    """The scale, rho and excess of a sum of independent terms: sqrt(a^2 + b^2), without
    squaring a scale.
    """
    if is_static(a.scale) and is_static(b.scale):
        total = math.hypot(a.size, b.size)
        # The scale of an operand that has no factor, if it is near enough: that operand
        # is then added as it is.
        for x in (a, b) if a.size >= b.size else (b, a):
            if x.factor == 1.0 and 0.5 <= total / x.scale <= 2:
                return x.scale, total / x.scale, None
        return *rounded(total), None
    both = of_one_base(a.multiple, b.multiple)
    if both is not None and a.excess is None and b.excess is None:
        scale, rho = rounded(math.hypot(both[0] * a.rho, both[1] * b.rho))
        return product(a.dynamic, scale), rho, None
    large, small = largest(a.size, b.size), smallest(a.size, b.size)
    r = lax.div(small, large)
    total = product(large, lax.sqrt(lax.add(np.float32(1), lax.mul(r, r))))
    scale = pow2_round(total)
    computed, excess = once(scale, lax.div(total, scale))
    return computed, 1.0, excess


def settled(
    data: Any,
    scale: Scale,
    rho: float,
    dtype: np.dtype,
    slack: float = 2.0,
    factor: float = 1.0,
) -> Value:
    """A value of this scale and expected RMS, moved to the nearest power of two if rho
    has left [1/slack, slack].
    """
    if is_static(scale):
        if 1 / slack <= rho <= slack and MIN_SCALE <= scale <= MAX_SCALE:
            return value(data, scale, rho, dtype, factor)
        new = pow2_round(scale * rho)
        return value(data, new, scale * rho / new, dtype, factor * (scale / new))
    if 1 / slack <= rho <= slack:
        return value(data, scale, rho, dtype, factor)
    power = pow2_round(rho)
    return value(data, product(scale, power), rho / power, dtype, factor / power)


class Before(NamedTuple):
    """A value before it was rescaled, the measured power of two, and its sums over all
    axes but the last, or None.
    """

    value: Value
    power: Any
    sums: Any = None


def rescaled_by(statistic: Any, v: Value) -> Value:
    """The value at the scale that a run-time statistic of its data calls for; 0, inf
    and NaN call for none.
    """
    v = scalar_scale(v)
    return _rescaled(v, statistic(wide(v)))


def rescaled_by_rms(v: Value, *, columns: bool = False) -> Value:
    """The value at the power of two that is nearest to its measured RMS.

    With `columns`, its sums over all axes but the last, as of the gradient of a bias,
    are made in the same pass.
    """
    v = scalar_scale(v)
    if not columns:
        return _rescaled(v, jnp.sqrt(jnp.mean(jnp.square(wide(v)))))
    sums, squares = column_sums(wide(v), sums_at_once)
    return _rescaled(v, jnp.sqrt(jnp.sum(stored(squares)) / v.data.size), sums)


def _rescaled(v: Value, measured: jax.Array, sums: Any = None) -> Value:
    power = jnp.where(
        (measured > 0) & jnp.isfinite(measured), pow2_round(measured), jnp.float32(1)
    )
    scale, change = together(*_rescaling(v, power))
    sums = None if sums is None else times(sums, change)
    return dataclasses.replace(
        value(times(wide(v), change), scale, 1.0, v.dtype),
        before=Before(v, power, sums),
    )


def _rescaling(v: Value, power: Any) -> tuple[Any, Any]:
    """The scale of a value that is rescaled by a measured power of two, and what its
    data is multiplied by.
    """
    scale = as_number(product(v.multiple, power))
    return scale, as_number(ratio(v.multiple, scale))


def before_rescaling(v: Value) -> tuple[Value, Value]:
    """A value whose scale is computed here, and the value that it was rescaled from:
    itself, if it was not.

    Who changes its scale anyway changes that of the latter, and computes all scalars in
    one kernel, not in two.
    """
    if v.before is None:
        return v, v
    scale, _ = _rescaling(v.before.value, v.before.power)
    return dataclasses.replace(v, dynamic=scale, before=None), v.before.value


def scalar_scale(v: Value) -> Value:
    """The value with one scale for all its elements: the largest of its scales."""
    if v.dynamic is None or v.dynamic.ndim == 0:
        return v
    scale = jnp.max(v.scale)
    return value(
        times(v.data, ratio(broadcast_scale(v.scale, v.data), scale)),
        scale,
        v.rho,
        v.dtype,
        v.factor,
    )


def scalar_scales(operands: Sequence[Any]) -> list[Any]:
    """Operands of which each value has one scale; those that are plain as they are."""
    return [scalar_scale(x) if isinstance(x, Value) else x for x in operands]


def result_dtype(*operands: Any) -> np.dtype:
    """The format of an arithmetic result: the promotion of the formats of the scaled
    operands.

    0-d operands count only where all are. FP8 formats are for storage: arithmetic on
    them alone gives FP16.
    """
    values = [v for v in operands if type(v) is Value]
    if len({v.dtype for v in values}) == 1 and values[0].dtype.itemsize > 1:
        return values[0].dtype
    formats = {v.dtype for v in values if v.shape} or {v.dtype for v in values}
    if len(formats) == 1:
        (only,) = formats
        return only if only.itemsize > 1 else np.dtype(np.float16)
    return np.dtype(
        jnp.result_type(
            *({f for f in formats if f.itemsize > 1} or {np.dtype(np.float16)})
        )
    )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Constant:
    """A uniform constant on its way into or out of a traced function: part of the
    structure, so it stays known.
    """

    number: float
    shape: tuple[int, ...]
    dtype: np.dtype


def pack(operands: Any, numbers: Collection[int] = ()) -> list[Any]:
    """Operands as a pytree: values, constants, arrays. Integers are constants at the
    positions `numbers` alone.
    """
    return [
        _whole(x) if isinstance(x, Value) else _packed(x, i in numbers)
        for i, x in enumerate(operands)
    ]


def _whole(x: Value) -> Value:
    """The value with its scale multiplied out, and alone: who takes values apart finds
    what is there. What an inner jaxpr stores of it stays in there.
    """
    x = dataclasses.replace(x, before=None, copies=dict(x.copies))
    return x if x.by == 1.0 else dataclasses.replace(x, dynamic=x.scale, by=1.0)


def _packed(x: Any, is_number: bool) -> Any:
    if isinstance(x, jax.Ref):
        return x
    dtype = jnp.result_type(x)
    is_number = jnp.issubdtype(dtype, jnp.floating) or (
        is_number and jnp.issubdtype(dtype, jnp.integer)
    )
    number = uniform(x) if is_number else None
    return (
        jnp.asarray(x)
        if number is None
        else Constant(number, np.shape(x), np.dtype(dtype))
    )


def unpack(operands: Any) -> list[Any]:
    """The inverse of `pack`."""
    return [_filled(x) if isinstance(x, Constant) else x for x in operands]


def _filled(constant: Constant) -> np.ndarray:
    return np.broadcast_to(
        np.asarray(constant.number).astype(constant.dtype), constant.shape
    )
