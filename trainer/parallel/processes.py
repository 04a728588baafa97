"""Several processes of one run: how they start, fail together and agree on a number."""

import contextlib
import functools
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.errors import UserError
from trainer.parallel.mesh import replicated

PROCESS_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# After so long without a word a process is lost, and the others end; JAX's default of
# 100 s would be most of a recovery.
HEARTBEAT_SECONDS = 10


def start_processes(config: Mapping[str, Any]) -> None:
    """Join the other processes of this run.

    They are named by `PROCESS_VARIABLES`, or found by JAX (Slurm, Kubernetes, MPI).

    Args:
      config: all settings, group by group, which must be the same in all processes.

    Raises:
      UserError: they could not be joined; or, in all of them, one has other settings.
    """
    # JAX's own service would catch SIGTERM for the whole life of the process; the loop
    # has its own handler, and agreement.
    jax.config.update("jax_enable_preemption_service", False)
    join = functools.partial(
        jax.distributed.initialize, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
    )
    address, count, index = (os.environ.get(name) for name in PROCESS_VARIABLES)
    try:
        if count is None and index is None:
            join(address)
        else:
            join(address, int(count or ""), int(index or ""))
    except (ValueError, RuntimeError) as error:
        raise UserError(
            "parallel.distributed=true, but the processes could not be joined:"
            f" {str(error).splitlines()[0]}; set {', '.join(PROCESS_VARIABLES)}, or run"
            " under Slurm"
        ) from error
    check_same(config)


# Paths, which may differ between machines.
PATH_KEYS = {
    "run_dir",
    "compile_cache",
    "init_from",
    "resume.source",
    "data.paths",
    "data.cache_dir",
    "data.prepared_dir",
}


def check_same(config: Mapping[str, Any]) -> None:
    """Raise UserError in all processes if one has another setting.

    Otherwise they would wait for each other forever.
    """
    settings: dict[str, Any] = {}
    for name, section in config.items():
        if isinstance(section, Mapping):
            settings |= {f"{name}.{key}": value for key, value in section.items()}
        else:
            settings[name] = section
    given = {name: settings[name] for name in sorted(settings.keys() - PATH_KEYS)}
    names, process = differing(given)
    if names:
        raise UserError(
            f"{', '.join(names)}: process {process} was given another value than"
            " process 0; start all processes of a run with the same arguments"
        )


def differing(values: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return which values differ between processes, and the first process that has
    others than process 0; all processes must call it with the same names.
    """
    checksums = np.array(
        [zlib.crc32(repr(value).encode()) for value in values.values()], np.uint32
    )
    gathered = np.atleast_2d(multihost_utils.process_allgather(checksums))
    is_other = gathered != gathered[:1]
    names = [
        name for name, other in zip(values, is_other.any(axis=0), strict=True) if other
    ]
    return names, int(is_other.any(axis=1).argmax())


def shared_name(prefix: str) -> str:
    """Return a random name of a file, the same in all processes."""
    number = np.frombuffer(secrets.token_bytes(8), np.uint8)
    if jax.process_count() > 1:
        number = multihost_utils.broadcast_one_to_all(number)
    return f"{prefix}-{number.tobytes().hex()}"


def refuse_other(names: Sequence[str], process: int) -> None:
    """Raise UserError if there are names of inputs in which a process differs."""
    if names:
        raise UserError(
            f"{' and '.join(names)}: process {process} reads another content there than"
            " process 0; give all processes of a run copies of the same files"
        )


MESSAGE_BYTES = 1000  # of an error that all processes raise


@contextlib.contextmanager
def refused_together() -> Iterator[None]:
    """Raise the UserError of the first process in all of them, with its exit code.

    For what the first process does for all. The others would go on and end otherwise,
    which a cluster takes for a crash and restarts.
    """
    refusal: UserError | None = None
    try:
        yield
    except UserError as error:
        refusal = error
    if jax.process_count() > 1:
        message = np.frombuffer(
            str(refusal or "").encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0"),
            np.uint8,
        )
        first_message = (
            multihost_utils.broadcast_one_to_all(message)
            .tobytes()
            .rstrip(b"\0")
            .decode(errors="replace")
        )
        refusal = refusal or (UserError(first_message) if first_message else None)
    if refusal is not None:
        raise refusal


class Agreement:
    """The largest number that any process gave, the same in all; each must call it
    equally often.

    Nobody waits: with several processes the answer is that to the previous call.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._largest = jax.jit(jnp.max, out_shardings=replicated(mesh))
        self._pending = self._ask(0)

    def __call__(self, number: int) -> int:
        """Give `number` (at least 0); several processes get 0 from the first call."""
        if jax.process_count() == 1:
            return number
        answer, self._pending = self._pending, self._ask(number)
        return int(answer)

    def _ask(self, number: int) -> jax.Array:
        sharding = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        given = np.full(self._mesh.size, number, np.int32)
        return self._largest(
            jax.make_array_from_callback(
                given.shape, sharding, lambda index: given[index]
            )
        )
