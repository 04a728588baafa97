"""The common form of loop iterations, or of cond branches: scale and format.

A loop's carry has one structure for all iterations. Its scale is static where one scale
is known to suit all of them. Otherwise a run-time scale is carried along, and measured
in each iteration.

A carry may *start* at a constant that every element replaces, as the lowest number for
a running maximum. Such a constant never sets a scale. It is stored at the scale of the
elements that it is compared with, as far as FP32 reaches. Its carry is kept in FP32
(`Value.is_fill_value`): FP16 might make it moderate beside small numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from scalify_core.interpreter import value as v
from scalify_core.interpreter.rules.elementwise import common, constant_at
from scalify_core.interpreter.value import Value
from scalify_core.numerics import formats
from scalify_core.numerics import scales as sc
from scalify_core.numerics.formats import pow2_round

_FAR = 256.0  # sizes further apart than this do not share a static scale
# Beside a run-time scale, constants of at least this magnitude are start values.
_SENTINEL = 2.0**16
# The largest data of a start value. It leaves room for later operations, such as the
# difference of two.
_LARGEST_START = 2.0**120


@dataclasses.dataclass(frozen=True)
class Form:
    """The common form of a branch's alternatives, or of a loop's iterations.

    Attributes:
        scale: None where it is dynamic.
        expected_rms: the expected RMS of the data.
        dtype: the format.
        start: the start constant of a loop that must not set its scale; None if there
            is none.
        wide: whether the data is FP32, for numbers that the format cannot represent.
    """

    scale: float | None
    expected_rms: float
    dtype: Any
    start: float | None = None
    wide: bool = False


def common_form(alternatives: tuple) -> Form | None:
    """Return the common form of the branches of a cond.

    Zeros take any scale, other constants have their own, other plain arrays have scale
    1. Where the scales are far apart, each branch brings its own: at the largest, the
    data of the other branches would underflow.
    """
    values = [x for x in alternatives if isinstance(x, Value)]
    if not values:
        return None
    dtype, wide = v.result_dtype(*values), any(x.is_fill_value for x in values)
    values += [
        v.lift(x, dtype)
        for x in alternatives
        if not isinstance(x, Value) and not _is_any_scale(x)
    ]
    if not sc.near([x.scale for x in values]):
        return Form(None, 1.0, dtype, wide=wide)
    return Form(
        max(x.scale for x in values),
        max(x.expected_rms for x in values),
        dtype,
        wide=wide,
    )


def wide_form(alternatives: Sequence[Any]) -> Form | None:
    """Return the form of branches and carries with measured scales: FP32 at scale 1."""
    values = [x for x in alternatives if isinstance(x, Value)]
    if not values:
        return None
    dtype = v.result_dtype(*values)  # of 8 bits: FP16, which results of a turn have
    return Form(1.0, v.MEASURED, dtype, wide=True)


def wide_carry_forms(turn: Callable, init: Sequence[Any]) -> list[Form | None]:
    """Return the forms of a carry where scales are measured.

    A part is a value if it becomes one in some iteration.
    """
    carry = list(init)
    while True:
        out = turn(carry)
        grown = [
            isinstance(y, Value) and not isinstance(x, Value)
            for x, y in zip(carry, out, strict=True)
        ]
        carry = [y if g else x for x, y, g in zip(carry, out, grown, strict=True)]
        if not any(grown):
            return [wide_form([x]) for x in carry]


def _is_any_scale(x: Any) -> bool:
    constant = v.uniform(x)
    return constant is not None and (constant == 0 or not math.isfinite(constant))


def to_form(x: Any, form: Form | None) -> Any:
    """Return `x` at the scale and in the format of a form.

    A form with a dynamic scale leaves the scale of `x`.
    """
    if form is None:
        return jnp.asarray(formats.materialise(x))
    if not isinstance(x, Value):
        if v.uniform(x) is not None and form.scale is not None:
            return _formed(
                constant_at(x, form.scale, form.dtype, not form.wide), form.scale, form
            )
        x = v.lift(x, form.dtype)
    x = v.scalar_scale(x)
    if form.scale is None:
        x = v.exact(x)
        scale = np.float32(x.scale) if sc.is_static(x.scale) else x.scale
        return _formed(x.data, jnp.asarray(scale), form)
    return _formed(
        x.data if sc.same_scale(x.scale, form.scale) else v.wide_at(x, form.scale),
        form.scale,
        form,
    )


def _formed(data: Any, scale: Any, form: Form) -> Value:
    if not form.wide:
        data = formats.saturating_cast(data, form.dtype)
    elif form.dtype.itemsize > 4:
        data = jnp.asarray(data, form.dtype)
    else:
        data = formats.as_float32(data)
    return v.value(data, scale, form.expected_rms, form.dtype, is_fill_value=form.wide)


def first_carry(x: Any, form: Form | None, scale: Any) -> Any:
    """Return a carry before the first iteration.

    Args:
        x: the initial value.
        form: its form.
        scale: the scale that the carry will have, used if the start must not set it.
    """
    if form is None or not _is_finite_start(form) or isinstance(x, Value):
        return to_form(x, form)
    scale = form.scale if form.scale is not None else jnp.asarray(scale, jnp.float32)
    return _formed(
        jnp.broadcast_to(_start(form.start, scale), np.shape(x)), scale, form
    )


def needs_scale(form: Form | None) -> bool:
    """Return whether `first_carry` reads its `scale`."""
    return form is not None and form.scale is None and _is_finite_start(form)


def _is_finite_start(form: Form) -> bool:
    return form.start is not None and math.isfinite(form.start)


def _start(constant: float | None, scale: Any) -> Any:
    """Return the data of a start constant."""
    if sc.is_static(scale):
        return jnp.float32(min(max(constant / scale, -_LARGEST_START), _LARGEST_START))
    return lax.clamp(
        np.float32(-_LARGEST_START),
        lax.div(np.float32(constant), scale),
        np.float32(_LARGEST_START),
    )


def next_carry(x: Any, form: Form | None, last: Any) -> Any:
    """Return a carry at the end of an iteration that began with `last`.

    A run-time scale is measured: expected sizes would multiply over the iterations.
    """
    if form is None or not isinstance(x, Value):
        return to_form(x, form)
    if form.scale is None:
        if form.start is None:
            x = v.rescaled_by_rms(x)
        else:
            x = _rescaled_beside(form.start, x, last)
    x = to_form(x, form)
    if _is_finite_start(form):
        return dataclasses.replace(x, data=_within(x.data))
    return x


def _within(data: Any) -> Any:
    """Return data clipped to the largest start value; infinities are preserved.

    At a small scale the start of a loop is clipped likewise.
    """
    clipped = lax.clamp(np.float32(-_LARGEST_START), data, np.float32(_LARGEST_START))
    return lax.select(lax.lt(lax.abs(data), np.float32(np.inf)), clipped, data)


def _rescaled_beside(start: float, x: Value, last: Value) -> Value:
    """Return `x` rescaled by its RMS, without elements near the loop's start value."""
    x = v.scalar_scale(x)
    limit: Any = np.float32(np.inf)
    if math.isfinite(start):
        # The start may have been clipped at its former scale.
        cut = sc.times(
            np.float32(_LARGEST_START / 2),
            sc.smallest(sc.as_number(sc.ratio(last.scale, x.scale)), 1.0),
        )
        limit = lax.min(
            lax.div(np.float32(abs(start) / 2), jnp.asarray(x.scale, jnp.float32)), cut
        )

    def rms(data: Any) -> Any:
        counted = lax.abs(data) < limit
        # Relative to the largest counted element, whose square may overflow FP32.
        peak = jnp.max(jnp.abs(data), initial=0.0, where=counted)
        share = jnp.where(counted, data, 0) / jnp.where(peak > 0, peak, 1)
        return peak * jnp.sqrt(
            jnp.sum(jnp.square(share)) / jnp.maximum(jnp.sum(counted), 1)
        )

    return v.rescaled_by(rms, x)


def chosen(which: Any, new: Any, old: Any) -> Any:
    """Return `new` where `which` (of leading axes) is true, else `old`.

    It is the carry of a batch of which some elements have ended.
    """
    if not isinstance(new, Value) and not isinstance(old, Value):
        new, old = (jnp.asarray(formats.materialise(x)) for x in (new, old))
        return lax.select(_over(which, new), new, old)
    (new_data, old_data), scale, rms, dtype = common(*v.scalar_scales((new, old)))
    wide = any(isinstance(x, Value) and x.is_fill_value for x in (new, old))
    return v.value(
        lax.select(_over(which, new_data), new_data, old_data),
        scale,
        rms,
        dtype,
        is_fill_value=wide,
    )


def _over(which: Any, x: Any) -> Any:
    return lax.broadcast_in_dim(which, x.shape, range(which.ndim))


def carry_forms(
    turn: Callable, init: Any, length: int | None
) -> tuple[list[Form | None], int]:
    """Return the loop-invariant forms of a carry, and the warm-up iterations.

    Two iterations tell how each part of the carry grows. More are taken while parts
    become scaled, or their scales dynamic, where one part is passed on to the next.

    Args:
        turn: returns the shapes of the carry after one iteration.
        init: the carry before the loop.
        length: the number of iterations; None if it is unknown.

    Returns:
        The form of each part, and the number of iterations after which all parts that
        become scaled are scaled.
    """
    history = [list(init)]
    while True:
        previous, out = history[-1], turn(history[-1])
        history.append(list(map(after, previous, out)))
        changed = any(
            _kind(x) != _kind(y) for x, y in zip(previous, history[-1], strict=True)
        )
        settled = all(
            _size(x) == _size(y) for x, y in zip(previous, history[-1], strict=True)
        )
        if not changed and (settled or len(history) > 2):
            scaled = [
                [isinstance(x, Value) for x in part]
                for part in zip(*history, strict=True)
            ]
            turns = max((part.index(True) for part in scaled if any(part)), default=0)
            parts = zip(*history, strict=True)
            return [_loop_form(part, length) for part in parts], turns


def coarse(x: Any) -> Any:
    """Return a value or form whose expected RMS is a power of two, mostly 1."""
    if not isinstance(x, (Value, Form)) or x.expected_rms == v.MEASURED:
        return x
    return dataclasses.replace(
        x,
        expected_rms=1.0
        if 0.5 <= x.expected_rms <= 2.0
        else pow2_round(x.expected_rms),
    )


def after(x: Any, y: Any) -> Any:
    """Return the part of the carry that enters the next iteration.

    It is `y`, except that plain parts and dynamic scales stay as in `x`.
    """
    if not isinstance(y, Value) or _kind(x) == "dynamic":
        return x
    return y


def _kind(x: Any) -> str:
    if not isinstance(x, Value):
        return "plain"
    if sc.is_static(x.scale):
        return "static"
    return "dynamic"


def _size(x: Any) -> float:
    """Return the expected RMS that is known while tracing.

    It is 0 where none is known: for zeros, and beside a dynamic scale.
    """
    if isinstance(x, Value):
        if sc.is_static(x.scale) and x.scale >= sc.OF_ZEROS:
            return x.size
        return 0.0
    if _is_any_scale(x):
        return 0.0
    return abs(v.uniform(x) or 1.0)


def _loop_form(part: Sequence[Any], length: int | None) -> Form | None:
    """Return the form of a part of the carry.

    `part` holds its value before the loop, and after each of the first iterations. The
    scale is static, in the middle of the range of sizes, if the data then stays within
    [1/16, 16]. Otherwise the scale is carried along.
    """
    first, last = next((x for x in part if isinstance(x, Value)), None), part[-1]
    if first is None:
        return None
    start = _start_of(part, length)
    wide = any(isinstance(x, Value) and x.is_fill_value for x in part) or (
        start is not None and math.isfinite(start)
    )
    if not sc.is_static(last.scale):
        return Form(
            None,
            last.expected_rms if last is part[0] else 1.0,
            first.dtype,
            start,
            wide,
        )
    # A start value says nothing about the sizes of later values.
    counted = [x for x in part if isinstance(x, Value)] if start is not None else part
    sizes = [_size(x) for x in counted]
    if not any(sizes):
        return Form(last.scale, last.expected_rms, first.dtype, start, wide)
    reached = _reached(sizes, length)
    if max(reached) > _FAR * min(reached):
        return Form(None, 1.0, first.dtype, start, wide)
    middle = math.sqrt(max(reached)) * math.sqrt(min(reached))
    if sc.is_static(first.scale) and 1 / 2 <= middle / first.scale <= 2:
        scale = first.scale
    else:
        scale = pow2_round(middle)
    return Form(scale, middle / scale, first.dtype, start, wide)


def _reached(sizes: Sequence[float], length: int | None) -> list[float]:
    return [*filter(None, sizes), _final_size(sizes, length)]


def _start_of(part: Sequence[Any], length: int | None) -> float | None:
    """Return the start constant of a part of the carry that must not set the scale.

    It is infinite, or far larger than the values after the first iterations. None: the
    part has no such constant.
    """
    constant = None if isinstance(part[0], Value) else v.uniform(part[0])
    if not constant or math.isnan(constant):
        return None
    last = part[-1]
    if math.isinf(constant):
        if not sc.is_static(last.scale):
            return constant
        return None
    if not sc.is_static(last.scale):
        if abs(constant) >= _SENTINEL:
            return constant
        return None
    sizes = [_size(x) for x in part if isinstance(x, Value)]
    if any(sizes) and abs(constant) > _FAR * max(_reached(sizes, length)):
        return constant
    return None


def _final_size(sizes: Sequence[float], length: int | None) -> float:
    """Return the expected RMS after all iterations of a loop.

    An iteration keeps a share `a` of the mean square and adds a constant, so its
    differences grow by the factor `a`. `a` is 1 where equal terms are added up, less
    where they decay, and the squared factor where the carry is multiplied. With
    `length` None the loop has any number of iterations.
    """
    *_, x, y, z = (0.0, 0.0, *(size**2 for size in sizes))
    rest = math.inf if length is None else length - len(sizes) + 1
    if len(sizes) < 2 or rest <= 0 or abs(z - y) <= 1e-6 * z:
        return sizes[-1]
    a = (z - y) / (y - x) if abs(y - x) > 1e-6 * y else 1.0
    if a <= 0:
        return sizes[-1]
    if abs(a - 1) < 1e-6:
        turns: float = rest
    elif a < 1:
        turns = a * (1 - a**rest) / (1 - a)
    else:
        turns = a * math.expm1(min(rest * math.log(a), 600.0)) / (a - 1)
    return math.sqrt(max(z + (z - y) * turns, 0.0))
