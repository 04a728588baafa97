"""What a training run carries from step to step, and nothing else: data positions are computed, not stored."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import optax

from scalify_core import tree


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
    """The form for checkpoints: every scale an array of its own."""
    return tree.with_dynamic_scales(dataclasses.replace(state, opt_state=tree.unpack(state.opt_state)))


def from_stored(state: TrainState) -> TrainState:
    """The form for training: the scales of parameters static, those of moments one array."""
    return TrainState(tree.with_static_scales(state.params), tree.pack(state.opt_state), state.key, state.scaling)
