"""A case of this trainer in a process of its own, see `scripts.bench.interleave`.

Messages: `{"prepare": settings}` comes first, compiles, makes the state and returns
figures; `{"take": n}` takes n steps; `{"profile": n}` also returns where their time
went; `{"memory": true}` returns the allocator's figures. It needs no data or network.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scripts.bench.cases import VOCAB, Case, without_data
from scripts.bench.interleave import make_take, serve
from scripts.bench.kernel_times import profiled
from trainer.compiled.fp8 import Gpu
from trainer.compiled.hlo import Program, fp8_share
from trainer.compiled.memory import held_bytes
from trainer.errors import UserError
from trainer.parallel.mesh import abstract_batch
from trainer.run.allocator import keep_freed_memory
from trainer.run.libraries import hide_missing_gpu, use_compilation_cache
from trainer.step.state import from_checkpoint_form
from trainer.step.step import StepInputs, Tokens
from trainer.workload import compile_step, first_state

GIB = 2**30
HIT = "/jax/compilation_cache/cache_hits"


class CompiledCase(NamedTuple):
    """A compiled step.

    Attributes:
      take: takes that many steps, and returns seconds.
      figures: known before a step is taken.
      text: of the compiled program; empty where there is none.
      device: the step's device.
    """

    take: Callable[[int], float]
    figures: dict[str, Any]
    text: str
    device: Any


def check_platform(platform: str) -> None:
    """Raise UserError where JAX has another platform: CPU figures are not a GPU's."""
    device = jax.devices()[0]
    if device.platform != platform:
        raise UserError(
            f"platform={platform}, but JAX has {device.device_kind}"
            f" ({device.platform}); platform={device.platform} times that, such as to"
            " rehearse"
        )


@contextmanager
def cache_hits() -> Iterator[list[str]]:
    """Yield a list that gets an entry for each program from JAX's compilation cache."""
    hits: list[str] = []

    def listen(event: str, **_: Any) -> None:
        if event == HIT:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(listen)


def prepare(case: Case, context: int | None, *, cached: bool) -> CompiledCase:
    """Compile a case, and make its state.

    Args:
      case: the case.
      context: tokens of a sequence; None: the model's.
      cached: whether compiled programs are cached.
    """
    task = without_data(case.overrides(context), cached=cached)
    state = from_checkpoint_form(first_state(task, seed=0))
    length = task.model.spec.context
    batch = abstract_batch(1, case.batch, length, document_mask=False, mesh=task.mesh)
    with cache_hits() as hits:
        start = time.perf_counter()
        step = compile_step(task, batch, state)
        compile_s = time.perf_counter() - start
    memory, text = step.memory_analysis(), step.as_text() or ""
    device = task.mesh.devices.flat[0]
    assert memory is not None
    figures: dict[str, Any] = {
        "compile_s": compile_s,
        "from_cache": bool(hits),
        "peak_gib": (held_bytes(memory) + memory.temp_size_in_bytes) / GIB,
        "device": device.device_kind,
        "jax": jax.__version__,
        "platform_version": device.client.platform_version,
    }
    if Gpu.from_device(device) is not None and text:
        figures["fp8_share"] = fp8_share(Program(text))
    tokens = np.random.default_rng(0).integers(
        0, VOCAB, (1, case.batch, length + 1), dtype=np.int32
    )
    inputs = Tokens(jnp.asarray(tokens), None)
    inputs = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), inputs, batch
    )
    step_inputs = StepInputs(np.float32(1e-4), np.int32(0), np.uint32(0))
    return CompiledCase(
        make_take(step, state, inputs, step_inputs), figures, text, device
    )


class JaxWorker:
    """The worker's answers; see the module."""

    def __init__(self) -> None:
        self._prepared: CompiledCase | None = None

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a message."""
        if "prepare" in message:
            return self.prepare(**message["prepare"])
        if self._prepared is None:
            raise UserError(
                "nothing is prepared; the first message is prepare, not"
                f" {', '.join(message)}"
            )
        compiled = self._prepared
        if "take" in message:
            return {"seconds": compiled.take(message["take"])}
        if "profile" in message:
            return profiled(
                compiled.take, message["profile"], compiled.text, compiled.device
            )
        stats = compiled.device.memory_stats() or {}  # a CPU has no figures
        keys = {
            "peak_bytes_in_use": "allocator_peak_gib",
            "bytes_limit": "allocator_limit_gib",
        }
        return {name: stats[key] / GIB for key, name in keys.items() if key in stats}

    def prepare(
        self, case: list[Any], context: int | None, platform: str, cache: str | None
    ) -> dict[str, Any]:
        """Compile the case; `cache` is the directory of compiled programs or None."""
        hide_missing_gpu()
        keep_freed_memory()
        check_platform(platform)
        warning = use_compilation_cache(cache)
        self._prepared = prepare(
            Case(*case), context, cached=cache is not None and warning is None
        )
        return self._prepared.figures | ({"warning": warning} if warning else {})


if __name__ == "__main__":
    serve(JaxWorker().answer)
