"""Settings of the libraries for the whole process: what they may print, where compiled programs are kept."""

import logging
import tempfile
from pathlib import Path

import jax


def hide_missing_gpu() -> None:
    """Keep JAX from logging a traceback about a CUDA plugin that is installed on a machine without an NVIDIA device."""
    if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")):
        logger = logging.getLogger("jax._src.xla_bridge")
        logger.addFilter(lambda record: "xla_cuda" not in record.getMessage())


def use_compilation_cache(directory: str | None) -> str | None:
    """Keep compiled programs between runs. Where that cannot be, why, in a line, and nothing is kept."""
    if directory is None:
        return None
    path = Path(directory).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        return f"compile_cache={directory} cannot be written ({error.strerror}): everything is compiled anew"
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return None
