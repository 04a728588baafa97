"""A Flax NNX model as pure functions of its parameters, with their roles."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.models.roles import roles_of
from trainer.precision.dots import OverwriteWithGradient

Params = dict[str, Any]


class Functional[Model](NamedTuple):
    """A model as pure functions.

    Attributes:
      init: key to parameters, nested dictionaries of arrays as `nnx.to_pure_dict` gives
          them.
      bind: parameters (and histories, where it has some) to the model that has them.
      init_histories: makes the first amax histories of delayed scaling, a nested
          dictionary too; empty without.
      roles: of the parameters, in the same nested dictionaries.
    """

    init: Callable[[jax.Array], Params]
    bind: Callable[..., Model]
    init_histories: Callable[[], Params]
    roles: Params


def as_functions[Model: nnx.Module](
    make: Callable[[nnx.Rngs], Model],
) -> Functional[Model]:
    """The functions of the module that `make` builds with a key stream `params`.

    Raises:
      ValueError: a parameter has no role.
    """

    def of_key(key: jax.Array) -> Model:
        return make(nnx.Rngs(params=key))

    abstract = nnx.eval_shape(of_key, jax.random.key(0))
    graphdef = nnx.graphdef(abstract)
    with_histories = bool(nnx.to_pure_dict(nnx.state(abstract, OverwriteWithGradient)))

    def init(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(of_key(key), nnx.Param))

    def bind(params: Params, histories: Params | None = None) -> Model:
        return (
            nnx.merge(graphdef, params, histories)
            if with_histories
            else nnx.merge(graphdef, params)
        )

    def init_histories() -> Params:
        return nnx.to_pure_dict(
            nnx.state(of_key(jax.random.key(0)), OverwriteWithGradient)
        )

    return Functional(init, bind, init_histories, roles_of(abstract))


def of_next_tokens(
    loss: Callable[..., jax.Array], tokens_BxT1: jax.Array, border: int | None
) -> jax.Array:
    """The loss `loss(inputs, targets)` of predicting each token from those before it.

    What follows the id `border` is no target: `loss(..., masked=True)` is then of
    negative ones too. Its gradient stays as it is, so that a token counts alike in
    every batch; its value becomes the mean over the targets that count.
    """
    inputs_BxT, targets_BxT = tokens_BxT1[:, :-1], tokens_BxT1[:, 1:]
    if border is None:
        return loss(inputs_BxT, targets_BxT)
    counted_BxT = inputs_BxT != border
    found = loss(inputs_BxT, jnp.where(counted_BxT, targets_BxT, -1), masked=True)
    share = jnp.maximum(jnp.mean(counted_BxT, dtype=jnp.float32), 1e-9)
    return found + jax.lax.stop_gradient(found * (1 / share - 1))
