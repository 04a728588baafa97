"""The values that the interpreter computes with: data, scale and expected RMS.

The logical value is `data * scale`.

See `numerics.scales` for scales.

`expected_rms` is the RMS that the rules expect of the data, about 1. Rules work on
`scale * expected_rms` unrounded and only round the resulting scale, so roundings do not
accumulate along a chain of operations. Beside a run-time scale, the expected RMS of a
sum is known at run time only. It is then `rms_correction`, an FP32 scalar, and counts
in the next sum.

Elementwise rules compute in FP32 and leave their result *wide*: `data` is FP32 while
`dtype`, the format of the value, may be narrower. A chain of elementwise operations is
rounded once, where its result is stored or enters a matrix product; the compiler fuses
the chain, so nothing is held in FP32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalify_core.numerics import jaxprs
from scalify_core.numerics.amax import Parts
from scalify_core.numerics.compiler_hints import in_one_kernel, materialize_once
from scalify_core.numerics.formats import (
    as_float32,
    at_least_float32,
    materialize,
    pow2_round,
    saturating_cast,
)
from scalify_core.numerics.scales import (
    MAX_SCALE,
    MIN_SCALE,
    Multiple,
    Scale,
    as_multiple,
    as_number,
    broadcast_scale,
    has_any_scale,
    is_static,
    largest,
    number_and_rest,
    of_one_base,
    product,
    ratio,
    scale_and_rms,
    smallest,
    times,
    unless_of_zeros,
)

_F32 = np.dtype(np.float32)


MEASURED = 0.0  # in place of an expected RMS: the scale was measured, nothing expected


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "dynamic", "rms_correction", "pre_rescale", "copies"],
    meta_fields=[
        "static",
        "expected_rms",
        "dtype",
        "is_fill_value",
        "scale_multiplier",
    ],
)
@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """A scaled value inside the interpreter.

    It is a pytree whose static scale, expected RMS and dtype are part of its structure.
    A function that makes a new one drops whatever it does not pass on.

    Attributes:
        data: narrow or FP32, without the scale.
        dynamic: the run-time scale; None where it is static.
        static: the scale where it is known while tracing.
        expected_rms: the RMS that is expected of the data; or `MEASURED`.
        dtype: the format that the value is stored in.
        rms_correction: a further factor of the expected RMS; None: 1.
        is_fill_value: whether its data stays FP32: it holds a constant that its format
            cannot represent, as in `maximum(x, 1e-12)`, or is a carry kept in FP32.
        scale_multiplier: a static power of two; the scale is `dynamic` times it, see
            `scales.Multiple`.
        pre_rescale: `PreRescale`; None: the value was not rescaled.
        copies: where scales are measured, the copies that products read, by format and
            granularity. It is filled in place, while the products are evaluated.
    """

    data: Any
    dynamic: Any
    static: float | None
    expected_rms: float
    dtype: np.dtype
    rms_correction: Any = None
    is_fill_value: bool = False
    scale_multiplier: float = 1.0
    pre_rescale: Any = None
    copies: dict[tuple[str, Parts], Any] = dataclasses.field(default_factory=dict)

    @property
    def scale(self) -> Scale:
        """Return a float where static, else an FP32 array."""
        return as_number(self.multiple)

    @property
    def multiple(self) -> Scale | Multiple:
        """Return the scale, as a `Multiple` where it is one.

        A multiple can be multiplied by another number before it is multiplied out.
        """
        if self.static is not None:
            return self.static
        if self.scale_multiplier == 1.0:
            return self.dynamic
        return Multiple(self.dynamic, self.scale_multiplier)

    def with_data(self, data: Any, **changes: Any) -> Value:
        """Return a value of this scale and format with other data.

        What was computed from the former data, as its copies, is dropped.
        """
        return dataclasses.replace(
            self, data=data, pre_rescale=None, copies={}, **changes
        )

    def with_scale(self, data: Any, scale: Scale | Multiple) -> Value:
        """Return a value of this expected RMS and format.

        It is a fill value if this one is.
        """
        return value(
            data,
            scale,
            self.expected_rms,
            self.dtype,
            is_fill_value=self.is_fill_value,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the data."""
        return self.data.shape

    @property
    def size(self) -> Scale:
        """Return the expected RMS of the logical value, unrounded."""
        if self.static is not None:
            return self.static * self.expected_rms
        # `as_number` keeps it within the range of scales. So the sizes of zeros are not
        # zeros: a sum divides one by the other.
        size = as_number(
            Multiple(self.dynamic, self.scale_multiplier * self.expected_rms)
        )
        if self.rms_correction is None:
            return size
        return product(size, self.rms_correction)


def is_value(x: Any) -> bool:
    """Return whether `x` is a `Value`, for `is_leaf=` of `jax.tree` functions."""
    return isinstance(x, Value)


def value(
    data: Any,
    scale: Scale | Multiple,
    expected_rms: float = 1.0,
    dtype: Any = None,
    rms_correction: Any = None,
    is_fill_value: bool = False,
) -> Value:
    """Return `Value` of this data and scale; its format is the data's dtype if not
    given.
    """
    if dtype is None:
        dtype = data.dtype
    base, multiplier, static = None, 1.0, None
    if isinstance(scale, float):
        # What is left of a static size stands in `expected_rms`: no number at run time.
        static, rms_correction = scale, None
    else:
        base, multiplier = as_multiple(scale)
    return Value(
        data,
        base,
        static,
        expected_rms,
        np.dtype(dtype),
        rms_correction,
        is_fill_value,
        multiplier,
    )


def uniform(x: Any) -> float | None:
    """Return the number that fills a plain constant, or None."""
    if isinstance(x, (Value, jax.core.Tracer)):  # nearly always
        return None
    # float() of a complex literal drops its imaginary part, and says so in a mere
    # warning.
    if isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind == "c":
        return None
    if isinstance(x, (float, int, np.generic)):
        return float(x)
    if (
        isinstance(x, np.ndarray)
        # Strides of 0: a broadcast number, told without reading the elements.
        and (x.ndim == 0 or not any(x.strides))
        and x.size
        and x.dtype != bool
    ):
        return float(x[(0,) * x.ndim])
    return None


def lift(x: Any, dtype: np.dtype) -> Value:
    """Return a plain operand as a value of format `dtype`; a value is unchanged.

    An array has scale 1; a uniform constant is split exactly. Zero, infinities and NaN
    are the same at every scale. They get the smallest, which a sum or a maximum with
    other values ignores.
    """
    if isinstance(x, Value):
        return x
    constant = uniform(x)
    if constant is None:
        # Its size is unknown while tracing, and a scale measured at run time would make
        # every later scale one of run time.
        return value(as_float32(x), 1.0, 1.0, dtype)
    scale, rms = MIN_SCALE, 1.0
    if not has_any_scale(constant):
        scale = pow2_round(constant)
        constant /= scale
        rms = abs(float(np.float32(constant)))
    data: Any = np.float32(constant)
    if np.shape(x):
        # Not a NumPy array, whose elements would all stand in the program.
        data = lax.full(np.shape(x), data, _F32)
    return value(data, scale, rms, dtype)


def data32(v: Value) -> Any:
    """Return the data in FP32."""
    return as_float32(v.data)


def exact(v: Value) -> Value:
    """Return the value with its scale multiplied out, for use as a number.

    `Value.scale` alone saturates. Here the part of the product beyond the range of
    scales goes into the data.
    """
    if v.scale_multiplier == 1.0:
        return v
    scale, rest = number_and_rest(v.multiple)
    # In FP32: the rest may be far from 1, and FP16 data is to stay near it.
    return v.with_data(times(data32(v), rest), dynamic=scale, scale_multiplier=1.0)


def typed_as(x: Any, aval: Any) -> Any:
    """Return a value or an array with the mesh type of an aval."""
    if isinstance(x, Value):
        return dataclasses.replace(x, data=jaxprs.typed_as(x.data, aval))
    return jaxprs.typed_as(x, aval)


def narrow(v: Value) -> Value:
    """Return the value with its data in its format.

    The cast saturates; infinities and NaN are preserved.
    """
    if v.data.dtype == v.dtype:
        return v
    # A mask's -1e9 is meant to saturate: `explain` is not to name it.
    data = saturating_cast(v.data, v.dtype, meant=v.is_fill_value)
    return v.with_data(data, is_fill_value=False)


def unscaled(v: Any, dtype: Any = _F32) -> Any:
    """Return the logical value as a plain array of `dtype`.

    Plain operands are materialized.
    """
    if not isinstance(v, Value):
        return materialize(v)
    return saturating_cast(logical(v), dtype)


def logical(v: Any) -> Any:
    """Return the logical value as a plain array.

    Plain operands are materialized. FP64 data at scale 1, as all is between stores of
    measured scales, stays FP64; at other scales the result is FP32.
    """
    if not isinstance(v, Value):
        return materialize(v)
    return times(at_least_float32(v.data), v.multiple)


def at_scale(v: Value, scale: Scale, expected_rms: float = 1.0) -> Value:
    """Return the value with another scale."""
    out = v.with_scale(times(v.data, ratio(v.multiple, scale)), scale)
    return dataclasses.replace(out, expected_rms=expected_rms)


def data32_at(v: Value, scale: Scale) -> Any:
    """Return the data that `v` would have at `scale`, in FP32."""
    return times(data32(v), ratio(v.multiple, scale))


def as_divisor(v: Value) -> Value:
    """Return the value, at scale 1 if its run-time scale is that of zeros.

    A quotient must not get the largest scale of all.
    """
    if v.static is not None:
        return v
    v = exact(v)
    scale = unless_of_zeros(v.scale, 1.0)
    return v.with_scale(times(data32(v), ratio(v.scale, scale)), scale)


def hypot(a: Value, b: Value) -> tuple[Scale, float, Any]:
    """Return the scale, expected RMS and RMS correction of a sum of independent terms.

    It is sqrt(a^2 + b^2), computed without squaring a scale.
    """
    if is_static(a.scale) and is_static(b.scale):
        total = math.hypot(a.size, b.size)
        # At the scale of an operand, that operand is added unchanged.
        for x in sorted((a, b), key=lambda x: x.size, reverse=True):
            if 0.5 <= total / x.scale <= 2:
                return x.scale, total / x.scale, None
        return *scale_and_rms(total), None
    # Multiples of one run-time scalar: their ratio is known while tracing, so the sum
    # needs no arithmetic on scalars at run time.
    both = of_one_base(a.multiple, b.multiple)
    if both is not None and a.rms_correction is None and b.rms_correction is None:
        scale, expected_rms = scale_and_rms(
            math.hypot(both[0] * a.expected_rms, both[1] * b.expected_rms)
        )
        return product(a.dynamic, scale), expected_rms, None
    large, small = largest(a.size, b.size), smallest(a.size, b.size)
    # Not sqrt(a^2 + b^2): the square of 2^64 is infinite in FP32, that of 2^-75 zero.
    r = lax.div(small, large)
    total = product(large, lax.sqrt(lax.add(np.float32(1), lax.mul(r, r))))
    scale = pow2_round(total)
    # Each sum's scale follows from that of the sum before. XLA's CPU backend repeats
    # the chain in every kernel that reads one of them: 150,762 instructions for the
    # norm of 32 tensors, and 9,743 with this barrier.
    computed, rms_correction = materialize_once(scale, lax.div(total, scale))
    # Without the remainder, scales that are rounded at each add creep: the data of 96
    # equal adds reaches an RMS of 5.4.
    return computed, 1.0, rms_correction


def settled(
    data: Any,
    scale: Scale,
    expected_rms: float,
    dtype: np.dtype,
    slack: float = 2.0,
) -> Value:
    """Return a value of this scale and expected RMS.

    Its scale moves to the nearest power of two if the expected RMS has left [1/slack,
    slack].
    """
    # A size that is off by an octave costs no digits, while a new scale multiplies all
    # of the data.
    fits = 1 / slack <= expected_rms <= slack
    if fits and (not is_static(scale) or MIN_SCALE <= scale <= MAX_SCALE):
        return value(data, scale, expected_rms, dtype)
    power = pow2_round(expected_rms)
    if is_static(scale):  # the new scale stays within the range of scales
        power = pow2_round(scale * expected_rms) / scale
    return value(
        times(data, 1 / power), product(scale, power), expected_rms / power, dtype
    )


class PreRescale(NamedTuple):
    """A value before it was rescaled.

    Attributes:
        value: the value.
        power: the measured power of two.
    """

    value: Value
    power: Any


def rescaled_by(statistic: Any, v: Value) -> Value:
    """Return the value at the scale given by a run-time statistic of its data.

    A statistic of 0, infinity or NaN leaves the scale unchanged.
    """
    v = scalar_scale(v)
    measured = statistic(data32(v))
    power = jnp.where(
        (measured > 0) & jnp.isfinite(measured), pow2_round(measured), jnp.float32(1)
    )
    # The kernel of the whole array reads both; on a GPU each would be a kernel before
    # it.
    scale, change = in_one_kernel(*_rescaling(v, power))
    return dataclasses.replace(
        v.with_scale(times(data32(v), change), scale),
        expected_rms=1.0,
        pre_rescale=PreRescale(v, power),
    )


def rescaled_by_rms(v: Value) -> Value:
    """Return the value at the power of two nearest to its measured RMS."""
    # Not `scales.rms_of`, which reads the data twice, for its peak and for its squares.
    # So data beyond 2^63 or below 2^-63 keeps its scale: that of a plain array, whose
    # scale is 1.
    return rescaled_by(lambda data: jnp.sqrt(jnp.mean(jnp.square(data))), v)


def _rescaling(v: Value, power: Any) -> tuple[Any, Any]:
    """Return the scale of a rescaled value, and the factor for its data."""
    scale = as_number(product(v.multiple, power))
    return scale, as_number(ratio(v.multiple, scale))


def before_rescaling(v: Value) -> tuple[Value, Value]:
    """Return the value, and what it was before it was rescaled, as operands of a sum.

    Both are the value itself, if it was not rescaled. A sum computes a new scale
    anyway: if it starts from the value before, all its scalars are one kernel. For that
    the first gets its scale anew, an equal number, by arithmetic of this equation.
    """
    if v.pre_rescale is None:
        return v, v
    scale, _ = _rescaling(v.pre_rescale.value, v.pre_rescale.power)
    return dataclasses.replace(v, dynamic=scale, pre_rescale=None), v.pre_rescale.value


def scalar_scale(v: Any) -> Any:
    """Return the value with one scale for all its elements, the largest.

    A plain operand is unchanged.
    """
    if not isinstance(v, Value) or v.dynamic is None or v.dynamic.ndim == 0:
        return v
    if 0 in v.dynamic.shape:  # no rows: there is no largest scale
        return v.with_scale(v.data, jnp.float32(MIN_SCALE))
    # The largest: at a smaller one some data would saturate.
    scale = jnp.max(v.scale)
    change = ratio(broadcast_scale(v.scale, v.data), scale)
    return v.with_scale(times(v.data, change), scale)


def data_of(x: Any) -> Any:
    """Return the data of a value; a plain operand is unchanged."""
    if isinstance(x, Value):
        return x.data
    return x


def result_dtype(*operands: Any) -> np.dtype:
    """Return the format of an arithmetic result.

    It is the promotion of the formats of the scaled operands. 0-d operands count only
    where all are 0-d. FP8 formats are for storage: arithmetic on them alone gives FP16.
    """
    values = [v for v in operands if isinstance(v, Value)]
    # A scalar beside arrays must not widen them: a learning rate in FP32, as with
    # JAX's weak types.
    formats = {v.dtype for v in values if v.shape} or {v.dtype for v in values}
    wide = {f for f in formats if f.itemsize > 1} or {np.dtype(np.float16)}
    if len(wide) == 1:
        return wide.pop()
    # FP16 beside BF16 is FP32, as in JAX: neither holds the numbers of the other.
    return np.dtype(jnp.result_type(*wide))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Constant:
    """A uniform constant on its way into or out of a traced function.

    It is part of the structure, so its number stays known.
    """

    number: float
    shape: tuple[int, ...]
    dtype: np.dtype


def pack(operands: Any, numbers: Collection[int] = ()) -> list[Any]:
    """Return operands as a pytree of values, constants and arrays.

    Integers become constants only at the positions `numbers`.
    """
    return [_packed(x, i in numbers) for i, x in enumerate(operands)]


def _multiplied_out(x: Value) -> Value:
    """Return the value with its scale multiplied out, and without `pre_rescale`.

    Code that flattens values then finds all of their scale in `dynamic`. Copies that an
    inner jaxpr stores are not added to the original.
    """
    # A copy that is made inside is a tracer of the inner trace: outside it would leak.
    x = dataclasses.replace(x, pre_rescale=None, copies=dict(x.copies))
    if x.scale_multiplier == 1.0:
        return x
    return dataclasses.replace(x, dynamic=x.scale, scale_multiplier=1.0)


def _packed(x: Any, is_number: bool) -> Any:
    if isinstance(x, Value):
        return _multiplied_out(x)
    # `jnp.asarray` of a reference fails, and reading it here would fix its content.
    if isinstance(x, jax.Ref):
        return x
    number, dtype = uniform(x), jnp.result_type(x)
    is_number = jnp.issubdtype(dtype, jnp.floating) or (
        is_number and jnp.issubdtype(dtype, jnp.integer)
    )
    # A number in the structure is one trace for each number: right for constants, which
    # have scales of their own, and wrong for indices that change at each call.
    if number is None or not is_number:
        return jnp.asarray(x)
    return Constant(number, np.shape(x), np.dtype(dtype))


def unpack(operands: Any) -> list[Any]:
    """Return the operands that `pack` packed."""
    return [_filled(x) if isinstance(x, Constant) else x for x in operands]


def _filled(constant: Constant) -> np.ndarray:
    return np.broadcast_to(
        np.asarray(constant.number).astype(constant.dtype), constant.shape
    )
