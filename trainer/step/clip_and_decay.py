"""Chain clipping, an optimizer and weight decay, at a learning rate of 1.

The step multiplies the update by the learning rate, which is an argument: the compiled
program does not depend on it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from trainer.step.optimizers import Optimizer

Params = Any


def matrix_mask(roles: Any) -> Params:
    """Return a tree of booleans like the parameters: true where weight decay applies.

    It applies to matrices, not to biases or gains.
    """
    return jax.tree.map(lambda role: role.is_matrix, roles)


def clip_by_norm(clip_norm: float) -> optax.GradientTransformationExtraArgs:
    """Return `optax.clip_by_global_norm` whose `update` takes the norm, as `grad_norm`.

    The step has computed the norm: to compute it again would read every gradient.
    """

    def update(
        updates: Params,
        state: Any,
        params: Any = None,
        *,
        grad_norm: jax.Array,
        **_: Any,
    ) -> tuple:
        def clip(g: jax.Array) -> jax.Array:
            # Optax's order of operations, for its bits. A norm of 0 is below the bound,
            # so the quotient 0 / 0 is not selected.
            return jnp.where(grad_norm < clip_norm, g, g / grad_norm * clip_norm)

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )


def optimizer_chain(settings: Optimizer, roles: Any) -> optax.GradientTransformation:
    """Return the chain of clipping, the optimizer and weight decay.

    Its update, times the learning rate, is added to the parameters. `roles` are those
    of the parameters.
    """
    # A checkpoint names moments by their index in the chain: identity() keeps it.
    clip: optax.GradientTransformation = optax.identity()
    decay: optax.GradientTransformation = optax.identity()
    if settings.clip_norm:
        clip = clip_by_norm(settings.clip_norm)
    if settings.weight_decay:
        decay = optax.add_decayed_weights(settings.weight_decay, matrix_mask(roles))
    # The decay is added behind the optimizer, so that second moments do not divide it
    # (decoupled weight decay, arXiv 1711.05101). The step multiplies both by the rate.
    return optax.chain(clip, settings.scale_by(roles), decay, optax.scale(-1.0))
