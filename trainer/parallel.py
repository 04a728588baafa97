"""Devices: the mesh, the shardings, arrays from host batches, and the start of a multi-process run."""

import os
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trainer.errors import UserError
from trainer.step import Tokens

if TYPE_CHECKING:  # whose tokenizers a plan and a benchmark can do without
    from trainer.data import Batch

PROCESS_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def start_processes() -> None:
    """Join the other processes of this run: named by `PROCESS_VARIABLES`, or found by JAX (Slurm, Kubernetes, MPI)."""
    # JAX's own service catches SIGTERM, for all of the process's life; the loop has its own handler, and agreement.
    jax.config.update("jax_enable_preemption_service", False)
    address, count, index = (os.environ.get(name) for name in PROCESS_VARIABLES)
    try:
        if count is None and index is None:
            jax.distributed.initialize(address)
        else:
            jax.distributed.initialize(address, int(count or ""), int(index or ""))
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"parallel.distributed=true, but the processes could not be joined: {str(error).splitlines()[0]}; "
            f"set {', '.join(PROCESS_VARIABLES)}, or run under Slurm"
        ) from error


def make_mesh(data: int) -> Mesh:
    """A mesh with the axis `data` over `data` devices, or over all of them (-1)."""
    found = jax.device_count()
    if data > found:
        raise UserError(f"parallel.data={data}, but there are {found} devices; valid: 1 to {found}, or -1 for all")
    devices = jax.devices()[: found if data == -1 else data]
    idle = jax.process_count() - len({device.process_index for device in devices})
    if idle:
        raise UserError(
            f"parallel.data={data} leaves {idle} of {jax.process_count()} processes without a device; use -1"
        )
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """For [A, B, T+1]: each device holds its share of B."""
    return NamedSharding(mesh, PartitionSpec(None, "data"))


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


class Agreement:
    """The largest number that any process gave, the same in all of them; each must ask equally often.

    Nobody waits for an answer: with several processes it is the one to the question before.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._largest = jax.jit(jnp.max, out_shardings=replicated(mesh))
        self._asked = self._ask(0)

    def __call__(self, number: int) -> int:
        """Give `number` (at least 0). 0 is the answer to the first question of several processes."""
        if jax.process_count() == 1:
            return number
        answer, self._asked = self._asked, self._ask(number)
        return int(answer)

    def _ask(self, number: int) -> jax.Array:
        sharding = NamedSharding(self._mesh, PartitionSpec("data"))
        given = np.full(self._mesh.size, number, np.int32)
        return self._largest(jax.make_array_from_callback(given.shape, sharding, lambda index: given[index]))
