"""A state that lies on several devices is put into its forms without a program for each
of its arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalify_core import ScaledArray
from trainer.step.state import TrainState, from_checkpoint_form, to_checkpoint_form
from trainer.step.state_tree import first_nonfinite_leaf


def test_scales_of_a_state_on_several_devices_come_back():
    """A program for each array would have a collective for each, and all at once they
    would wait for each other for ever."""
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    split, replicated = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["fsdp"], [])
    )
    params = {
        f"w{i}": ScaledArray(jnp.ones((16, 4), jnp.float16), jnp.float32(2.0**-i))
        for i in range(6)
    }
    shardings = jax.tree.map(lambda x: split if x.ndim else replicated, params)
    placed = jax.device_put(params, shardings)
    moments = optax.sgd(1.0, momentum=0.9).init(placed)
    state = TrainState(placed, moments, jax.random.key(0))

    stored = to_checkpoint_form(from_checkpoint_form(state))
    for i in range(6):
        assert float(jax.tree.leaves(stored.params[f"w{i}"])[-1]) == 2.0**-i


def test_a_scaled_array_whose_data_times_its_scale_is_infinite_is_not_finite():
    data = jnp.asarray([1.0, 4.0], jnp.float16)
    tree = {"params": {"w": ScaledArray(data, jnp.float32(2.0**125))}}
    assert first_nonfinite_leaf(tree) is None
    for scale in (jnp.float32(2.0**126), np.float32(2.0**126)):
        tree["params"]["w"] = ScaledArray(data, scale)
        assert first_nonfinite_leaf(tree) == "params/w"
