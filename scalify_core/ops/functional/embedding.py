"""Table look-up whose gradient is summed in FP32 and, on every platform, in one order.

Shape legend: `...` the shape of the ids, N their number, V rows of the table, D width.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from scalify_core.numerics import compiler_hints
from scalify_core.ops.composite import composite


def embedding(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the rows `table[ids]`.

    Args:
        table: [V, D], any float dtype.
        ids: [...], integers in [0, V); an id outside gives a row of NaN, so that it
            cannot go unnoticed.

    Returns:
        [..., D] in the dtype of the table. The gradient of the table adds up in FP32,
        always in the same order. (By default a GPU's scatter-add is atomic, and not
        deterministic.)
    """
    return _embedding(table, ids)


@composite(name="embedding")
def _embedding(table: jax.Array, ids: jax.Array) -> jax.Array:
    return table.at[ids].get(mode="fill", fill_value=jnp.nan)


def _embedding_fwd(table: jax.Array, ids: jax.Array) -> tuple:
    return _embedding.fun(table, ids), (table, ids)


def _embedding_bwd(residuals: tuple, gradient: jax.Array) -> tuple:
    table, ids = residuals
    zeros = jnp.zeros(table.shape, jnp.float32)
    return (
        zeros.at[ids]
        .add(gradient.astype(jnp.float32), mode="drop")
        .astype(table.dtype),
        None,
    )


def _embedding_bwd_cuda(residuals: tuple, gradient: jax.Array) -> tuple:
    """Return the gradient of the table without atomics.

    Ids are sorted, a segmented scan adds up each run of equal ids, and each sum is
    written once.
    """
    table, ids = residuals
    width, count = table.shape[-1], math.prod(ids.shape)
    order = jnp.argsort(ids.reshape(count), stable=True)
    sorted_ids = ids.reshape(count)[order]
    rows = gradient.astype(jnp.float32).reshape(count, width)[order]
    starts = jnp.concatenate([jnp.ones((1,), bool), sorted_ids[1:] != sorted_ids[:-1]])

    def add(left: tuple, right: tuple) -> tuple:
        (sum_l, start_l), (sum_r, start_r) = left, right
        return jnp.where(start_r, sum_r, sum_l + sum_r), start_l | start_r

    sums, _ = jax.lax.associative_scan(add, (rows, starts[:, None]))
    ends = jnp.concatenate([starts[1:], jnp.ones((1,), bool)])
    # Rows that do not end a run go to distinct places past the table, and are dropped.
    target = jnp.where(
        ends, sorted_ids, table.shape[0] + jnp.arange(count, dtype=sorted_ids.dtype)
    )
    # Not before the sums are there: zeros would be among the first things that are
    # made, and held all the while.
    zero, sums = compiler_hints.barrier("late_zeros", (jnp.float32(0), sums))
    zeros = jnp.full(table.shape, zero)
    return (
        zeros.at[target]
        .set(sums, mode="drop", unique_indices=True)
        .astype(table.dtype),
        None,
    )


_embedding.defvjp(
    _embedding_fwd, _embedding_bwd, cuda=(_embedding_fwd, _embedding_bwd_cuda)
)
