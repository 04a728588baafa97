"""The device mesh, and batches: their shardings, and their arrays on the mesh.

Legend: A micro-batches, B sequences of a micro-batch, N = A * B, T tokens.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trainer.errors import UserError
from trainer.step.step import Tokens

if TYPE_CHECKING:  # the tokenizers of `trainer.data` take long to import
    from trainer.data import Batch

# Mesh axes over which a replica's batch is split.
BATCH_AXES = ("data", "fsdp")
REPLICATED = PartitionSpec()
# Outermost, so that the devices of a replica are neighbors: replicas sync rarely.
REPLICA = "replica"


class MeshSizes(NamedTuple):
    """Sizes of the mesh's axes; one of them may be -1: all remaining devices.

    Attributes:
      data: splits the batch, not the state.
      fsdp: splits the batch and the state.
      tensor: splits attention and MLP (Megatron), and the state.
    """

    data: int
    fsdp: int
    tensor: int

    def __str__(self) -> str:
        return " x ".join(
            f"parallel.{name}={size}" for name, size in self._asdict().items()
        )

    def filled(self, devices: int) -> "MeshSizes":
        """Return the sizes with -1 replaced; raise UserError if they do not fit."""
        known = math.prod(size for size in self if size != -1)
        sizes = MeshSizes(*(devices // known if size == -1 else size for size in self))
        # A product of 0 means that the known sizes exceed the devices, so -1 was
        # replaced by 0.
        fits = 1 <= math.prod(sizes) <= devices
        # Without a -1 the sizes may leave devices over; with it all are used, so the
        # known sizes must divide their number.
        divides = -1 not in self or devices % known == 0
        if not (fits and divides):
            valid = [n for n in range(1, devices + 1) if devices % n == 0]
            raise UserError(
                f"{self} does not fit: there are {devices} devices; valid: a product of"
                f" at most {devices}, or one axis -1 and the others with a product of"
                f" {' or '.join(map(str, valid))}"
            )
        return sizes


# Mesh axes of the devices that compute one step.
STEP_AXES = MeshSizes._fields


def make_mesh(
    data: int,
    fsdp: int = 1,
    tensor: int = 1,
    *,
    num_replicas: int | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Return a mesh with the axes of `MeshSizes`, the last one innermost.

    Args:
      data, fsdp, tensor: see `MeshSizes`.
      num_replicas: number of DiLoCo replicas. They get an outermost axis, of size
        `replica_axis_size`; None: no such axis.
      devices: available devices; the mesh takes the first ones. None: all devices.

    Raises:
      UserError: the sizes do not fit the devices, or a process would have no device.
    """
    devices = jax.devices() if devices is None else devices
    sizes = MeshSizes(data, fsdp, tensor)
    replica_axis = 1
    if num_replicas is not None:
        # Before the sizes are filled: a -1 takes the devices that one replica gets.
        replica_axis = replica_axis_size(num_replicas, sizes, len(devices))
    filled = sizes.filled(len(devices) // replica_axis)
    used = devices[: replica_axis * math.prod(filled)]
    processes = {device.process_index for device in devices}
    # A process without a device would wait for the others forever.
    idle = len(processes) - len({device.process_index for device in used})
    if idle:
        raise UserError(
            f"{sizes} leaves {idle} of {len(processes)} processes without a device; set"
            " one axis to -1 to use all devices"
        )
    shape: tuple[int, ...] = filled
    names: tuple[str, ...] = STEP_AXES
    if num_replicas is not None:
        shape = (replica_axis, *shape)
        names = (REPLICA, *names)
    # `with_sharding_constraint` takes Auto axes only.
    types = (AxisType.Auto,) * len(names)
    return Mesh(np.array(used).reshape(shape), names, axis_types=types)


def replica_axis_size(num_replicas: int, sizes: MeshSizes, devices: int) -> int:
    """Return the size of the axis REPLICA.

    It is the largest divisor n of `num_replicas` for which n meshes of `sizes` fit on
    the devices. -1 in `sizes` counts as 1.
    """
    mesh_devices = math.prod(size for size in sizes if size != -1)
    divisors = [n for n in range(1, num_replicas + 1) if num_replicas % n == 0]
    # The default: if not even one mesh fits, `filled` says so with the valid sizes.
    return max((n for n in divisors if n * mesh_devices <= devices), default=1)


def over_devices(
    fun: Callable[..., Any], mesh: Mesh, *, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Return `jax.shard_map` over a mesh.

    Inside a DiLoCo replica, REPLICA is already a manual axis. Then only STEP_AXES of
    the current abstract mesh are mapped.
    """
    settings: dict[str, Any] = {"mesh": mesh}
    current = jax.sharding.get_abstract_mesh()
    # `shard_map` inside `shard_map` takes the mesh of the context, in which REPLICA is
    # manual.
    if REPLICA in current.manual_axes:
        settings = {"mesh": current, "axis_names": set(STEP_AXES)}
    return jax.shard_map(
        fun, in_specs=in_specs, out_specs=out_specs, check_vma=False, **settings
    )


def devices_of_replica(mesh: Mesh) -> int:
    """Return the number of devices that compute one step: all without DiLoCo."""
    return math.prod(mesh.shape[axis] for axis in STEP_AXES)


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes over which the batch of all replicas is split."""
    return tuple(axis for axis in (REPLICA, *BATCH_AXES) if axis in mesh.shape)


def batch_shards(mesh: Mesh, num_replicas: int = 1) -> int:
    """Return the number of parts into which the batch of all replicas is split.

    Several replicas may share devices, so `num_replicas` is not the size of REPLICA.
    """
    return num_replicas * math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding in which every device holds the whole array."""
    return NamedSharding(mesh, REPLICATED)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch [A, B, T+1] that splits B."""
    return NamedSharding(mesh, PartitionSpec(None, batch_axes(mesh)))


def abstract_batch(
    accum: int, batch_size: int, context: int, *, document_mask: bool, mesh: Mesh
) -> Tokens:
    """Return shapes, dtypes and shardings of a batch of N = `batch_size` sequences."""
    shape = (accum, batch_size // accum, context + 1)
    tokens: Any = jax.ShapeDtypeStruct(shape, np.int32, sharding=batch_sharding(mesh))
    segments = tokens if document_mask else None  # same shape, dtype and sharding
    return Tokens(tokens, segments)


def place_batch(batch: "Batch", *, accum: int, mesh: Mesh) -> Tokens:
    """Return the global arrays [A, B, T+1] of a step from its host batch [N, T+1].

    Each process copies the rows of its devices.
    """
    sharding = batch_sharding(mesh)

    def place(rows_NxT1: np.ndarray) -> jax.Array:
        # Consecutive rows are a micro-batch, on every mesh, so gradients are summed
        # over the same sequences.
        rows_AxBxT1 = rows_NxT1.reshape(accum, -1, rows_NxT1.shape[-1])
        return jax.make_array_from_callback(
            rows_AxBxT1.shape, sharding, lambda index: rows_AxBxT1[index]
        )

    segments = None if batch.segments is None else place(batch.segments)
    return Tokens(place(batch.tokens), segments)
