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
are widened to FP32, the optimiser computes in FP32, and the new values are narrowed again. Compiled, all of it fuses
to a pass for the scale and one that stores; no moment is held in FP32. What is particular about it:

- **The scale comes from the largest magnitude**, which then lies in the upper octave of the format. A format's range
  is asymmetric about RMS 1 and moments reach far down (rows of an embedding that are seldom seen), not up. Nothing
  saturates, and a maximum does not depend on the order of reduction: the state is bitwise the same on any sharding.
- **A second moment is stored as its square root**, which spans half the octaves. A positive one is never stored as
  zero, or a first moment that survives would be divided by epsilon alone. One that is zero is widened to 2^-120, so
  that a row never seen gives 0/2^-60, not 0/0, even without an epsilon.
- **Stochastic rounding of a square root is unbiased in its square.** Unbiased in the root, the second moment would
  gain the variance of the rounding at each step, and keep 1/(1-b2) times that.
- **Random bits are a hash** of seed, step, leaf and element (`formats.counter_bits`), so nothing else is to be saved.

The plain route, as in the Scalify paper (arXiv 2407.17353), is the optimiser itself under `scalify`, parameters and
state in FP16 data: `scalify(tx.update)(grads, state, params)`, with `dynamic_rescale_rms` on the new state. It rounds
to nearest, stores the second moment as it is, and lets the rules choose scales; it needs no function of this module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from scalify_core.array import ScaledArray, is_scaled_array
from scalify_core.formats import FP16, FP32, FloatFormat, pow2_floor
from scalify_core.value import MIN_SCALE
from scalify_core.weights import Rounding, check_rounding, round_to, wide

_SQUARE_FLOOR = 2.0**-120  # of widened second moments: times any usual decay it is still a normal FP32 number


@dataclasses.dataclass(frozen=True)
class Stored:
    """How a field of an optimiser's state is stored between steps.

    Attributes:
        format: of the data; one with a native dtype.
        sqrt: store the square root. For fields that are not negative: second moments.
        rounding: to "nearest" (ties to even), or "stochastic": to one of the two neighbours, the nearer the likelier,
            such that the field (with `sqrt`, its square root's square) has the exact value as its expectation.
            To nearest, an average stops moving where a step changes it by less than half an ulp. A second moment with
            its root in E5M2 and a decay of 0.95 stops at a quarter of its value when it grows, and never falls.
    """

    format: FloatFormat
    sqrt: bool = False
    rounding: Rounding = "stochastic"

    def __post_init__(self) -> None:
        """Raise ValueError for a format that cannot be stored or an unknown rounding."""
        check_rounding(self.rounding)
        if self.format.dtype is None:
            raise ValueError(f"Stored: {self.format} has no native dtype to store it in")


class ScaledStateState(NamedTuple):
    """State of `scaled_state`."""

    count: jax.Array  # shape=(), dtype=int32: updates made, the step of the random bits
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
        mu: the format (or dtype) of the fields called `mu`, first moments. FP32: they are left alone.
        nu: the format of the fields called `nu`, second moments, stored as square roots. FP32: they are left alone.
        rounding: of `mu` and `nu`. "auto": stochastic, but to nearest for a `mu` of ten mantissa bits or more (FP16):
            what that loses is at most epsilon/2/(1-b1), 0.5% at b1 = 0.9.
        fields: how other fields are stored ("trace" of momentum, "v_row" of Adafactor), by name; or `mu` and `nu`,
            for all that `Stored` can say.
        seed: of the stochastic rounding; with the count in the state it determines every bit.

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
            new, names, treedef = _flatten(tx.init(wide(params)), stored)
            like = jnp.float32(MIN_SCALE)  # of zeros, as in as_scaled_array
            scales = [_scale(x, like, stored[name]) if name else None for x, name in zip(new, names, strict=True)]
            count = jnp.zeros((), jnp.int32)
            return ScaledStateState(count, treedef.unflatten(_narrow(new, names, scales, stored, seed, count)))

        # Compiled, the FP32 state that `tx.init` makes is never allocated.
        return jax.jit(narrow)(params)

    def update(updates: Any, state: ScaledStateState, params: Any = None, **extra: Any) -> tuple[Any, ScaledStateState]:
        def advance(updates: Any, inner_state: Any) -> tuple[Any, list[Any], Any]:
            moments = [
                _widen(x, stored[n]) if n else x for x, n in zip(*_flatten(inner_state, stored)[:2], strict=True)
            ]
            updates, inner_state = tx.update(wide(updates), treedef.unflatten(moments), wide(params), **extra)
            new, _, new_treedef = _flatten(inner_state, stored)
            return updates, new, new_treedef

        old, names, treedef = _flatten(state.inner_state, stored)
        _, new, _ = advance(updates, state.inner_state)
        scales = [
            _scale(x, like.scale, stored[name]) if name else None for x, like, name in zip(new, old, names, strict=True)
        ]
        # Computed again once the scales are known: the compiler would hold the new moments in FP32 in between. Of the
        # first time only what the scales depend on is compiled.
        updates, inner_state, scales = jax.lax.optimization_barrier((updates, state.inner_state, scales))
        updates, new, treedef = advance(updates, inner_state)
        count = state.count + 1
        return updates, ScaledStateState(count, treedef.unflatten(_narrow(new, names, scales, stored, seed, count)))

    return optax.GradientTransformationExtraArgs(init, update)


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
    return stored


def _flatten(state: Any, stored: Mapping[str, Stored]) -> tuple[list[Any], list[str | None], Any]:
    """Arrays of a state, for each the name of the stored field that it belongs to (or None), and the structure.

    Raises:
        ValueError: a stored field has no float array in this state.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_scaled_array)
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for _, x in flat]
    paths = [[key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)] for path, _ in flat]
    names = [
        next((name for name in path if name in stored), None) if is_float else None
        for path, is_float in zip(paths, floats, strict=True)
    ]
    for name in stored:
        if name not in names:
            has = sorted({path[-1] for path, is_float in zip(paths, floats, strict=True) if path and is_float})
            raise ValueError(f"scaled_state: the state has no float array in a field {name!r}; it has some in {has}")
    return [x for _, x in flat], names, treedef


def _widen(x: ScaledArray, stored: Stored) -> jax.Array:
    wide = x.unscale()
    # The maximum also catches squares that leave FP32.
    return jnp.maximum(jnp.square(wide), _SQUARE_FLOOR) if stored.sqrt else wide


def _scale(x: jax.Array, old: jax.Array, stored: Stored) -> jax.Array:
    """The scale at which a field's new value is stored; a tensor without a largest magnitude keeps the old one."""
    peak = _root(jnp.max(jnp.abs(x), initial=0.0), stored)
    # The largest magnitude goes into [top/2, top): pow2_floor(y) > y/2. BF16 data gets that of FP16, not 2^127.
    top = min(stored.format.max, FP16.max)
    return jnp.where(jnp.isfinite(peak) & (peak > 0), pow2_floor(peak * (2 / top)), old)


def _root(x: jax.Array, stored: Stored) -> jax.Array:
    return jnp.where(x <= _SQUARE_FLOOR, 0.0, jnp.sqrt(x)) if stored.sqrt else x


def _narrow(
    new: list[Any], names: list[str | None], scales: list[Any], stored: Mapping[str, Stored], seed: int, step: Any
) -> list[Any]:
    """The arrays of a state, those of stored fields narrow."""

    def narrow(leaf: int, x: jax.Array, scale: jax.Array, how: Stored) -> ScaledArray:
        fmt, x = how.format, _root(x, how)
        data = x * (1 / scale)
        if how.sqrt:
            data = jnp.where(x > 0, jnp.maximum(data, _smallest(fmt)), data)
            data = _unbiased_in_square(data, fmt) if how.rounding == "stochastic" else data
        return ScaledArray(round_to(data, fmt, how.rounding, seed, step, leaf), scale)

    return [
        narrow(leaf, x, scale, stored[name]) if name else x
        for leaf, (x, scale, name) in enumerate(zip(new, scales, names, strict=True))
    ]


def _smallest(fmt: FloatFormat) -> float:
    """The smallest positive number of the format that is a normal one in FP32: others may count as zero."""
    return max(fmt.min_subnormal, FP32.min_normal)


def _unbiased_in_square(x: jax.Array, fmt: FloatFormat) -> jax.Array:
    """`x` >= 0 moved between its neighbours a < b in the format so that rounded stochastically, E[square] = x^2.

    b is drawn with probability (y - a) / (b - a) where y is what is returned, and that must be
    (x^2 - a^2) / (b^2 - a^2), hence y = a + (x - a) (x + a) / (a + b).
    """
    ulp = jnp.maximum(pow2_floor(x) * fmt.epsilon, _smallest(fmt))
    below = jnp.floor(x * (1 / ulp)) * ulp
    return below + (x - below) * ((x + below) / (2 * below + ulp))
