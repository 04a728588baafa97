"""The training step under scalify against the plain one, on the same machine in turns:
`bench.py` prints it.

Three times are compared: to trace the step to a jaxpr (all caches of JAX empty), to
compile it, and to take it. The scaled step has static scales: parameters that of their
RMS, moments a fixed one.
"""

import gc
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from scalify_core import PrecisionWarning, as_scaled_array, asarray, scalify, tree
from trainer.models.gpt2 import functional
from trainer.models.spec import GPT2Spec

State = tuple[Any, Any]  # parameters, optimizer's state
MOMENT_SCALE = 2.0**-10


class Contestant:
    """One way to take the step: `step(state, tokens)` gives the next state, of the same
    form, and the loss.
    """

    def __init__(self, step: Callable, state: State, tokens: jax.Array) -> None:
        self.jitted = jax.jit(step, donate_argnums=0)
        self.state, self.tokens = state, tokens
        self.compiled: Any = None

    def trace(self) -> float:
        """Seconds to trace the step, caches empty."""
        jax.clear_caches()
        gc.collect()
        return _seconds(lambda: self.jitted.trace(self.state, self.tokens))

    def compile(self) -> float:
        """Seconds to compile the step, tracing and lowering left out; keeps the program
        for `take`.
        """
        # or the second compilation would be the first one, found again
        jax.clear_caches()
        lowered = self.jitted.lower(self.state, self.tokens)
        start = time.perf_counter()
        self.compiled = lowered.compile()
        return time.perf_counter() - start

    def take(self, steps: int) -> float:
        """Seconds for that many steps."""
        return _seconds(
            lambda: [self._step() for _ in range(steps)][-1].block_until_ready()
        )

    def _step(self) -> jax.Array:
        self.state, loss = self.compiled(self.state, self.tokens)
        return loss


def contestants(
    spec: GPT2Spec, batch_size: int, formats: tuple[str, ...]
) -> dict[str, Contestant]:
    """The plain step, FP32, and the scaled one with data of each of these dtypes; same
    weights, same batch.
    """
    init, bind, *_ = functional(spec)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-4, b2=0.95, weight_decay=0.1)
    )

    def step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(
            lambda p: bind(p).loss(tokens[:, :-1], tokens[:, 1:])
        )(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    scaled_step = scalify(step)

    def closed(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        with warnings.catch_warnings():
            # The trainer's layers branch on the dtype: it cannot be told what plain
            # code has in FP32, which is nothing.
            warnings.simplefilter("ignore", PrecisionWarning)
            new, loss = scaled_step(state, tokens)
        return tree.rescaled_like(new, state), asarray(loss)

    params = jax.jit(init)(jax.random.key(0))
    shape = batch_size, spec.context + 1
    tokens = jnp.asarray(
        np.random.default_rng(0).integers(0, spec.vocab_size, shape, dtype=np.int32)
    )
    ways = {
        name: Contestant(closed, scaled((params, tx.init(params)), name), tokens)
        for name in formats
    }
    return {"plain": Contestant(step, (params, tx.init(params)), tokens), **ways}


def scaled(state: State, dtype: str) -> State:
    """Parameters and optimizer's state with static scales and data of `dtype`."""
    params, opt_state = state
    params = tree.with_static_scales(as_scaled_array(params, dtype=dtype))
    return params, as_scaled_array(opt_state, MOMENT_SCALE, dtype=dtype)


def in_turns(
    measures: dict[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each, one figure a round. Who begins alternates."""
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for i in range(rounds):
        for name in list(measures)[:: 1 if i % 2 else -1]:
            seconds[name].append(measures[name]())
    return seconds


def ratios(over: list[float], under: list[float]) -> dict[str, float]:
    """Median and extremes of the ratios of each round's pair, so that a slow moment
    counts on both sides.
    """
    found = [a / b for a, b in zip(over, under, strict=True)]
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def compare(
    spec: GPT2Spec,
    batch_size: int,
    formats: tuple[str, ...],
    *,
    rounds: int,
    compiles: int,
    steps: int,
) -> dict[str, Any]:
    """Figures of one size: seconds of the plain step (medians) and, for each format,
    ratios of the scaled one to it.

    `trace` and `compile` are times of the scaled step over those of the plain one;
    `speed` is the other way round.
    """
    ways = contestants(spec, batch_size, formats)
    for way in ways.values():
        way.trace()  # imports, and what Python itself caches
    trace = in_turns({name: way.trace for name, way in ways.items()}, rounds)
    compile_ = in_turns({name: way.compile for name, way in ways.items()}, compiles)
    for way in ways.values():
        way.take(2)
    take = in_turns(
        {name: lambda way=way: way.take(steps) / steps for name, way in ways.items()},
        rounds,
    )  # type: ignore[misc]
    times = {"trace": trace, "compile": compile_, "step": take}
    out: dict[str, Any] = {
        "plain": {f"{k}_s": statistics.median(t["plain"]) for k, t in times.items()}
    }
    for name in formats:
        out[name] = {
            "trace": ratios(trace[name], trace["plain"]),
            "compile": ratios(compile_[name], compile_["plain"]),
            "speed": ratios(take["plain"], take[name]),
        }
    return out


def report(figures: dict[str, Any]) -> str:
    """The figures of `compare` as lines."""
    plain = figures["plain"]
    lines = [
        f"plain: trace {plain['trace_s']:.2f} s, compile {plain['compile_s']:.2f} s,"
        f" step {plain['step_s']:.3f} s"
    ]
    for name, row in figures.items():
        if name != "plain":
            shown = (
                f"{key} {r['median']:.2f} ({r['min']:.2f} to {r['max']:.2f})"
                for key, r in row.items()
            )
            lines.append(f"scalify, {name} data, against plain: {', '.join(shown)}")
    return "\n".join(lines)


def _seconds(fun: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fun()
    return time.perf_counter() - start
