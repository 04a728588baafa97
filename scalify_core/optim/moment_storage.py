"""Store the chosen fields of an optimizer's state narrow between steps.

Fields are widened, given scales, and narrowed again. `optim.scaled_state` describes the
effects and the reasons; here a state is a flat list of arrays, each with its plan.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core.array.scaled_array import (
    ScaledArray,
    data_of,
    is_scaled_array,
    value_of,
    with_scale,
)
from scalify_core.numerics import compiler_hints
from scalify_core.numerics.amax import largest_magnitudes, largest_of_rows
from scalify_core.numerics.formats import (
    FP16,
    FP32,
    FloatFormat,
    is_float,
    pow2_floor,
    pow2_inverse,
)
from scalify_core.numerics.scales import MIN_SCALE
from scalify_core.optim.weights import (
    LARGE,
    Rounding,
    check_rounding,
    round_to,
    words_of,
)

# The least widened second moment: times any usual decay it is a normal FP32 number.
_SQUARE_FLOOR = 2.0**-120


# How the largest magnitude of each array is found, FP32 [number of arrays]: arrays that
# are split over devices move their maxima alone. Arguments: groups of arrays, each the
# moments of one parameter, and the parameters' paths.
AmaxFn = Callable[[Sequence[Sequence[jax.Array]], Sequence[tuple]], jax.Array]


def largest_of_arrays(
    groups: Sequence[Sequence[jax.Array]], paths: Sequence[tuple]
) -> jax.Array:
    """Return the largest magnitudes of arrays that are whole on each device."""
    return largest_magnitudes(groups)


@dataclasses.dataclass(frozen=True)
class Stored:
    """The storage of an optimizer state's field between steps.

    Attributes:
        format: the format of the data; one with a native dtype.
        sqrt: whether to store the square root, for nonnegative fields: second moments.
        rounding: to "nearest" (ties to even), or "stochastic": to one of the two
            neighbors such that the expectation of the stored number is exact. To
            nearest, an average stops moving where a step changes it by less than half
            an ulp. With its root in E5M2 and a decay of 0.95, a second moment stops at
            a quarter of its value when it grows, and never falls. (An exact expectation
            of the square has been tried: the second moment is then exact on average,
            but the steps, which go with 1/root, are twice as far off.)
        relative_to: store the quotient of the field and the root of this other field of
            the same state (as stored): "nu", for a first moment. In Adam it is at most
            (1-b1) / sqrt((1-b2)(1-b1^2/b2)), 1.2 at (0.9, 0.95) and 7.3 at (0.9,
            0.999), however small the gradients of a row are beside those of others.
        largest_quotient: of a relative field, which saturates beyond it; its scale is
            then a constant. None: its scale is measured, for optimizers whose `mu` has
            other units than the root of `nu` (Adamax, ADOPT); an array without such a
            partner (Muon's) is stored by itself.
    """

    format: FloatFormat
    sqrt: bool = False
    rounding: Rounding = "stochastic"
    relative_to: str | None = None
    # Above Adam's quotients and roundings; 448 / 16, so E4M3's scale is exactly 2^-4.
    largest_quotient: float | None = 28.0

    def __post_init__(self) -> None:
        """Raise ValueError for a format that cannot be stored or an unknown
        rounding.
        """
        check_rounding(self.rounding)
        if self.format.dtype is None:
            raise ValueError(
                f"Stored: {self.format} has no native dtype to store it in"
            )


def stored_fields(
    mu: Any, nu: Any, fields: Mapping[str, Stored] | None
) -> dict[str, Stored]:
    """Return the storage of each field, by name; for the arguments see `scaled_state`.

    Raises:
        ValueError: a field is given twice, or is relative to a relative one.
        TypeError: a field's storage is not a `Stored`.
    """
    stored = dict(fields or {})
    for name, how in stored.items():
        if not isinstance(how, Stored):
            raise TypeError(
                f"scaled_state: fields[{name!r}] is {how!r}, expected a Stored, such as"
                " Stored(FP16)"
            )
    for name, given in (("nu", nu), ("mu", mu)):
        fmt = given if isinstance(given, FloatFormat) else FloatFormat.of(given)
        # FP32 is the optimizer's own form: no scale, and no square root that would
        # change its bits.
        if fmt is FP32:
            continue
        if name in stored:
            raise ValueError(
                f"scaled_state: {name} is given twice, as {name}={fmt} and in fields"
            )
        # Stochastic, also in FP16: to nearest, at b2 = 0.999, steps are 1.8% too large,
        # in E5M2 3.8 times as large.
        stored[name] = Stored(fmt, sqrt=name == "nu")
        # A first moment forgets in ten steps: to nearest, its error in FP16 stays below
        # 0.5%, without random bits.
        if name == "mu" and fmt.mantissa_bits >= 10:
            stored[name] = Stored(fmt, rounding="nearest")
        # By the amax an embedding's first moment is 9% off in E4M3, or 21% with rows by
        # Zipf's law; the quotient is 3.5 and 7.8%. Not at a constant scale: ADOPT and
        # NovoGrad have other units.
        if name == "mu" and fmt.mantissa_bits <= 3 and "nu" in stored:
            stored[name] = Stored(fmt, relative_to="nu", largest_quotient=None)
    for name, how in stored.items():
        other = stored.get(how.relative_to or "")
        if other is not None and other.relative_to is not None:
            raise ValueError(
                f"scaled_state: {name} is relative to {how.relative_to}, which is"
                " relative itself"
            )
    return stored


class Plan(NamedTuple):
    """The storage of one array of a state.

    Attributes:
        how: None: unchanged.
        other: the index of the array that it is relative to.
        parameter: its path without the name of the field, which is equal for all
            moments of one parameter.
    """

    how: Stored | None
    other: int | None
    parameter: Any


def flatten(
    state: Any, stored: Mapping[str, Stored]
) -> tuple[list[Any], list[Plan], Any]:
    """Return the arrays of a state, their plans, and the structure.

    Raises:
        ValueError: a field of `stored`, or one that it is relative to, has no float
            array in this state.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_scaled_array)
    places = {path: i for i, (path, x) in enumerate(flat) if is_float(x)}
    plans, missing = [], set(stored)
    for path, _ in flat:
        field = next(
            (
                key
                for key in path
                if isinstance(key, jax.tree_util.GetAttrKey) and key.name in stored
            ),
            None,
        )
        if field is None or path not in places:
            plans.append(Plan(None, None, None))
            continue
        how, other = stored[field.name], None
        missing.discard(field.name)
        if how.relative_to is not None:
            partner = jax.tree_util.GetAttrKey(how.relative_to)
            # The same path with the other field: `mu` and `nu` have one tree.
            other = places.get(tuple(partner if key is field else key for key in path))
            # Muon's moment has no partner; at a measured scale it is stored by itself.
            if other is None and how.largest_quotient is not None:
                missing.add(how.relative_to)
        plans.append(Plan(how, other, tuple(key for key in path if key is not field)))
    if missing:
        # A scalar saves no memory, and a sum in it would lose terms in a narrow format.
        arrays = [path for path, i in places.items() if flat[i][1].shape]
        attributes = [
            [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
            for path in arrays
        ]
        has = sorted({names[-1] for names in attributes if names})
        raise ValueError(
            f"scaled_state: the state has no float array in a field {min(missing)!r};"
            f" it has some in {has}, which fields= stores"
        )
    return [x for _, x in flat], plans, treedef


def widen(arrays: list[Any], plans: list[Plan]) -> list[Any]:
    """Return the arrays of a state in FP32, with their meaning for the optimizer."""
    values = list(map(value_of, arrays))
    # The maximum also catches squares that underflow FP32.
    values = [
        jnp.maximum(jnp.square(x), _SQUARE_FLOOR) if how and how.sqrt else x
        for x, (how, *_) in zip(values, plans, strict=True)
    ]
    # After the squares: a quotient was taken of the root as it is stored.
    return [
        x if i is None else x * _divisor(values[i])
        for x, (_, i, _) in zip(values, plans, strict=True)
    ]


def _divisor(square: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.maximum(square, _SQUARE_FLOOR))


def recompute_barrier(tree: Any, scales: Any) -> tuple[Any, Any]:
    """Return both arguments behind a compiler barrier.

    Later computations run after both, and are not merged with earlier equal ones. The
    scales in the tree are not held: each part of an array would become an array.
    """
    flat, treedef = jax.tree.flatten(tree, is_leaf=is_scaled_array)
    # New moments would be held in FP32 until their scales are known: 3.75 FP32 tensors
    # at the peak.
    data, scales = compiler_hints.barrier((list(map(data_of, flat)), scales))
    barred = [
        with_scale(d, x.scale) if is_scaled_array(x) else d
        for d, x in zip(data, flat, strict=True)
    ]
    return jax.tree.unflatten(treedef, barred), scales


class StorageScales(NamedTuple):
    """The scales at which arrays are stored.

    Attributes:
        numbers: FP32, the scales of all arrays one after the other.
        places: by an array's number in the state, the place of its scale, or of the
            scales of a stack's rows.
    """

    numbers: jax.Array
    places: dict[int, int | slice]

    def of(self, leaf: int, like: Any) -> jax.Array:
        """Return the scale of an array like this one, a scalar; `[n, 1, ...]` for a
        stack.
        """
        place = self.places[leaf]
        if isinstance(place, slice):
            return self.numbers[place].reshape(-1, *[1] * (like.ndim - 1))
        return self.numbers[place]


def new_scales(
    new: list[Any],
    plans: list[Plan],
    old: list[Any],
    accept: Any = None,
    largest_of: AmaxFn = largest_of_arrays,
) -> StorageScales:
    """Return the scales at which new values are stored.

    An array without a positive finite magnitude keeps its old scale. Where `accept` is
    given and false, all arrays do. An array whose old scale is not a scalar is a stack.
    """
    new, is_stack = list(new), [np.ndim(scale) > 0 for scale in old]
    alone: dict[Any, list[int]] = {}
    stacks: dict[Any, list[int]] = {}
    constants: dict[int, float] = {}
    for leaf, (how, other, parameter) in enumerate(plans):
        if how is None:
            continue
        if other is not None and how.largest_quotient is not None:
            constants[leaf] = pow2_floor(how.largest_quotient / _top(how))
            continue
        if other is not None:
            # The divisor as it is stored, in two bits, may be smaller by a fifth.
            new[leaf] = 1.25 * new[leaf] / _divisor(new[other])
        # By parameter: both moments are computed from one gradient, which one kernel
        # then reads once.
        groups = stacks if is_stack[leaf] else alone
        groups.setdefault((parameter, new[leaf].shape), []).append(leaf)
    measured = list(itertools.chain(*alone.values(), *stacks.values()))
    rows = {
        leaf: len(new[leaf]) if is_stack[leaf] else 1
        for leaf in (*measured, *constants)
    }
    parts: list[Any] = []
    if measured:
        how_stored: list[Any] = [
            plans[leaf].how for leaf in measured for _ in range(rows[leaf])
        ]
        is_root = np.array([how.sqrt for how in how_stored])
        top = np.array([_top(how) for how in how_stored], np.float32)
        # All at once: hundreds of scalars would be as many operations, in one kernel
        # that takes long to compile.
        peaks = [
            largest_of(
                [[new[leaf] for leaf in group] for group in alone.values()],
                [parameter for parameter, _ in alone],
            )
        ]
        for group in stacks.values():
            peaks += largest_of_rows([new[leaf] for leaf in group])
        largest = jnp.concatenate(peaks)
        # The root of the maximum: the maximum of roots would take a root for each
        # element.
        largest = jnp.where(is_root, _square_root(largest), largest)
        # An infinity would set the scale, and zeros would bring the smallest one.
        is_new = jnp.isfinite(largest) & (largest > 0)
        if accept is not None:
            is_new = is_new & accept
        # The largest magnitude goes into [top/2, top): pow2_floor(y) > y/2.
        previous = jnp.concatenate([jnp.ravel(old[leaf]) for leaf in measured])
        parts.append(jnp.where(is_new, pow2_floor(largest * (2 / top)), previous))
    if constants:  # In a shard_map over CPUs, XLA ends the process at an empty part.
        numbers = np.array(list(constants.values()), np.float32)
        parts.append(np.repeat(numbers, [rows[leaf] for leaf in constants]))
    places: dict[int, int | slice] = {}
    end = 0
    for leaf, count in rows.items():
        places[leaf] = slice(end, end + count) if is_stack[leaf] else end
        end += count
    return StorageScales(jnp.concatenate(parts) if parts else jnp.zeros(0), places)


def _top(how: Stored) -> float:
    """Return the largest stored number; BF16 data is stored like FP16 data."""
    # At BF16's own maximum, the scales of most moments would be below 2^-126.
    return min(how.format.max, FP16.max)


def _square_root(x: jax.Array) -> jax.Array:
    # Negative numbers, the least aside, become NaN: a zero would pass unseen.
    return jnp.where(jnp.abs(x) <= _SQUARE_FLOOR, 0.0, jnp.sqrt(x))


def narrow_arrays(
    new: list[Any],
    plans: list[Plan],
    scales: StorageScales,
    seed: int,
    step: Any,
    restore_rejected: Callable[[int, Any], Any] = lambda leaf, x: x,
    numbers: Sequence[Any] | None = None,
) -> list[Any]:
    """Return the arrays of a state in storage form.

    Args:
        new: their FP32 values.
        plans: their storage.
        scales: their scales.
        seed, step: of the stochastic rounding.
        restore_rejected: takes an array's number and its new storage form, and returns
            the array to store, with the old values of an update that is not accepted.
        numbers: tell the random bits of arrays apart, see `weights.words_of`; None: 0,
            1, ...
    """
    fresh, stored = list(new), list(scales.places)
    array_numbers = list(range(len(new))) if numbers is None else numbers
    # A stack, however large, is many small arrays for the compiler.
    is_large = [
        x.size >= LARGE and np.ndim(n) == 0
        for x, n in zip(new, array_numbers, strict=True)
    ]
    words = words_of(seed, step, array_numbers, is_large)
    # All at once: one by one, some would be a kernel each.
    inverses = scales._replace(numbers=pow2_inverse(scales.numbers))
    inverse = {leaf: inverses.of(leaf, new[leaf]) for leaf in stored}
    large = [leaf for leaf in stored if is_large[leaf] and inverse[leaf].ndim == 0]
    separate = compiler_hints.separate_scalars([inverse[leaf] for leaf in large])
    inverse |= zip(large, separate, strict=True)

    def narrow(leaf: int) -> ScaledArray:
        how, other, _ = plans[leaf]
        assert how is not None
        x = _square_root(new[leaf]) if how.sqrt else new[leaf]
        if other is not None:
            # By the root as it is stored: `widen` multiplies by that one.
            x = x / _divisor(widen([fresh[other]], [plans[other]])[0])
        data = x * inverse[leaf]
        if how.sqrt:
            # Devices may flush FP32 subnormals to zero.
            smallest = max(how.format.min_subnormal, FP32.min_normal)
            data = jnp.where(x > 0, jnp.maximum(data, smallest), data)
        return with_scale(
            round_to(data, how.format, how.rounding, words[leaf]), scales.of(leaf, x)
        )

    groups: dict[Any, list[int]] = {}
    for leaf in sorted(stored):
        groups.setdefault(plans[leaf].parameter, []).append(leaf)
    out = [
        x if plan.how else restore_rejected(leaf, x)
        for leaf, (x, plan) in enumerate(zip(new, plans, strict=True))
    ]
    previous = list[int]()
    for group in groups.values():
        if any(is_large[leaf] for leaf in group):
            # One parameter after the other: equal code for many would be merged into
            # kernels that spill to memory.
            finished, inverses_of_group = recompute_barrier(
                [out[i] for i in previous], [inverse[i] for i in group]
            )
            for i, x in zip(previous, finished, strict=True):
                out[i] = x
            inverse |= zip(group, inverses_of_group, strict=True)
            previous = group
        # The root is stored first: the quotient is taken of what later steps read.
        for i in sorted(group, key=lambda i: plans[i].other is not None):
            fresh[i] = narrow(i)
            out[i] = restore_rejected(i, fresh[i])
    return out


def narrow_first_arrays(new: list[Any], plans: list[Plan]) -> list[Any]:
    """Return the arrays of a first state in storage form, rounded to nearest.

    Each array is computed apart from those of other parameters, so that one program
    serves all arrays that are equal in shape and plan.
    """
    out = []
    for x, (how, other, _) in zip(new, plans, strict=True):
        if how is None:
            out.append(x)
        elif other is None:
            # Without the parameter's path: the plan is static, and a path would compile
            # a program for each leaf.
            out.append(_narrow_first([x], (Plan(how, None, None),)))
        else:
            pair = Plan(how, 1, None), plans[other]._replace(parameter=None)
            out.append(_narrow_first([x, new[other]], pair))
    return out


@functools.partial(jax.jit, static_argnums=1)
def _narrow_first(new: list[jax.Array], plans: tuple[Plan, ...]) -> Any:
    """Return the first array in storage form; another is one that it is relative to."""
    # The compiler would fold statistics of constants, for minutes.
    one = compiler_hints.barrier(jnp.float32(1))
    new = [
        x if plan.how is None else x * one.astype(x.dtype)
        for x, plan in zip(new, plans, strict=True)
    ]
    # An array of zeros keeps this scale, as in `as_scaled_array`.
    scales = new_scales(new, list(plans), [jnp.float32(MIN_SCALE)] * len(new))
    # First states are constants: nothing random is needed, and programs are smaller.
    to_nearest = [
        Plan(how and dataclasses.replace(how, rounding="nearest"), other, None)
        for how, other, _ in plans
    ]
    return narrow_arrays(new, to_nearest, scales, 0, jnp.zeros((), jnp.int32))[0]
