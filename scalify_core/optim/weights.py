"""Scaled master weights: narrow parameters with static scales, that lose no update.

The scale of a parameter is a constant of the compiled step. It is chosen when the
weights are made, and changed by a power of two in the rare event that the data leaves
its range. Stochastic rounding keeps small updates: an FP16 parameter has 11 significant
bits, and updates below half of its last place, 2^-12 of its value, are otherwise lost.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core.array.scaled_array import (
    ScaledArray,
    as_scaled_array,
    data_of,
    is_scaled_array,
    value_of,
    with_scale,
    with_valid_scales,
)
from scalify_core.array.tree import (
    leaves,
    map_arrays,
    structure_of,
)
from scalify_core.numerics import compiler_hints
from scalify_core.numerics.formats import (
    FP32,
    FloatFormat,
    bits_of_words,
    counter_words,
    is_float,
    pow2_floor,
)
from scalify_core.numerics.scales import (
    MAX_SCALE,
    MIN_SCALE,
    broadcast_scale,
    rms_scale,
)

Rounding = Literal["nearest", "stochastic"]

# A run-time scale moves down when the largest element of the data is below this. At a
# fixed scale, weights that shrink by a tenth a step leave FP16 at 2^-24.
LEAST = 2.0**-4
# Elements. Below this, XLA may merge the arithmetic of many arrays into one kernel.
LARGE = 2**16
# Parameters whose random words are made together. XLA makes an array of their first
# words and one of the second, and merges kernels that read different parts of one only
# below 1 KiB: without that a model of 48 layers has 380 kernels more.
WORDS = 255


def apply_updates(
    params: Any,
    updates: Any,
    *,
    rounding: Rounding = "nearest",
    seed: Any = None,
    step: Any = None,
    accept: Any = None,
    leaf_indices: Any = None,
) -> Any:
    """Return `params + updates`, added in FP32 and rounded once to the parameters'
    formats.

    The sum has the parameter's scale, and saturates.

    Args:
        params: ScaledArrays and plain arrays. Static scales are unchanged, as are the
            NumPy scales of a stack's rows. A run-time scale is unchanged while the
            largest new value is below half of the format's largest number, and at least
            2^-4. Otherwise it becomes that of the largest new value, also where all
            elements were zero (a fresh bias). FP32 parameters are not rounded.
        updates: a tree of the same structure, plain or scaled: the terms to add
            (learning rate and sign included).
        rounding: "nearest" loses every update below half an ulp (2^-12 of an FP16
            parameter, 2^-9 of a BF16 one); "stochastic" keeps them in expectation.
        seed: of the stochastic rounding, which needs it: an integer or an integer
            scalar. The random bits differ from those of `scaled_state` with the same
            seed and step.
        step: the number of the update, which stochastic rounding needs, too.
        accept: boolean scalar; false: the parameters are unchanged. None: true.
        leaf_indices: a tree of integers, which tell the random bits of the parameters
            apart; arrays of integers for the rows of stacks. None: 0, 1, ...

    Raises:
        ValueError: `updates` or `leaf_indices` is another tree than `params`; an
            unknown rounding; stochastic rounding without seed or step.
    """
    new, _ = apply_with_compensation(
        params,
        updates,
        (),
        rounding=rounding,
        seed=seed,
        step=step,
        accept=accept,
        leaf_indices=leaf_indices,
    )
    return new


def moving_average(
    average: Any, params: Any, decay: float, *, seed: Any, step: Any
) -> Any:
    """Return `decay * average + (1 - decay) * params`, in the formats of `average`.

    An average in FP16 that is computed leaf by leaf never moves where
    `(1 - decay) * params` is below half of its last bit. Stochastic rounding keeps it
    in expectation.

    Args:
        average: a tree of ScaledArrays and plain arrays, of any float dtypes.
        params: a tree of the same structure, plain or scaled.
        decay: in [0, 1].
        seed: as for `apply_updates`, but another one than that of the parameters.
        step: as for `apply_updates`.

    Raises:
        ValueError: `params` is another tree than `average`.
    """
    structure = structure_of(average)
    if structure_of(params) != structure:
        raise ValueError("weights.moving_average: params is not a tree like average")
    old, new = (
        leaves(with_valid_scales("weights.moving_average", x))
        for x in (average, params)
    )
    # As an update: data at two scales cannot be averaged, and the rounding is that of
    # parameters.
    updates = [(1 - decay) * (wide(x) - wide(y)) for x, y in zip(new, old, strict=True)]
    averages = apply_updates(old, updates, rounding="stochastic", seed=seed, step=step)
    return structure.unflatten(averages)


def apply_with_compensation(
    params: Any,
    updates: Any,
    compensation: Any,
    *,
    rounding: Rounding = "nearest",
    seed: Any = None,
    step: Any = None,
    accept: Any = None,
    leaf_indices: Any = None,
) -> tuple[Any, Any]:
    """Return `apply_updates`, and its rounding errors for the next update (Kahan
    summation).

    Args:
        params: see `apply_updates`, as for all that is not listed here.
        updates: see `apply_updates`.
        compensation: the errors of earlier roundings (`kahan_compensation`), plain
            arrays in a tree like the parameters'; (): none are kept. They are values,
            not over scales, so that a scale may change in between.

    Returns:
        The new parameters, and the new compensation, in its dtypes.

    Reference: Kahan 1965, "Further remarks on reducing truncation errors"; for weights
    Zamirai et al. 2020, https://arxiv.org/abs/2010.06192.
    """
    check_rounding(rounding)
    if rounding == "stochastic" and (seed is None or step is None):
        raise ValueError(
            'rounding="stochastic" needs seed= and step=, of which its random bits are'
            " made"
        )

    structure = structure_of(params)
    # Scaled updates may come from arithmetic on leaves, as `optax.apply_updates` does,
    # which makes invalid scales.
    updates = with_valid_scales("weights.apply_updates, the update", updates)
    # Optax takes numbers of Python among parameters.
    old: list[Any] = [
        x if hasattr(x, "dtype") else jnp.asarray(x) for x in leaves(params)
    ]
    changes = _beside(structure, updates, "updates")
    indices: Sequence[Any] = range(len(old))
    if leaf_indices is not None:
        indices = _beside(structure, leaf_indices, "leaf_indices")
    # Leaves are numbered from the other end: another stream than that of the
    # optimiser's state.
    numbers = [-1 - n for n in indices]
    is_random = rounding == "stochastic"
    is_large = [
        # To nearest there are no words to hold a parameter back by.
        is_random and p.size >= LARGE and np.ndim(n) == 0
        for p, n in zip(old, numbers, strict=True)
    ]
    words: list[Any] = [None] * len(old)
    if is_random:
        words = words_of(seed, step, numbers, is_large)
    rests: list[Any] = [None] * len(old)
    if leaves(compensation):
        rests = _beside(structure, compensation, "compensation")
    new: list[Any] = []
    remain: list[Any] = []
    previous: int | None = None
    for i, (p, update, rest) in enumerate(zip(old, changes, rests, strict=True)):
        if is_large[i] and previous is not None:
            # One parameter after the other: equal code for many would be merged into
            # kernels that spill to memory. The next one waits by its words, and not
            # by its data, which the compiler would then read twice.
            new[previous], words[i] = compiler_hints.barrier((new[previous], words[i]))
        total, scale, remainder = _added(p, update, rest, rounding, words[i])
        if accept is not None and is_float(p):
            if np.ndim(numbers[i]):
                # A later kernel writes the rows of a stack again: without a barrier,
                # each row is copied first.
                total = compiler_hints.barrier(total)
            total = jnp.where(accept, total, data_of(p))
            if remainder is not None:
                remainder = jnp.where(accept, remainder, rest)
            if isinstance(scale, jax.Array):
                scale = jnp.where(accept, scale, p.scale)
        if is_scaled_array(p):
            new.append(with_scale(total, scale))
        else:
            new.append(total)
        if rest is not None:
            remain.append(remainder)
        if is_large[i]:
            previous = i
    return structure.unflatten(new), structure.unflatten(remain) if remain else ()


def _added(
    p: Any, update: Any, rest: Any, rounding: Rounding, words: Any
) -> tuple[jax.Array, Any, Any]:
    """Return the data and the scale of a parameter plus an update.

    And the rest that its rounding leaves, in the dtype of `rest`; None if that is None.
    """
    data = data_of(p)
    if not is_float(data):  # as in Optax
        return jnp.asarray(data + update, data.dtype), None, rest
    fmt, update = FloatFormat.of(data.dtype), wide(update)
    if rest is not None:
        update = update + rest.astype(jnp.float32)
    scale = spread = p.scale if is_scaled_array(p) else 1.0
    total = data.astype(jnp.float32)
    # Static scales stay: a new one would compile the step again. A NumPy array has the
    # static scales of a stack's rows.
    if not isinstance(scale, (float, np.ndarray)):
        scale = _scale_of_sum(p, update, fmt.max)
        spread = broadcast_scale(scale, data)
        # The quotient of a scale of zeros leaves FP32, and would make them NaN.
        shrunk = jnp.minimum(p.scale / scale, np.float32(MAX_SCALE))
        total = total * broadcast_scale(shrunk, data)
    exact = total = total + update * (1 / spread)
    if fmt is not FP32:
        total = round_to(total, fmt, rounding, words)
    if rest is not None:
        # As a value, and not over the scale, which may move before the next update.
        rest = (_remainder(exact, fmt) * spread).astype(rest.dtype)
    return total, scale, rest


def _beside(structure: Any, tree: Any, name: str) -> list[Any]:
    """Return the leaves of a tree that correspond to the parameters.

    The structures are compared, so leaves correspond by name and not only by position.
    """
    flat, tree_structure = jax.tree.flatten(tree, is_leaf=is_scaled_array)
    if tree_structure != structure:
        raise ValueError(
            f"weights.apply_updates: {name} is not a tree like params:"
            f" {tree_structure}, expected {structure}"
        )
    return flat


def _remainder(exact: jax.Array, fmt: FloatFormat) -> jax.Array:
    """Return the rounding error of FP32 numbers in a format.

    It is zero beyond the format, where numbers saturate. It is not computed by a cast
    and its inverse, which compilers remove.
    """
    return jnp.where(jnp.abs(exact) <= fmt.max, exact - fmt.quantize(exact), 0.0)


def kahan_compensation(exact: Any, params: Any, dtype: Any = jnp.bfloat16) -> Any:
    """Return the rounding errors of parameters against their FP32 values.

    It is a tree of plain arrays of `dtype`.
    """
    structure = structure_of(params)
    pairs = zip(leaves(exact), leaves(params), strict=True)
    return structure.unflatten(
        # In BF16: it has FP32's range, so the errors need no scale of their own.
        [(wide(value) - wide(p)).astype(dtype) for value, p in pairs]
    )


def words_of(
    seed: Any, step: Any, numbers: Sequence[int | np.ndarray], large: Sequence[bool]
) -> list[jax.Array]:
    """Return `formats.counter_words` of each number, uint32 `[2]`.

    An array of n numbers gives `[n, 2]`.

    Args:
        seed: of all arrays.
        step: of all arrays.
        numbers: the numbers of arrays, or of the rows of a stack.
        large: for each array, whether its words get a buffer of their own. All large
            arrays of a shape are then rounded by one program.
    """
    alone = [i for i, n in enumerate(numbers) if np.ndim(n) == 0]
    apart = [i for i in alone if large[i]]
    rest = [i for i in alone if not large[i]]

    def table(indices: Sequence[int]) -> jax.Array:
        return counter_words(seed, step, np.array([numbers[i] for i in indices], int))

    words = dict(zip(apart, compiler_hints.separate_buffers(table(apart)), strict=True))
    for block in itertools.batched(rest, WORDS):
        words |= zip(block, table(block), strict=True)
    return [
        words[i] if i in words else counter_words(seed, step, n)
        for i, n in enumerate(numbers)
    ]


def _scale_of_sum(p: ScaledArray, update: jax.Array, top: float) -> jax.Array:
    """Return the run-time scale of `p` plus an update.

    It is the scale of `p` where the sum fits, else that of the sum's largest magnitude.
    The sum does not fit where it is too large for the format, or so small that digits
    would be lost.
    """
    total = jnp.abs(p.unscale() + update)
    if p.scale.ndim == p.ndim:
        shared = tuple(axis for axis, size in enumerate(p.scale.shape) if size == 1)
        largest = jnp.max(total, axis=shared, keepdims=True, initial=0.0)
    else:
        largest = jnp.max(total, axis=tuple(range(p.scale.ndim, p.ndim)), initial=0.0)
    # An octave of room, so that the next update need not move it again.
    moved = ((largest > p.scale * (top / 2)) & jnp.isfinite(largest)) | (
        largest < p.scale * LEAST
    )
    # Zeros have no size to be moved to.
    moved &= largest > 0
    return jnp.where(
        moved, jnp.maximum(pow2_floor(largest), np.float32(MIN_SCALE)), p.scale
    )


def scaled_params(params: Any, dtype: Any) -> Any:
    """Return master weights: float arrays as ScaledArrays with `dtype` data.

    Their static scale is the power of two nearest to the RMS. A parameter that is all
    zeros (a fresh bias) has no RMS. It gets the scale 2^-6, at which FP16 reaches
    from 2^-30 to 2^10. At the smallest scale, which `as_scaled_array` takes, its
    updates would saturate.

    Not for use inside jit: it reads the scales from the device.
    """

    def convert(x: Any) -> Any:
        if is_scaled_array(x) or not hasattr(x, "dtype") or not is_float(x):
            return x
        power = float(_rms_scale(x))
        scale = 2.0**-6 if power == MIN_SCALE else power
        return ScaledArray(_at_scale(x, np.float32(scale), np.dtype(dtype)), scale)

    return map_arrays(convert, params)


# A program for each shape, and not one for a whole model, which would take longer to
# compile with every layer. Each result is read before the next program: many small
# programs that communicate can deadlock.
_rms_scale = jax.jit(rms_scale)


@functools.partial(jax.jit, static_argnums=2)
def _at_scale(x: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    return as_scaled_array(x, scale, dtype).data


def check_rounding(rounding: str) -> None:
    """Check the name of a rounding.

    Raises:
        ValueError: it is not "nearest" or "stochastic".
    """
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(
            f"rounding={rounding!r} is not a choice; valid: nearest, stochastic"
        )


def round_to(
    x: jax.Array, fmt: FloatFormat, rounding: Rounding, words: jax.Array
) -> jax.Array:
    """Return FP32 `x` in the format.

    The random bits depend only on the words (`formats.counter_words`).
    """
    if rounding == "nearest":
        return fmt.cast(x)
    return fmt.stochastic_round(x, bits_of_words(x.shape, words))


def wide(tree: Any) -> Any:
    """Return the logical values of a tree; float arrays in FP32."""

    def convert(x: Any) -> Any:
        x = jnp.asarray(value_of(x))
        if is_float(x):
            return x.astype(jnp.float32)
        return x

    return map_arrays(convert, tree)
