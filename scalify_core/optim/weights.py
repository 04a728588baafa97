"""Scaled master weights: FP16 (or other narrow) parameters with static scales, that
lose no update.

The scale of a parameter is a constant of the compiled step: chosen when the weights are
made, changed only in the rare event that the data has left its place, by a power of
two. What keeps small updates is stochastic rounding: an FP16 parameter has 11
significant bits, and updates below half of its last place, 2^-12 of its value, are
otherwise lost.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core.array.scaled_array import (
    ScaledArray,
    as_scaled_array,
    is_scaled_array,
    readable,
    with_scale,
)
from scalify_core.array.tree import leaves, map_arrays
from scalify_core.numerics import compiler_hints
from scalify_core.numerics.formats import (
    FP32,
    FloatFormat,
    bits_of_words,
    counter_words,
    pow2_floor,
)
from scalify_core.numerics.scales import MIN_SCALE, broadcast_scale, rms_of, rms_scale

Rounding = Literal["nearest", "stochastic"]

# of the largest number of a parameter's data; smaller, and a run-time scale moves down
LEAST = 2.0**-4
# elements; the arithmetic of smaller arrays may be merged into kernels for many
LARGE = 2**16
# Parameters whose random words are one array: XLA merges kernels that read different
# parts of one only below 1 KiB, and without that a model of 48 layers has 380 kernels
# more.
WORDS = 255


def apply_updates(
    params: Any,
    updates: Any,
    *,
    rounding: Rounding = "nearest",
    seed: Any = None,
    step: Any = None,
    accept: Any = None,
    numbers: Any = None,
) -> Any:
    """`params + updates`, added in FP32 and rounded once to each parameter's own format
    and scale, saturating.

    Args:
        params: ScaledArrays and plain arrays. Static scales stay as they are, as do
            NumPy's of the rows of a stack. A run-time scale does, too, while the
            largest new value is below half of the format's largest number, and at least
            2^-4; beyond that, also where all was zero (a fresh bias, whose scale is the
            smallest), it becomes that of the largest new value. FP32 parameters are not
            rounded.
        updates: a tree of the same structure, plain or scaled, what is to be added
            (learning rate and sign included).
        rounding: "nearest" loses every update below half an ulp (2^-12 of an FP16
            parameter, 2^-9 of a BF16 one); "stochastic" keeps them in expectation.
        seed, step: of the stochastic rounding, which needs both: integers or integer
            scalars. The random bits are not those of `scaled_state`, also with the same
            seed and step.
        accept: boolean scalar, false: the parameters stay as they are. None: true.
        numbers: of the parameters, a tree of integers, which tell their random bits
            apart; arrays of them of the rows of stacks. None: 0, 1, ...

    Raises:
        ValueError: `updates` or `numbers` is another tree than `params`; an unknown
            rounding; stochastic rounding without seed or step.
    """
    options = {
        "rounding": rounding,
        "seed": seed,
        "step": step,
        "accept": accept,
        "numbers": numbers,
    }
    return apply_with_lost(params, updates, (), **options)[0]


def moving_average(
    average: Any,
    params: Any,
    decay: float,
    *,
    rounding: Rounding = "stochastic",
    seed: Any = None,
    step: Any = None,
) -> Any:
    """Return `decay * average + (1 - decay) * params`, in the formats of `average`.

    An average in FP16 that is computed leaf by leaf never moves where
    `(1 - decay) * params` is below half of its last bit. Stochastic rounding keeps it
    in expectation.

    Args:
        average: a tree of ScaledArrays and plain arrays, of any float dtypes.
        params: a tree of the same structure, plain or scaled.
        decay: in [0, 1].
        rounding, seed, step: as for `apply_updates`; the seed is another one than that
            of the parameters.

    Raises:
        ValueError: as `apply_updates`.
    """
    structure: Any = jax.tree.structure(average, is_leaf=is_scaled_array)
    if jax.tree.structure(params, is_leaf=is_scaled_array) != structure:
        raise ValueError("weights.moving_average: params is not a tree like average")
    old, new = leaves(average), leaves(params)
    updates = [(1 - decay) * (wide(x) - wide(y)) for x, y in zip(new, old, strict=True)]
    found = apply_updates(old, updates, rounding=rounding, seed=seed, step=step)
    return structure.unflatten(found)


def apply_with_lost(
    params: Any,
    updates: Any,
    lost: Any,
    *,
    rounding: Rounding = "nearest",
    seed: Any = None,
    step: Any = None,
    accept: Any = None,
    numbers: Any = None,
) -> tuple[Any, Any]:
    """`apply_updates`, and what its rounding loses, so that the next update has it:
    Kahan's summation.

    Args:
        params, updates, rounding, seed, step, accept, numbers: see `apply_updates`.
        lost: what earlier roundings have lost (`remainders`), plain arrays in a tree
            like the parameters'; (): nothing is kept. They are values, not over scales,
            so that a scale may change in between.

    Returns:
        The new parameters, and what is lost now, in the dtypes of `lost`.

    Reference: Kahan 1965, "Further remarks on reducing truncation errors"; for weights
    Zamirai et al. 2020, https://arxiv.org/abs/2010.06192.
    """
    check_rounding(rounding)
    if rounding == "stochastic" and (seed is None or step is None):
        raise ValueError(
            'rounding="stochastic" needs seed= and step=, of which its random bits are'
            " made"
        )

    def add(p: Any, update: Any, number: Any, words: Any, before_lost: Any) -> Any:
        data = p.data if is_scaled_array(p) else p
        fmt = FloatFormat.of(data.dtype)
        update = (
            wide(update)
            if before_lost is None
            else wide(update) + before_lost.astype(jnp.float32)
        )
        scale = p.scale if is_scaled_array(p) else 1.0
        total = data.astype(jnp.float32)
        is_static = isinstance(scale, (float, np.ndarray))
        if is_static:
            total = total + update * (1 / scale)
        else:
            before, scale = scale, _scale_of_sum(p, update, fmt.max)
            total = total * broadcast_scale(before / scale, data) + update * (
                1 / broadcast_scale(scale, data)
            )
        exact = total
        if fmt is not FP32:
            total = round_to(total, fmt, rounding, words)
        if before_lost is not None:
            rest = _remainder(exact, fmt) * (
                scale if is_static else broadcast_scale(scale, data)
            )
            rest = rest.astype(before_lost.dtype)
            remain.append(
                rest if accept is None else jnp.where(accept, rest, before_lost)
            )
        if accept is not None:
            total = jnp.where(
                accept,
                compiler_hints.held("rows", total) if np.ndim(number) else total,
                data,
            )
            scale = scale if is_static else jnp.where(accept, scale, before)
        return with_scale(total, scale) if is_scaled_array(p) else total

    structure: Any = jax.tree.structure(params, is_leaf=is_scaled_array)
    found, changes = leaves(params), _beside(structure, updates, "updates")
    changes = _readable(updates, changes)
    # Leaves are numbered from the other end: another stream than that of the
    # optimiser's state.
    own = [
        -1 - n
        for n in (
            range(len(found))
            if numbers is None
            else _beside(structure, numbers, "numbers")
        )
    ]
    is_random = rounding == "stochastic"
    words: list[Any] = (
        words_of(seed, step, own, [p.size >= LARGE for p in found])
        if is_random
        else list(own)
    )
    rests = _beside(structure, lost, "lost") if leaves(lost) else [None] * len(found)
    new: list[Any] = []
    remain: list[Any] = []
    before: int | None = None
    for i, (p, update, number, rest) in enumerate(
        zip(found, changes, own, rests, strict=True)
    ):
        is_large = p.size >= LARGE and np.ndim(number) == 0 and is_random
        if is_large and before is not None:
            # One parameter after the other: equal code for many would be merged into
            # kernels that spill to memory. What is held is small: the compiler would
            # read an array that is also held twice.
            new[before], words[i] = compiler_hints.held(
                "in_turn", (new[before], words[i])
            )
        new.append(add(p, update, number, words[i], rest))
        before = i if is_large else before
    return structure.unflatten(new), structure.unflatten(remain) if remain else ()


def _readable(updates: Any, changes: Sequence[Any]) -> list[Any]:
    """Return updates of which those with a scale that is none are NaN, warned of by
    name.

    Updates of `scaled_state` are plain. Scaled ones that are no result of a scalified
    function may come from arithmetic on the leaves of ScaledArrays.
    """

    def names() -> list[str]:
        found = jax.tree_util.tree_leaves_with_path(updates, is_leaf=is_scaled_array)
        return [jax.tree_util.keystr(path) for path, _ in found]

    return readable("weights.apply_updates, the update", changes, names)


def _beside(structure: Any, tree: Any, name: str) -> list[Any]:
    """The leaves of a tree that belong to those of the parameters, by name and not by
    position alone.
    """
    found, own = jax.tree.flatten(tree, is_leaf=is_scaled_array)
    if own != structure:
        raise ValueError(
            f"weights.apply_updates: {name} is not a tree like params: {own}, expected"
            f" {structure}"
        )
    return found


def _remainder(exact: jax.Array, fmt: FloatFormat) -> jax.Array:
    """What rounding FP32 numbers to a format takes away; zero beyond the format, whose
    largest number they become.

    Not from a cast to the format and back, which compilers leave out.
    """
    return jnp.where(jnp.abs(exact) <= fmt.max, exact - fmt.quantise(exact), 0.0)


def remainders(exact: Any, params: Any, dtype: Any = jnp.bfloat16) -> Any:
    """What parameters have lost of the FP32 values that they were made of: a tree of
    plain arrays of `dtype`.
    """
    structure: Any = jax.tree.structure(params, is_leaf=is_scaled_array)
    pairs = zip(leaves(exact), leaves(params), strict=True)
    return structure.unflatten(
        [(wide(value) - wide(p)).astype(dtype) for value, p in pairs]
    )


def words_of(
    seed: Any, step: Any, numbers: Sequence[int | np.ndarray], large: Sequence[bool]
) -> list[jax.Array]:
    """`formats.counter_words` of each number, uint32 `[2]`; `[n, 2]` of n numbers in an
    array.

    Args:
        seed, step: of all.
        numbers: of arrays, or of the rows of one each.
        large: of which arrays; what rounds one is then the same program for all of a
            shape.
    """
    words: list[Any] = [None] * len(numbers)
    alone = [i for i, n in enumerate(numbers) if np.ndim(n) == 0]
    apart = [i for i in alone if large[i]]
    rest = [i for i in alone if not large[i]]
    for i, own in zip(
        apart,
        compiler_hints.apart(counter_words(seed, step, _integers(numbers, apart))),
        strict=True,
    ):
        words[i] = own
    for block in itertools.batched(rest, WORDS):
        for i, own in zip(
            block, counter_words(seed, step, _integers(numbers, block)), strict=True
        ):
            words[i] = own
    return [
        counter_words(seed, step, n) if found is None else found
        for n, found in zip(numbers, words, strict=True)
    ]


def _integers(numbers: Sequence[Any], which: Sequence[int]) -> np.ndarray:
    return np.array([numbers[i] for i in which], int)


def _scale_of_sum(p: ScaledArray, update: jax.Array, top: float) -> jax.Array:
    """The run-time scale of `p` where its sum with an update fits, else that of the
    sum's largest magnitude.

    It does not fit where it is too large for the format, nor where it has shrunk so far
    that digits would be lost.
    """
    total = jnp.abs(p.unscale() + update)
    if p.scale.ndim == p.ndim:
        shared = tuple(axis for axis, size in enumerate(p.scale.shape) if size == 1)
        largest = jnp.max(total, axis=shared, keepdims=True, initial=0.0)
    else:
        largest = jnp.max(total, axis=tuple(range(p.scale.ndim, p.ndim)), initial=0.0)
    moved = ((largest > p.scale * (top / 2)) & jnp.isfinite(largest)) | (
        largest < p.scale * LEAST
    )
    moved &= largest > 0
    return jnp.where(
        moved, jnp.maximum(pow2_floor(largest), np.float32(MIN_SCALE)), p.scale
    )


def scaled_params(params: Any, dtype: Any, *, zeros: float = 2.0**-6) -> Any:
    """Master weights: every float array as a ScaledArray with `dtype` data and a static
    scale, nearest to its RMS.

    A parameter that is all zeros (a fresh bias) has no RMS. It gets the scale `zeros`,
    at which FP16 reaches from 2^-30 to 2^10: at the smallest scale, which
    `as_scaled_array` takes, its updates would saturate.

    Not for use inside jit: it reads the scales from the device.
    """

    def is_weight(x: Any) -> bool:
        return not is_scaled_array(x) and jnp.issubdtype(x.dtype, jnp.floating)

    flat = leaves(params)
    arrays = [x for x in flat if is_weight(x)]
    powers = [float(power) for power in _rms_scales(arrays)]
    scales = [zeros if power == MIN_SCALE else power for power in powers]
    data = _at_scales(arrays, [np.float32(scale) for scale in scales], np.dtype(dtype))
    scaled = iter(map(ScaledArray, data, scales))
    return jax.tree.unflatten(
        jax.tree.structure(params, is_leaf=is_scaled_array),
        [next(scaled) if is_weight(x) else x for x in flat],
    )


# Under jit: one program for a whole model, where array by array there would be a
# hundred small ones to compile.
@jax.jit
def _rms_scales(arrays: list[jax.Array]) -> list[jax.Array]:
    return [rms_scale(x) for x in arrays]


@jax.jit
def _rms(arrays: list[jax.Array]) -> list[jax.Array]:
    return [rms_of(x) for x in arrays]


@functools.partial(jax.jit, static_argnums=2)
def _at_scales(
    arrays: list[jax.Array], scales: list[jax.Array], dtype: np.dtype
) -> list[jax.Array]:
    return [
        as_scaled_array(x, scale, dtype).data
        for x, scale in zip(arrays, scales, strict=True)
    ]


def rms_of_params(params: Any) -> dict[str, float]:
    """The RMS of the data of every ScaledArray in a tree, by its path. Not for use
    inside jit.
    """
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_scaled_array)
    data = {
        jax.tree_util.keystr(path): x.data for path, x in found if is_scaled_array(x)
    }
    return dict(zip(data, map(float, _rms(list(data.values()))), strict=True))


def rescale_params(params: Any, powers: Mapping[str, float]) -> Any:
    """`params` with the scales at the paths of `powers` multiplied by those powers of
    two, and the data divided.

    Others are returned as they are. The values are the same, except that what was
    subnormal may now be normal or the reverse, and what leaves the format saturates. A
    new static scale is a new constant: steps are compiled again.
    """

    def rescale(path: Any, x: Any) -> Any:
        power = powers.get(jax.tree_util.keystr(path))
        return x if power is None else x.rescale(x.scale * power)

    return jax.tree_util.tree_map_with_path(rescale, params, is_leaf=is_scaled_array)


def check_rounding(rounding: str) -> None:
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(
            f"rounding={rounding!r} is not a choice; valid: nearest, stochastic"
        )


def round_to(
    x: jax.Array, fmt: FloatFormat, rounding: Rounding, words: jax.Array
) -> jax.Array:
    """FP32 `x` in the format; the random bits depend on the words
    (`formats.counter_words`) and on nothing else.
    """
    if rounding == "nearest":
        return fmt.cast(x)
    return fmt.stochastic_round(x, bits_of_words(x.shape, words))


def wide(tree: Any) -> Any:
    """Logical values; float arrays in FP32."""

    def convert(x: Any) -> Any:
        if is_scaled_array(x):
            return x.unscale()
        x = jnp.asarray(x)
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return map_arrays(convert, tree)
