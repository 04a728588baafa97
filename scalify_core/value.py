"""What the interpreter computes with: data, scale and the RMS that the data is expected to have.

The logical value is `data * factor * scale`.

A scale is *static* when it is a Python float: arithmetic on it happens while tracing and leaves nothing in the
compiled program. Otherwise it is an FP32 array, a scalar or broadcastable to the data. Every scale is a power of two
in [2^-126, 2^126].

`factor` is a number that has not been multiplied into the data yet, nearly always 1. The next operation that
multiplies the data anyway takes it along, so constants and changes of scale cost one multiplication in all, or none.

`rho` is the RMS that the rules expect of the data, about 1. Rules work on `scale * rho` unrounded and only round the
scale that comes out, so roundings do not accumulate along a chain of operations. Beside a run-time scale, what a sum
leaves of its expected RMS is known at run time only: it is `excess`, an FP32 scalar, and counts in the next sum.

Elementwise rules compute in FP32 and leave their result *wide*: `data` is FP32 while `dtype`, the format of the
value, may be narrower. A chain of elementwise operations is rounded once, where its result is stored or enters a
matrix product; the compiler fuses the chain, so nothing is held in FP32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters.partial_eval import DynamicJaxprTracer

from scalify_core.formats import FloatFormat, pow2_inverse, pow2_round
from scalify_core.reductions import sums_at_once

Scale = Any  # float: static; FP32 jax.Array: dynamic
MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**126
# A scale below this one is that of zeros (2^-126), perhaps times some constants: it says nothing about other values.
OF_ZEROS = 2.0**-100
_TOGETHER = 64  # scalars of one array: XLA gives a kernel some 96 operands
_F32 = np.dtype(np.float32)


class Multiple(NamedTuple):
    """A run-time scale times a static power of two, not yet multiplied.

    A chain of such powers, as every product adds one, is so one number, and data that is multiplied by the scale is
    multiplied by both: it leaves no operation on scalars in the program, which on a GPU would be a kernel each.
    """

    base: Any  # FP32 scalar
    by: float


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "dynamic", "excess", "before"],
    meta_fields=["static", "rho", "dtype", "factor", "guard", "by"],
)
@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """A scaled value inside the interpreter; a pytree whose static scale, rho and dtype are part of its structure."""

    data: Any
    dynamic: Any
    static: float | None
    rho: float  # of data * factor
    dtype: np.dtype
    factor: float
    excess: Any = None  # further factor of the expected RMS; None: 1
    guard: bool = False  # whether it holds a constant that its format does not (as in `maximum(x, 1e-12)`): stays wide
    by: float = 1.0  # the scale is `dynamic` times this
    before: Any = None  # `Before`: what this value was rescaled from; None: it was not

    @property
    def scale(self) -> Scale:
        """A float where static, else an FP32 array."""
        return as_number(self.multiple)

    @property
    def multiple(self) -> Scale | Multiple:
        """The scale as `Multiple`, where it is one: for what multiplies it on, or multiplies data by it."""
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
        # Within the range of scales, so that the sizes of zeros are not zeros: a sum divides one by the other.
        size = clip_scale(times(self.dynamic, self.by * self.rho))
        return size if self.excess is None else clip_scale(lax.mul(size, self.excess))


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


_drawn: ContextVar[int | None] = ContextVar("drawn", default=None)  # numbers, while a function is evaluated


@contextlib.contextmanager
def numbered() -> Iterator[None]:
    """Inside, `serial` counts from 0; inside another, it goes on."""
    token = _drawn.set(0) if _drawn.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _drawn.reset(token)


@contextlib.contextmanager
def numbers_returned() -> Iterator[None]:
    """What is drawn inside is drawn again: the program inside is only looked at."""
    token = _drawn.set(_drawn.get())
    try:
        yield
    finally:
        _drawn.reset(token)


def serial() -> int:
    """A number that no other call gets while one function is evaluated: what tells equal operations apart."""
    number = drawn()
    _continue_at(number + 1)
    return number


def drawn() -> int:
    """How many numbers have been drawn, which is the next one."""
    return _drawn.get() or 0


def _continue_at(number: int) -> None:
    if _drawn.get() is not None:
        _drawn.set(number)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Count:
    """Of the numbers that a trace drew: part of its result, so who is given the same trace again finds it."""

    count: int


def counting(fun: Callable) -> Callable:
    """`fun` for traces that are kept: its result and how many numbers it drew, which `take` takes apart."""

    @functools.wraps(fun)
    def counted(*args: Any) -> tuple[Any, _Count]:
        first = drawn()
        return fun(*args), _Count(drawn() - first)

    return counted


def take(result: tuple[Any, _Count], first: int) -> Any:
    """The result of a counting function, traced now or before: from `first` on its numbers are taken either way."""
    out, numbers = result
    _continue_at(first + numbers.count)
    return out


def is_static(scale: Scale) -> bool:
    """Whether the scale is known while tracing."""
    return isinstance(scale, float)


def uniform(x: Any) -> float | None:
    """The number that all elements of a plain constant are known to be, or None."""
    if type(x) is Value or isinstance(x, jax.core.Tracer):  # nearly always
        return None
    if isinstance(x, (float, int, np.generic)):
        return float(x)
    if isinstance(x, np.ndarray) and (x.ndim == 0 or not any(x.strides)) and x.size and x.dtype != bool:
        return float(x[(0,) * x.ndim])
    return None


def materialise(x: Any) -> Any:
    """A plain operand for `bind`: a uniform constant becomes a broadcast, not an array of constants."""
    if isinstance(x, np.ndarray) and x.ndim and not any(x.strides):
        return lax.full(x.shape, x[(0,) * x.ndim] if x.size else 0, x.dtype)
    return x


def lift(x: Any, dtype: np.dtype) -> Value:
    """A plain operand as a value of format `dtype`: an array has scale 1, a uniform constant is split exactly.

    Zero, infinities and NaN have any scale: the smallest, which does not count beside another.
    """
    constant = uniform(x)
    if constant is None:
        return value(as_float32(x), 1.0, 1.0, dtype)
    any_scale = constant == 0 or not math.isfinite(constant)
    scale = MIN_SCALE if any_scale else pow2_round(constant)
    number = np.float32(constant if any_scale else constant / scale)
    data = lax.full(np.shape(x), number, _F32) if np.shape(x) else number
    return value(data, scale, 1.0 if any_scale else abs(float(number)), dtype)


def as_float32(x: Any) -> Any:
    """`x` in FP32 (no operation where it is)."""
    x = materialise(x)
    return x if getattr(x, "dtype", None) == _F32 else lax.convert_element_type(x, _F32)


def wide(v: Value) -> Any:
    """The data in FP32, without the factor."""
    return as_float32(v.data)


def settle(v: Value) -> Value:
    """The value with its factor multiplied into the data."""
    return v if v.factor == 1.0 else value(times(v.data, v.factor), v.multiple, v.rho, v.dtype, 1.0, v.excess)


def narrow(v: Value) -> Value:
    """The value with its data in its format, saturating (NaN and infinities stay), and the factor in it."""
    if v.data.dtype == v.dtype and v.factor == 1.0:
        return v
    return value(saturating_cast(times(v.data, v.factor), v.dtype), v.multiple, v.rho, v.dtype, 1.0, v.excess)


def in_format(v: Value) -> Value:
    """The value with its data in its format, as `narrow`; data that is so already keeps its factor beside it."""
    return v if v.data.dtype == v.dtype else dataclasses.replace(narrow(v), before=v.before)


def saturating_cast(x: Any, dtype: Any) -> Any:
    """`x` in `dtype`; finite numbers beyond its largest become that, what is not finite stays not finite."""
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    if float(jnp.finfo(dtype).max) >= float(jnp.finfo(x.dtype).max):
        return lax.convert_element_type(x, dtype)
    return _saturating_cast(x, dtype)


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


def together(*scalars: jax.Array) -> tuple[jax.Array, ...]:
    """FP32 scalars. Compiled for CUDA, one kernel computes them; it would be one for each that a large kernel reads."""

    def cuda(*scalars: jax.Array) -> tuple[jax.Array, ...]:
        stacked = lax.optimization_barrier(jnp.stack(scalars))
        return tuple(stacked[i] for i in range(len(scalars)))

    return lax.platform_dependent(*scalars, cuda=cuda, default=lambda *scalars: scalars)


def once(*scalars: jax.Array) -> tuple[jax.Array, ...]:
    """FP32 scalars. Compiled for CPU, they are computed once, and what reads them reads the result.

    XLA repeats scalars in every kernel that reads them, with all they are computed from: of a sum of many terms, where
    each scale follows from that before, more than a machine compiles.
    """
    return lax.platform_dependent(
        *scalars, cpu=lambda *scalars: lax.optimization_barrier(scalars), default=lambda *scalars: scalars
    )


def stored_both_ways(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A matrix, twice. Compiled for CUDA, what computes it writes both, the second with its columns in one piece."""

    def cuda(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = _row_major(x)  # or the order of the other would spread to what `x` is computed from
        rows, columns = lax.optimization_barrier((x, _row_major(x.T)))
        return rows, columns.T

    return lax.platform_dependent(x, cuda=cuda, default=lambda x: (x, x))


def _row_major(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def times(x: Any, factor: Scale | Multiple) -> Any:
    """`x * factor`, exact for a power of two and else rounded in FP32; no operation where the factor is 1."""
    if isinstance(factor, Multiple):
        if not 2.0**-60 <= factor.by <= 2.0**60:  # data of a narrow format times more could leave FP32 on the way
            return times(x, as_number(factor))
        return times(times(as_float32(x), factor.by), factor.base)
    if isinstance(factor, float):
        if factor == 1.0:
            return x
        if isinstance(x, np.float32):  # a literal: the product is one too
            return np.float32(float(x) * factor)
        if factor and math.isfinite(factor) and not MIN_SCALE <= abs(factor) <= MAX_SCALE:
            step = MAX_SCALE if abs(factor) > 1 else MIN_SCALE  # too large or small for one FP32 number
            return times(times(as_float32(x), step), factor / step)
        in_format = x.dtype.itemsize == 2 and 2.0**-14 <= abs(factor) <= 1 and math.frexp(factor)[0] in (0.5, -0.5)
        x = x if in_format else as_float32(x)
        return lax.mul(x, x.dtype.type(factor))
    return jnp.multiply(as_float32(x), broadcast_scale(factor, x))


def broadcast_scale(scale: Any, x: Any) -> Any:
    """A dynamic scale for data `x`: a scalar, or of the rank of the data; what is of lower rank is of leading axes."""
    if scale.ndim in (0, x.ndim):
        return scale
    return lax.reshape(scale, scale.shape + (1,) * (x.ndim - scale.ndim))


def unscaled(v: Any, dtype: Any = _F32) -> Any:
    """The logical value as a plain array of `dtype`; plain operands are materialised."""
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


def _of_one_base(*scales: Any) -> tuple[float, ...] | None:
    """The static parts of scales that are multiples of one run-time scalar; None: they are not."""
    parts = [s if isinstance(s, Multiple) else Multiple(s, 1.0) for s in scales if not is_static(s)]
    one = len(parts) == len(scales) and all(part.base is parts[0].base for part in parts)
    return tuple(part.by for part in parts) if one and parts[0].base.ndim == 0 else None


def same_scale(a: Scale, b: Scale) -> bool:
    """Whether two scales are known to be equal."""
    both = _of_one_base(a, b)
    return a is b or (both[0] == both[1] if both else is_static(a) and is_static(b) and a == b)


def near(scales: Sequence[Scale]) -> bool:
    """Whether scales are static and so near that what has the smallest loses nothing at the largest."""
    return all(map(is_static, scales)) and max(scales) <= 16 * min(scales)


def as_number(scale: Scale | Multiple) -> Scale:
    """A scale that is multiplied out, within the range of scales."""
    return clip_scale(lax.mul(scale.base, np.float32(scale.by))) if isinstance(scale, Multiple) else scale


def as_numbers(scales: Sequence[Scale | Multiple]) -> list[Scale]:
    """`as_number` of each. Multiples of scalars are multiplied out together: one by one, each is a kernel on a GPU.

    Of scalars that jit traces, and of one type: those of vmap may be batched or not, arrays be on different devices.
    """
    found = list(scales)
    alike: dict[Any, list[int]] = {}
    for i, x in enumerate(scales):
        if isinstance(x, Multiple) and isinstance(x.base, DynamicJaxprTracer) and x.base.ndim == 0:
            alike.setdefault(jax.typeof(x.base), []).append(i)
    blocks = [same[i : i + _TOGETHER] for same in alike.values() for i in range(0, len(same), _TOGETHER)]
    for block in blocks:
        bases, by = [scales[i].base for i in block], np.array([scales[i].by for i in block], np.float32)
        numbers = clip_scale(lax.mul(jnp.stack(bases), by))
        for place, i in enumerate(block):
            found[i] = numbers[place]
    return [as_number(x) for x in found]


def ratio(a: Any, b: Any) -> Any:
    """`a / b`, within the range of scales where dynamic; a `Multiple` where `b` is static and `a` a run-time scalar.

    Static for multiples of one run-time scalar.
    """
    if is_static(b):
        return product(a, 1 / b)
    if (both := _of_one_base(a, b)) is not None:
        return both[0] / both[1]
    a, b = _arrays(a, b)
    return clip_scale(lax.mul(a, pow2_inverse(b)))


def product(a: Any, b: Any) -> Any:
    """`a * b`, within the range of scales where dynamic; a `Multiple` where one is static and one a run-time scalar."""
    if is_static(a) and is_static(b):
        return a * b
    if is_static(a) or is_static(b):
        static, dynamic = (a, b) if is_static(a) else (b, a)
        if static == 1.0:
            return dynamic
        base, by = dynamic if isinstance(dynamic, Multiple) else (dynamic, 1.0)
        if base.ndim == 0 and MIN_SCALE <= by * static <= MAX_SCALE and math.frexp(static)[0] == 0.5:
            return base if by * static == 1.0 else Multiple(base, by * static)
    return clip_scale(lax.mul(*_arrays(a, b)))


def product_and_rest(a: Any, b: Any) -> tuple[Any, Scale]:
    """`a * b` as `product`, and the power of two by which that falls short of it, for the data (1 where static)."""
    a, b = as_number(a), as_number(b)
    scale = as_number(product(a, b))
    if is_static(scale) or scale is a or scale is b:
        return scale, 1.0
    # Within FP32: the smaller over the product is at most the inverse of the larger, or the scale is at its limit.
    return scale, lax.mul(lax.div(*_arrays(smallest(a, b), scale)), largest(a, b))


def unless_of_zeros(scale: Any, other: Any) -> Any:
    """A dynamic scale, or `other` (a number) where it is that of zeros."""
    return lax.select(lax.lt(scale, np.float32(OF_ZEROS)), lax.full_like(scale, other), scale)


def as_divisor(v: Value) -> Value:
    """The value at scale 1 if its run-time scale is that of zeros: a quotient must not get the largest scale of all."""
    if is_static(v.scale):
        return v
    scale = unless_of_zeros(v.scale, 1.0)
    return value(times(wide(v), ratio(v.scale, scale)), scale, v.rho, v.dtype, v.factor)


def largest(*scales: Scale) -> Scale:
    """The largest."""
    if all(map(is_static, scales)):
        return max(scales)
    if (multiples := _of_one_base(*scales)) is not None:
        return scales[multiples.index(max(multiples))]
    return functools.reduce(lambda a, b: lax.max(*_arrays(a, b)), scales)


def smallest(a: Scale, b: Scale) -> Scale:
    """The smaller."""
    return min(a, b) if is_static(a) and is_static(b) else lax.min(*_arrays(a, b))


def hypot(a: Value, b: Value) -> tuple[Scale, float, Any]:
    """The scale, rho and excess of a sum of independent terms: sqrt(a^2 + b^2), without squaring a scale."""
    if is_static(a.scale) and is_static(b.scale):
        total = math.hypot(a.size, b.size)
        # The scale of an operand that has no factor, if it is near enough: that operand is then added as it is.
        for x in (a, b) if a.size >= b.size else (b, a):
            if x.factor == 1.0 and 0.5 <= total / x.scale <= 2:
                return x.scale, total / x.scale, None
        return *rounded(total), None
    both = _of_one_base(a.multiple, b.multiple)
    if both is not None and a.excess is None and b.excess is None:
        scale, rho = rounded(math.hypot(both[0] * a.rho, both[1] * b.rho))
        return product(a.dynamic, scale), rho, None
    large, small = largest(a.size, b.size), smallest(a.size, b.size)
    r = lax.div(small, large)
    total = clip_scale(lax.mul(large, lax.sqrt(lax.add(np.float32(1), lax.mul(r, r)))))
    scale = pow2_round(total)
    computed, excess = once(scale, lax.div(total, scale))
    return computed, 1.0, excess


def settled(data: Any, scale: Scale, rho: float, dtype: np.dtype, slack: float = 2.0, factor: float = 1.0) -> Value:
    """A value of this scale and expected RMS, moved to the nearest power of two if rho has left [1/slack, slack]."""
    if is_static(scale):
        if 1 / slack <= rho <= slack and MIN_SCALE <= scale <= MAX_SCALE:
            return value(data, scale, rho, dtype, factor)
        new = pow2_round(scale * rho)
        return value(data, new, scale * rho / new, dtype, factor * (scale / new))
    if 1 / slack <= rho <= slack:
        return value(data, scale, rho, dtype, factor)
    power = pow2_round(rho)
    return value(data, product(scale, power), rho / power, dtype, factor / power)


def rounded(size: float) -> tuple[float, float]:
    """The scale of data of this expected size, and its rho."""
    scale = pow2_round(size)
    return scale, size / scale


def clip_scale(scale: Any) -> Any:
    """Keep a dynamic scale within [2^-126, 2^126]."""
    return lax.clamp(np.float32(MIN_SCALE), scale, np.float32(MAX_SCALE))


class Before(NamedTuple):
    """A value before it was rescaled, the measured power of two, and its sums over all axes but the last, or None."""

    value: Value
    power: Any
    sums: Any = None


def rescaled_by(statistic: Any, v: Value) -> Value:
    """The value at the scale that a run-time statistic of its data calls for; 0, inf and NaN call for none."""
    v = scalar_scale(v)
    return _rescaled(v, statistic(wide(v)))


def rescaled_by_rms(v: Value, *, columns: bool = False) -> Value:
    """The value at the power of two that is nearest to its measured RMS.

    With `columns`, its sums over all axes but the last, as of the gradient of a bias, are made in the same pass.
    """
    v = scalar_scale(v)
    if not columns:
        return _rescaled(v, jnp.sqrt(jnp.mean(jnp.square(wide(v)))))
    sums, squares = _column_sums(wide(v))
    return _rescaled(v, jnp.sqrt(jnp.sum(stored(squares)) / v.data.size), sums)


def _column_sums(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums of `x` and of its squares over all axes but the last."""
    rows = tuple(range(x.ndim - 1))
    return lax.platform_dependent(
        x,
        cuda=lambda x: tuple(sums_at_once((x, jnp.square(x)), rows)),
        default=lambda x: (jnp.sum(x, rows), jnp.sum(jnp.square(x), rows)),
    )


def _rescaled(v: Value, measured: jax.Array, sums: Any = None) -> Value:
    power = jnp.where((measured > 0) & jnp.isfinite(measured), pow2_round(measured), jnp.float32(1))
    scale, change = together(*_rescaling(v, power))
    sums = None if sums is None else times(sums, change)
    return dataclasses.replace(value(times(wide(v), change), scale, 1.0, v.dtype), before=Before(v, power, sums))


def _rescaling(v: Value, power: Any) -> tuple[Any, Any]:
    """The scale of a value that is rescaled by a measured power of two, and what its data is multiplied by."""
    scale = as_number(product(v.scale, power))
    return scale, as_number(ratio(v.scale, scale))


def before_rescaling(v: Value) -> tuple[Value, Value]:
    """A value whose scale is computed here, and the value that it was rescaled from: itself, if it was not.

    Who changes its scale anyway changes that of the latter, and computes all scalars in one kernel, not in two.
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
    return value(times(v.data, ratio(broadcast_scale(v.scale, v.data), scale)), scale, v.rho, v.dtype, v.factor)


def scalar_scales(operands: Sequence[Any]) -> list[Any]:
    """Operands of which each value has one scale; those that are plain as they are."""
    return [scalar_scale(x) if isinstance(x, Value) else x for x in operands]


def result_dtype(*operands: Any) -> np.dtype:
    """The format of an arithmetic result: the promotion of the formats of the scaled operands.

    0-d operands count only where all are. FP8 formats are for storage: arithmetic on them alone gives FP16.
    """
    values = [v for v in operands if type(v) is Value]
    if len({v.dtype for v in values}) == 1 and values[0].dtype.itemsize > 1:
        return values[0].dtype
    formats = {v.dtype for v in values if v.shape} or {v.dtype for v in values}
    if len(formats) == 1:
        (only,) = formats
        return only if only.itemsize > 1 else np.dtype(np.float16)
    return np.dtype(jnp.result_type(*({f for f in formats if f.itemsize > 1} or {np.dtype(np.float16)})))


def _arrays(a: Any, b: Any) -> tuple[Any, Any]:
    """Both as FP32 arrays of one rank."""
    a, b = (np.float32(s) if is_static(s) else as_number(s) for s in (a, b))
    if np.ndim(a) and np.ndim(b) and a.shape != b.shape:
        a, b = jnp.broadcast_arrays(a, b)
    return a, b


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Constant:
    """A uniform constant on its way into or out of a traced function: part of the structure, so it stays known."""

    number: float
    shape: tuple[int, ...]
    dtype: np.dtype


def pack(operands: Any) -> list[Any]:
    """Operands as a pytree: values, constants, arrays."""
    return [_whole(x) if isinstance(x, Value) else _packed(x) for x in operands]


def _whole(x: Value) -> Value:
    """The value with its scale multiplied out, and alone: who takes values apart finds what is there."""
    x = x if x.before is None else dataclasses.replace(x, before=None)
    return x if x.by == 1.0 else dataclasses.replace(x, dynamic=x.scale, by=1.0)


def _packed(x: Any) -> Any:
    dtype = jnp.result_type(x)
    number = uniform(x) if jnp.issubdtype(dtype, jnp.floating) else None
    return jnp.asarray(x) if number is None else Constant(number, np.shape(x), np.dtype(dtype))


def unpack(operands: Any) -> list[Any]:
    """The inverse of `pack`."""
    return [_filled(x) if isinstance(x, Constant) else x for x in operands]


def _filled(constant: Constant) -> np.ndarray:
    return np.broadcast_to(np.asarray(constant.number).astype(constant.dtype), constant.shape)
