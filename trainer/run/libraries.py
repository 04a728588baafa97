"""Settings of the libraries for the whole process: log messages, and the compilation
cache.
"""

import json
import logging
import os
import tempfile
import zlib
from pathlib import Path

import jax

from trainer.data.shards import read_json_or_empty
from trainer.errors import UserError
from trainer.files import path_of, write_atomically
from trainer.version import __version__

MIN_COMPILE_TIME_VARIABLE = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
# With another value of one of these the same configuration may give other bits, so a
# run that resumes reports changes.
NUMERIC_SETTINGS = (
    "JAX_ALLOW_F16_REDUCTIONS",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_DEFAULT_PRNG_IMPL",
    "JAX_DISABLE_MOST_OPTIMIZATIONS",
    "JAX_HIGH_DYNAMIC_RANGE_GUMBEL",
    "JAX_NUMPY_DTYPE_PROMOTION",
    "JAX_OPTIMIZATION_LEVEL",
    "JAX_RANDOM_SEED_OFFSET",
    "JAX_SOFTMAX_CUSTOM_JVP",
    "JAX_THREEFRY_PARTITIONABLE",
)
# They change no number: a resumed run reports other devices by a line of its own.
NON_NUMERIC_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count")
INTACT = "whole.json"  # size and time of each entry that was found intact


def prepare_jax() -> None:
    """Silence JAX's traceback about a missing GPU. Raise UserError for settings of JAX
    that change a run's numbers or disable jit.
    """
    for name, effect in (
        ("JAX_ENABLE_X64", "computes in FP64 what is FP32 here"),
        ("JAX_DISABLE_JIT", "compiles no step"),
    ):
        if getattr(jax.config, name.lower()):
            raise UserError(
                f"{name}={os.environ.get(name, 'true')} {effect}, so a run would not be"
                " the same; unset it"
            )
    hide_missing_gpu()


def numeric_settings() -> dict[str, str]:
    """Return the versions, and the settings of JAX and XLA, that change results.

    A run's numbers depend on these, its configuration, and its devices.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    used = [flag for flag in flags if not flag.startswith(NON_NUMERIC_FLAGS)]
    return {
        "scalify-trainer": __version__,
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "XLA_FLAGS": " ".join(sorted(used)),
    } | {name: str(jax.config.values.get(name.lower())) for name in NUMERIC_SETTINGS}


def hide_missing_gpu() -> None:
    """Keep JAX from logging a traceback when a CUDA plugin finds no NVIDIA device."""
    # /dev/dxg is the GPU of WSL.
    if not any(
        Path(node).exists() for node in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
    ):
        logger = logging.getLogger("jax._src.xla_bridge")
        logger.addFilter(lambda record: "xla_cuda" not in record.getMessage())


def use_compilation_cache(directory: str | None) -> str | None:
    """Keep compiled programs between runs.

    Returns:
      A warning if the directory cannot be written, so nothing is kept; else None.
    """
    if directory is None:
        return None
    path = path_of(directory)
    try:
        # `mkdir` passes for a directory that cannot be written, so a file is tried.
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
        remove_corrupt_entries(path)
    except OSError as error:
        return (
            f"compile_cache={directory} cannot be written ({error.strerror}):"
            " all programs are compiled again"
        )
    jax.config.update("jax_compilation_cache_dir", str(path))
    if MIN_COMPILE_TIME_VARIABLE not in os.environ:
        # The first state is made by many programs of 0.1 to 0.4 s.
        jax.config.update(MIN_COMPILE_TIME_VARIABLE.lower(), 0.1)
    return None


def remove_corrupt_entries(cache: Path) -> None:
    """Remove entries of the compilation cache that a killed process left incomplete.

    JAX would read them, warn and compile again at every start, without replacing them.
    Each entry is read once. An entry that another process is writing is removed too,
    so its program is compiled once more.
    """
    known = read_json_or_empty(cache / INTACT)
    intact = {}
    for entry in cache.glob("*-cache"):
        try:
            stat = entry.stat()
            intact[entry.name] = [stat.st_size, stat.st_mtime_ns]
            # To read all entries at each start would take too long: these were read
            # before.
            if known.get(entry.name) != intact[entry.name] and is_corrupt(
                entry.read_bytes()
            ):
                entry.unlink()
                del intact[entry.name]
        except FileNotFoundError:  # another process cleans up too
            continue
    if intact != known:
        write_atomically(cache / INTACT, json.dumps(intact).encode())


def is_corrupt(entry: bytes) -> bool:
    """Return whether a compressed program ends too early or has a wrong checksum.

    JAX compresses with zstd if that is installed. Of such entries only an empty file is
    recognized as corrupt.
    """
    if entry[:1] != b"\x78":  # the first byte of zlib data
        return not entry
    unpack = zlib.decompressobj()
    try:
        unpack.decompress(entry)
    except zlib.error:
        return True
    return not unpack.eof
