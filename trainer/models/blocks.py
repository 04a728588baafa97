"""A stack of equal blocks: unrolled or scanned, with or without remat, and decoding.

Legend: N = B*T tokens, D model, L layers.
"""

import functools
from collections.abc import Callable, Mapping
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
    # Iterating is one operation; `keys_L[i]` would be another one for each layer.
    return nnx.List([make(str(i), key) for i, key in enumerate(keys_L)])


def stack_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    """Stack the parameters of unrolled layers along a leading axis L."""
    blocks = params[BLOCKS]
    layers = [blocks[i] for i in range(len(blocks))]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return {**params, BLOCKS: stacked}


def unstack_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `stack_layers`."""
    stacked = params[BLOCKS]
    n_layer = jax.tree.leaves(stacked)[0].shape[0]
    return {**params, BLOCKS: {i: layer_of(stacked, i) for i in range(n_layer)}}


def layer_of(stacked: Any, i: int) -> Any:
    """Return the entry of layer `i` of a pytree [L, ...]; None for None."""
    return jax.tree.map(lambda x: x[i], stacked)


def apply_blocks(
    blocks: Any,
    call: Callable[[Any, jax.Array, Any, Any], jax.Array],
    x_NxD: jax.Array,
    shared: Any,
    per_layer: Any,
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
        # The graph definition is static: `jax.checkpoint`, scans and `_apply_gathered`
        # get a layer's arrays alone.
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
        x_NxD = run(graphdef, x_NxD, layer, shared, layer_of(per_layer, i))
    return x_NxD


def _apply_gathered(
    run: Callable[..., jax.Array],
    shards: Any,
    x_NxD: jax.Array,
    shared: Any,
    per_layer: Any,
    layer_comm: LayerComm,
) -> jax.Array:
    """Apply stacked blocks of which devices hold shards.

    While a layer is computed, the weights of the next layer are gathered. The backward
    pass gathers each layer's weights again, and recomputes its block.
    """
    n_layer = jax.tree.leaves(shards)[0].shape[0]
    layer_index_L = jnp.arange(n_layer)

    def gather_layer(shards_L: Any, layer_index: jax.Array | int) -> Any:
        """Return the weights of `layer_index`, in the formats that are sent."""
        # Of one layer only: all-gathering the stack would put all layers into memory.
        shard = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, layer_index, 0, False), shards_L
        )
        return layer_comm.gather(shard)

    def to_dtypes(weights: Any) -> Any:
        """Return a layer's weights in the dtypes of its shards."""
        return jax.tree.map(
            lambda weight, shard: weight.astype(shard.dtype), weights, shards
        )

    # Derived by JAX, the scan would keep the gathered weights of all layers.
    @jax.custom_vjp
    def apply(
        shards_L: Any, x_NxD: jax.Array, shared: Any, per_layer: Any
    ) -> jax.Array:
        return forward(shards_L, x_NxD, shared, per_layer)[0]

    def forward(
        shards_L: Any, x_NxD: jax.Array, shared: Any, per_layer: Any
    ) -> tuple[jax.Array, Any]:
        def step(carry: tuple, inputs: tuple) -> tuple[Any, Any]:
            (x_NxD, weights), (layer_index, entry) = carry, inputs
            # The layer below does not need them, so XLA may gather while it computes.
            # The last layer gathers its own weights again, for the start of the
            # backward pass.
            next_weights = gather_layer(
                shards_L, jnp.minimum(layer_index + 1, n_layer - 1)
            )
            y_NxD = run(x_NxD, to_dtypes(weights), shared, entry)
            return (y_NxD, next_weights), x_NxD

        first = x_NxD, gather_layer(shards_L, 0)
        (y_NxD, last_weights), x_LxNxD = lax.scan(
            step, first, (layer_index_L, per_layer)
        )
        # The backward pass begins with the last layer's weights.
        return y_NxD, (shards_L, last_weights, x_LxNxD, shared, per_layer)

    def backward(residuals: Any, dy_NxD: jax.Array) -> tuple:
        shards_L, last_weights, x_LxNxD, shared, per_layer = residuals
        # XLA takes the first iteration out of the loop. Its gather needs only the
        # shards: without the barrier XLA ran it before the forward pass, and held the
        # weights of a third layer.
        shards_L, dy_NxD = lax.optimization_barrier((shards_L, dy_NxD))

        def step(carry: tuple, inputs: tuple) -> tuple[Any, Any]:
            (dy_NxD, weights), (layer_index, x_NxD, entry) = carry, inputs
            # The first layer has none before it: all iterations of a loop are one
            # program.
            next_weights = gather_layer(shards_L, jnp.maximum(layer_index - 1, 0))
            _, pullback = jax.vjp(
                lambda weights, x_NxD: run(x_NxD, weights, shared, entry),
                to_dtypes(weights),
                x_NxD,
            )
            grads, dx_NxD = pullback(dy_NxD)
            return (dx_NxD, next_weights), layer_comm.reduce(grads, layer_index)

        first, inputs = (dy_NxD, last_weights), (layer_index_L, x_LxNxD, per_layer)
        (dx_NxD, _), grads_L = lax.scan(step, first, inputs, reverse=True)
        # Segments, angles, keys and flags are no parameters: None stands for zeros.
        return grads_L, dx_NxD, None, None

    apply.defvjp(forward, backward)
    return apply(shards, x_NxD, shared, per_layer)


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
        x_NxD, layer_cache = call(block, x_NxD, layer_of(per_layer, i))
        new_caches.append(layer_cache)
    # As a scan stacks them, so that callers see one layout of the cache.
    return x_NxD, jax.tree.map(lambda *c: jnp.stack(c), *new_caches)
