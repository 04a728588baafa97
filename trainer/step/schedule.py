"""Learning-rate schedules: a linear warm-up, then the named decay."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from jax.typing import ArrayLike

ScheduleName = Literal["cosine", "wsd", "linear", "constant"]
BLOCK = 1 << 16  # steps whose rates are computed at once


class LearningRates:
    """The learning rate of every step of a run, computed when it is read.

    A table would take gigabytes for the 10^8 steps that a configuration may name.

    Args:
      rates_of: returns the rates of consecutive steps, counted from 0, FP32 `[n]`.
      steps: number of steps of the run.
    """

    def __init__(
        self, rates_of: Callable[[np.ndarray], np.ndarray], steps: int
    ) -> None:
        self.steps = steps
        self._rates_of = rates_of
        # Steps are read in order, so one block serves 65,536 of them.
        self._block = functools.lru_cache(maxsize=1)(self._compute_block)

    def _compute_block(self, number: int) -> np.ndarray:
        return self._rates_of(np.arange(number * BLOCK, (number + 1) * BLOCK))

    def __getitem__(self, step: int) -> np.float32:
        """Return the rate of a step, counted from 0."""
        number, place = divmod(step, BLOCK)
        rate: np.float32 = self._block(number)[place]
        return rate

    def begins_like(self, other: "LearningRates", steps: int) -> bool:
        """Return whether the first `steps` steps have the same rates in both."""
        # Compared for equality: the same settings compute the same bits.
        for number in range(-(-steps // BLOCK)):
            count = min(BLOCK, steps - number * BLOCK)
            mine, others = self._block(number), other._block(number)
            if not np.array_equal(mine[:count], others[:count]):
                return False
        return True


def learning_rates(
    name: ScheduleName,
    step: np.ndarray,
    *,
    steps: int,
    peak: float,
    warmup_fraction: float,
    min_ratio: float,
    decay_fraction: float,
) -> np.ndarray:
    """Return the learning rates of the steps `step`, FP32 of the same shape.

    `step` counts from 0, `steps` is the number of all steps. After a linear warm-up all
    schedules but `constant` decay. They would reach `min_ratio * peak` one step after
    the last, so the last rate is slightly above it. wsd (warm-up, stable, decay) stays
    at the peak until the last `decay_fraction` of the steps, then falls linearly.
    """
    # Imported here: the schema of the configuration must not import JAX.
    import jax
    import optax

    warmup = round(warmup_fraction * steps)
    # Optax's cosine refuses a decay of 0 steps, which a run that only warms up has.
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
            # A decay that is longer than what the warm-up leaves begins at once.
            decayed_rate = optax.linear_schedule(
                peak, min_rate, decay, transition_begin=max(0, decay_steps - decay)
            )
    # Step i of the warm-up has (i + 1) / warmup of the peak: at a rate of 0 the first
    # batch would be wasted.
    ramp = peak * (step + 1) / max(1, warmup)
    # `np.where` evaluates both sides: the decay must not get the steps before it.
    decayed = np.asarray(jax.vmap(decayed_rate)(np.maximum(step - warmup, 0)))
    return np.where(step < warmup, ramp, decayed).astype(np.float32)
