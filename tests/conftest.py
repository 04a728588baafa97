"""Eight CPU devices, no implicit rank promotion: what the tests run is what a sharded,
strict user program runs.

The workers of a test run share what they have compiled. They let XLA emit code that is
quick to compile and slow to run: of the same optimised programs, operation by
operation, in a quarter of the time, in one piece rather than in one for each processor.
So do the trainers that they start. With `XLA_FLAGS="" make test` everything is compiled
as for users.

`make test` leaves out tests with the mark `slow`, and `make test-all` runs everything
(`families`).

With SCALIFY_TEST_PLATFORM=gpu (`make test-gpu`) none of that holds: the device is JAX's
own choice.
"""

import gc
import os
import tempfile
from pathlib import Path

ON_GPU = os.environ.get("SCALIFY_TEST_PLATFORM", "cpu") == "gpu"
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not ON_GPU:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0"
        " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
        " --xla_cpu_parallel_codegen_split_count=1",
    )
# Smaller programs compile about as quickly as they are written and read.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.02")

import pytest  # noqa: E402

pytest_plugins = ["progress"]
# Of the objects that imports and traces make, few are garbage before they end: the
# collector need not look every few thousand.
gc.set_threshold(100_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """The directory is made by the first process, told to its workers through the
    environment, and removed by it.

    A first process that has workers runs no test, and imports neither JAX nor Hydra.
    """
    if "SCALIFY_TEST_CACHE" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="scalify-tests-")
        os.environ["SCALIFY_TEST_CACHE"] = folder.name
        config.add_cleanup(folder.cleanup)
    is_worker = hasattr(config, "workerinput")
    if is_worker or config.getoption("dist", "no") == "no":
        configure_libraries()


def configure_libraries() -> None:
    import hydra_once  # noqa: F401 (its import changes Hydra)
    import jax

    if not ON_GPU:
        jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_compilation_cache_dir", os.environ["SCALIFY_TEST_CACHE"])


KINDS = ("unit", "integration", "e2e")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What kind a test is of, its folder says; what only a GPU can tell is an
    integration at a small size."""
    depth = len(Path(__file__).parent.parts)
    for item in items:
        folder = item.path.parts[depth]
        item.add_marker(folder if folder in KINDS else "integration")


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the collector need not look at them again."""
    gc.freeze()
