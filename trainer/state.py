"""What a training run carries from step to step, and nothing else: data positions are computed, not stored."""

from dataclasses import dataclass
from typing import Any

import jax
import optax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The whole of it. A skipped step leaves every bit of it as it was.

    Attributes:
      params: nested dictionaries of arrays.
      opt_state: of the optax transformation; its count is the number of updates applied.
      key: base PRNG key; the randomness of step n comes from `fold_in(key, n)`.
    """

    params: Any
    opt_state: optax.OptState
    key: jax.Array


def init_state(params: Any, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """The state before the first step."""
    return TrainState(params=params, opt_state=optimizer.init(params), key=key)
