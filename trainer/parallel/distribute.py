"""The loss and its gradient over several devices, by `shard_map`.

Every device runs the program of one device. It gathers the parameters of which it holds
a part, and differentiates the loss of its rows of the batch. The gradients are then
reduced to the parts that the devices hold. All communication and its formats are here
and in `reduction`; of activations only the sums of attention and MLP over `tensor`
leave a device (`layers.leave`).

Legend: D model, F width of a group of columns, n devices of the tensor-parallel group.
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
from scalify_core.optim import Largest, largest_of_arrays
from trainer.models.roles import Role, role_of
from trainer.parallel.mesh import (
    BATCH_AXES,
    REPLICATED,
    Sizes,
    batch_axes,
    devices_of_replica,
    over_devices,
)
from trainer.parallel.reduction import (
    WireFormat,
    all_gather,
    all_to_all,
    mean_over_devices,
)
from trainer.parallel.sharding import (
    fsdp_axis,
    mesh_axes,
    parameter_partitions,
    partition,
    partitions,
)
from trainer.precision.gradients import ValueAndGrad
from trainer.step.state import TrainState
from trainer.step.step import (
    Gradient,
    StepReductions,
    Tokens,
    mean_gradient,
    squares_of_arrays,
)

LossOfState = Callable[[TrainState, jax.Array, jax.Array | None], jax.Array]
MICRO_BATCHES = PartitionSpec(None, BATCH_AXES)


class GradReduceConfig(NamedTuple):
    """The reduction of gradients over devices; see `CommConfig`."""

    format: str = "fp32"
    deterministic: bool = False


class CommConfig(NamedTuple):
    """The formats of gradients and parameters between devices.

    Attributes:
      reduce: gradients: fp32, bf16, fp16, or fp8: E4M3 for the kernels of the blocks'
        linear layers, FP16 for the rest.
      deterministic: FP32, summed in fixed order.
      narrow: (role, parameter) to the parameter in the format of its all-gather.
      roles: of the parameters, in their nested dictionaries.
    """

    reduce: str
    deterministic: bool
    narrow: Callable[[Role, Any], Any]
    roles: Any

    def wire_format(self, role: Role) -> WireFormat:
        """Return how the gradient of a parameter with this role is reduced."""
        if self.reduce == "fp8":
            return WireFormat(E4M3 if role.is_kernel else FP16, False)
        return WireFormat(FloatFormat.parse(self.reduce), self.deterministic)


def unshard_fused_qkv(x: jax.Array, role: Role) -> jax.Array:
    """Return the columns of this device's heads.

    A fused QKV kernel of g groups is stored split by rows, because the columns of a
    head are not contiguous: [.., D/n, gF] becomes [.., D, gF/n]. A bias [.., gF] is
    whole on every device of the tensor-parallel group.
    """
    n = lax.axis_size("tensor")
    if n == 1:
        return x
    parts = x.reshape(*x.shape[:-1], role.groups, n, -1)
    if role.is_kernel:
        parts = all_to_all(parts, "tensor", parts.ndim - 2, parts.ndim - 4)
    else:
        parts = lax.dynamic_index_in_dim(
            parts, lax.axis_index("tensor"), parts.ndim - 2
        )
    return parts.reshape(*parts.shape[:-3], -1)


def reshard_fused_qkv(x: jax.Array, role: Role) -> jax.Array:
    """Invert `unshard_fused_qkv`."""
    n = lax.axis_size("tensor")
    if n == 1:
        return x
    parts = x.reshape(*x.shape[:-1], role.groups, 1, -1)
    if role.is_kernel:
        parts = all_to_all(parts, "tensor", parts.ndim - 4, parts.ndim - 2)
    else:
        parts = all_gather(parts, parts.ndim - 2, "tensor")
    return parts.reshape(*parts.shape[:-3], -1)


def gather(params: Any, specs: Any, comm: CommConfig) -> Any:
    """Gather the parameters that a device computes with, from the parts that the
    devices hold; inside `shard_map`.
    """

    def gather_leaf(p: Any, spec: PartitionSpec, role: Role) -> Any:
        axis, is_fused = fsdp_axis(spec), role.groups > 1

        def move(x: jax.Array) -> jax.Array:
            x = x if axis is None else all_gather(x, axis, "fsdp")
            return unshard_fused_qkv(x, role) if is_fused else x

        if axis is None and not is_fused:
            return p
        form = comm.narrow(role, p)
        if is_scaled_array(form):
            return with_scale(move(form.data), form.scale)
        return move(form).astype(p.dtype)

    return map_arrays(gather_leaf, params, specs, comm.roles)


def reduced(grads: Any, specs: Any, comm: CommConfig, seed: jax.Array) -> Any:
    """Return the mean of the devices' gradients: of each parameter the part that a
    device holds.

    Scaled gradients become plain FP32.
    """
    numbers = itertools.count()

    def reduce_leaf(grad: Any, spec: PartitionSpec, role: Role) -> Any:
        def arrange(x: jax.Array) -> jax.Array:
            return reshard_fused_qkv(x, role) if role.groups > 1 else x

        with jax.named_scope("reduce"):
            out = mean_over_devices(
                weights.wide(grad),
                fsdp_axis(spec),
                comm.wire_format(role),
                seed=seed,
                leaf=next(numbers),
                arrange=arrange,
            )
        return out if is_scaled_array(grad) else out.astype(grad.dtype)

    return map_arrays(reduce_leaf, grads, specs, comm.roles)


def mean_of_figures(x: jax.Array, axes: tuple[str, ...] = BATCH_AXES) -> jax.Array:
    """Return the mean of a scalar, or of each of several, over the devices of the batch
    in their order.
    """
    return jnp.mean(lax.all_gather(x, axes), axis=0)


def gradient_over(mesh: Mesh, comm: CommConfig) -> Gradient:
    """Return `step.mean_gradient` over the devices of a mesh, for parameters split as
    `sharding` says.

    With `fsdp` the gradient of every micro-batch is reduced, so that only parts are
    kept; else their sum, once.
    """
    every_micro_batch = mesh.shape["fsdp"] > 1

    def gradient(
        value_and_grad: ValueAndGrad,
        params: Any,
        scaling: Any,
        batch: Tokens,
        keys_AxB: jax.Array,
    ) -> tuple[jax.Array, Any, Any]:
        specs = parameter_partitions(params, mesh, comm.roles)

        def micro_gradient(
            params: Any, scaling: Any, tokens: Any, segments: Any, keys_B: Any
        ) -> tuple[Any, Any, Any]:
            loss, grads, observed = value_and_grad(
                gather(params, specs, comm), scaling, tokens, segments, keys_B
            )
            if every_micro_batch:
                grads = reduced(grads, specs, comm, random_word(keys_B))
            return loss, grads, observed

        def on_device(
            params: Any, scaling: Any, batch: Tokens, keys_AxB: jax.Array
        ) -> tuple[Any, Any, Any]:
            loss, grads, observed = mean_gradient(
                micro_gradient, params, scaling, batch, keys_AxB
            )
            if not every_micro_batch:
                grads = reduced(grads, specs, comm, random_word(keys_AxB[0]))
            return (
                mean_of_figures(loss),
                grads,
                jax.tree.map(lambda x: lax.pmax(x, Sizes._fields), observed),
            )

        return over_devices(
            on_device,
            mesh,
            in_specs=(
                partitions(params, mesh, comm.roles),
                REPLICATED,
                MICRO_BATCHES,
                MICRO_BATCHES,
            ),
            out_specs=(REPLICATED, specs, REPLICATED),
        )(params, scaling, batch, keys_AxB)

    return gradient


def reductions_over(mesh: Mesh, comm: CommConfig, trained_roles: Any) -> StepReductions:
    """Return the reductions of a train step over the devices of a mesh."""
    gradient: Gradient = mean_gradient
    if devices_of_replica(mesh) > 1:
        gradient = gradient_over(mesh, comm)
    squares = squares_over(mesh, trained_roles)
    return StepReductions(gradient, squares, largest_over(mesh, comm.roles))


def random_word(keys_B: jax.Array) -> jax.Array:
    """Return the seed of a device's stochastic rounding, from its first sequence's
    key.
    """
    return jax.random.bits(keys_B[0], (), jnp.uint32)


def loss_over(mesh: Mesh, comm: CommConfig, loss: LossOfState) -> LossOfState:
    """Return the mean of `loss(state, tokens, segments)` over the devices of a mesh,
    each on its rows.
    """

    def mean_loss(
        state: TrainState, tokens: jax.Array, segments: jax.Array | None
    ) -> jax.Array:
        specs = parameter_partitions(state.params, mesh, comm.roles)
        axes = batch_axes(mesh)
        rows = PartitionSpec(axes)

        def on_device(
            params: Any, scaling: Any, tokens: jax.Array, segments: jax.Array | None
        ) -> jax.Array:
            gathered_state = dataclasses.replace(
                state, params=gather(params, specs, comm), scaling=scaling
            )
            return mean_of_figures(loss(gathered_state, tokens, segments), axes)

        return over_devices(
            on_device,
            mesh,
            in_specs=(
                partitions(state.params, mesh, comm.roles),
                REPLICATED,
                rows,
                rows,
            ),
            out_specs=REPLICATED,
        )(state.params, state.scaling, tokens, segments)

    return mean_loss


def largest_over(mesh: Mesh, roles: Any) -> Largest:
    """Return `largest_of_arrays` for a state that is split as `sharding` says.

    Only maxima are moved.
    """
    if mesh.shape["fsdp"] * mesh.shape["tensor"] == 1:
        return largest_of_arrays
    sizes = dict(mesh.shape)

    def largest(
        groups: Sequence[Sequence[jax.Array]], paths: Sequence[tuple]
    ) -> jax.Array:
        roles_of_groups = [role_of(roles, path) for path in paths]
        specs = [
            [partition(role, x.shape, sizes) for x in group]
            for group, role in zip(groups, roles_of_groups, strict=True)
        ]

        def on_device(groups: Sequence[Sequence[jax.Array]]) -> jax.Array:
            return lax.pmax(largest_magnitudes(groups), ("fsdp", "tensor"))

        return over_devices(on_device, mesh, in_specs=(specs,), out_specs=REPLICATED)(
            groups
        )

    return largest


def squares_over(mesh: Mesh, roles: Any) -> Callable[[Any], jax.Array]:
    """Return `step.squares_of_arrays` for a tree that is split as `sharding` says;
    parts are added in mesh order.
    """
    if mesh.shape["fsdp"] * mesh.shape["tensor"] == 1:
        return squares_of_arrays

    def squares(tree: Any) -> jax.Array:
        specs = parameter_partitions(tree, mesh, roles)

        def on_device(tree: Any) -> jax.Array:
            sums, groups = squares_of_arrays(tree), dict[tuple[str, ...], list[int]]()
            for i, spec in enumerate(jax.tree.leaves(specs)):
                groups.setdefault(mesh_axes(spec), []).append(i)
            parts = []
            for axes, group in groups.items():
                part = sums[np.array(group)]
                if axes:
                    part = jnp.sum(lax.all_gather(part, axes), axis=0)
                parts.append(part)
            order = [i for group in groups.values() for i in group]
            return jnp.concatenate(parts)[np.argsort(order)]

        return over_devices(on_device, mesh, in_specs=(specs,), out_specs=REPLICATED)(
            tree
        )

    return squares
