"""Several processes of one run: how they start, refuse together and agree on a number."""

import contextlib
import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.errors import UserError
from trainer.parallel.mesh import replicated

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


WORDS = 1000  # bytes of a refusal


@contextlib.contextmanager
def refused_together() -> Iterator[None]:
    """Around what the first process does for all: its UserError is raised in all of them, with its exit code.

    Else the others would go on, and end otherwise, which a cluster takes for a crash and starts again.
    """
    refusal: UserError | None = None
    try:
        yield
    except UserError as error:
        refusal = error
    if jax.process_count() > 1:
        said = np.frombuffer(str(refusal or "").encode()[:WORDS].ljust(WORDS, b"\0"), np.uint8)
        first = multihost_utils.broadcast_one_to_all(said).tobytes().rstrip(b"\0").decode(errors="replace")
        refusal = refusal or (UserError(first) if first else None)
    if refusal is not None:
        raise refusal


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
        sharding = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        given = np.full(self._mesh.size, number, np.int32)
        return self._largest(jax.make_array_from_callback(given.shape, sharding, lambda index: given[index]))
