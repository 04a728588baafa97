"""A case of this trainer in a process of its own, which `scripts.bench.racing.Worker`
asks.

What it is asked, one at a time, first to prepare: `{"prepare": settings}` compiles,
makes the state and answers with figures; `{"take": n}` takes n steps, `{"profile": n}`
as well, and says where their time went; `{"memory": true}` says what the allocator has
seen. Needs jax, flax and optax: neither Hydra, nor data, nor a network.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from scripts.bench.cases import VOCAB, Case, read_group
from scripts.bench.racing import serve, taking
from trainer.errors import UserError

GIB = 2**30
HIT = "/jax/compilation_cache/cache_hits"


class Contestant(NamedTuple):
    """A compiled step.

    Attributes:
      take: takes that many steps; seconds.
      figures: known before a step was taken.
      text: of the compiled program; empty where there is none.
      device: that it runs on.
    """

    take: Callable[[int], float]
    figures: dict[str, Any]
    text: str
    device: Any


def check_platform(platform: str) -> None:
    """Raise UserError where JAX has another platform: nobody wants a CPU's figures for
    a GPU's.
    """
    import jax

    found = jax.devices()[0]
    if found.platform != platform:
        raise UserError(
            f"platform={platform}, but JAX has {found.device_kind} ({found.platform}); "
            f"platform={found.platform} times that, such as to rehearse"
        )


@contextmanager
def cache_hits() -> Iterator[list[str]]:
    """What of JAX's compilation cache is read meanwhile, an entry for each program."""
    import jax

    hits: list[str] = []

    def listen(event: str, **_: Any) -> None:
        if event == HIT:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(listen)


def prepare(case: Case, context: int | None, *, cached: bool) -> Contestant:
    """The case, compiled, with a state. `context`: None: the model's; `cached`: whether
    programs are kept.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from trainer.compiled.fp8 import Gpu
    from trainer.compiled.hlo import Program, fp8_share
    from trainer.config import schema
    from trainer.config.fields import from_tree
    from trainer.parallel.mesh import abstract_batch, make_mesh
    from trainer.step.kernels import Kernels
    from trainer.step.optimizer import make_optimizer
    from trainer.step.state import from_stored
    from trainer.step.step import Hyper, Tokens
    from trainer.workload import Model, TrainTask, compile_step, first_state

    tree = read_group("model", case.model) | {
        "remat": case.remat,
        "scan_layers": case.scan,
        "vocab_size": VOCAB,
    }
    tree |= {"loss_logits": None if case.logits == "fp32" else case.logits}
    tree |= {} if context is None else {"context": context}
    spec = from_tree(schema.MODELS[tree["family"]], tree).spec(VOCAB)
    precision = from_tree(schema.Precision, read_group("precision", case.precision))
    mesh = make_mesh(1)
    adamw = make_optimizer(
        "adamw", b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1, clip_norm=1.0
    )
    kernels = Kernels.chosen(case.deterministic, cached=cached)  # type: ignore[arg-type]
    w = TrainTask(
        Model.make(spec, precision.policy), "adamw", adamw, mesh, kernels=kernels
    )
    state = from_stored(first_state(w, seed=0))
    batch = abstract_batch(1, case.batch, spec.context, document_mask=False, mesh=mesh)
    with cache_hits() as hits:
        start = time.perf_counter()
        step = compile_step(w, batch, state)
        compile_s = time.perf_counter() - start
    memory, text, device = (
        step.memory_analysis(),
        step.as_text() or "",
        mesh.devices.flat[0],
    )
    assert memory is not None
    held = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
    figures: dict[str, Any] = {
        "compile_s": compile_s,
        "from_cache": bool(hits),
        "peak_gib": (held + memory.temp_size_in_bytes) / GIB,
        "device": device.device_kind,
        "jax": jax.__version__,
        "platform_version": device.client.platform_version,
    }
    if Gpu.from_device(device) is not None and text:
        figures["fp8_share"] = fp8_share(Program(text))
    tokens = np.random.default_rng(0).integers(
        0, VOCAB, (1, case.batch, spec.context + 1), dtype=np.int32
    )
    fed, hyper = (
        Tokens(jnp.asarray(tokens), None),
        Hyper(np.float32(1e-4), np.int32(0), np.uint32(0)),
    )
    fed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), fed, batch)
    return Contestant(taking(step, state, fed, hyper), figures, text, device)


class Ours:
    """What is asked of a case, answered."""

    def __init__(self) -> None:
        self._prepared: Contestant | None = None

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """See the module."""
        if "prepare" in message:
            return self.prepare(**message["prepare"])
        if self._prepared is None:
            raise UserError(
                "nothing is prepared; first of all comes prepare, not"
                f" {', '.join(message)}"
            )
        contestant = self._prepared
        if "take" in message:
            return {"seconds": contestant.take(message["take"])}
        if "profile" in message:
            from scripts.bench.kernel_times import profiled

            return profiled(
                contestant.take, message["profile"], contestant.text, contestant.device
            )
        stats = contestant.device.memory_stats() or {}  # a CPU counts nothing
        keys = {
            "peak_bytes_in_use": "allocator_peak_gib",
            "bytes_limit": "allocator_limit_gib",
        }
        return {name: stats[key] / GIB for key, name in keys.items() if key in stats}

    def prepare(
        self, case: list[Any], context: int | None, platform: str, cache: str | None
    ) -> dict[str, Any]:
        """Compile the case for a platform; `cache`: the directory of compiled
        programs.
        """
        from trainer.run.allocator import keep_freed_memory
        from trainer.run.libraries import hide_missing_gpu, use_compilation_cache

        hide_missing_gpu()
        keep_freed_memory()
        check_platform(platform)
        warning = use_compilation_cache(cache)
        self._prepared = prepare(
            Case(*case), context, cached=cache is not None and warning is None
        )
        return self._prepared.figures | ({"warning": warning} if warning else {})


if __name__ == "__main__":
    serve(Ours().answer)
