"""An optimizer whose update runs under `scalify`, as in the Scalify paper.

Reference: https://arxiv.org/abs/2407.17353. The optimizer itself computes in FP16 data
at propagated scales. It rounds to nearest, stores the second moment without a root, and
lets the rules choose scales. `scalify_core.scaled_state` computes in FP32.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from scalify_core import as_scaled_array, scalify
from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.array.tree import map_arrays
from scalify_core.numerics.formats import is_float
from scalify_core.optim import ScaledOptState, Stored
from scalify_core.optim.moment_storage import flatten
from scalify_core.optim.weights import wide
from scalify_core.static import dynamic_rescale_rms


def propagated_state(
    tx: optax.GradientTransformation,
    *,
    fields: Mapping[str, Stored],
    compute: Any,
) -> optax.GradientTransformationExtraArgs:
    """Return `tx` under `scalify`: gradients, parameters and state have `compute` data.

    Updates have `compute` data, too. The new state gets the scale of its RMS in each
    step, since the rules' upper bounds would add up over the steps. Each of its fields
    gets the format of `fields`, rounded to nearest. The state has the form of
    `scaled_state`'s.

    Args:
        tx: any transformation.
        fields: the storage of fields, by name, of which the format counts; other fields
            have `compute` data.
        compute: a float dtype.

    Raises:
        ValueError: from `init`, if the state has no array in a field of a given name.
    """
    tx = optax.with_extra_args_support(tx)

    def in_compute(tree: Any) -> Any:
        scaled = as_scaled_array(tree, dtype=compute)
        return map_arrays(
            lambda x: x.astype(compute) if is_scaled_array(x) else x, scaled
        )

    def store(state: Any) -> Any:
        flat, plans, treedef = flatten(state, fields)
        return treedef.unflatten(
            [
                x.astype(plan.how.format.dtype) if plan.how else x
                for x, plan in zip(flat, plans, strict=True)
            ]
        )

    def init(params: Any) -> ScaledOptState:
        return ScaledOptState(
            jnp.zeros((), jnp.int32), store(in_compute(jax.jit(tx.init)(wide(params))))
        )

    def update(
        updates: Any,
        state: ScaledOptState,
        params: Any = None,
        *,
        accept: Any = True,
        largest_of: Any = None,
        leaf_indices: Any = None,
        **extra: Any,
    ) -> tuple[Any, ScaledOptState]:
        del largest_of, leaf_indices  # scales come from the RMS, and nothing is random

        def advance(updates: Any, inner_state: Any, params: Any) -> tuple[Any, Any]:
            updates, inner_state = tx.update(updates, inner_state, params, **extra)
            return updates, jax.tree.map(
                # Rules assume independent terms, and moments add up what agrees: SGD
                # with momentum was all zeros after 29 steps.
                lambda x: dynamic_rescale_rms(x) if is_float(x) else x,
                inner_state,
            )

        inner_state = in_compute(state.inner_state)
        updates, inner_state = scalify(advance, scales="static")(
            in_compute(updates), inner_state, in_compute(params)
        )
        return updates, jax.tree.map(
            lambda new, old: jnp.where(accept, new, old),
            ScaledOptState(state.step + 1, store(inner_state)),
            state,
        )

    return optax.GradientTransformationExtraArgs(init, update)
