"""A stack of equal blocks: unrolled or scanned, with or without remat, and decoding.

Legend: N = B*T tokens, D model, L layers.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

BLOCKS = "h"  # the name of a model's blocks, and of their parameters

# A function from a block's name ("*" for scanned blocks) and its key to the block.
Make = Callable[[str, jax.Array], nnx.Module]


class LayerComm(Protocol):
    """The communication of devices that hold shards of every layer's weights.

    A layer's weights are a pytree.
    """

    def gather(self, shards: Any) -> Any:
        """Return the whole weights of a layer, in the formats that are sent."""

    def reduce(self, grads: Any, layer_index: jax.Array) -> Any:
        """Return this device's shards of a layer's mean gradients."""


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
    layer_comm: LayerComm | None = None,
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
      layer_comm: gathers the shards that the blocks hold; with `scan` and remat
        "block".
    """

    def run(
        graphdef: Any, x_NxD: jax.Array, layer: Any, shared: Any, per_layer: Any
    ) -> jax.Array:
        return call(nnx.merge(graphdef, layer), x_NxD, shared, per_layer)

    if layer_comm is not None:
        graphdef, layers = nnx.split(blocks)
        apply = functools.partial(run, graphdef)
        return _apply_gathered(apply, layers, x_NxD, shared, per_layer, layer_comm)
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


def _apply_gathered(
    run: Callable[..., jax.Array],
    layers: Any,
    x_NxD: jax.Array,
    shared: Any,
    per_layer: Any,
    layer_comm: LayerComm,
) -> jax.Array:
    """Apply stacked blocks of which devices hold shards.

    An iteration starts to gather the weights of the next one, which nothing in it
    waits for. The backward pass gathers them again, and recomputes the block.
    """
    last = jax.tree.leaves(layers)[0].shape[0] - 1
    numbers_L = jnp.arange(last + 1)

    def gathered(layers: Any, layer: jax.Array | int) -> Any:
        return layer_comm.gather(
            jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer, 0, False), layers)
        )

    def wide(weights: Any) -> Any:
        return jax.tree.map(lambda w, x: w.astype(x.dtype), weights, layers)

    @jax.custom_vjp
    def apply(layers: Any, x_NxD: jax.Array, shared: Any, per_layer: Any) -> jax.Array:
        return forward(layers, x_NxD, shared, per_layer)[0]

    def forward(
        layers: Any, x_NxD: jax.Array, shared: Any, per_layer: Any
    ) -> tuple[jax.Array, Any]:
        def step(carry: tuple, inputs: tuple) -> tuple[Any, Any]:
            (x_NxD, weights), (layer, entry) = carry, inputs
            following = gathered(layers, jnp.minimum(layer + 1, last))
            return (run(x_NxD, wide(weights), shared, entry), following), x_NxD

        first = x_NxD, gathered(layers, 0)
        (y_NxD, weights), inputs = lax.scan(step, first, (numbers_L, per_layer))
        # `weights` are those of the last layer, with which the backward pass begins.
        return y_NxD, (layers, weights, inputs, shared, per_layer)

    def backward(residuals: Any, dy_NxD: jax.Array) -> tuple:
        layers, weights, x_LxNxD, shared, per_layer = residuals
        # XLA takes the first iteration out of the loop. Its gather, which waits for
        # nothing else, would run before the forward pass.
        layers, dy_NxD = lax.optimization_barrier((layers, dy_NxD))

        def step(carry: tuple, inputs: tuple) -> tuple[Any, Any]:
            (dy_NxD, weights), (layer, x_NxD, entry) = carry, inputs
            following = gathered(layers, jnp.maximum(layer - 1, 0))
            _, pullback = jax.vjp(
                lambda weights, x_NxD: run(x_NxD, weights, shared, entry),
                wide(weights),
                x_NxD,
            )
            grads, dx_NxD = pullback(dy_NxD)
            return (dx_NxD, following), layer_comm.reduce(grads, layer)

        (dx_NxD, _), grads = lax.scan(
            step, (dy_NxD, weights), (numbers_L, x_LxNxD, per_layer), reverse=True
        )
        return grads, dx_NxD, None, None

    apply.defvjp(forward, backward)
    return apply(layers, x_NxD, shared, per_layer)


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
