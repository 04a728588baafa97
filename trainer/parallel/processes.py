"""The processes of one run: join them, raise an error in all of them, all-reduce a
number.
"""

import contextlib
import functools
import hashlib
import os
import secrets
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
# A process without a heartbeat for this long counts as lost, and the others exit. With
# JAX's default, 100 s, most of a recovery's time would be spent waiting.
HEARTBEAT_SECONDS = 10


def start_processes(config: Mapping[str, Any]) -> None:
    """Join the other processes of this run.

    The environment names them in PROCESS_VARIABLES, or JAX finds them (Slurm,
    Kubernetes, MPI).

    Args:
      config: all settings by group, which must be the same in all processes.

    Raises:
      UserError: the processes cannot be joined, or their settings differ. In the
        second case all processes raise it.
    """
    # JAX's preemption service would catch SIGTERM for the life of the process. The loop
    # has its own handler, and `AsyncMax` tells the other processes.
    jax.config.update("jax_enable_preemption_service", False)
    join = functools.partial(
        jax.distributed.initialize, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
    )
    address, count, index = (os.environ.get(name) for name in PROCESS_VARIABLES)
    advice = f"set {', '.join(PROCESS_VARIABLES)}, or run under Slurm"
    # `join(address)` below would ignore the one that is set.
    if (count is None) != (index is None):
        raise UserError(
            f"parallel.distributed=true, but only one of {PROCESS_VARIABLES[1]} and"
            f" {PROCESS_VARIABLES[2]} is set; {advice}"
        )
    try:
        if count is None or index is None:
            join(address)
        else:
            join(address, int(count), int(index))
    # A number that is none and a missing coordinator are ValueErrors, errors of JAX's
    # service RuntimeErrors.
    except (ValueError, RuntimeError) as error:
        raise UserError(
            "parallel.distributed=true, but the processes could not be joined:"
            f" {str(error).splitlines()[0]}; {advice}"
        ) from error
    # After the join: comparing needs a collective.
    check_same_settings(config)


HASH_WORDS = 4  # 32-bit words in the hash of a value that processes compare
# Keys of files and directories, which each machine may have elsewhere.
MAY_DIFFER_BY_MACHINE = {
    "run_dir",
    "compile_cache",
    "init_from",
    "resume.source",
    "data.paths",
    "data.cache_dir",
    "data.prepared_dir",
}


def check_same_settings(config: Mapping[str, Any]) -> None:
    """Raise UserError in all processes if their settings differ.

    Processes with different programs would wait for each other forever.
    """
    # The group is part of the name, so that the message names keys as they are typed.
    settings: dict[str, Any] = {}
    for name, section in config.items():
        if isinstance(section, Mapping):
            settings |= {f"{name}.{key}": value for key, value in section.items()}
        else:
            settings[name] = section
    # Sorted, so that all processes compare hashes in the same order.
    compared = sorted(settings.keys() - MAY_DIFFER_BY_MACHINE)
    names, process = compare_processes({name: settings[name] for name in compared})
    if names:
        raise UserError(
            f"{', '.join(names)}: process {process} was given another value than"
            " process 0; start all processes of a run with the same arguments"
        )


def compare_processes(values: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return the names of the values that differ between processes, and the first
    process that differs from process 0.

    All processes must call it, with the same names.
    """
    data = b"".join(
        # Not a checksum of 32 bits: other content with the same CRC-32 is easy to make.
        hashlib.blake2b(repr(value).encode(), digest_size=4 * HASH_WORDS).digest()
        for value in values.values()
    )
    # Not uint64, which JAX narrows to 32 bits unless x64 is enabled.
    hashes = np.frombuffer(data, np.uint32)
    gathered = np.asarray(multihost_utils.process_allgather(hashes))
    gathered = gathered.reshape(-1, len(values), HASH_WORDS)
    differs = (gathered != gathered[:1]).any(axis=2)
    differs_by_name = zip(values, differs.any(axis=0), strict=True)
    names = [name for name, name_differs in differs_by_name if name_differs]
    return names, int(differs.any(axis=1).argmax())


def shared_name(prefix: str) -> str:
    """Return a random file name, the same in all processes."""
    # Bytes, because an array is all that a broadcast takes.
    suffix = np.frombuffer(secrets.token_bytes(8), np.uint8)
    if jax.process_count() > 1:
        suffix = multihost_utils.broadcast_one_to_all(suffix)
    return f"{prefix}-{suffix.tobytes().hex()}"


def check_same_content(contents: Mapping[str, Any]) -> None:
    """Raise UserError in all processes if they read different files.

    `contents`: a checksum, or another value of the content, by the name of the input.
    """
    names, process = compare_processes(contents)
    if names:
        raise UserError(
            f"{' and '.join(names)}: process {process} reads another content there than"
            " process 0; give all processes of a run copies of the same files"
        )


MESSAGE_BYTES = 1000  # a broadcast array has the same shape in all processes


@contextlib.contextmanager
def raise_together() -> Iterator[None]:
    """Raise process 0's UserError in all processes, with its exit code.

    It surrounds work that process 0 does for all. Without it the other processes would
    fail later with another exit code. A cluster takes that for a crash, and restarts
    the run.
    """
    user_error: UserError | None = None
    try:
        yield
    except UserError as error:
        user_error = error
    if jax.process_count() > 1:
        message = np.frombuffer(
            # Cut by bytes, which may split a character; `decode` below replaces its
            # rest.
            str(user_error or "").encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0"),
            np.uint8,
        )
        first_message = (
            multihost_utils.broadcast_one_to_all(message)
            .tobytes()
            .rstrip(b"\0")
            .decode(errors="replace")
        )
        if user_error is None and first_message:
            user_error = UserError(first_message)
    if user_error is not None:
        raise user_error


class AsyncMax:
    """An asynchronous all-reduce of the maximum over processes.

    Every process must call it equally often. With several processes a call returns the
    result of the previous call, so that no process waits.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._largest = jax.jit(jnp.max, out_shardings=replicated(mesh))
        # Started at once, so that each call has a result of an earlier one to return.
        self._pending = self._start(0)

    def __call__(self, number: int) -> int:
        """Contribute `number` (at least 0); with several processes the first call
        returns 0.
        """
        if jax.process_count() == 1:
            return number
        result, self._pending = self._pending, self._start(number)
        return int(result)

    def _start(self, number: int) -> jax.Array:
        sharding = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        # One element for each device: a process fills those of its devices, and the
        # maximum needs no other layout.
        copies = np.full(self._mesh.size, number, np.int32)
        return self._largest(
            jax.make_array_from_callback(
                copies.shape, sharding, lambda index: copies[index]
            )
        )
