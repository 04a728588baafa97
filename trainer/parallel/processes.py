"""Several processes of one run: how they start, refuse together and agree on a
number.
"""

import contextlib
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.errors import UserError
from trainer.parallel.mesh import replicated

PROCESS_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def start_processes(config: Mapping[str, Any]) -> None:
    """Join the other processes of this run: named by `PROCESS_VARIABLES`, or found by
    JAX (Slurm, Kubernetes, MPI).

    Args:
      config: all settings, section by section, which must be the same in all of them.

    Raises:
      UserError: they could not be joined; or, in all of them, one has other settings.
    """
    # JAX's own service catches SIGTERM, for all of the process's life; the loop has its
    # own handler, and agreement.
    jax.config.update("jax_enable_preemption_service", False)
    address, count, index = (os.environ.get(name) for name in PROCESS_VARIABLES)
    try:
        if count is None and index is None:
            jax.distributed.initialize(address)
        else:
            jax.distributed.initialize(address, int(count or ""), int(index or ""))
    except (ValueError, RuntimeError) as error:
        raise UserError(
            "parallel.distributed=true, but the processes could not be joined:"
            f" {str(error).splitlines()[0]}; set {', '.join(PROCESS_VARIABLES)}, or run"
            " under Slurm"
        ) from error
    check_same(config)


# Where things are, which may be elsewhere on each machine.
PLACES = {
    "run_dir",
    "compile_cache",
    "init_from",
    "resume.source",
    "data.paths",
    "data.cache_dir",
    "data.prepared_dir",
}


def check_same(config: Mapping[str, Any]) -> None:
    """Raise UserError in all processes where one has another setting: else they would
    wait for each other for ever.
    """
    settings = {
        f"{name}.{key}" if key else name: value
        for name, section in config.items()
        for key, value in (
            section.items() if isinstance(section, Mapping) else [("", section)]
        )
    }
    names = sorted(settings.keys() - PLACES)
    own = np.array(
        [zlib.crc32(repr(settings[name]).encode()) for name in names], np.uint32
    )
    of_all = multihost_utils.process_allgather(own)
    others = np.flatnonzero((of_all != of_all[:1]).any(axis=1))
    if others.size:
        differ = [
            name
            for name, same in zip(
                names, (of_all == of_all[:1]).all(axis=0), strict=True
            )
            if not same
        ]
        raise UserError(
            f"{', '.join(differ)}: process {others[0]} was given another value than"
            " process 0; start all processes of a run with the same arguments"
        )


WORDS = 1000  # bytes of a refusal


@contextlib.contextmanager
def refused_together() -> Iterator[None]:
    """Around what the first process does for all: its UserError is raised in all of
    them, with its exit code.

    Else the others would go on, and end otherwise, which a cluster takes for a crash
    and starts again.
    """
    refusal: UserError | None = None
    try:
        yield
    except UserError as error:
        refusal = error
    if jax.process_count() > 1:
        said = np.frombuffer(
            str(refusal or "").encode()[:WORDS].ljust(WORDS, b"\0"), np.uint8
        )
        first = (
            multihost_utils.broadcast_one_to_all(said)
            .tobytes()
            .rstrip(b"\0")
            .decode(errors="replace")
        )
        refusal = refusal or (UserError(first) if first else None)
    if refusal is not None:
        raise refusal


class Agreement:
    """The largest number that any process gave, the same in all of them; each must ask
    equally often.

    Nobody waits for an answer: with several processes it is the one to the question
    before.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._largest = jax.jit(jnp.max, out_shardings=replicated(mesh))
        self._asked = self._ask(0)

    def __call__(self, number: int) -> int:
        """Give `number` (at least 0). 0 is the answer to the first question of several
        processes.
        """
        if jax.process_count() == 1:
            return number
        answer, self._asked = self._asked, self._ask(number)
        return int(answer)

    def _ask(self, number: int) -> jax.Array:
        sharding = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        given = np.full(self._mesh.size, number, np.int32)
        return self._largest(
            jax.make_array_from_callback(
                given.shape, sharding, lambda index: given[index]
            )
        )
