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
    all_gather_data,
    all_gather_param,
    reduce_data,
)
from trainer.parallel.sharding import data_specs


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


@composite(name="gather_weights")
def _gather(shard: jax.Array, *, array: LayerArray, is_scaled: bool) -> jax.Array:
    if is_scaled:  # only traced for its shape: the rule below replaces it
        return all_gather_data(shard, array.spec, array.role)
    return all_gather_param(shard, array.spec, array.role, array.comm)


@composite_rule("gather_weights")
def _gather_scaled(call: Any, shard: v.Value) -> v.Value:
    array, shard = call.settings["array"], v.scalar_scale(shard)
    p = with_scale(shard.data, shard.scale)
    sent = all_gather_param(p, array.spec, array.role, array.comm)
    return v.value(sent.data, sent.scale, shard.expected_rms)


@composite(name="reduce_gradients")
def _reduce(
    grad: jax.Array, leaf_index: jax.Array, seed: jax.Array, *, array: LayerArray
) -> jax.Array:
    wide = grad.astype(jnp.float32)
    mean = reduce_data(
        wide, array.spec, array.role, array.comm, seed=seed, leaf_index=leaf_index
    )
    return mean.astype(grad.dtype)


@composite_rule("reduce_gradients", wide=True)
def _reduce_scaled(call: Any, grad: Any, leaf_index: Any, seed: Any) -> jax.Array:
    array = call.settings["array"]
    return reduce_data(
        v.unscaled(grad),
        array.spec,
        array.role,
        array.comm,
        seed=formats.materialize(seed),
        leaf_index=formats.materialize(leaf_index),
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

        What is no parameter, as an amax history, is returned as it is.
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
            leaf_index = layer_index * len(self.arrays) + array.index
            return _reduce(grad, leaf_index, self.seed, array=array)

        return tree_map_with_path(reduce_leaf, grads)


def fsdp_layer_comm(
    params: Any, mesh: Mesh, comm: CommConfig, *, is_scaled: bool
) -> FsdpLayerComm:
    """Return the communication of a model's layers; `params` may be shapes."""
    specs = jax.tree.leaves(data_specs(params, mesh, comm.roles)[BLOCKS])
    roles = tree_leaves_with_path(comm.roles[BLOCKS])
    arrays = {}
    for i, (spec, (path, role)) in enumerate(zip(specs, roles, strict=True)):
        layer_spec = PartitionSpec(*spec[1:])  # without the axis of layers
        arrays[_names(path)] = LayerArray(layer_spec, role, comm, i)
    return FsdpLayerComm(arrays, is_scaled)


def _names(path: Any) -> tuple[str, ...]:
    return tuple(entry.key for entry in path if isinstance(entry, DictKey))
