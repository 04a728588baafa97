"""Softmax attention in blocks of queries: the products, and the mask, of one block.

Shape legend: B batch, T query positions, S key positions, t and s those of a block, H
query heads, G heads of keys and values, K head dim.

Grouped queries (G < H) meet the keys and values of their group as more rows of one
product: nothing is repeated.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sees(NamedTuple):
    """The keys that a query sees; see `attention`."""

    causal: bool
    window: int | None


def blocks_of_queries(queries: int, keys: int, sees: Sees) -> list[tuple[slice, slice]]:
    """Return each block of queries, and the keys that it may see.

    Leaving out the masked half is nearly twice as fast.
    """
    # 64 is fastest on CPU (measured from T = 256 to 1024); past 512, fewer blocks keep
    # compilation short.
    size = 64 if queries <= 512 else max(128, queries // 16)
    rows = [
        slice(start, min(start + size, queries)) for start in range(0, queries, size)
    ]
    window = sees.window or queries
    # From the first query of the block on: `masked_logits` masks the rest.
    first = [max(0, block.start - window + 1) for block in rows]
    last = [block.stop if sees.causal else keys for block in rows]
    return [(rows[i], slice(first[i], last[i])) for i in range(len(rows))]


def masked_logits(
    q: jax.Array,
    k: jax.Array,
    segments: jax.Array | None,
    rows: slice,
    cols: slice,
    sees: Sees,
    logit_scale: float,
) -> jax.Array:
    """Return [B, H, t, s] FP32, -inf where the query may not see the key."""
    logits = rows_dot(q[:, :, rows], k[:, :, cols], 3) * logit_scale
    if sees.causal:
        query = jnp.arange(rows.start, rows.stop)[:, None]
        key = jnp.arange(cols.start, cols.stop)[None, :]
        visible = key <= query
        if sees.window is not None:
            # The window counts the query itself, as Hugging Face's Mistral does.
            visible &= key > query - sees.window
        # -inf is below logits of any size, and its exponential is exactly zero.
        logits = jnp.where(visible[None, None], logits, -jnp.inf)
    if segments is not None:
        same = segments[:, rows, None] == segments[:, None, cols]
        logits = jnp.where(same[:, None], logits, -jnp.inf)
    return logits


def rows_dot(a: jax.Array, b: jax.Array, contract_b: int) -> jax.Array:
    """Return the last axis of `a` [B, H, t, *] with an axis of its group's `b` [B, G,
    *, *]: [B, H, t, *] FP32.
    """
    product = _batched_dot(_grouped(a, b.shape[1]), b, 3, contract_b)
    return product.reshape(*a.shape[:3], product.shape[-1])


def over_rows(a: jax.Array, b: jax.Array, groups: int) -> jax.Array:
    """Return the sum over the rows t, of all heads of a group, of `a` [B, H, t, s] and
    `b` [B, H, t, K]: [B, G, s, K] FP32.
    """
    return _batched_dot(_grouped(a, groups), _grouped(b, groups), 2, 2)


def _grouped(x: jax.Array, groups: int) -> jax.Array:
    """Return [B, H, t, *] as [B, G, H / G * t, *], the heads of a group as rows."""
    return x.reshape(x.shape[0], groups, -1, x.shape[3])


def _batched_dot(
    a: jax.Array, b: jax.Array, contract_a: int, contract_b: int
) -> jax.Array:
    """Return a product batched over the first two axes, in FP32."""
    dims = (((contract_a,), (contract_b,)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def heads_first(x: jax.Array) -> jax.Array:
    """Return [B, T, H, K] as [B, H, T, K], and the reverse."""
    return x.swapaxes(1, 2)
