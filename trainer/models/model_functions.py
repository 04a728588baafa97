"""A Flax NNX model as pure functions of its parameters, with their roles."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.models.roles import roles_of
from trainer.precision.dots import OverwriteWithGradient

Params = dict[str, Any]


class ModelFunctions[Model](NamedTuple):
    """A model as pure functions.

    Attributes:
      init: a function from a key to parameters, nested dictionaries of arrays as in
        `nnx.to_pure_dict`.
      bind: a function from parameters, and amax histories if any, to the model.
      init_histories: returns the initial amax histories of delayed scaling, a nested
        dictionary, which is empty without delayed scaling.
      roles: the roles of the parameters, in the same nested dictionaries.
      shapes: the shapes and dtypes of the parameters, likewise.
    """

    init: Callable[[jax.Array], Params]
    bind: Callable[..., Model]
    init_histories: Callable[[], Params]
    roles: Params
    shapes: Params


def functions_of_module[Model: nnx.Module](
    make: Callable[[nnx.Rngs], Model],
) -> ModelFunctions[Model]:
    """Return the module that `make` builds, with key stream `params`, as functions.

    Raises:
      ValueError: a parameter has no role.
    """

    def build(key: jax.Array) -> Model:
        return make(nnx.Rngs(params=key))

    # Nothing is allocated: a model may be larger than this process's memory.
    abstract = nnx.eval_shape(build, jax.random.key(0))
    graphdef = nnx.graphdef(abstract)
    with_histories = bool(nnx.to_pure_dict(nnx.state(abstract, OverwriteWithGradient)))

    def init(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(build(key), nnx.Param))

    def bind(params: Params, histories: Params | None = None) -> Model:
        if with_histories:
            return nnx.merge(graphdef, params, histories)
        return nnx.merge(graphdef, params)

    def init_histories() -> Params:
        # Any key: initial histories are constants.
        model = build(jax.random.key(0))
        return nnx.to_pure_dict(nnx.state(model, OverwriteWithGradient))

    shapes = nnx.to_pure_dict(nnx.state(abstract, nnx.Param))
    return ModelFunctions(init, bind, init_histories, roles_of(abstract), shapes)


def next_token_loss(
    loss: Callable[..., jax.Array], tokens_BxT1: jax.Array, loss_boundary_id: int | None
) -> jax.Array:
    """Return `loss(inputs, targets)` of predicting each token from those before it.

    `loss_boundary_id` is the end-of-text id. The token after it is not predicted: its
    target becomes -1, which `loss(..., masked=True)` ignores. It still counts in the
    denominator B*T, so that a token has the same weight in every batch.
    """
    inputs_BxT, targets_BxT = tokens_BxT1[:, :-1], tokens_BxT1[:, 1:]
    if loss_boundary_id is None:
        return loss(inputs_BxT, targets_BxT)
    counted_BxT = inputs_BxT != loss_boundary_id
    return loss(inputs_BxT, jnp.where(counted_BxT, targets_BxT, -1), masked=True)
