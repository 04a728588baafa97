"""What the turns of a loop, or the branches of a cond, have in common: the scale and
the format of each part.

A loop's carry has one structure for all turns. Its scale is static where that is known
to do for all of them; else a run-time scale is carried along, and measured in each
turn.

A carry may *start* at a constant that is only there to lose: the lowest number, for a
running maximum. Such a constant never sets a scale. It stands at that of what it is
compared with, as far as FP32 goes there, and its carry is kept in FP32 (a `guard`, see
`value`): in FP16 it might end up moderate beside small numbers.
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
from scalify_core.numerics import scales as sc
from scalify_core.numerics import storage
from scalify_core.numerics.formats import pow2_round

_FAR = 256.0  # sizes further apart than this do not share a static scale
# beside a run-time scale, a constant from here on is one to start at
_SENTINEL = 2.0**16
# The largest data of a constant to start at. Above it is room for what follows, such as
# differences of two.
_LOWEST = 2.0**120


@dataclasses.dataclass(frozen=True)
class Form:
    """What the alternatives of a branch, or the turns of a loop, have in common.

    Attributes:
        scale: None where it is dynamic.
        rho: the expected RMS of the data.
        dtype: the format.
        start: the constant that a loop starts at and that must not set its scale; None
            where there is none.
        wide: whether the data is FP32, for the sake of numbers that the format does not
            hold.
    """

    scale: float | None
    rho: float
    dtype: Any
    start: float | None = None
    wide: bool = False


def common_form(alternatives: tuple) -> Form | None:
    """For the branches of a cond. Zeros take any scale, other constants have their own,
    other plain arrays scale 1.

    Where the scales are far apart, each branch brings its own: at the largest, the
    others' data would underflow.
    """
    values = [x for x in alternatives if isinstance(x, Value)]
    if not values:
        return None
    dtype, wide = v.result_dtype(*values), any(x.guard for x in values)
    values += [
        v.lift(x, dtype)
        for x in alternatives
        if not isinstance(x, Value) and not _is_any_scale(x)
    ]
    if not sc.near([x.scale for x in values]):
        return Form(None, 1.0, dtype, wide=wide)
    return Form(
        max(x.scale for x in values), max(x.rho for x in values), dtype, wide=wide
    )


def wide_form(alternatives: Sequence[Any]) -> Form | None:
    """The form of branches and carries where scales are measured: FP32 at scale 1."""
    values = [x for x in alternatives if isinstance(x, Value)]
    if not values:
        return None
    dtype = v.result_dtype(*values)  # of 8 bits: FP16, which results of a turn have
    return Form(1.0, v.UNKNOWN, dtype, wide=True)


def wide_carry_forms(turn: Callable, init: Sequence[Any]) -> list[Form | None]:
    """As `carry_forms`, where scales are measured.

    A part is a value if it becomes one in some turn.
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
    """`x` at the scale and in the format of a form; with a dynamic scale, the one it
    has.
    """
    if form is None:
        return jnp.asarray(storage.materialise(x))
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
    data = (
        storage.as_float32(data)
        if form.wide
        else storage.saturating_cast(data, form.dtype)
    )
    return v.value(data, scale, form.rho, form.dtype, guard=form.wide)


def first_carry(x: Any, form: Form | None, scale: Any) -> Any:
    """A carry before the first turn; `scale`: what the carry will have, where its start
    must not set that.
    """
    if form is None or not _is_finite_start(form) or isinstance(x, Value):
        return to_form(x, form)
    scale = form.scale if form.scale is not None else jnp.asarray(scale, jnp.float32)
    return _formed(
        jnp.broadcast_to(_start(form.start, scale), np.shape(x)), scale, form
    )


def needs_scale(form: Form | None) -> bool:
    """Whether `first_carry` wants to be told a scale."""
    return form is not None and form.scale is None and _is_finite_start(form)


def _is_finite_start(form: Form) -> bool:
    return form.start is not None and math.isfinite(form.start)


def _start(constant: float | None, scale: Any) -> Any:
    """The data of a constant to start at."""
    if sc.is_static(scale):
        return jnp.float32(min(max(constant / scale, -_LOWEST), _LOWEST))
    return lax.clamp(
        np.float32(-_LOWEST), lax.div(np.float32(constant), scale), np.float32(_LOWEST)
    )


def next_carry(x: Any, form: Form | None, last: Any) -> Any:
    """A carry at the end of a turn, of which it was `last` at the beginning.

    A run-time scale is measured: what the rules expect would multiply up.
    """
    if form is None or not isinstance(x, Value):
        return to_form(x, form)
    if form.scale is None:
        x = (
            v.rescaled_by_rms(x)
            if form.start is None
            else _rescaled_beside(form.start, x, last)
        )
    x = to_form(x, form)
    return dataclasses.replace(x, data=_within(x.data)) if _is_finite_start(form) else x


def _within(data: Any) -> Any:
    """Numbers beyond the largest to start at become that, as at a small scale the start
    of a loop; infinities stay.
    """
    clipped = lax.clamp(np.float32(-_LOWEST), data, np.float32(_LOWEST))
    return lax.select(lax.lt(lax.abs(data), np.float32(np.inf)), clipped, data)


def _rescaled_beside(start: float, x: Value, last: Value) -> Value:
    """As `rescaled_by_rms`; elements that are still at the start of the loop, or as
    large, do not count.
    """
    x = v.scalar_scale(x)
    limit: Any = np.float32(np.inf)
    if math.isfinite(start):
        # The start may have been cut off at the scale it had.
        cut = sc.times(
            np.float32(_LOWEST / 2),
            sc.smallest(sc.as_number(sc.ratio(last.scale, x.scale)), 1.0),
        )
        limit = lax.min(
            lax.div(np.float32(abs(start) / 2), jnp.asarray(x.scale, jnp.float32)), cut
        )

    def rms(data: Any) -> Any:
        counted = lax.abs(data) < limit
        # Relative to the largest of them: next to a start it may be anything, and its
        # square beyond FP32.
        peak = jnp.max(jnp.abs(data), initial=0.0, where=counted)
        share = jnp.where(counted, data, 0) / jnp.where(peak > 0, peak, 1)
        return peak * jnp.sqrt(
            jnp.sum(jnp.square(share)) / jnp.maximum(jnp.sum(counted), 1)
        )

    return v.rescaled_by(rms, x)


def chosen(which: Any, new: Any, old: Any) -> Any:
    """`new` where `which` (of leading axes) is true, else `old`: a carry of which some
    elements have ended.
    """
    if not isinstance(new, Value) and not isinstance(old, Value):
        new, old = (jnp.asarray(storage.materialise(x)) for x in (new, old))
        return lax.select(_over(which, new), new, old)
    (new_data, old_data), scale, rho, dtype = common(*v.scalar_scales((new, old)))
    wide = any(isinstance(x, Value) and x.guard for x in (new, old))
    return v.value(
        lax.select(_over(which, new_data), new_data, old_data),
        scale,
        rho,
        dtype,
        guard=wide,
    )


def _over(which: Any, x: Any) -> Any:
    return lax.broadcast_in_dim(which, x.shape, range(which.ndim))


def carry_forms(
    turn: Callable, init: Any, length: int | None
) -> tuple[list[Form | None], int]:
    """The loop-invariant forms of a carry, and after how many turns each part that
    becomes scaled is so.

    `turn` gives the shapes of the carry after one turn of the loop. Two turns tell how
    each part of the carry grows; more are taken while parts become scaled, or scales
    dynamic, where one part is handed on to the next.
    """
    history = [list(init)]
    while True:
        before, out = history[-1], turn(history[-1])
        history.append(list(map(after, before, out)))
        changed = any(
            _kind(x) != _kind(y) for x, y in zip(before, history[-1], strict=True)
        )
        settled = all(
            _size(x) == _size(y) for x, y in zip(before, history[-1], strict=True)
        )
        if not changed and (settled or len(history) > 2):
            scaled = [
                [isinstance(x, Value) for x in part]
                for part in zip(*history, strict=True)
            ]
            turns = max((part.index(True) for part in scaled if any(part)), default=0)
            return [
                _loop_form(part, length) for part in zip(*history, strict=True)
            ], turns


def coarse(x: Any) -> Any:
    """A value or a form whose expected RMS is a power of two, and mostly 1."""
    if not isinstance(x, (Value, Form)) or x.rho == v.UNKNOWN:
        return x
    return dataclasses.replace(x, rho=1.0 if 0.5 <= x.rho <= 2.0 else pow2_round(x.rho))


def after(x: Any, y: Any) -> Any:
    """A part of the carry that goes into the next turn: `y`, but what is plain stays,
    and a dynamic scale, too.
    """
    return x if not isinstance(y, Value) or _kind(x) == "dynamic" else y


def _kind(x: Any) -> str:
    if not isinstance(x, Value):
        return "plain"
    return "static" if sc.is_static(x.scale) else "dynamic"


def _size(x: Any) -> float:
    """The expected RMS that is known while tracing; 0 where there is none: of zeros,
    and beside a dynamic scale.
    """
    if isinstance(x, Value):
        return x.size if sc.is_static(x.scale) and x.scale >= sc.OF_ZEROS else 0.0
    return 0.0 if _is_any_scale(x) else abs(v.uniform(x) or 1.0)


def _loop_form(part: Sequence[Any], length: int | None) -> Form | None:
    """The form of a part of the carry, of which `part` is what it was before, and after
    each of the first turns.

    A static scale in the middle of its way, if its data then stays within [1/16, 16];
    else the scale is carried along.
    """
    first, last = next((x for x in part if isinstance(x, Value)), None), part[-1]
    if first is None:
        return None
    start = _start_of(part, length)
    wide = any(isinstance(x, Value) and x.guard for x in part) or (
        start is not None and math.isfinite(start)
    )
    if not sc.is_static(last.scale):
        return Form(
            None, last.rho if last is part[0] else 1.0, first.dtype, start, wide
        )
    # What starts the loop tells nothing of what is compared with it.
    counted = [x for x in part if isinstance(x, Value)] if start is not None else part
    sizes = [_size(x) for x in counted]
    if not any(sizes):
        return Form(last.scale, last.rho, first.dtype, start, wide)
    reached = _reached(sizes, length)
    if max(reached) > _FAR * min(reached):
        return Form(None, 1.0, first.dtype, start, wide)
    middle = math.sqrt(max(reached)) * math.sqrt(min(reached))
    scale = (
        first.scale
        if sc.is_static(first.scale) and 1 / 2 <= middle / first.scale <= 2
        else pow2_round(middle)
    )
    return Form(scale, middle / scale, first.dtype, start, wide)


def _reached(sizes: Sequence[float], length: int | None) -> list[float]:
    return [*filter(None, sizes), _final_size(sizes, length)]


def _start_of(part: Sequence[Any], length: int | None) -> float | None:
    """The constant that a part of the carry starts at, if it is one that must not set
    the scale.

    One that was told nothing of the sizes of the turns after it: infinite, or far
    larger than all of them.
    """
    constant = None if isinstance(part[0], Value) else v.uniform(part[0])
    if not constant or math.isnan(constant):
        return None
    last = part[-1]
    if math.isinf(constant):
        return constant if not sc.is_static(last.scale) else None
    if not sc.is_static(last.scale):
        return constant if abs(constant) >= _SENTINEL else None
    sizes = [_size(x) for x in part if isinstance(x, Value)]
    return (
        constant
        if any(sizes) and abs(constant) > _FAR * max(_reached(sizes, length))
        else None
    )


def _final_size(sizes: Sequence[float], length: int | None) -> float:
    """The expected RMS after all turns of a loop; `length` None: after any number of
    turns.

    Of the mean square, a turn keeps a share `a` and adds a constant, so its differences
    grow by the factor `a`: 1 where equal terms are added up, less where they decay, the
    square of the factor where the carry is multiplied.
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
