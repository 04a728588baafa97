"""Optax optimisers by name, at a learning rate of one.

The step multiplies their update by the learning rate, which it receives as an argument: the compiled program does not
depend on the schedule. This is exact for every optimiser here, because each is linear in its learning rate.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from trainer.errors import UserError
from trainer.models.roles import role_of

Params = Any
OptimizerFor = Callable[[Any], optax.GradientTransformation]  # from the roles of the parameters


def matrix_mask(roles: Any) -> Params:
    """A tree of booleans like the parameters: where weight decay applies. Not to biases or gains."""
    return jax.tree.map(lambda role: role.is_matrix, roles)


def hidden_matrices(roles: Any) -> Callable[[Params], Params]:
    """From parameters to Muon's share: the kernels, over their last two axes, any leading ones being layers.

    None: by Adam instead.
    """

    def axes(path: tuple[Any, ...], leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        role = role_of(roles, path)
        return optax.contrib.MuonDimensionNumbers(-2, -1) if role and role.is_kernel else None

    return lambda params: jax.tree_util.tree_map_with_path(axes, params)


def adamw(roles: Any, *, b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam with bias correction."""
    return optax.scale_by_adam(b1, b2, eps)


def lion(roles: Any, *, b1: float, b2: float) -> optax.GradientTransformation:
    """The sign of an interpolated momentum."""
    return optax.scale_by_lion(b1, b2)


def sgd(roles: Any, *, momentum: float) -> optax.GradientTransformation:
    """Gradient descent with momentum."""
    return optax.trace(momentum)


def adafactor(roles: Any) -> optax.GradientTransformation:
    """Factored second moments, clipped and scaled per tensor: per layer too where layers are stacked."""
    core = optax.chain(optax.adafactor(1.0), optax.scale(-1.0))

    def over_layers(fn: Callable[..., Any]) -> Callable[..., Any]:
        # Without stacked layers there is nothing to map over.
        return lambda tree, *rest: (jax.vmap(fn) if jax.tree.leaves(tree) else fn)(tree, *rest)

    stacked = optax.GradientTransformation(over_layers(core.init), over_layers(core.update))
    return optax.partition({True: stacked, False: core}, jax.tree.map(lambda role: role.stacked, roles))


def muon(roles: Any, *, momentum: float, b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Orthogonalised momentum for the kernels, Adam (b1, b2) for the rest; `eps` of both."""
    # An update's RMS is 0.2, as AdamW's: one learning rate serves both parts (arXiv 2502.16982, section 2.2).
    descent = optax.contrib.muon(
        1.0,
        beta=momentum,
        eps=eps,
        adam_b1=b1,
        adam_b2=b2,
        muon_weight_dimension_numbers=hidden_matrices(roles),
        consistent_rms=0.2,
    )
    return optax.chain(descent, optax.scale(-1.0))


def clip_by_norm(clip_norm: float) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_global_norm`, to which the norm may be given: `update(..., grad_norm=norm)`."""

    def update(updates: Params, state: Any, params: Any = None, *, grad_norm: Any = None, **_: Any) -> tuple:
        norm = optax.global_norm(updates) if grad_norm is None else grad_norm
        return jax.tree.map(lambda g: jnp.where(norm < clip_norm, g, g / norm * clip_norm), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {  # (roles, **settings) ->
    "adamw": adamw,
    "lion": lion,
    "adafactor": adafactor,
    "sgd": sgd,
    "muon": muon,
}


def make_optimizer(name: str, *, weight_decay: float, clip_norm: float, **settings: float) -> OptimizerFor:
    """From the roles of parameters to the transformation whose update, times the learning rate, is added to them.

    Args:
      name: of OPTIMIZERS.
      weight_decay: decoupled, on matrices only, whatever the optimiser.
      clip_norm: the gradient's global L2 norm is scaled down to this; 0 leaves it alone.
      settings: those of the function in OPTIMIZERS.
    """
    if name not in OPTIMIZERS:
        raise UserError(f"optimizer.name={name!r} is not a choice; valid: {', '.join(OPTIMIZERS)}")

    def of_parameters(roles: Any) -> optax.GradientTransformation:
        return optax.chain(
            clip_by_norm(clip_norm) if clip_norm else optax.identity(),
            OPTIMIZERS[name](roles, **settings),
            optax.add_decayed_weights(weight_decay, matrix_mask(roles)) if weight_decay else optax.identity(),
            optax.scale(-1.0),
        )

    return of_parameters


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
