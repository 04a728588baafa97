"""The loss and its gradient over several devices, by `shard_map`.

Every device runs the program of one device. It gathers the parameters of which it holds
a shard, and differentiates the loss of its rows of the batch. The gradients are then
reduced to the shards that the devices hold. All communication of parameters and
gradients is here and in `reduction`. Activations and their gradients are only summed
over `tensor`, around attention and MLP (`layers.sum_over_axis`).

Legend: A micro-batches, B sequences of a micro-batch, D model, F columns of queries,
keys or values, n devices of the tensor-parallel group.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from scalify_core import weights
from scalify_core.array.scaled_array import is_scaled_array, with_scale
from scalify_core.array.tree import map_arrays
from scalify_core.numerics.amax import largest_magnitudes
from scalify_core.numerics.formats import E4M3, FP16, FloatFormat
from scalify_core.optim import AmaxFn, largest_of_arrays
from trainer.models.blocks import BLOCKS
from trainer.models.roles import Role, role_of
from trainer.parallel.mesh import (
    BATCH_AXES,
    REPLICATED,
    STEP_AXES,
    batch_axes,
    devices_of_replica,
    over_devices,
)
from trainer.parallel.reduction import (
    all_gather_bits,
    all_to_all_bits,
    mean_over_devices,
)
from trainer.parallel.sharding import (
    array_specs,
    fsdp_axis,
    mesh_axes,
    param_specs,
    partition_spec,
)
from trainer.precision.gradients import ValueAndGrad
from trainer.step.state import TrainState
from trainer.step.step import (
    GradientFn,
    Tokens,
    mean_gradient,
    squared_norms_of_arrays,
)

LossOfState = Callable[[TrainState, jax.Array, jax.Array | None], jax.Array]
MICRO_BATCH_SPEC = PartitionSpec(None, BATCH_AXES)


class GradReduceConfig(NamedTuple):
    """The reduction of gradients over devices.

    Attributes:
      format: fp32, bf16, fp16 or fp8. With fp8 the kernels of the blocks' linear layers
        are reduced in E4M3, the rest in FP16.
      deterministic: whether FP32 gradients are summed in the order of the devices.
    """

    format: str = "fp32"
    deterministic: bool = False


class CommConfig(NamedTuple):
    """The formats of gradients and parameters between devices.

    Attributes:
      reduce: how gradients are reduced.
      cast_for_all_gather: `(role, parameter) -> parameter` casts it to the format in
        which it is all-gathered.
      roles: roles of the parameters, in their nested dictionaries.
      gathers_by_layer: whether the model gathers its blocks itself, one by one, and
        reduces their gradients (`parallel.layerwise`).
    """

    reduce: GradReduceConfig
    cast_for_all_gather: Callable[[Role, Any], Any]
    roles: Any
    gathers_by_layer: bool = False

    def reduce_format(self, role: Role) -> FloatFormat:
        """Return the format in which the gradient of a parameter is sent."""
        if self.reduce.format == "fp8":
            return E4M3 if role.is_kernel else FP16
        return FloatFormat.parse(self.reduce.format)


def qkv_rows_to_columns(x: jax.Array, role: Role) -> jax.Array:
    """Reshard a fused QKV array from rows to the columns of this device's heads.

    A kernel of g fused parts is stored split by rows, because the columns of a head are
    not contiguous: [.., D/n, gF] becomes [.., D, gF/n]. A bias [.., gF] is whole on
    every device of the tensor-parallel group. Arrays that are not fused are unchanged.
    """
    n = lax.axis_size("tensor")
    if n == 1 or role.groups == 1:
        return x
    # kernel [.., D/n, g, n, F/n], bias [.., g, n, F/n]
    parts = x.reshape(*x.shape[:-1], role.groups, n, -1)
    if role.is_kernel:
        # Each device gets the columns of its heads alone: an all-gather of the rows
        # would hold the whole kernel first.
        parts = all_to_all_bits(parts, "tensor", parts.ndim - 2, parts.ndim - 4)
    else:
        parts = lax.dynamic_index_in_dim(
            parts, lax.axis_index("tensor"), parts.ndim - 2
        )
    return parts.reshape(*parts.shape[:-3], -1)


def qkv_columns_to_rows(x: jax.Array, role: Role) -> jax.Array:
    """Invert `qkv_rows_to_columns`."""
    n = lax.axis_size("tensor")
    if n == 1 or role.groups == 1:
        return x
    # kernel [.., D, g, 1, F/n], bias [.., g, 1, F/n]
    parts = x.reshape(*x.shape[:-1], role.groups, 1, -1)
    if role.is_kernel:
        parts = all_to_all_bits(parts, "tensor", parts.ndim - 4, parts.ndim - 2)
    else:
        # A device holds its heads' part of the gradient of a bias that is whole on all,
        # so all parts are gathered.
        parts = all_gather_bits(parts, "tensor", parts.ndim - 2)
    return parts.reshape(*parts.shape[:-3], -1)


def all_gather_array(x: jax.Array, spec: PartitionSpec, role: Role) -> jax.Array:
    """All-gather an array from the shards of the devices; inside `shard_map`.

    A fused QKV array gets the columns of this device's heads.
    """
    axis = fsdp_axis(spec)
    if axis is not None:
        x = all_gather_bits(x, "fsdp", axis)
    return qkv_rows_to_columns(x, role)


def all_gather_param(p: Any, spec: PartitionSpec, role: Role, comm: CommConfig) -> Any:
    """All-gather a parameter, and return it in the format in which it was sent.

    One that no device must send is returned as it is.
    """
    if fsdp_axis(spec) is None and role.groups == 1:
        return p
    # The format is the one to which the first use rounds the parameter, or its own, so
    # a narrow all-gather does not change the loss.
    narrow = comm.cast_for_all_gather(role, p)
    if is_scaled_array(narrow):
        return with_scale(all_gather_array(narrow.data, spec, role), narrow.scale)
    return all_gather_array(narrow, spec, role)


def all_gather_tree(params: Any, specs: Any, comm: CommConfig) -> Any:
    """All-gather parameters from the shards of the devices; inside `shard_map`.

    The shards of blocks that are gathered one by one stay shards.
    """

    def gather_leaf(p: Any, spec: PartitionSpec, role: Role) -> Any:
        whole = all_gather_param(p, spec, role, comm)
        if is_scaled_array(whole):
            return whole
        # A gradient has the dtype of its parameter, so one that was sent in a narrower
        # dtype is widened to that of the state.
        return whole.astype(p.dtype)

    return _map_params(gather_leaf, params, specs, comm)


def reduce_array(
    grad: jax.Array,
    spec: PartitionSpec,
    role: Role,
    comm: CommConfig,
    *,
    seed: jax.Array,
    leaf_index: Any,
) -> jax.Array:
    """Return this device's shard of the mean of the devices' gradients, FP32.

    Each array that is rounded stochastically must have its own `leaf_index`. Only
    kernels are, so blocks that are gathered one by one and the rest both count from 0.
    """
    with jax.named_scope("reduce"):
        return mean_over_devices(
            grad,
            fsdp_axis(spec),
            comm.reduce_format(role),
            deterministic=comm.reduce.deterministic,
            seed=seed,
            leaf_index=leaf_index,
            reshard=lambda x: qkv_columns_to_rows(x, role),
        )


def reduce_tree(grads: Any, specs: Any, comm: CommConfig, seed: jax.Array) -> Any:
    """Return this device's shards of the mean of the devices' gradients.

    Scaled gradients become plain FP32. Those of blocks that are gathered one by one are
    reduced already.
    """
    next_index = itertools.count()

    def reduce_leaf(grad: Any, spec: PartitionSpec, role: Role) -> Any:
        # Scales that are measured at run time differ by device, so the data of scaled
        # gradients cannot be added.
        mean = reduce_array(
            weights.wide(grad), spec, role, comm, seed=seed, leaf_index=next(next_index)
        )
        if is_scaled_array(grad):
            return mean
        return mean.astype(grad.dtype)

    return _map_params(reduce_leaf, grads, specs, comm)


def _map_params(
    fun: Callable[[Any, PartitionSpec, Role], Any],
    tree: Any,
    specs: Any,
    comm: CommConfig,
) -> Any:
    """Map parameters or gradients, but not blocks that are gathered one by one."""
    trees = (tree, specs, comm.roles)
    if not comm.gathers_by_layer:
        return map_arrays(fun, *trees)
    rest = [{k: x for k, x in part.items() if k != BLOCKS} for part in trees]
    return map_arrays(fun, *rest) | {BLOCKS: tree[BLOCKS]}


def ordered_pmean(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return the mean over the devices of mesh axes, summed in mesh order."""
    # The order of `lax.pmean` is that of the backend's collective, which may differ
    # with the processes.
    return jnp.mean(lax.all_gather(x, axes), axis=0)


def gradient_over(mesh: Mesh, comm: CommConfig) -> GradientFn:
    """Return a function like `step.mean_gradient` over the devices of a mesh, for
    parameters sharded as in `sharding`.

    With `fsdp` the gradient of every micro-batch is reduce-scattered, so that a device
    keeps only its shard. Without `fsdp` the sum over micro-batches is reduced once.
    """
    if devices_of_replica(mesh) == 1:
        return mean_gradient
    reduce_micro_batches = mesh.shape["fsdp"] > 1

    def gradient(
        value_and_grad: ValueAndGrad,
        params: Any,
        scaling: Any,
        batch: Tokens,
        keys_AxB: jax.Array,
    ) -> tuple[jax.Array, Any, Any]:
        specs = param_specs(params, mesh, comm.roles)

        def sharded_value_and_grad(
            params: Any, scaling: Any, tokens: Any, segments: Any, keys_B: Any
        ) -> tuple[Any, Any, Any]:
            # Gathered outside of `value_and_grad`: the gradient is that of the whole
            # parameters, and `reduce_tree` chooses how it is sent. Inside, JAX would
            # transpose the gather by itself.
            loss, grads, statistics = value_and_grad(
                all_gather_tree(params, specs, comm), scaling, tokens, segments, keys_B
            )
            if reduce_micro_batches:
                grads = reduce_tree(grads, specs, comm, rounding_seed(keys_B))
            return loss, grads, statistics

        def on_device(
            params: Any, scaling: Any, batch: Tokens, keys_AxB: jax.Array
        ) -> tuple[Any, Any, Any]:
            loss, grads, statistics = mean_gradient(
                sharded_value_and_grad, params, scaling, batch, keys_AxB
            )
            if not reduce_micro_batches:
                grads = reduce_tree(grads, specs, comm, rounding_seed(keys_AxB[0]))
            return (
                # `tensor` is left out: its devices share the rows, and so the loss.
                ordered_pmean(loss, BATCH_AXES),
                grads,
                # `statistics` holds the amax of tensors, for their next scales.
                jax.tree.map(lambda x: lax.pmax(x, STEP_AXES), statistics),
            )

        return over_devices(
            on_device,
            mesh,
            # Parameters may be scaled arrays, whose scales have a spec too. Reduced
            # gradients are plain arrays.
            in_specs=(
                array_specs(params, mesh, comm.roles),
                REPLICATED,
                MICRO_BATCH_SPEC,
                MICRO_BATCH_SPEC,
            ),
            out_specs=(REPLICATED, specs, REPLICATED),
        )(params, scaling, batch, keys_AxB)

    return gradient


def rounding_seed(keys_B: jax.Array) -> jax.Array:
    """Return the seed of a device's stochastic rounding, from its first key."""
    # The keys belong to sequences, so devices with different rows have different seeds,
    # and the devices of a tensor-parallel group the same one.
    return jax.random.bits(keys_B[0], (), jnp.uint32)


def loss_over(mesh: Mesh, comm: CommConfig, loss: LossOfState) -> LossOfState:
    """Return a function like `loss` that computes the mean over the devices of a mesh.

    Each device computes the loss of its rows. With DiLoCo the weights are the outer
    ones, and the devices of all replicas share the rows.
    """

    def mean_loss(
        state: TrainState, tokens: jax.Array, segments: jax.Array | None
    ) -> jax.Array:
        specs = param_specs(state.params, mesh, comm.roles)
        axes = batch_axes(mesh)
        rows = PartitionSpec(axes)

        def on_device(
            params: Any, scaling: Any, tokens: jax.Array, segments: jax.Array | None
        ) -> jax.Array:
            gathered_state = dataclasses.replace(
                state, params=all_gather_tree(params, specs, comm), scaling=scaling
            )
            return ordered_pmean(loss(gathered_state, tokens, segments), axes)

        return over_devices(
            on_device,
            mesh,
            in_specs=(
                array_specs(state.params, mesh, comm.roles),
                REPLICATED,
                rows,
                rows,
            ),
            out_specs=REPLICATED,
        )(state.params, state.scaling, tokens, segments)

    return mean_loss


def amax_over(mesh: Mesh, roles: Any) -> AmaxFn:
    """Return a function that computes the amax of each group of arrays, for a state
    sharded as in `sharding`.

    Its argument `paths` holds the path of each group in the state. Devices send only
    maxima.
    """
    if mesh.shape["fsdp"] * mesh.shape["tensor"] == 1:
        return largest_of_arrays
    sizes = dict(mesh.shape)

    def amax(
        groups: Sequence[Sequence[jax.Array]], paths: Sequence[tuple]
    ) -> jax.Array:
        roles_of_groups = [role_of(roles, path) for path in paths]
        specs = [
            [partition_spec(role, x.shape, sizes) for x in group]
            for group, role in zip(groups, roles_of_groups, strict=True)
        ]

        def on_device(groups: Sequence[Sequence[jax.Array]]) -> jax.Array:
            # Not over `data`, whose devices hold copies of the state.
            return lax.pmax(largest_magnitudes(groups), ("fsdp", "tensor"))

        return over_devices(on_device, mesh, in_specs=(specs,), out_specs=REPLICATED)(
            groups
        )

    return amax


def squared_norms_over(mesh: Mesh, roles: Any) -> Callable[[Any], jax.Array]:
    """Return a function like `step.squared_norms_of_arrays` for a tree sharded as in
    `sharding`. It adds the devices' sums in mesh order.
    """
    if mesh.shape["fsdp"] * mesh.shape["tensor"] == 1:
        return squared_norms_of_arrays

    def squared_norms(tree: Any) -> jax.Array:
        specs = param_specs(tree, mesh, roles)

        def on_device(tree: Any) -> jax.Array:
            sums = squared_norms_of_arrays(tree)
            # The sums are scalars, whose all-gathers take their latency: arrays that
            # are split over the same axes share one.
            groups: dict[tuple[str, ...], list[int]] = {}
            for i, spec in enumerate(jax.tree.leaves(specs)):
                groups.setdefault(mesh_axes(spec), []).append(i)
            totals = []
            for axes, group in groups.items():
                group_sums = sums[np.array(group)]
                # Only an axis that splits an array may be summed over: the devices of
                # another hold copies, which would be counted again.
                if axes:
                    group_sums = jnp.sum(lax.all_gather(group_sums, axes), axis=0)
                totals.append(group_sums)
            # The totals are in the order of groups, the result in that of the leaves.
            order = list(itertools.chain.from_iterable(groups.values()))
            return jnp.concatenate(totals)[np.argsort(order)]

        return over_devices(on_device, mesh, in_specs=(specs,), out_specs=REPLICATED)(
            tree
        )

    return squared_norms
