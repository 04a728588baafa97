"""Chain clipping, an optimizer of `optimizers.OPTIMIZERS` and weight decay, at a
learning rate of 1.

The step multiplies the update by the learning rate, which is an argument: the compiled
program does not depend on it. This is exact because each optimizer is linear in its
learning rate.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trainer.errors import UserError
from trainer.step.optimizers import OPTIMIZERS

Params = Any
# A function from the roles of the parameters to an optimizer.
OptimizerFor = Callable[[Any], optax.GradientTransformation]


def matrix_mask(roles: Any) -> Params:
    """Return a tree of booleans like the parameters: true where weight decay applies.

    It applies to matrices, not to biases or gains.
    """
    return jax.tree.map(lambda role: role.is_matrix, roles)


def clip_by_norm(clip_norm: float) -> optax.GradientTransformationExtraArgs:
    """Return `optax.clip_by_global_norm` whose `update` also takes the norm, as
    `grad_norm`.
    """

    def update(
        updates: Params,
        state: Any,
        params: Any = None,
        *,
        grad_norm: Any = None,
        **_: Any,
    ) -> tuple:
        # The step has computed the norm: computing it here would read every gradient
        # again.
        norm = optax.global_norm(updates) if grad_norm is None else grad_norm

        def clip(g: jax.Array) -> jax.Array:
            return jnp.where(norm < clip_norm, g, g / norm * clip_norm)

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )


def optimizer_from_roles(
    name: str, *, weight_decay: float, clip_norm: float, **settings: float
) -> OptimizerFor:
    """Return a function from the parameters' roles to an optax transformation.

    Its update, times the learning rate, is added to the parameters.

    Args:
      name: a key of `optimizers.OPTIMIZERS`.
      weight_decay: decoupled, on matrices only.
      clip_norm: bound on the gradient's global L2 norm; 0: no clipping.
      settings: the other fields of the entry, except `lr`.
    """
    if name not in OPTIMIZERS:
        raise UserError(
            f"optimizer.name={name!r} is not a choice; valid: {', '.join(OPTIMIZERS)}"
        )
    entry = OPTIMIZERS[name](
        name=name, lr=1.0, weight_decay=weight_decay, clip_norm=clip_norm, **settings
    )

    def optimizer(roles: Any) -> optax.GradientTransformation:
        clip: optax.GradientTransformation = optax.identity()
        decay: optax.GradientTransformation = optax.identity()
        if clip_norm:
            clip = clip_by_norm(clip_norm)
        if weight_decay:
            decay = optax.add_decayed_weights(weight_decay, matrix_mask(roles))
        return optax.chain(clip, entry.scale_by(roles), decay, optax.scale(-1.0))

    return optimizer
