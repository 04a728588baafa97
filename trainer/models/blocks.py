"""A stack of equal blocks: unrolled or scanned, with or without remat, and decoding.

Legend: N = B*T tokens, D model, L layers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# A function from a block's name ("*" for scanned blocks) and its key to the block.
Make = Callable[[str, jax.Array], nnx.Module]


def make_blocks(make: Make, key: jax.Array, n_layer: int, *, scan: bool) -> Any:
    """Return a list of blocks, or with `scan` one block with stacked parameters.

    Both have the same values for the same key.
    """
    keys_L = jax.random.split(key, n_layer)
    if scan:
        return nnx.vmap(lambda key: make("*", key))(keys_L)
    return nnx.List([make(str(i), keys_L[i]) for i in range(n_layer)])


def apply_blocks(
    blocks: Any,
    call: Callable[[Any, jax.Array, Any, Any], jax.Array],
    x_NxD: jax.Array,
    shared: Any = None,
    per_layer: Any = None,
    *,
    scan: bool,
    remat: str,
) -> jax.Array:
    """Apply all blocks to `x`, and return the result.

    Args:
      blocks: the result of `make_blocks`.
      call: `(block, x, shared, the layer's entry of `per_layer`) -> x`.
      x_NxD: the input of the first block.
      shared: a pytree of arrays that all blocks take.
      per_layer: a pytree [L, ...] with an entry for each block, or None.
      scan: whether the blocks are stacked.
      remat: the values that the backward pass recomputes, as in `GPT2Spec`; blocks
        themselves handle "none" and "elementwise".
    """

    def run(
        graphdef: Any, x_NxD: jax.Array, layer: Any, shared: Any, per_layer: Any
    ) -> jax.Array:
        return call(nnx.merge(graphdef, layer), x_NxD, shared, per_layer)

    if remat not in ("none", "elementwise"):
        policy = None if remat == "block" else getattr(jax.checkpoint_policies, remat)
        # `prevent_cse` keeps XLA from merging the recomputation with the forward pass.
        # In a scan XLA cannot merge them.
        run = jax.checkpoint(run, policy=policy, prevent_cse=not scan, static_argnums=0)
    if scan:
        graphdef, layers = nnx.split(blocks)
        return jax.lax.scan(
            lambda x, xs: (run(graphdef, x, xs[0], shared, xs[1]), None),
            x_NxD,
            (layers, per_layer),
        )[0]
    for i, block in enumerate(blocks):
        graphdef, layer = nnx.split(block)
        x_NxD = run(
            graphdef, x_NxD, layer, shared, None if per_layer is None else per_layer[i]
        )
    return x_NxD


def decode_blocks(
    blocks: Any,
    call: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]],
    x_NxD: jax.Array,
    per_layer: Any,
    *,
    scan: bool,
) -> tuple[jax.Array, Any]:
    """Apply all blocks to `x`; return `x` and the new cache.

    `per_layer` is the cache [L, ...], or a pytree that contains it. `call(block, x, the
    layer's entry of per_layer)` returns `x` and the layer's new cache.
    """
    if scan:
        graphdef, layers = nnx.split(blocks)
        return jax.lax.scan(
            lambda x, xs: call(nnx.merge(graphdef, xs[0]), x, xs[1]),
            x_NxD,
            (layers, per_layer),
        )
    new_caches = []
    for i, block in enumerate(blocks):
        x_NxD, layer_cache = call(
            block, x_NxD, jax.tree.map(lambda c, i=i: c[i], per_layer)
        )
        new_caches.append(layer_cache)
    return x_NxD, jax.tree.map(lambda *c: jnp.stack(c), *new_caches)
