"""Devices: the mesh, the shardings, arrays from host batches, and the start of a multi-process run."""

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

BATCH_AXES = ("data", "fsdp")  # of the mesh: those that the batch is split over


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
        return " x ".join(f"parallel.{name}={size}" for name, size in self._asdict().items())

    def filled(self, devices: int) -> "Sizes":
        """With numbers that `devices` devices are enough for. Raises UserError where there are none."""
        given = math.prod(size for size in self if size != -1)
        sizes = Sizes(*(devices // given if size == -1 else size for size in self))
        wanted = math.prod(sizes)
        if not 1 <= wanted <= devices or (-1 in self and devices % given):
            valid = [n for n in range(1, devices + 1) if devices % n == 0]
            raise UserError(
                f"{self} does not fit: there are {devices} devices; valid: a product of at most {devices}, or -1 for "
                f"one of them and others whose product is one of {', '.join(map(str, valid))}"
            )
        return sizes


def make_mesh(data: int, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes of `Sizes`, the last one the innermost, over the first of the devices (None: of all).

    Raises UserError for sizes that the devices do not have, and for processes that would be left without a device.
    """
    devices = jax.devices() if devices is None else devices
    sizes = Sizes(data, fsdp, tensor)
    filled = sizes.filled(len(devices))
    used = devices[: math.prod(filled)]
    found = {device.process_index for device in devices}
    idle = len(found) - len({device.process_index for device in used})
    if idle:
        raise UserError(f"{sizes} leaves {idle} of {len(found)} processes without a device; use -1 for one of them")
    return Mesh(np.array(used).reshape(filled), Sizes._fields, axis_types=(AxisType.Auto,) * 3)


def batch_devices(mesh: Mesh) -> int:
    """Over how many of them the batch is split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """For [A, B, T+1]: each device holds its share of B."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))


def abstract_batch(accum: int, batch_size: int, context: int, *, document_mask: bool, mesh: Mesh) -> Tokens:
    """Shapes, dtypes and shardings of a step's batch of `batch_size` sequences."""
    shape = (accum, batch_size // accum, context + 1)
    tokens: Any = jax.ShapeDtypeStruct(shape, np.int32, sharding=batch_sharding(mesh))
    return Tokens(tokens, tokens if document_mask else None)


def place_batch(batch: "Batch", *, accum: int, mesh: Mesh) -> Tokens:
    """The global arrays [accum, B / accum, T+1] of a step; each process copies only the rows of its own devices."""
    sharding = batch_sharding(mesh)

    def place(rows_BxT1: np.ndarray) -> jax.Array:
        micro = rows_BxT1.reshape(accum, -1, rows_BxT1.shape[-1])
        return jax.make_array_from_callback(micro.shape, sharding, lambda index: micro[index])

    return Tokens(place(batch.tokens), None if batch.segments is None else place(batch.segments))


def on_one_device(mesh: Mesh) -> Callable[[Any], Any]:
    """Takes arrays on the mesh to the same arrays, whole, on this process's first device."""
    everywhere = jax.jit(lambda arrays: arrays, out_shardings=replicated(mesh))
    return lambda arrays: jax.tree.map(lambda x: x.addressable_data(0), everywhere(arrays))
