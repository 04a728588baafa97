"""Learning-rate schedules: a linear warm-up, then the named decay."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from jax.typing import ArrayLike

ScheduleName = Literal["cosine", "wsd", "linear", "constant"]


def learning_rates(
    name: ScheduleName,
    *,
    steps: int,
    peak: float,
    warmup_fraction: float,
    min_ratio: float,
    decay_fraction: float,
) -> np.ndarray:
    """Return the learning rate of every step, FP32 `[steps]`.

    After a linear warm-up all schedules but `constant` decay. They would reach
    `min_ratio * peak` one step after the last, so the last rate is slightly above it.
    wsd (warm-up, stable, decay) stays at the peak until the last `decay_fraction` of
    the steps, then falls linearly.
    """
    # Imported here: the schema of the configuration must not import JAX.
    import jax
    import optax

    warmup = round(warmup_fraction * steps)
    decay_steps = max(1, steps - warmup)
    min_rate = min_ratio * peak
    decayed_rate: Callable[[ArrayLike], ArrayLike]
    match name:
        case "cosine":
            decayed_rate = optax.cosine_decay_schedule(
                peak, decay_steps, alpha=min_ratio
            )
        case "linear":
            decayed_rate = optax.linear_schedule(peak, min_rate, decay_steps)
        case "constant":
            decayed_rate = optax.constant_schedule(peak)
        case "wsd":
            decay = max(1, round(decay_fraction * steps))
            decayed_rate = optax.linear_schedule(
                peak, min_rate, decay, transition_begin=max(0, decay_steps - decay)
            )
    step = np.arange(steps)
    # Step i of the warm-up has (i + 1) / warmup of the peak: at a rate of 0 the first
    # batch would be wasted.
    ramp = peak * (step + 1) / max(1, warmup)
    decayed = np.broadcast_to(
        np.asarray(jax.vmap(decayed_rate)(np.maximum(step - warmup, 0))), (steps,)
    )
    return np.where(step < warmup, ramp, decayed).astype(np.float32)
