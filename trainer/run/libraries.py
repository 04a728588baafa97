"""Settings of the libraries for the whole process: what they may print, where compiled
programs are kept.
"""

import json
import logging
import os
import tempfile
import zlib
from pathlib import Path

import jax

from trainer.data.shards import read_json
from trainer.files import write_atomically

MIN_SECONDS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
WHOLE = "whole.json"  # entries found whole before, with size and time


def hide_missing_gpu() -> None:
    """Keep JAX from logging a traceback about a CUDA plugin that is installed on a
    machine without an NVIDIA device.
    """
    if not any(
        Path(node).exists() for node in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
    ):
        logger = logging.getLogger("jax._src.xla_bridge")
        logger.addFilter(lambda record: "xla_cuda" not in record.getMessage())


def use_compilation_cache(directory: str | None) -> str | None:
    """Keep compiled programs between runs. Where that cannot be, why, in a line, and
    nothing is kept.
    """
    if directory is None:
        return None
    path = Path(directory).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
        remove_torn(path)
    except OSError as error:
        return (
            f"compile_cache={directory} cannot be written ({error.strerror}):"
            " everything is compiled anew"
        )
    jax.config.update("jax_compilation_cache_dir", str(path))
    if MIN_SECONDS not in os.environ:
        jax.config.update(MIN_SECONDS.lower(), 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return None


def remove_torn(cache: Path) -> None:
    """Remove what a kill left half written: JAX would read it, warn, compile anew and
    keep it, at every start.

    Each entry is read once. One that another process is writing is removed as well, and
    compiled once more.
    """
    known, found = read_json(cache / WHOLE), {}
    for entry in cache.glob("*-cache"):
        try:
            stat = entry.stat()
            found[entry.name] = [stat.st_size, stat.st_mtime_ns]
            if known.get(entry.name) != found[entry.name] and is_torn(
                entry.read_bytes()
            ):
                entry.unlink()
                del found[entry.name]
        except FileNotFoundError:  # another process cleans up too
            continue
    if found != known:
        write_atomically(cache / WHOLE, json.dumps(found).encode())


def is_torn(entry: bytes) -> bool:
    """Return whether a compressed program ends too early or has another checksum than
    it had.

    JAX compresses with zlib, but with zstd where that is installed; of that only the
    empty file is known as torn.
    """
    if entry[:1] != b"\x78":
        return not entry
    unpack = zlib.decompressobj()
    try:
        unpack.decompress(entry)
    except zlib.error:
        return True
    return not unpack.eof
