"""Scanned layers whose weights are gathered one layer ahead, under FSDP.

`models.blocks.apply_blocks` gathers the next layer's shards while a layer computes, and
drops the weights of the last one. The backward pass gathers them again, and reduces the
gradients of a layer before it comes to the next. So a device holds the whole weights of
two layers at most.

Gathering and reducing are composites: under scale propagation, the data of a weight is
sent in its narrow format and keeps its scale, and a reduced gradient is plain FP32.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import DictKey, tree_leaves_with_path, tree_map_with_path

from scalify_core.array.scaled_array import with_scale
from scalify_core.interpreter import value as v
from scalify_core.interpreter.registry import composite_rule
from scalify_core.numerics import formats
from scalify_core.ops.composite import composite
from trainer.models.blocks import BLOCKS
from trainer.models.roles import Role
from trainer.parallel.distribute import (
    CommConfig,
    all_gather_array,
    all_gather_param,
    reduce_array,
)
from trainer.parallel.sharding import param_specs


@dataclasses.dataclass(frozen=True, eq=False)
class LayerArray:
    """How one array of each layer is sent.

    Composites take it as a static argument, so it needs a hash: that of its identity,
    since the dictionaries in `comm` have none.

    Attributes:
      spec: how a layer's array is split.
      role: its role.
      comm: the formats.
      index: its index among the arrays of a layer.
    """

    spec: PartitionSpec
    role: Role
    comm: CommConfig
    index: int

    def gather(self, shard: Any) -> Any:
        """Return the whole array in the format in which it is sent."""
        return all_gather_param(shard, self.spec, self.role, self.comm)

    def reduce(
        self, grad: jax.Array, leaf_index: jax.Array, seed: jax.Array
    ) -> jax.Array:
        """Return this device's shard of the mean of FP32 gradients."""
        return reduce_array(
            grad, self.spec, self.role, self.comm, seed=seed, leaf_index=leaf_index
        )


@composite(name="gather_weights")
def _gather(shard: jax.Array, *, array: LayerArray, is_scaled: bool) -> jax.Array:
    if is_scaled:  # only traced for its shape: the rule below replaces it
        return all_gather_array(shard, array.spec, array.role)
    return array.gather(shard)


@composite_rule("gather_weights")
def _gather_scaled(call: Any, shard: v.Value) -> v.Value:
    p = v.scalar_scale(shard)
    # Without this rule the call would be evaluated in FP32 at scale 1, and four bytes
    # an element would be sent.
    sent = call.settings["array"].gather(with_scale(p.data, p.scale))
    return v.value(sent.data, sent.scale, p.expected_rms)


@composite(name="reduce_gradients")
def _reduce(
    grad: jax.Array, leaf_index: jax.Array, seed: jax.Array, *, array: LayerArray
) -> jax.Array:
    # The gradient of an array has its dtype, also where the reduction computes in FP32.
    return array.reduce(grad.astype(jnp.float32), leaf_index, seed).astype(grad.dtype)


# With `wide` the gradient comes in FP32: it is reduced first, and rounded to its format
# once.
@composite_rule("reduce_gradients", wide=True)
def _reduce_scaled(call: Any, grad: Any, leaf_index: Any, seed: Any) -> jax.Array:
    return call.settings["array"].reduce(
        v.unscaled(grad), formats.materialize(leaf_index), formats.materialize(seed)
    )


class FsdpLayerComm(NamedTuple):
    """The communication of a model's layers: a `models.blocks.LayerComm`.

    Attributes:
      arrays: `LayerArray` of each array of a layer, by its path in the layer.
      is_scaled: whether the weights are scaled arrays.
      seed: of stochastic rounding; None: gradients are not reduced.
    """

    arrays: Mapping[tuple[str, ...], LayerArray]
    is_scaled: bool
    seed: jax.Array | None = None

    def gather(self, shards: Any) -> Any:
        """Return the whole weights of a layer, in the formats in which they are sent.

        Arrays that are not parameters, such as amax histories, are unchanged.
        """

        def gather_leaf(path: Any, shard: Any) -> Any:
            array = self.arrays.get(_names(path))
            if array is None:
                return shard
            return _gather(shard, array=array, is_scaled=self.is_scaled)

        return tree_map_with_path(gather_leaf, shards)

    def reduce(self, grads: Any, layer_index: jax.Array) -> Any:
        """Return this device's shards of a layer's mean gradients."""

        def reduce_leaf(path: Any, grad: Any) -> Any:
            array = self.arrays.get(_names(path))
            if array is None:
                return grad
            # Layers have different random bits, although a scan traces one body for all
            # of them.
            leaf_index = layer_index * len(self.arrays) + array.index
            return _reduce(grad, leaf_index, self.seed, array=array)

        return tree_map_with_path(reduce_leaf, grads)


def fsdp_layer_comm(
    params: Any, mesh: Mesh, comm: CommConfig, *, is_scaled: bool
) -> FsdpLayerComm:
    """Return the communication of a model's layers; `params` may be shapes."""
    specs = jax.tree.leaves(param_specs(params, mesh, comm.roles)[BLOCKS])
    roles = tree_leaves_with_path(comm.roles[BLOCKS])
    arrays = {}
    for i, (spec, (path, role)) in enumerate(zip(specs, roles, strict=True)):
        layer_spec = PartitionSpec(*spec[1:])  # without the axis of layers
        arrays[_names(path)] = LayerArray(layer_spec, role, comm, i)
    return FsdpLayerComm(arrays, is_scaled)


def _names(path: Any) -> tuple[str, ...]:
    return tuple(entry.key for entry in path if isinstance(entry, DictKey))
