"""Optimizer state and weights in narrow formats, around Optax."""

from scalify_core.optim.moment_storage import AmaxFn, Stored, largest_of_arrays
from scalify_core.optim.scaled_optimizer import (
    ScaledOptState,
    narrow_state,
    scaled_state,
    wide_state,
)

__all__ = [
    "AmaxFn",
    "ScaledOptState",
    "Stored",
    "largest_of_arrays",
    "narrow_state",
    "scaled_state",
    "wide_state",
]
