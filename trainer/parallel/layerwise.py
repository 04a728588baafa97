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
    gather_array,
    gather_narrow,
    reduce_array,
)
from trainer.parallel.sharding import data_specs


@dataclasses.dataclass(frozen=True, eq=False)
class LayerArray:
    """How one array of each layer is sent. It is a static argument: equal to itself.

    Attributes:
      spec: how a layer's array is split.
      role: its role.
      comm: the formats.
      leaf: its number among the arrays of a layer.
      leaves: the number of arrays of a layer.
    """

    spec: PartitionSpec
    role: Role
    comm: CommConfig
    leaf: int
    leaves: int

    def reduced(self, grad: jax.Array, layer: Any, seed: Any) -> jax.Array:
        """Return this device's shard of the mean of FP32 gradients."""
        leaf = layer * self.leaves + self.leaf
        return reduce_array(grad, self.spec, self.role, self.comm, seed=seed, leaf=leaf)


@composite(name="gather_weights")
def _gather(shard: jax.Array, *, array: LayerArray, scaled: bool) -> jax.Array:
    if scaled:  # the trace of a scaled program, which `_gather_scaled` evaluates
        return gather_array(shard, array.spec, array.role)
    return gather_narrow(shard, array.spec, array.role, array.comm)


@composite_rule("gather_weights")
def _gather_scaled(call: Any, shard: v.Value) -> v.Value:
    array, shard = call.settings["array"], v.scalar_scale(shard)
    scaled = with_scale(shard.data, shard.scale)
    sent = gather_narrow(scaled, array.spec, array.role, array.comm)
    return v.value(sent.data, sent.scale, shard.expected_rms)


@composite(name="reduce_gradients")
def _reduce(
    grad: jax.Array, layer: jax.Array, seed: jax.Array, *, array: LayerArray
) -> jax.Array:
    mean = array.reduced(grad.astype(jnp.float32), layer, seed)
    return mean.astype(grad.dtype)


@composite_rule("reduce_gradients", wide=True)
def _reduce_scaled(call: Any, grad: Any, layer: Any, seed: Any) -> jax.Array:
    layer, seed = formats.materialize(layer), formats.materialize(seed)
    return call.settings["array"].reduced(v.unscaled(grad), layer, seed)


class FsdpLayerComm(NamedTuple):
    """The communication of a model's layers: a `models.blocks.LayerComm`.

    Attributes:
      arrays: `LayerArray` of each array of a layer, by its path in the layer.
      scaled: whether the weights are scaled arrays.
      seed: of stochastic rounding; None: gradients are not reduced.
    """

    arrays: Mapping[tuple[str, ...], LayerArray]
    scaled: bool
    seed: jax.Array | None = None

    def gather(self, shards: Any) -> Any:
        """Return the whole weights of a layer, in the formats in which they are sent.

        What is no parameter, as an amax history, is returned as it is.
        """

        def gather_leaf(path: Any, shard: Any) -> Any:
            array = self.arrays.get(_names(path))
            if array is None:
                return shard
            return _gather(shard, array=array, scaled=self.scaled)

        return tree_map_with_path(gather_leaf, shards)

    def reduce(self, grads: Any, layer: jax.Array) -> Any:
        """Return this device's shards of the mean gradients of layer number `layer`."""

        def reduce_leaf(path: Any, grad: Any) -> Any:
            array = self.arrays.get(_names(path))
            if array is None:
                return grad
            return _reduce(grad, layer, self.seed, array=array)

        return tree_map_with_path(reduce_leaf, grads)


def fsdp_layer_comm(
    params: Any, mesh: Mesh, comm: CommConfig, *, scaled: bool
) -> FsdpLayerComm:
    """Return the communication of a model's layers; `params` may be shapes."""
    specs = data_specs(params, mesh, comm.roles)[BLOCKS]
    roles = comm.roles[BLOCKS]
    leaves = tree_leaves_with_path(roles)
    arrays = {}
    for leaf, (path, role) in enumerate(leaves):
        spec = specs
        for name in _names(path):
            spec = spec[name]
        layer_spec = PartitionSpec(*spec[1:])  # without the axis of layers
        arrays[_names(path)] = LayerArray(layer_spec, role, comm, leaf, len(leaves))
    return FsdpLayerComm(arrays, scaled)


def _names(path: Any) -> tuple[str, ...]:
    return tuple(entry.key for entry in path if isinstance(entry, DictKey))
