"""Compare the training step under scalify with the plain one, interleaved.

Three times are compared: of tracing the step to a jaxpr (with JAX's caches empty), of
compiling it, and of taking it. The scaled step has static scales: those of parameters
by their RMS, that of moments fixed.
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
from scripts.bench.interleave import interleave
from trainer.models.gpt2.model import functional
from trainer.models.gpt2.spec import GPT2Spec

State = tuple[Any, Any]  # parameters, optimizer's state
MOMENT_SCALE = 2.0**-10


class TimedStep:
    """A compiled step: `step(state, tokens)` returns the next state and the loss."""

    def __init__(self, step: Callable, state: State, tokens: jax.Array) -> None:
        self.jitted = jax.jit(step, donate_argnums=0)
        self.state, self.tokens = state, tokens
        self.compiled: Any = None

    def trace(self, _: int) -> float:
        """Return the seconds of tracing the step once, with empty caches."""
        jax.clear_caches()
        gc.collect()
        return _seconds(lambda: self.jitted.trace(self.state, self.tokens))

    def compile(self, _: int) -> float:
        """Return the seconds of compiling the step once, without tracing and lowering.

        The program is stored for `take`.
        """
        # Otherwise the second compilation would be a cache hit.
        jax.clear_caches()
        lowered = self.jitted.lower(self.state, self.tokens)
        start = time.perf_counter()
        self.compiled = lowered.compile()
        return time.perf_counter() - start

    def take(self, steps: int) -> float:
        """Return the seconds of that many steps."""
        return _seconds(
            lambda: [self._step() for _ in range(steps)][-1].block_until_ready()
        )

    def _step(self) -> jax.Array:
        self.state, loss = self.compiled(self.state, self.tokens)
        return loss


def timed_steps(
    spec: GPT2Spec, batch_size: int, formats: tuple[str, ...]
) -> dict[str, TimedStep]:
    """Return the plain FP32 step, and the scaled one for each dtype of its data.

    All have the same weights and batch.
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

    def with_static_scales(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        with warnings.catch_warnings():
            # The trainer's layers branch on the dtype, so scalify cannot compare with
            # the dtypes of the plain program, and warns.
            warnings.simplefilter("ignore", PrecisionWarning)
            new, loss = scaled_step(state, tokens)
        return tree.rescaled_like(new, state), asarray(loss)

    params = jax.jit(init)(jax.random.key(0))
    shape = batch_size, spec.context + 1
    tokens = jnp.asarray(
        np.random.default_rng(0).integers(0, spec.vocab_size, shape, dtype=np.int32)
    )
    steps = {"plain": TimedStep(step, (params, tx.init(params)), tokens)}
    for name in formats:
        state = scaled((params, tx.init(params)), name)
        steps[name] = TimedStep(with_static_scales, state, tokens)
    return steps


def scaled(state: State, dtype: str) -> State:
    """Return parameters and optimizer state with static scales and data of `dtype`."""
    params, opt_state = state
    params = tree.with_static_scales(as_scaled_array(params, dtype=dtype))
    return params, as_scaled_array(opt_state, MOMENT_SCALE, dtype=dtype)


def ratios(over: list[float], under: list[float]) -> dict[str, float]:
    """Return median and extremes of the ratios of each round, which share its load."""
    values = [a / b for a, b in zip(over, under, strict=True)]
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def compare(
    spec: GPT2Spec,
    batch_size: int,
    formats: tuple[str, ...],
    *,
    rounds: int,
    compiles: int,
    steps: int,
) -> dict[str, Any]:
    """Return seconds of the plain step (medians), and ratios for each format.

    `trace` and `compile` are times of the scaled step over those of the plain one;
    `speed` is the inverse.
    """
    timed = timed_steps(spec, batch_size, formats)
    for step in timed.values():
        step.trace(1)  # imports, and Python's own caches
    trace = interleave({name: step.trace for name, step in timed.items()}, rounds, 1)
    compile_ = interleave({n: step.compile for n, step in timed.items()}, compiles, 1)
    for step in timed.values():
        step.take(2)
    take = interleave({name: step.take for name, step in timed.items()}, rounds, steps)
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
    """Return the figures of `compare` as lines of text."""
    plain = figures["plain"]
    lines = [
        f"plain: trace {plain['trace_s']:.2f} s, compile {plain['compile_s']:.2f} s,"
        f" step {plain['step_s']:.3f} s"
    ]
    for name, row in figures.items():
        if name != "plain":
            ratios_text = ", ".join(
                f"{key} {r['median']:.2f} ({r['min']:.2f} to {r['max']:.2f})"
                for key, r in row.items()
            )
            lines.append(f"scalify, {name} data, against plain: {ratios_text}")
    return "\n".join(lines)


def _seconds(fun: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fun()
    return time.perf_counter() - start
