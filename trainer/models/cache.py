"""The key-value cache of decoding, and attention over it.

Legend: B batch, T time, S cache length, H heads of queries, G heads of keys and values,
R = H / G, K head dim, L layers.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class KVCache(NamedTuple):
    """Keys and values in the compute dtype, `[L, B, S, G, K]`; no L for one layer."""

    k: jax.Array
    v: jax.Array


def empty_cache(
    n_layer: int, batch: int, context: int, heads: int, head_dim: int, dtype: DTypeLike
) -> KVCache:
    """Return an empty cache of `context` positions."""
    # The cache has its full size from the start, so that decoding is compiled once.
    shape = (n_layer, batch, context, heads, head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def extend_cache(
    cache: KVCache,
    k_BxTxGxK: jax.Array,
    v_BxTxGxK: jax.Array,
    position: jax.Array | int,
) -> KVCache:
    """Return a layer's cache with new keys and values from `position` on."""
    # JAX shifts back an update that exceeds the cache, in silence: callers keep
    # `position + T` within it.
    update = jax.lax.dynamic_update_slice_in_dim
    return KVCache(
        update(cache.k, k_BxTxGxK, position, axis=1),
        update(cache.v, v_BxTxGxK, position, axis=1),
    )


def cached_attention(
    q_BxTxHxK: jax.Array,
    cache: KVCache,
    position: jax.Array | int,
    window: int | None = None,
) -> jax.Array:
    """Return the attention of queries to the cached positions up to their own.

    Query t is at `position + t`. It sees only the last `window` of these positions, its
    own included. The softmax is FP32. Each head of keys and values serves R successive
    query heads.
    """
    k_BxSxGxK, v_BxSxGxK = cache
    (B, T, _, K), (S, G) = q_BxTxHxK.shape, k_BxSxGxK.shape[1:3]
    # Queries are grouped, not keys repeated: the cache is read once for R heads.
    q_BxTxGxRxK = q_BxTxHxK.reshape(B, T, G, -1, K)
    logits_BxGxRxTxS = jnp.einsum(
        "btgrk,bsgk->bgrts", q_BxTxGxRxK, k_BxSxGxK, preferred_element_type=jnp.float32
    )
    key_1xS, query_Tx1 = jnp.arange(S)[None, :], position + jnp.arange(T)[:, None]
    visible_TxS = key_1xS <= query_Tx1
    if window is not None:
        visible_TxS &= key_1xS > query_Tx1 - window
    # -inf is safe: each query sees its own position at least, so no row is -inf alone,
    # whose softmax would be NaN.
    logits_BxGxRxTxS = jnp.where(
        visible_TxS[None, None, None], logits_BxGxRxTxS / math.sqrt(K), -jnp.inf
    )
    weights_BxGxRxTxS = jax.nn.softmax(logits_BxGxRxTxS, axis=-1).astype(
        v_BxSxGxK.dtype
    )
    return jnp.einsum("bgrts,bsgk->btgrk", weights_BxGxRxTxS, v_BxSxGxK).reshape(
        q_BxTxHxK.shape
    )
