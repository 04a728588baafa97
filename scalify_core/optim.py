"""Optax optimisers whose state is stored narrow.

    tx = optim.scaled_state(optax.adamw(1e-3, b2=0.95), mu=E4M3, nu=E5M2, seed=0)
    params = weights.scaled_params(params, jnp.float16)
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, number, batch):
        grads = ...                                                   # plain or ScaledArrays, any float dtype
        updates, state = tx.update(grads, state, params)              # FP32
        return weights.apply_updates(params, updates, rounding="stochastic", seed=0, step=number), state

Between steps the chosen fields of the state are ScaledArrays: narrow data and one power-of-two scale. In a step they
are widened to FP32, the optimiser computes in FP32, and the new values are narrowed again. Compiled for a GPU, all of
it fuses to a pass for the scales and one that stores, parameter by parameter. What is particular about it:

- **The scale comes from the largest magnitude**, which then lies in the upper octave of the format. Moments reach far
  down (rows of an embedding that are seldom seen), not up, and nothing saturates. A maximum does not depend on the
  order of reduction either: the state is bitwise the same on any sharding.
- **A first moment in FP8 is stored relative to the root of the second**, a quotient near 1 for rows of any frequency:
  E4M3 has normal numbers over 15 octaves only. Its scale is a constant.
- **A second moment is stored as its square root**, which spans half the octaves. A positive one is never stored as
  zero, or a first moment that survives would be divided by epsilon alone. One that is zero is widened to 2^-120, so
  that a row never seen gives 0/2^-60, not 0/0, even without an epsilon.
- **Random bits are a hash** of seed, step, leaf and element (`formats.counter_bits`), so nothing else is to be saved.

The plain route, as in the Scalify paper (arXiv 2407.17353), is `propagated_state`: the optimiser itself under
`scalify`, in FP16 data. It rounds to nearest, stores the second moment as it is, and lets the rules choose scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from scalify_core import lowering
from scalify_core.array import ScaledArray, as_scaled_array, is_scaled_array, trusted
from scalify_core.formats import FP16, FP32, FloatFormat, counter_words, pow2_floor, pow2_inverse
from scalify_core.reductions import largest_magnitudes
from scalify_core.rescale import dynamic_rescale_rms
from scalify_core.scales import MIN_SCALE
from scalify_core.transform import scalify
from scalify_core.tree import map_arrays
from scalify_core.weights import LARGE, Rounding, check_rounding, round_to, wide

_SQUARE_FLOOR = 2.0**-120  # of widened second moments: times any usual decay it is still a normal FP32 number
_QUOTIENT_TOP = 28.0  # in E4M3, at scale 2^-4: as far above what Adam reaches as its rounding can need


# Of groups of arrays, the moments of one parameter of one shape, and the paths of their parameters in the state: the
# largest magnitude of each array, FP32 [number of arrays].
Largest = Callable[[Sequence[Sequence[jax.Array]], Sequence[tuple]], jax.Array]


def largest_of_arrays(groups: Sequence[Sequence[jax.Array]], paths: Sequence[tuple]) -> jax.Array:
    """The `Largest` of arrays that are whole on each device."""
    return largest_magnitudes(groups)


@dataclasses.dataclass(frozen=True)
class Stored:
    """How a field of an optimiser's state is stored between steps.

    Attributes:
        format: of the data; one with a native dtype.
        sqrt: store the square root. For fields that are not negative: second moments.
        rounding: to "nearest" (ties to even), or "stochastic": to one of the two neighbours such that the expectation
            of what is stored is exact. (Rounding a root so that its square's is exact has been tried: the second
            moment is then exact on average, but the steps, which go with 1/root, are twice as far off.) To nearest,
            an average stops moving where a step changes it by less than half an ulp: a second moment with its root in
            E5M2 and a decay of 0.95 at a quarter of its value when it grows, and it never falls.
        relative_to: store the quotient of the field and the root of this other field of the same state (as stored):
            "nu", for a first moment. In Adam it is at most (1-b1) / sqrt((1-b2)(1-b1^2/b2)), 1.2 at (0.9, 0.95) and
            7.3 at (0.9, 0.999), however small the gradients of a row are beside those of others; saturates at 28.
    """

    format: FloatFormat
    sqrt: bool = False
    rounding: Rounding = "stochastic"
    relative_to: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a format that cannot be stored or an unknown rounding."""
        check_rounding(self.rounding)
        if self.format.dtype is None:
            raise ValueError(f"Stored: {self.format} has no native dtype to store it in")


class ScaledStateState(NamedTuple):
    """State of `scaled_state`."""

    step: jax.Array  # shape=(), dtype=int32: updates made, a counter of the random bits
    inner_state: Any  # of the wrapped transformation, the arrays of the stored fields being ScaledArrays


def scaled_state(
    tx: optax.GradientTransformation,
    *,
    mu: FloatFormat | Any = FP32,
    nu: FloatFormat | Any = FP32,
    rounding: Literal["auto"] | Rounding = "auto",
    fields: Mapping[str, Stored] | None = None,
    seed: int,
) -> optax.GradientTransformationExtraArgs:
    """`tx` with the named fields of its state stored narrow, and everything computed in FP32.

    Args:
        tx: any transformation; its states are searched for fields at every depth (chain, masked, inject_hyperparams).
        mu: the format (or dtype) of the fields called `mu`, first moments. FP32: they are left alone. In FP8, with a
            narrow `nu` beside it, it is stored relative to that.
        nu: the format of the fields called `nu`, second moments, stored as square roots. FP32: they are left alone.
        rounding: of `mu` and `nu`. "auto": stochastic, but to nearest for a `mu` of ten mantissa bits or more (FP16):
            what that loses is at most epsilon/2/(1-b1), 0.5% at b1 = 0.9.
        fields: how other fields are stored ("trace" of momentum, "v_row" of Adafactor), by name; or `mu` and `nu`,
            for all that `Stored` can say.
        seed: of the stochastic rounding; with the step in the state it determines every bit.

    `update` takes `accept`, a boolean scalar: where it is false, the new state is the old one, at no cost of its own
    (the old values are read in any case). It takes `largest_of`, a `Largest`: where arrays are split over devices,
    one by which nothing but the maxima moves between them. Other keyword arguments are handed on to `tx`.

    Gradients and parameters may be given as plain arrays or ScaledArrays of any float dtype; the transformation gets
    FP32, and updates are plain FP32 arrays. A tensor with infinities or NaNs keeps its scale and stays not finite: it
    is the caller who puts the old state back. Scales are FP32 scalars, each a buffer of its own (they can be donated).

    Raises:
        ValueError: from `init`, where the state has no array in a field of a given name; also a field given twice, a
            format without a native dtype, an unknown rounding.
    """
    stored = _stored_fields(mu, nu, rounding, fields or {})
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> ScaledStateState:
        def narrow(params: Any) -> ScaledStateState:
            new, plans, treedef = _flatten(tx.init(wide(params)), stored)
            # Of constants, the compiler would compute statistics and roundings itself, for minutes.
            one = lowering.held("not_folded", jnp.float32(1))
            new = [x if plan.how is None else x * one.astype(x.dtype) for x, plan in zip(new, plans, strict=True)]
            like = jnp.float32(MIN_SCALE)  # of zeros, as in as_scaled_array
            scales = _scales(new, plans, [like] * len(new))
            # To nearest: first states are constants, and the program is much smaller.
            plans = [
                plan._replace(how=plan.how and dataclasses.replace(plan.how, rounding="nearest")) for plan in plans
            ]
            step = jnp.zeros((), jnp.int32)
            return ScaledStateState(step, treedef.unflatten(_narrow(new, plans, scales, seed, step)))

        # Compiled, the FP32 state that `tx.init` makes is never allocated.
        return jax.jit(narrow)(params)

    def update(
        updates: Any,
        state: ScaledStateState,
        params: Any = None,
        *,
        accept: Any = None,
        largest_of: Largest = largest_of_arrays,
        **extra: Any,
    ) -> tuple[Any, ScaledStateState]:
        def advance(updates: Any, inner_state: Any) -> tuple[Any, list[Any], Any]:
            arrays, plans, treedef = _flatten(inner_state, stored)
            moments = treedef.unflatten(_widen(arrays, plans))
            updates, inner_state = tx.update(wide(updates), moments, wide(params), **extra)
            new, _, treedef = _flatten(inner_state, stored)
            return updates, new, treedef

        if not stored:
            updates, inner_state = tx.update(wide(updates), state.inner_state, wide(params), **extra)
            return updates, _unless(accept, ScaledStateState(state.step + 1, inner_state), state)
        old, plans, _ = _flatten(state.inner_state, stored)
        first, new, _ = advance(updates, state.inner_state)
        kept = [x.scale if plan.how else None for x, plan in zip(old, plans, strict=True)]
        scales = _scales(new, plans, kept, accept, largest_of)
        # Computed again once the scales are known: the compiler would hold the new moments in FP32 in between. Of the
        # first time only what the scales depend on is compiled, and the updates of small arrays: the moments of many
        # are stored by one kernel, and what still read the old ones then would read a copy of each. Small gradients
        # are not held: their casts, of which each would be a kernel, become part of what reads them.
        small = {i: x for i, x in enumerate(jax.tree.leaves(first)) if x.size < LARGE}
        gradients, form = jax.tree.flatten(updates, is_leaf=is_scaled_array)
        large = {i: x for i, x in enumerate(gradients) if x.size >= LARGE}
        (large, inner_state, small), scales = _held((large, state.inner_state, small), scales)
        updates, new, treedef = advance(jax.tree.unflatten(form, _with(gradients, large)), inner_state)
        found, form = jax.tree.flatten(updates)
        updates = jax.tree.unflatten(form, _with(found, small))
        old, step = _flatten(inner_state, stored)[0], state.step + 1

        def keep(leaf: int, x: Any) -> Any:
            if plans[leaf].how is None:
                return _unless(accept, x, old[leaf])
            return ScaledArray(_unless(accept, x.data, old[leaf].data), x.scale)

        arrays = _narrow(new, plans, scales, seed, step, keep)
        return updates, ScaledStateState(_unless(accept, step, state.step), treedef.unflatten(arrays))

    return optax.GradientTransformationExtraArgs(init, update)


def propagated_state(
    tx: optax.GradientTransformation, *, fields: Mapping[str, FloatFormat], compute: Any = jnp.float16
) -> optax.GradientTransformationExtraArgs:
    """`tx` itself under `scalify`: gradients, parameters and state enter as scaled arrays with `compute` data.

    What the rules make of its arithmetic is the update, in `compute` data too. The new state gets the scale of its RMS
    each time, since the rules' caution would add up over the steps, and each of its fields the format of `fields`,
    rounded to nearest. Compare with `scaled_state`, whose state this one's has the form of.

    Args:
        tx: any transformation.
        fields: formats with a native dtype, by the names of the state's fields; others stay in `compute` data.
        compute: a float dtype.

    Raises:
        ValueError: from `init`, where the state has no array in a field of a given name; also a format without a
            native dtype.
    """
    stored = {name: Stored(fmt, rounding="nearest") for name, fmt in fields.items()}
    tx = optax.with_extra_args_support(tx)

    def in_compute(tree: Any) -> Any:
        scaled = as_scaled_array(tree, dtype=compute)
        return map_arrays(lambda x: x.astype(compute) if is_scaled_array(x) else x, scaled)

    def store(state: Any) -> Any:
        flat, plans, treedef = _flatten(state, stored)
        return treedef.unflatten(
            [x.astype(plan.how.format.dtype) if plan.how else x for x, plan in zip(flat, plans, strict=True)]
        )

    def init(params: Any) -> ScaledStateState:
        return ScaledStateState(jnp.zeros((), jnp.int32), store(in_compute(jax.jit(tx.init)(wide(params)))))

    def update(
        updates: Any,
        state: ScaledStateState,
        params: Any = None,
        *,
        accept: Any = None,
        grad_norm: Any = None,
        largest_of: Any = None,
        **extra: Any,
    ) -> tuple[Any, ScaledStateState]:
        del grad_norm  # a plain number: here the norm has a scale, too
        del largest_of  # scales come from the RMS

        def advance(updates: Any, inner_state: Any, params: Any) -> tuple[Any, Any]:
            updates, inner_state = tx.update(updates, inner_state, params, **extra)
            return updates, jax.tree.map(
                lambda x: dynamic_rescale_rms(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, inner_state
            )

        inner_state = in_compute(state.inner_state)
        updates, inner_state = scalify(advance, scales="static")(in_compute(updates), inner_state, in_compute(params))
        return updates, _unless(accept, ScaledStateState(state.step + 1, store(inner_state)), state)

    return optax.GradientTransformationExtraArgs(init, update)


def wide_state(state: ScaledStateState, **settings: Any) -> ScaledStateState:
    """A state with all its moments in FP32 and with their own meaning, as the optimiser would have it unstored.

    `settings`: `mu`, `nu`, `rounding` and `fields`, as `scaled_state` was given them.
    """
    arrays, plans, treedef = _flatten(state.inner_state, _stored_fields(**_DEFAULTS | settings))
    return ScaledStateState(state.step, treedef.unflatten(_widen(arrays, plans)))


def narrow_state(state: ScaledStateState, *, seed: int, **settings: Any) -> ScaledStateState:
    """The inverse of `wide_state`, for these settings: a state can so go on in other formats. Rounds once."""
    new, plans, treedef = _flatten(state.inner_state, _stored_fields(**_DEFAULTS | settings))
    scales = _scales(new, plans, [jnp.float32(MIN_SCALE)] * len(new))
    return ScaledStateState(state.step, treedef.unflatten(_narrow(new, plans, scales, seed, state.step)))


_DEFAULTS: dict[str, Any] = {"mu": FP32, "nu": FP32, "rounding": "auto", "fields": {}}


def _stored_fields(
    mu: Any, nu: Any, rounding: Literal["auto"] | Rounding, fields: Mapping[str, Stored]
) -> dict[str, Stored]:
    stored = dict(fields)
    for name, given, sqrt in (("mu", mu, False), ("nu", nu, True)):
        fmt = given if isinstance(given, FloatFormat) else FloatFormat.of(given)
        if fmt is FP32:
            continue
        if name in stored:
            raise ValueError(f"scaled_state: {name} is given twice, as {name}={fmt} and in fields")
        precise = fmt.mantissa_bits >= 10 and not sqrt
        automatic: Rounding = "nearest" if precise else "stochastic"
        stored[name] = Stored(fmt, sqrt, automatic if rounding == "auto" else rounding)
    if "mu" in stored and "nu" in stored and "mu" not in fields and stored["mu"].format.mantissa_bits <= 3:
        stored["mu"] = dataclasses.replace(stored["mu"], relative_to="nu")
    for name, how in stored.items():
        if how.relative_to in stored and stored[how.relative_to].relative_to is not None:
            raise ValueError(f"scaled_state: {name} is relative to {how.relative_to}, which is relative itself")
    return stored


class _Plan(NamedTuple):
    """How one array of a state is stored."""

    how: Stored | None  # None: as it is
    other: int | None  # the index of the array that it is relative to
    parameter: Any  # what the stored arrays that belong to one parameter have in common: the path without the field


def _flatten(state: Any, stored: Mapping[str, Stored]) -> tuple[list[Any], list[_Plan], Any]:
    """Arrays of a state, their plans, and the structure.

    Raises:
        ValueError: a field of `stored`, or one that it is relative to, has no float array in this state.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_scaled_array)
    places = {path: i for i, (path, x) in enumerate(flat) if jnp.issubdtype(x.dtype, jnp.floating)}
    plans, missing = [], set(stored)
    for path, _ in flat:
        field = next((key for key in path if isinstance(key, jax.tree_util.GetAttrKey) and key.name in stored), None)
        if field is None or path not in places:
            plans.append(_Plan(None, None, None))
            continue
        how, other = stored[field.name], None
        missing.discard(field.name)
        if how.relative_to is not None:
            partner = jax.tree_util.GetAttrKey(how.relative_to)
            other = places.get(tuple(partner if key is field else key for key in path))
            missing |= {how.relative_to} if other is None else set()
        plans.append(_Plan(how, other, tuple(key for key in path if key is not field)))
    if missing:
        attributes = [[key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)] for path in places]
        has = sorted({names[-1] for names in attributes if names})
        raise ValueError(
            f"scaled_state: the state has no float array in a field {min(missing)!r}; it has some in {has}"
        )
    # The optimiser's own scales need not be read: on a GPU each would be a kernel.
    return [trusted(x) for _, x in flat], plans, treedef


def _widen(arrays: list[Any], plans: list[_Plan]) -> list[Any]:
    """The arrays of a state in FP32, with their meaning for the optimiser."""
    values = [x.unscale() if is_scaled_array(x) else x for x in arrays]
    # The maximum also catches squares that leave FP32.
    values = [
        jnp.maximum(jnp.square(x), _SQUARE_FLOOR) if how and how.sqrt else x
        for x, (how, *_) in zip(values, plans, strict=True)
    ]
    return [x if i is None else x * _divisor(values[i]) for x, (_, i, _) in zip(values, plans, strict=True)]


def _divisor(square: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.maximum(square, _SQUARE_FLOOR))


def _unless(accept: Any, new: Any, old: Any) -> Any:
    """`new`; where `accept` is given and false, `old`."""
    return new if accept is None else jax.tree.map(lambda n, o: jnp.where(accept, n, o), new, old)


def _with(arrays: list[Any], others: Mapping[int, Any]) -> list[Any]:
    """The arrays; in place of some, by index, others."""
    return [others.get(i, x) for i, x in enumerate(arrays)]


def _held(tree: Any, scales: jax.Array) -> tuple[Any, jax.Array]:
    """Both, of which a compiler does not know that they are: what follows comes after both, and is computed again.

    The scales in the tree are left alone: parts of one array as they are, each would have to be made an array.
    """
    found, treedef = jax.tree.flatten(tree, is_leaf=is_scaled_array)
    data, scales = lowering.held("computed_again", ([x.data if is_scaled_array(x) else x for x in found], scales))
    held = [ScaledArray(d, x.scale) if is_scaled_array(x) else d for d, x in zip(data, found, strict=True)]
    return jax.tree.unflatten(treedef, held), scales


def _scales(
    new: list[Any], plans: list[_Plan], old: list[Any], accept: Any = None, largest_of: Largest = largest_of_arrays
) -> jax.Array:
    """The scales at which new values are stored, FP32 `[stored arrays]`; one without a largest magnitude keeps its own.

    Where `accept` is given and false, all do.
    """
    groups: dict[Any, list[int]] = {}
    for leaf, plan in enumerate(plans):
        if plan.how is not None and plan.how.relative_to is None:
            groups.setdefault((plan.parameter, new[leaf].shape), []).append(leaf)
    measured = [leaf for group in groups.values() for leaf in group]
    if not measured:
        return jnp.zeros(0)
    is_root = np.asarray([plans[leaf].how.sqrt for leaf in measured])  # type: ignore[union-attr]
    top = np.asarray([_top(plans[leaf].how) for leaf in measured], np.float32)  # type: ignore[arg-type]
    # All at once: hundreds of scalars would be as many operations, in one kernel that takes long to compile.
    paths = [parameter for parameter, _ in groups]
    peaks = largest_of([[new[leaf] for leaf in group] for group in groups.values()], paths)
    peaks = jnp.where(is_root, _square_root(peaks), peaks)
    is_new = jnp.isfinite(peaks) & (peaks > 0)
    is_new = is_new if accept is None else is_new & accept
    # The largest magnitude goes into [top/2, top): pow2_floor(y) > y/2.
    found = jnp.where(is_new, pow2_floor(peaks * (2 / top)), jnp.stack([old[leaf] for leaf in measured]))
    fixed = [leaf for leaf, plan in enumerate(plans) if plan.how is not None and leaf not in set(measured)]
    constants = [pow2_floor(_QUOTIENT_TOP / _top(plans[leaf].how)) for leaf in fixed]  # type: ignore[arg-type]
    both = jnp.concatenate([found, np.asarray(constants, np.float32)])
    return both[np.argsort([*measured, *fixed])]


def _top(how: Stored) -> float:
    """The largest number that is stored. BF16 data gets the place of FP16 data, not 2^127."""
    return min(how.format.max, FP16.max)


def _square_root(x: jax.Array) -> jax.Array:
    return jnp.where(x <= _SQUARE_FLOOR, 0.0, jnp.sqrt(x))


def _narrow(
    new: list[Any],
    plans: list[_Plan],
    scales: jax.Array,
    seed: int,
    step: Any,
    keep: Callable[[int, Any], Any] = lambda leaf, x: x,
) -> list[Any]:
    """The arrays of a state as they are stored; `new` are its FP32 values, `keep` may put back old ones."""
    fresh, inverses = list(new), pow2_inverse(scales)  # of all at once: one by one, some would be a kernel each
    words = counter_words(seed, step, np.arange(len(plans)))
    slot = {leaf: i for i, leaf in enumerate(leaf for leaf, plan in enumerate(plans) if plan.how is not None)}

    def narrow(leaf: int, inverse: jax.Array) -> ScaledArray:
        how, other, _ = plans[leaf]
        assert how is not None
        x = _square_root(new[leaf]) if how.sqrt else new[leaf]
        if other is not None:
            # By the root that will be read, so that its rounding does not enter.
            x = x / _divisor(_widen([fresh[other]], [plans[other]])[0])
        data = x * inverse
        if how.sqrt:
            smallest = max(how.format.min_subnormal, FP32.min_normal)  # FP32 subnormals may count as zero
            data = jnp.where(x > 0, jnp.maximum(data, smallest), data)
        return ScaledArray(round_to(data, how.format, how.rounding, words[leaf]), scales[slot[leaf]])

    groups: dict[Any, list[int]] = {}
    for leaf, plan in enumerate(plans):
        if plan.how is not None:
            groups.setdefault(plan.parameter, []).append(leaf)
    out = [x if plan.how else keep(leaf, x) for leaf, (x, plan) in enumerate(zip(new, plans, strict=True))]
    before = list[int]()
    for group in groups.values():
        if max(new[i].size for i in group) >= LARGE:
            # One parameter after the other: equal code for many would be merged into kernels that spill to memory.
            finished, inverses = _held([out[i] for i in before], inverses)
            for i, x in zip(before, finished, strict=True):
                out[i] = x
            before = group
        for i in sorted(group, key=lambda i: plans[i].other is not None):
            fresh[i] = narrow(i, inverses[slot[i]])
            out[i] = keep(i, fresh[i])
    return out
