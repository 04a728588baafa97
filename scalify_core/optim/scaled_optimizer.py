"""Optax optimizers whose state is stored narrow.

    tx = optim.scaled_state(optax.adamw(1e-3, b2=0.95), mu=E4M3, nu=E5M2, seed=0)
    params = weights.scaled_params(params, jnp.float16)
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, number, batch):
        grads = ...  # plain or ScaledArrays, any float dtype
        updates, state = tx.update(grads, state, params)  # FP32
        params = weights.apply_updates(
            params, updates, rounding="stochastic", seed=0, step=number
        )
        return params, state

Between steps the chosen fields of the state are ScaledArrays: narrow data and one
power-of-two scale. In a step they are widened to FP32, the optimizer computes in FP32,
and the new values are narrowed again. Compiled for a GPU, all of it fuses to a pass for
the scales and one that stores, parameter by parameter. Its properties:

- **The scale comes from the largest magnitude**, which then lies in the upper octave of
  the format. Moments reach far down (rows of an embedding that are seldom seen), not
  up, and nothing saturates. A maximum does not depend on the order of reduction either:
  the state is bitwise the same on any sharding.
- **A first moment in FP8 is stored relative to the root of the second**, a quotient
  near 1 for rows of any frequency: E4M3 has normal numbers over 15 octaves only.
- **A second moment is stored as its square root**, which spans half the octaves. A
  positive one is never stored as zero, or a first moment that survives would be divided
  by epsilon alone. One that is zero is widened to 2^-120, so that a row never seen
  gives 0/2^-60, not 0/0, even without an epsilon.
- **Random bits are a hash** of seed, step, leaf and element (`formats.counter_bits`),
  so checkpoints need nothing else.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from scalify_core.array.scaled_array import (
    is_scaled_array,
    with_scale,
    with_valid_scales,
)
from scalify_core.numerics import compiler_hints
from scalify_core.numerics.formats import FP32, FloatFormat
from scalify_core.numerics.scales import MIN_SCALE
from scalify_core.optim.moment_storage import (
    AmaxFn,
    Stored,
    flatten,
    largest_of_arrays,
    narrow_arrays,
    narrow_first_arrays,
    new_scales,
    recompute_barrier,
    stored_fields,
    widen,
)
from scalify_core.optim.weights import LARGE, wide


class ScaledOptState(NamedTuple):
    """State of `scaled_state`."""

    step: jax.Array  # shape=(), dtype=int32: updates made, a counter of the random bits
    # The wrapped transformation's state; arrays of stored fields are ScaledArrays.
    inner_state: Any


def scaled_state(
    tx: optax.GradientTransformation,
    *,
    mu: FloatFormat | Any = FP32,
    nu: FloatFormat | Any = FP32,
    fields: Mapping[str, Stored] | None = None,
    seed: int,
) -> optax.GradientTransformationExtraArgs:
    """Return `tx` with the named fields of its state stored narrow, computing in FP32.

    Args:
        tx: any transformation; its states are searched for fields at every depth
            (chain, masked, inject_hyperparams).
        mu: the format (or dtype) of the fields called `mu`, first moments. FP32: they
            are not changed. With ten mantissa bits or more (FP16) it is rounded to
            nearest: its error is at most epsilon/2/(1-b1), 0.5% at b1 = 0.9. In others
            it is rounded stochastically, as `nu` is. In FP8, with a narrow `nu` beside
            it, it is stored relative to `nu`.
        nu: the format of the fields called `nu`, second moments, stored as square
            roots. FP32: they are not changed. A negative number becomes NaN: give a
            signed `nu`, as that of SM3, in `fields`, without `sqrt`.
        fields: the storage of other fields, by name ("trace" of momentum, "v_row" of
            Adafactor); or of `mu` and `nu`, for all options of `Stored`.
        seed: the seed of the stochastic rounding; with the step in the state it
            determines every random bit.

    Returns:
        The transformation. Its `update` takes three more arguments, and passes all
        others to `tx`:

        - `accept`, a boolean scalar: where it is false, the new state is the old one,
          at no extra cost (the old values are read in any case).
        - `largest_of`, an `AmaxFn`: for arrays that are split over devices, a function
          that moves only the maxima between them.
        - `leaf_indices`, a tree of integers like the inner state: they tell the random
          bits of its arrays apart (default: their positions). An array of integers
          marks a stack, whose rows have scales of their own.

        Gradients and parameters may be plain arrays or ScaledArrays of any float dtype;
        the transformation gets FP32, and updates are plain FP32 arrays. A tensor with
        infinities or NaNs keeps its scale and stays not finite: the caller restores the
        old state. Scales are FP32 scalars in separate buffers, so they can be donated.

    Raises:
        ValueError: from `init`, if the state has no array in a field of a given name;
            a field is given twice, or a format has no native dtype.
    """
    stored = stored_fields(mu, nu, fields)
    # A transformation that takes no further arguments then ignores those of others.
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> ScaledOptState:
        def narrow(params: Any) -> ScaledOptState:
            new, plans, treedef = flatten(tx.init(wide(params)), stored)
            return ScaledOptState(
                jnp.zeros((), jnp.int32),
                treedef.unflatten(narrow_first_arrays(new, plans)),
            )

        # Compiled, the FP32 state that `tx.init` makes is never allocated.
        return jax.jit(narrow)(params)

    def update(
        updates: Any,
        state: ScaledOptState,
        params: Any = None,
        *,
        accept: Any = None,
        largest_of: AmaxFn = largest_of_arrays,
        leaf_indices: Any = None,
        **extra: Any,
    ) -> tuple[Any, ScaledOptState]:
        updates, params = (
            with_valid_scales("scaled_state", x) for x in (updates, params)
        )

        def advance(updates: Any, inner_state: Any) -> tuple[Any, list[Any], Any]:
            arrays, plans, treedef = flatten(inner_state, stored)
            moments = treedef.unflatten(widen(arrays, plans))
            updates, inner_state = tx.update(
                wide(updates), moments, wide(params), **extra
            )
            new, _, treedef = flatten(inner_state, stored)
            return updates, new, treedef

        # Nothing to widen, so the optimizer runs once: bits and kernels are those of
        # the plain one.
        if not stored:
            updates, inner_state = tx.update(
                wide(updates), state.inner_state, wide(params), **extra
            )
            return updates, _unless(
                accept, ScaledOptState(state.step + 1, inner_state), state
            )
        old, plans, treedef = flatten(state.inner_state, stored)
        if any(
            plan.how and not is_scaled_array(x)
            for x, plan in zip(old, plans, strict=True)
        ):
            raise TypeError(
                "scaled_state: its state has no scales, as inside of scalify, where"
                " ScaledArrays are plain arrays; take the gradient inside,"
                " scalify(jax.grad(loss)), and call update outside of scalify"
            )
        first, new, _ = advance(updates, state.inner_state)
        old_scales = [
            x.scale if plan.how else None for x, plan in zip(old, plans, strict=True)
        ]
        scales = new_scales(new, plans, old_scales, accept, largest_of)
        # `advance` runs twice. Otherwise XLA would hold all new moments in FP32 until
        # the scales are known.
        #   first:   gradients, old moments -> new scales, updates of small arrays
        #   barrier: new scales | large gradients, old moments, updates of small arrays
        #   second:  gradients, old moments -> moments to store, updates of the rest
        # Small arrays keep their first updates: one kernel stores the moments of many,
        # and a later reader of the old moments would need a copy of each. Stacks are
        # copies already.
        # Scales of large arrays get separate buffers, so that equal arrays run one
        # program. Small gradients stay outside the barrier: their casts fuse into their
        # readers.
        gradients, form = jax.tree.flatten(updates, is_leaf=is_scaled_array)
        stacks = {
            i
            for i, x in enumerate(gradients)
            if is_scaled_array(x) and np.ndim(x.scale) > 0
        }
        small = {
            i: x
            for i, x in enumerate(jax.tree.leaves(first))
            if x.size < LARGE and i not in stacks
        }
        inputs = _with_separate_scales([*old, *gradients])
        inner_state = treedef.unflatten(inputs[: len(old)])
        gradients = inputs[len(old) :]
        large = {
            i: x
            for i, x in enumerate(gradients)
            if np.size(x) >= LARGE and i not in stacks
        }
        (large, inner_state, small), known = recompute_barrier(
            (large, inner_state, small), scales.numbers
        )
        updates, new, treedef = advance(
            jax.tree.unflatten(form, _with(gradients, large)), inner_state
        )
        flat, form = jax.tree.flatten(updates)
        updates = jax.tree.unflatten(form, _with(flat, small))
        # The old values from behind the barrier, too: else the select of `accept` is a
        # pass and a copy of its own for every moment.
        old, step = flatten(inner_state, stored)[0], state.step + 1

        def restore_rejected(leaf: int, x: Any) -> Any:
            if plans[leaf].how is None:
                return _unless(accept, x, old[leaf])
            # A later kernel writes the rows of a stack again: without a barrier, each
            # row is copied first.
            data = compiler_hints.barrier(x.data) if x.scale.ndim else x.data
            return with_scale(_unless(accept, data, old[leaf].data), x.scale)

        indices = jax.tree.leaves(leaf_indices) or None
        arrays = narrow_arrays(
            new,
            plans,
            scales._replace(numbers=known),
            seed,
            step,
            restore_rejected,
            indices,
        )
        return updates, ScaledOptState(
            _unless(accept, step, state.step), treedef.unflatten(arrays)
        )

    return optax.GradientTransformationExtraArgs(init, update)


def wide_state(state: ScaledOptState, fields: Mapping[str, Stored]) -> ScaledOptState:
    """Return a state with all its moments in FP32 and with their own meaning.

    It is the optimizer's own state. `fields`: as given to `scaled_state`.
    """
    arrays, plans, treedef = flatten(state.inner_state, fields)
    return ScaledOptState(state.step, treedef.unflatten(widen(arrays, plans)))


def narrow_state(
    state: ScaledOptState, fields: Mapping[str, Stored], *, seed: int
) -> ScaledOptState:
    """Return the inverse of `wide_state` for these fields, rounded once.

    So a state can be continued in other formats.
    """
    new, plans, treedef = flatten(state.inner_state, fields)
    # A moment of zeros keeps this scale, which sets no other.
    scales = new_scales(new, plans, [jnp.float32(MIN_SCALE)] * len(new))
    return ScaledOptState(
        state.step,
        treedef.unflatten(narrow_arrays(new, plans, scales, seed, state.step)),
    )


def _with_separate_scales(arrays: list[Any]) -> list[Any]:
    """Return the arrays, with the run-time scales of large ones in separate buffers.

    See `compiler_hints.separate_buffers`.
    """
    large = [
        i
        for i, x in enumerate(arrays)
        if is_scaled_array(x) and x.size >= LARGE and np.ndim(x.scale) == 0
    ]
    # A static scale is a constant of the program, without a buffer.
    large = [i for i in large if not arrays[i].is_static]
    scales = compiler_hints.separate_scalars([arrays[i].scale for i in large])
    return _with(
        arrays,
        {i: with_scale(arrays[i].data, x) for i, x in zip(large, scales, strict=True)},
    )


def _unless(accept: Any, new: Any, old: Any) -> Any:
    """Return `new`; where `accept` is given and false, `old`."""
    if accept is None:
        return new
    # A select is part of the kernel that stores; a branch copies operands that it
    # returns.
    return jax.tree.map(lambda n, o: jnp.where(accept, n, o), new, old)


def _with(arrays: list[Any], others: Mapping[int, Any]) -> list[Any]:
    """Return the arrays, some replaced by index."""
    return [others.get(i, x) for i, x in enumerate(arrays)]
