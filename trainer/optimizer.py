"""Optax optimisers by name, at a learning rate of one.

The step multiplies their update by the learning rate, which it receives as an argument: the compiled program does not
depend on the schedule. This is exact for every optimiser here, because each is linear in its learning rate.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.typing import ArrayLike

from trainer.errors import UserError

Params = Any


def is_matrix(path: tuple[Any, ...], leaf: jax.Array) -> bool:
    """Whether weight decay applies: kernels and embedding tables, not biases or gains (stacked over layers or not)."""
    return path[-1].key in ("kernel", "embedding")


def matrix_mask(params: Params) -> Params:
    """A tree of booleans like `params`: where weight decay applies."""
    return jax.tree_util.tree_map_with_path(is_matrix, params)


def hidden_matrices(params: Params) -> Params:
    """Muon's share: the kernels, over their last two axes, any leading ones being layers. None: by Adam instead."""

    def axes(path: tuple[Any, ...], leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        return optax.contrib.MuonDimensionNumbers(-2, -1) if path[-1].key == "kernel" else None

    return jax.tree_util.tree_map_with_path(axes, params)


def make_optimizer(
    name: str, *, b1: float, b2: float, eps: float, momentum: float, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """The transformation whose update, times the learning rate, is added to the parameters.

    Args:
      name: adamw, lion, adafactor, sgd or muon.
      b1, b2, eps: of adamw and lion; b1 and b2 also of the part of the parameters that muon leaves to Adam.
      momentum: of sgd and muon.
      weight_decay: decoupled, on matrices only.
      clip_norm: the gradient's global L2 norm is scaled down to this; 0 leaves it alone.
    """
    decay = optax.add_decayed_weights(weight_decay, matrix_mask) if weight_decay else optax.identity()
    match name:
        case "adamw":
            core = optax.chain(optax.scale_by_adam(b1, b2, eps), decay, optax.scale(-1.0))
        case "lion":
            core = optax.chain(optax.scale_by_lion(b1, b2), decay, optax.scale(-1.0))
        case "adafactor":
            core = optax.chain(optax.adafactor(1.0), optax.scale(-1.0), decay, optax.scale(-1.0))
        case "sgd":
            core = optax.chain(optax.trace(momentum), decay, optax.scale(-1.0))
        case "muon":
            # An update's RMS is 0.2, as AdamW's: one learning rate serves both parts (arXiv 2502.16982, section 2.2).
            core = optax.contrib.muon(
                1.0,
                beta=momentum,
                weight_decay=weight_decay,
                adam_b1=b1,
                adam_b2=b2,
                muon_weight_dimension_numbers=hidden_matrices,
                consistent_rms=0.2,
            )
        case _:
            raise UserError(f"optimizer.name={name!r} is not a choice; valid: adamw, lion, adafactor, sgd, muon")
    return optax.chain(optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(), core)


def learning_rates(
    name: str, *, steps: int, peak: float, warmup_fraction: float, min_ratio: float, decay_fraction: float
) -> np.ndarray:
    """The learning rate of every step, FP32 `[steps]`: linear warm-up, then the named schedule to `min_ratio * peak`.

    wsd (warm-up, stable, decay) stays at the peak until the last `decay_fraction` of the steps, then falls linearly.
    """
    warmup = round(warmup_fraction * steps)
    rest = max(1, steps - warmup)
    last = min_ratio * peak
    after: Callable[[ArrayLike], ArrayLike]
    match name:
        case "cosine":
            after = optax.cosine_decay_schedule(peak, rest, alpha=min_ratio)
        case "linear":
            after = optax.linear_schedule(peak, last, rest)
        case "constant":
            after = optax.constant_schedule(peak)
        case "wsd":
            decay = max(1, round(decay_fraction * steps))
            after = optax.linear_schedule(peak, last, decay, transition_begin=max(0, rest - decay))
        case _:
            raise UserError(f"schedule.name={name!r} is not a choice; valid: cosine, wsd, linear, constant")
    count = np.arange(steps)
    # Step i of the warm-up has (i + 1) / warmup of the peak: the first update already moves.
    ramp = peak * (count + 1) / max(1, warmup)
    decayed = np.broadcast_to(np.asarray(jax.vmap(after)(np.maximum(count - warmup, 0))), (steps,))
    return np.where(count < warmup, ramp, decayed).astype(np.float32)
