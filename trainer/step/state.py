"""The training state, carried from step to step. Data positions are computed, not
stored.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from scalify_core import ScaledArray, tree
from scalify_core.array.scaled_array import is_scaled_array
from trainer.step.packing import pack, unpack
from trainer.step.state_tree import first_nonfinite_leaf, replicated_like

# Fields of `Replicas` whose arrays have a leading axis of replicas. `parallel.sharding`
# recognizes such arrays by these names in their paths: no other field of a state may
# have one of them.
REPLICA_FIELDS = ("states", "residuals")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Replicas:
    """The state of K DiLoCo replicas beside the outer weights; see
    `trainer.parallel.diloco`.

    Attributes:
      states: their TrainState; every array is [K, ...], and `opt_state` is packed. The
        scales of parameters are scalars, those of the outer weights.
      residuals: the accumulated rounding error of the trained parameters, [K, ...],
        stored as the weights are, or ().
      momentum: the outer optimizer's momentum, stored as the weights are, or ().
    """

    states: "TrainState"
    residuals: Any
    momentum: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The training state. A skipped step changes only the loss scale in `scaling`.

    With DiLoCo `params` are the outer weights, so that readers of a checkpoint need not
    know of replicas. `opt_state` is then (), and `scaling` the maximum over replicas.

    Attributes:
      params: nested dictionaries of arrays, or of ScaledArrays whose scales are static:
        constants of compiled steps.
      opt_state: the state of the optax transformation; its count is the number of
        applied updates. In training it is packed (`trainer.step.packing.Packed`).
      key: base PRNG key; a step's randomness comes from `fold_in(key, inputs.step)`.
      scaling: state of the scaling method: amax histories, a loss scale, or ().
      diloco: the replicas of a run with DiLoCo.
      kahan_compensation: the rounding error of the trained parameters, plain BF16
        arrays, with `precision.weights_rounding=kahan`; else ().
    """

    params: Any
    opt_state: optax.OptState
    key: jax.Array
    scaling: Any = ()
    diloco: Replicas | None = None
    kahan_compensation: Any = ()

    def __repr__(self) -> str:
        """Return the numbers of parameters and bytes, without values."""
        params = sum(x.size for x in jax.tree.leaves(self.params))
        leaves = jax.tree.leaves((self.params, self.opt_state))
        num_bytes = sum(x.nbytes for x in leaves)
        return f"TrainState({params:,} parameters, {num_bytes:,} bytes with moments)"


def first_nonfinite_array(state: TrainState) -> str | None:
    """Return the name of the first array of weights or moments that is not finite.

    Returns None if all are finite. Waits for the state. If it is split over processes,
    all of them must call this.
    """
    # `scaling` stays finite: the loss scale is clipped, and a bad step leaves the
    # histories.
    fields = ("params", "opt_state", "diloco", "kahan_compensation")
    return first_nonfinite_leaf({name: getattr(state, name) for name in fields})


def to_checkpoint_form(state: TrainState) -> TrainState:
    """Return the state with every scale as an array, replicated over the devices of its
    data.
    """

    def replicate_scale(x: Any) -> Any:
        if not is_scaled_array(x) or not isinstance(x.data.sharding, NamedSharding):
            return x
        # By the host: a program for each scale has a collective for each, and on CPU
        # devices all of them at once waited for each other forever.
        replicated = replicated_like(x.data.sharding)
        if x.scale.sharding == replicated:
            return x
        scale = np.asarray(x.scale.addressable_data(0))
        return ScaledArray(
            x.data,
            jax.make_array_from_callback(
                scale.shape, replicated, lambda index: scale[index]
            ),
        )

    def in_checkpoint_form(part: Any) -> Any:
        return tree.map_arrays(replicate_scale, tree.with_dynamic_scales(part))

    # A checkpoint has each scale beside its moment, so it does not depend on the
    # packing.
    unpacked = dataclasses.replace(
        state, opt_state=unpack(state.opt_state), diloco=None
    )
    return dataclasses.replace(
        in_checkpoint_form(unpacked),
        diloco=_convert_replica_params(in_checkpoint_form, state.diloco),
    )


def from_checkpoint_form(state: TrainState) -> TrainState:
    """Return the state for training: the scales of parameters are static, and those of
    moments are one array.
    """
    return dataclasses.replace(
        state,
        params=tree.with_static_scales(state.params),
        opt_state=pack(state.opt_state),
        diloco=_convert_replica_params(tree.with_static_scales, state.diloco),
    )


def _convert_replica_params(
    convert: Callable[[Any], Any], diloco: Replicas | None
) -> Replicas | None:
    # The replicas' moments stay packed: their scales have a row for each replica.
    if diloco is None:
        return None
    params = convert(diloco.states.params)
    return dataclasses.replace(
        diloco, states=dataclasses.replace(diloco.states, params=params)
    )
