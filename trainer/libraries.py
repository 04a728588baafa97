"""Settings of the libraries for the whole process: what they may print, where compiled programs are kept."""

import logging
import os
from pathlib import Path

import jax


def hide_missing_gpu() -> None:
    """Keep JAX from logging a traceback about a CUDA plugin that is installed on a machine without an NVIDIA device."""
    if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")):
        logger = logging.getLogger("jax._src.xla_bridge")
        logger.addFilter(lambda record: "xla_cuda" not in record.getMessage())


def use_compilation_cache(directory: str | None) -> None:
    """Keep compiled programs between runs."""
    if directory is not None:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
