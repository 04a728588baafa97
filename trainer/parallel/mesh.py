"""Devices: the mesh, the shardings, arrays from host batches, and the start of a
multi-process run.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trainer.errors import UserError
from trainer.step.step import Tokens

if TYPE_CHECKING:  # whose tokenizers a plan and a benchmark can do without
    from trainer.data import Batch

BATCH_AXES = ("data", "fsdp")  # of the mesh: those that a replica's batch is split over
# of the mesh of a run with DiLoCo, outermost: the axis of the replicas; see `diloco`
REPLICA = "replica"


class Sizes(NamedTuple):
    """Of the mesh's axes; -1 in one of them: whatever the others leave.

    Attributes:
      data: the batch is split, the state is not.
      fsdp: the batch and the state are split.
      tensor: attention and MLP are split (Megatron), and the state.
    """

    data: int
    fsdp: int
    tensor: int

    def __str__(self) -> str:
        return " x ".join(
            f"parallel.{name}={size}" for name, size in self._asdict().items()
        )

    def filled(self, devices: int) -> "Sizes":
        """With numbers that `devices` devices are enough for. Raises UserError where
        there are none.
        """
        given = math.prod(size for size in self if size != -1)
        sizes = Sizes(*(devices // given if size == -1 else size for size in self))
        wanted = math.prod(sizes)
        if not 1 <= wanted <= devices or (-1 in self and devices % given):
            valid = [n for n in range(1, devices + 1) if devices % n == 0]
            raise UserError(
                f"{self} does not fit: there are {devices} devices; valid: a product of"
                f" at most {devices}, or -1 for one of them and others whose product is"
                f" one of {', '.join(map(str, valid))}"
            )
        return sizes


def make_mesh(
    data: int,
    fsdp: int = 1,
    tensor: int = 1,
    *,
    replicas: int | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh with the axes of `Sizes`, the last one the innermost, over the first of
    the devices (None: of all).

    `replicas`: of DiLoCo, which get an axis of their own, the outermost, over as many
    devices as divide them; None: there is no such axis.

    Raises UserError for sizes that the devices do not have, and for processes that
    would be left without a device.
    """
    devices = jax.devices() if devices is None else devices
    sizes = Sizes(data, fsdp, tensor)
    apart = places_of(replicas, sizes, len(devices)) if replicas else 1
    filled = sizes.filled(len(devices) // apart)
    used = devices[: apart * math.prod(filled)]
    found = {device.process_index for device in devices}
    idle = len(found) - len({device.process_index for device in used})
    if idle:
        raise UserError(
            f"{sizes} leaves {idle} of {len(found)} processes without a device; use -1"
            " for one of them"
        )
    if replicas is None:
        return Mesh(
            np.array(used).reshape(filled),
            Sizes._fields,
            axis_types=(AxisType.Auto,) * 3,
        )
    return Mesh(
        np.array(used).reshape(apart, *filled),
        (REPLICA, *Sizes._fields),
        axis_types=(AxisType.Auto,) * 4,
    )


def places_of(replicas: int, sizes: Sizes, devices: int) -> int:
    """Over how many places replicas are spread, each of the mesh `sizes`: the most that
    divide them and fit.
    """
    each = math.prod(size for size in sizes if size != -1)
    fitting = [
        n for n in range(1, replicas + 1) if replicas % n == 0 and n * each <= devices
    ]
    return max(fitting, default=1)


def is_inside_replica() -> bool:
    """Return whether what is traced is the program of a replica."""
    return REPLICA in jax.sharding.get_abstract_mesh().manual_axes


def over_devices(
    fun: Callable[..., Any], mesh: Mesh, *, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`jax.shard_map` over a mesh; inside a replica over the axes of `Sizes` alone."""
    if not is_inside_replica():
        return jax.shard_map(
            fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
    inner: Any = jax.sharding.get_abstract_mesh()
    names = set(Sizes._fields)
    return jax.shard_map(
        fun,
        mesh=inner,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=names,
        check_vma=False,
    )


def devices_of_replica(mesh: Mesh) -> int:
    """How many devices compute one step: those of one replica, or all."""
    return math.prod(mesh.shape[axis] for axis in Sizes._fields)


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of a mesh that a whole batch is split over."""
    return tuple(axis for axis in (REPLICA, *BATCH_AXES) if axis in mesh.shape)


def batch_devices(mesh: Mesh, replicas: int = 1) -> int:
    """In how many parts a batch is split: over the devices of a replica, times how many
    of these there are.
    """
    return replicas * math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """For [A, B, T+1]: each device holds its share of B."""
    return NamedSharding(mesh, PartitionSpec(None, batch_axes(mesh)))


def abstract_batch(
    accum: int, batch_size: int, context: int, *, document_mask: bool, mesh: Mesh
) -> Tokens:
    """Shapes, dtypes and shardings of a step's batch of `batch_size` sequences."""
    shape = (accum, batch_size // accum, context + 1)
    tokens: Any = jax.ShapeDtypeStruct(shape, np.int32, sharding=batch_sharding(mesh))
    return Tokens(tokens, tokens if document_mask else None)


def place_batch(batch: "Batch", *, accum: int, mesh: Mesh) -> Tokens:
    """The global arrays [accum, B / accum, T+1] of a step; each process copies only the
    rows of its own devices.
    """
    sharding = batch_sharding(mesh)

    def place(rows_BxT1: np.ndarray) -> jax.Array:
        micro = rows_BxT1.reshape(accum, -1, rows_BxT1.shape[-1])
        return jax.make_array_from_callback(
            micro.shape, sharding, lambda index: micro[index]
        )

    return Tokens(
        place(batch.tokens), None if batch.segments is None else place(batch.segments)
    )
