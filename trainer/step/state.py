"""What a training run carries from step to step, and nothing else: data positions are computed, not stored."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from scalify_core import ScaledArray, tree
from scalify_core.array import is_scaled_array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The whole of it. A skipped step leaves every bit of it as it was, except the loss scale of `scaling`.

    Attributes:
      params: nested dictionaries of arrays, or of ScaledArrays whose scales are static: constants of compiled steps.
      opt_state: of the optax transformation; its count is the number of updates applied. In training it is packed
        (`scalify_core.tree.Packed`).
      key: base PRNG key; the randomness of step n comes from `fold_in(key, n)`.
      scaling: what the precision carries along: amax histories, a loss scale, or ().
    """

    params: Any
    opt_state: optax.OptState
    key: jax.Array
    scaling: Any = ()


def init_state(params: Any, optimizer: optax.GradientTransformation, key: jax.Array, scaling: Any = ()) -> TrainState:
    """The state before the first step."""
    return TrainState(params, optimizer.init(params), key, scaling)


def to_stored(state: TrainState) -> TrainState:
    """The form for checkpoints: every scale an array of its own, on all devices of its data."""

    def place(x: Any) -> Any:
        if not is_scaled_array(x) or not isinstance(x.data.sharding, NamedSharding):
            return x
        everywhere = NamedSharding(x.data.sharding.mesh, PartitionSpec())
        scale = tree.scale_of_leaf(x)
        if scale.sharding == everywhere:
            return x
        number = np.asarray(scale.addressable_data(0))
        return ScaledArray(x.data, jax.make_array_from_callback(number.shape, everywhere, lambda index: number[index]))

    unpacked = dataclasses.replace(state, opt_state=tree.unpack(state.opt_state))
    return tree.map_arrays(place, tree.with_dynamic_scales(unpacked))


def from_stored(state: TrainState) -> TrainState:
    """The form for training: the scales of parameters static, those of moments one array."""
    return TrainState(tree.with_static_scales(state.params), tree.pack(state.opt_state), state.key, state.scaling)
