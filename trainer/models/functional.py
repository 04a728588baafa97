"""A Flax NNX model as pure functions of its parameters, with their roles."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from trainer.models.roles import roles_of
from trainer.precision.dots import OverwriteWithGradient

Params = dict[str, Any]


class Functional(NamedTuple):
    """A model as pure functions.

    Attributes:
      init: key to parameters, nested dictionaries of arrays as `nnx.to_pure_dict` gives them.
      bind: parameters (and histories, where it has some) to the model that has them.
      init_histories: makes the first amax histories of delayed scaling, a nested dictionary too; empty without.
      roles: of the parameters, in the same nested dictionaries.
    """

    init: Callable[[jax.Array], Params]
    bind: Callable[..., Any]
    init_histories: Callable[[], Params]
    roles: Params


def pure_functions(make: Callable[[nnx.Rngs], nnx.Module]) -> Functional:
    """The model that `make` builds of a key stream `params`, as pure functions.

    Raises:
      ValueError: a parameter has no role.
    """

    def from_key(key: jax.Array) -> nnx.Module:
        return make(nnx.Rngs(params=key))

    abstract = nnx.eval_shape(from_key, jax.random.key(0))
    graphdef = nnx.graphdef(abstract)
    with_histories = bool(nnx.to_pure_dict(nnx.state(abstract, OverwriteWithGradient)))

    def init(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(from_key(key), nnx.Param))

    def bind(params: Params, histories: Params | None = None) -> Any:
        return nnx.merge(graphdef, params, histories) if with_histories else nnx.merge(graphdef, params)

    def init_histories() -> Params:
        return nnx.to_pure_dict(nnx.state(from_key(jax.random.key(0)), OverwriteWithGradient))

    return Functional(init, bind, init_histories, roles_of(abstract))
