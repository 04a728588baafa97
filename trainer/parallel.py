"""Devices: the mesh, the shardings, arrays from host batches, and the start of a multi-process run."""

import os
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trainer.data import Batch
from trainer.errors import UserError
from trainer.step import Tokens

PROCESS_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def start_processes() -> None:
    """Join the other processes of this run: named by `PROCESS_VARIABLES`, or found by JAX (Slurm, Kubernetes, MPI)."""
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
    size = found if data == -1 else data
    return jax.make_mesh((size,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])


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


def place_batch(batch: Batch, *, accum: int, mesh: Mesh) -> Tokens:
    """The global arrays [accum, B / accum, T+1] of a step; each process copies only the rows of its own devices."""
    sharding = batch_sharding(mesh)

    def place(rows_BxT1: np.ndarray) -> jax.Array:
        micro = rows_BxT1.reshape(accum, -1, rows_BxT1.shape[-1])
        return jax.make_array_from_callback(micro.shape, sharding, lambda index: micro[index])

    return Tokens(place(batch.tokens), None if batch.segments is None else place(batch.segments))
