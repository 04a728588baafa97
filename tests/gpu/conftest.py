"""Where the checks run: on a GPU with `make test-gpu`, and there only; at a small size
on a CPU among `make test`."""

import os

import jax
import pytest


@pytest.fixture(scope="session")
def on_gpu():
    """Whether the checks are at full size. They are skipped where a GPU is asked for
    and there is none."""
    is_gpu_requested = os.environ.get("SCALIFY_TEST_PLATFORM", "cpu") == "gpu"
    actual = jax.devices()[0]
    if is_gpu_requested and actual.platform != "gpu":
        pytest.skip(f"SCALIFY_TEST_PLATFORM=gpu, but JAX has {actual.device_kind}")
    return is_gpu_requested
