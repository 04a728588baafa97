"""The common form of loop iterations, or of cond branches: scale and format.

A loop's carry has one structure for all iterations. Its scale is static where one scale
is known to suit all of them. Otherwise a run-time scale is carried along, and measured
in each iteration.

A carry may *start* at a constant that every element replaces, as the lowest number for
a running maximum. Such a constant never sets a scale. Its carry is kept in FP32
(`Value.is_fill_value`), at a static scale: FP16 might make it moderate beside small
numbers.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from scalify_core.interpreter import value as v
from scalify_core.interpreter.rules.elementwise import common, constant_at
from scalify_core.interpreter.value import Value
from scalify_core.numerics import formats
from scalify_core.numerics import scales as sc
from scalify_core.numerics.formats import pow2_round

# Sizes further apart than this do not share a static scale. At one halfway between, the
# data is within [1/16, 16], where E4M3 and E5M2 round as well as at 1.
_FAR = 256.0
# Beside a run-time scale, constants of at least this magnitude are start values: FP16's
# largest number, 65504, is below it, so no FP16 data at scale 1 has them.
_SENTINEL = 2.0**16


@dataclasses.dataclass(frozen=True)
class Form:
    """The common form of a branch's alternatives, or of a loop's iterations.

    Attributes:
        scale: None where it is dynamic.
        expected_rms: the expected RMS of the data.
        dtype: the format.
        wide: whether the data is FP32, for numbers that the format cannot represent.
    """

    scale: float | None
    expected_rms: float
    dtype: Any
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
        if not isinstance(x, Value) and not sc.has_any_scale(v.uniform(x))
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
    dtype = v.result_dtype(*values)  # FP8 counts as FP16: a body's results have that
    return Form(1.0, v.MEASURED, dtype, wide=True)


def wide_carry_forms(carry_after: Callable, init: Sequence[Any]) -> list[Form | None]:
    """Return the forms of a carry where scales are measured.

    A part is a value if it becomes one in some iteration.
    """
    carry = list(init)
    while True:
        out = carry_after(carry)
        grown = [
            i for i, x in enumerate(carry) if v.is_value(out[i]) and not v.is_value(x)
        ]
        # Only parts become values, and none plain again: at most one more look for each
        # part.
        if not grown:
            return [wide_form([x]) for x in carry]
        for i in grown:
            carry[i] = out[i]


def to_form(x: Any, form: Form | None) -> Any:
    """Return `x` at the scale and in the format of a form.

    A form with a dynamic scale leaves the scale of `x`.
    """
    if form is None:
        # A constant would be part of the structure, and the next iteration has another.
        return jnp.asarray(formats.materialize(x))
    if not isinstance(x, Value):
        if v.uniform(x) is not None and form.scale is not None:
            return _formed(
                constant_at(x, form.scale, form.dtype, not form.wide), form.scale, form
            )
        # A constant with a scale of its own: beside a run-time scale no other is known.
        x = v.lift(x, form.dtype)
    x = v.scalar_scale(x)
    if form.scale is None:
        # The carry is data and one number: a factor that is known while tracing has no
        # place in it.
        x = v.exact(x)
        return _formed(x.data, jnp.asarray(x.scale, jnp.float32), form)
    data = x.data
    if not sc.same_scale(x.scale, form.scale):
        data = v.data32_at(x, form.scale)
    return _formed(data, form.scale, form)


def _formed(data: Any, scale: Any, form: Form) -> Value:
    if not form.wide:
        data = formats.saturating_cast(data, form.dtype)
    elif form.dtype.itemsize > 4:
        # A program with x64 keeps the digits of an FP64 carry, if its scale is 1.
        data = jnp.asarray(data, form.dtype)
    else:
        data = formats.as_float32(data)
    return v.value(data, scale, form.expected_rms, form.dtype, is_fill_value=form.wide)


def next_carry(x: Any, form: Form | None) -> Any:
    """Return a carry at the end of an iteration.

    A run-time scale is measured: expected sizes would multiply over the iterations.
    """
    if form is not None and form.scale is None and isinstance(x, Value):
        # Of Muon's Newton-Schulz iteration, for one, the rules predict a cubic growth
        # that does not happen: its scales reached 2^126 after five iterations.
        x = v.rescaled_by_rms(x)
    return to_form(x, form)


def chosen(which: Any, new: Any, old: Any) -> Any:
    """Return `new` where `which` (of leading axes) is true, else `old`.

    It is the carry of a batch of which some elements have ended.
    """
    if not isinstance(new, Value) and not isinstance(old, Value):
        new, old = (jnp.asarray(formats.materialize(x)) for x in (new, old))
        return lax.select(_over(which, new), new, old)
    # One predicate for each element, and one scale for all: elements that have ended
    # must keep their values at the new scale.
    (new, old), like = common(*map(v.scalar_scale, (new, old)))
    return like.with_data(lax.select(_over(which, new), new, old))


def _over(which: Any, x: Any) -> Any:
    return lax.broadcast_in_dim(which, x.shape, range(which.ndim))


def carry_forms(
    carry_after: Callable, init: Any, length: int | None
) -> list[Form | None]:
    """Return the loop-invariant forms of a carry.

    Two iterations tell how each part of the carry grows. More are taken while parts
    become scaled, or their scales dynamic, where one part is passed on to the next.

    Args:
        carry_after: returns the shapes of the carry after one iteration.
        init: the carry before the loop.
        length: the number of iterations; None if it is unknown.
    """
    history = [list(init)]
    while True:
        previous, out = history[-1], carry_after(history[-1])
        history.append(list(map(_after, previous, out)))
        pairs = list(zip(previous, history[-1], strict=True))
        changed = any(_kind(x) != _kind(y) for x, y in pairs)
        settled = all(_size(x) == _size(y) for x, y in pairs)
        # Three sizes tell a factor from a term in `_final_size`.
        if not changed and (settled or len(history) > 2):
            parts = zip(*history, strict=True)
            return [_loop_form(part, length) for part in parts]


def _after(x: Any, y: Any) -> Any:
    """Return the part of the carry that enters the next iteration.

    It is `y`, except that plain parts and dynamic scales stay as in `x`.
    """
    # A dynamic scale is measured in each iteration, so one more tells nothing new.
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
        # Zeros that a loop adds to say nothing of the sum's size.
        if sc.is_static(x.scale) and x.scale >= sc.LEAST_NONZERO_SCALE:
            return x.size
        return 0.0
    if sc.has_any_scale(v.uniform(x)):
        return 0.0
    return abs(v.uniform(x) or 1.0)


def _loop_form(part: Sequence[Any], length: int | None) -> Form | None:
    """Return the form of a part of the carry.

    `part` holds its value before the loop, and after each of the first iterations. The
    scale is static, in the middle of the range of sizes, if the data then stays within
    [1/16, 16]. Otherwise the scale is carried along, or, beside a start constant, is 1.
    """
    values, last = [x for x in part if isinstance(x, Value)], part[-1]
    if not values:
        return None
    first, starts = values[0], _is_start(part, length)
    wide = starts or any(x.is_fill_value for x in values)
    # A start value says nothing about the sizes of later values.
    sizes, far_scale = list(map(_size, part)), None
    if starts:
        sizes, far_scale = list(map(_size, values)), 1.0
    if not sc.is_static(last.scale):
        # A part that the body hands on as it is keeps what is known of it; any other is
        # rescaled in each iteration, to an RMS of 1.
        rms = last.expected_rms if last is part[0] else 1.0
        return Form(far_scale, rms, first.dtype, wide)
    if not any(sizes):
        return Form(last.scale, last.expected_rms, first.dtype, wide)
    # Sizes are those of independent terms. Where they are near each other for all
    # iterations, a static scale saves the measurement in each of them.
    reached = _reached(sizes, length)
    if max(reached) > _FAR * min(reached):
        return Form(far_scale, 1.0, first.dtype, wide)
    # Not the root of the product, which may leave FP64.
    middle = math.sqrt(max(reached)) * math.sqrt(min(reached))
    scale = pow2_round(middle)
    # The scale of the start, if it serves: the start then enters the loop as it is.
    if sc.is_static(first.scale) and 1 / 2 <= middle / first.scale <= 2:
        scale = first.scale
    return Form(scale, middle / scale, first.dtype, wide)


def _reached(sizes: Sequence[float], length: int | None) -> list[float]:
    return [*filter(None, sizes), _final_size(sizes, length)]


def _is_start(part: Sequence[Any], length: int | None) -> bool:
    """Return whether a part of the carry starts at a constant that sets no scale.

    Beside a run-time scale that is a constant of at least `_SENTINEL`, infinities
    included. Beside static scales it is a finite constant far larger than the values
    after the first iterations: infinities are the same at every scale.
    """
    constant = v.uniform(part[0])
    if not constant or math.isnan(constant):
        return False
    if not sc.is_static(part[-1].scale):
        return abs(constant) >= _SENTINEL
    sizes = [_size(x) for x in part if isinstance(x, Value)]
    if math.isinf(constant) or not any(sizes):
        return False
    return abs(constant) > _FAR * max(_reached(sizes, length))


def _final_size(sizes: Sequence[float], length: int | None) -> float:
    """Return the expected RMS after all iterations of a loop.

    An iteration keeps a share `a` of the mean square and adds a constant, so its
    differences grow by the factor `a`. `a` is 1 where equal terms are added up, less
    where they decay, and the squared factor where the carry is multiplied. With
    `length` None the loop has any number of iterations.
    """
    # Squares: the mean squares of independent terms add up, their roots do not.
    *_, x, y, z = (0.0, 0.0, *(size**2 for size in sizes))
    rest = math.inf if length is None else length - len(sizes) + 1
    # A difference of a millionth is a rounding, as sizes of constants are those of FP32
    # numbers; a long loop would multiply it.
    if len(sizes) < 2 or rest <= 0 or abs(z - y) <= 1e-6 * z:
        return sizes[-1]
    a = (z - y) / (y - x) if abs(y - x) > 1e-6 * y else 1.0
    # It grew and shrank, so no factor describes it.
    if a <= 0:
        return sizes[-1]
    if abs(a - 1) < 1e-6:
        growth: float = rest
    else:
        # e^600 is within FP64, and far beyond every static scale.
        growth = a * math.expm1(min(rest * math.log(a), 600.0)) / (a - 1)
    return math.sqrt(max(z + (z - y) * growth, 0.0))
