"""What all optimisers have around the descent of their entry: clipping, weight decay,
and a learning rate of one.

The step multiplies their update by the learning rate (see `schedule`), which it
receives as an argument: the compiled program does not depend on it. This is exact for
every optimiser here, because each is linear in its learning rate.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trainer.errors import UserError
from trainer.step.optimizers import ENTRIES

Params = Any
# from the roles of the parameters
OptimizerFor = Callable[[Any], optax.GradientTransformation]


def matrix_mask(roles: Any) -> Params:
    """A tree of booleans like the parameters: where weight decay applies. Not to biases
    or gains.
    """
    return jax.tree.map(lambda role: role.is_matrix, roles)


def clip_by_norm(clip_norm: float) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_global_norm`, to which the norm may be given:
    `update(..., grad_norm=norm)`.
    """

    def update(
        updates: Params,
        state: Any,
        params: Any = None,
        *,
        grad_norm: Any = None,
        **_: Any,
    ) -> tuple:
        norm = optax.global_norm(updates) if grad_norm is None else grad_norm
        return (
            jax.tree.map(
                lambda g: jnp.where(norm < clip_norm, g, g / norm * clip_norm), updates
            ),
            state,
        )

    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )


def make_optimizer(
    name: str, *, weight_decay: float, clip_norm: float, **settings: float
) -> OptimizerFor:
    """From the roles of parameters to the transformation whose update, times the
    learning rate, is added to them.

    Args:
      name: of `optimizers.ENTRIES`.
      weight_decay: decoupled, on matrices only, whatever the optimiser.
      clip_norm: the gradient's global L2 norm is scaled down to this; 0 leaves it
          alone.
      settings: the other fields of the entry, but for `lr`.
    """
    if name not in ENTRIES:
        raise UserError(
            f"optimizer.name={name!r} is not a choice; valid: {', '.join(ENTRIES)}"
        )
    entry = ENTRIES[name](
        name=name, lr=1.0, weight_decay=weight_decay, clip_norm=clip_norm, **settings
    )

    def of_parameters(roles: Any) -> optax.GradientTransformation:
        return optax.chain(
            clip_by_norm(clip_norm) if clip_norm else optax.identity(),
            entry.descent(roles),
            (
                optax.add_decayed_weights(weight_decay, matrix_mask(roles))
                if weight_decay
                else optax.identity()
            ),
            optax.scale(-1.0),
        )

    return of_parameters
