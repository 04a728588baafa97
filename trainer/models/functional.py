"""A model as pure functions of its parameters, and what holds for the parameters of any model here.

Blocks stand under `h`: a dictionary by number where they are unrolled, one with stacked arrays where they are scanned.

Legend: L layers.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.precision.dots import OverwriteWithGradient

Params = dict[str, Any]


class Functional[Model](NamedTuple):
    """A model as pure functions.

    Attributes:
      init: key to parameters, nested dictionaries of arrays as `nnx.to_pure_dict` gives them.
      bind: parameters (and histories, where it has some) to the model that has them.
      init_histories: makes the first amax histories of delayed scaling, a nested dictionary too; empty without.
    """

    init: Callable[[jax.Array], Params]
    bind: Callable[..., Model]
    init_histories: Callable[[], Params]


def as_functions[Model: nnx.Module](make: Callable[[nnx.Rngs], Model]) -> Functional[Model]:
    """The functions of the module that `make` builds with a key stream `params`."""

    def of_key(key: jax.Array) -> Model:
        return make(nnx.Rngs(params=key))

    abstract = nnx.eval_shape(of_key, jax.random.key(0))
    graphdef = nnx.graphdef(abstract)
    with_histories = bool(nnx.to_pure_dict(nnx.state(abstract, OverwriteWithGradient)))

    def init(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(of_key(key), nnx.Param))

    def bind(params: Params, histories: Params | None = None) -> Model:
        return nnx.merge(graphdef, params, histories) if with_histories else nnx.merge(graphdef, params)

    def init_histories() -> Params:
        return nnx.to_pure_dict(nnx.state(of_key(jax.random.key(0)), OverwriteWithGradient))

    return Functional(init, bind, init_histories)


def stack_layers(params: Params) -> Params:
    """Parameters of unrolled layers (`h` has one entry per layer) as those of scanned layers (leading axis L)."""
    layers = [params["h"][i] for i in range(len(params["h"]))]
    return params | {"h": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


def unstack_layers(params: Params) -> Params:
    """The inverse of `stack_layers`."""
    n_layer = jax.tree.leaves(params["h"])[0].shape[0]
    return params | {"h": {i: jax.tree.map(lambda leaf, i=i: leaf[i], params["h"]) for i in range(n_layer)}}


def count_parameters(model: Functional[Any], padding: int) -> int:
    """Trainable parameters but for so many that are padding. Nothing is allocated."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return sum(math.prod(s.shape) for s in jax.tree.leaves(shapes)) - padding
