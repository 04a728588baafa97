"""Small states, and their checkpoints, for the tests of checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trainer.step.state import TrainState
from trainer.step.state_tree import leaf_names

META = {"config": {"seed": 1}, "tracker": "abc"}


def make_state(seed=0, width=32):
    key = jax.random.key(seed)
    params = {
        "wte": jax.random.normal(key, (width, 16)),
        "h": [{"kernel": jnp.full((16, 16), float(seed))}],
    }
    return TrainState(params, optax.adamw(1e-3).init(params), key)


def abstract(tree, sharding=None):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding or x.sharding
        ),
        tree,
    )


def bits(tree):
    """Names, dtypes and bytes: equal exactly when the trees are, NaN payloads
    included."""
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(tree)
    ]
    return [
        (n, str(x.dtype), x.shape, np.asarray(x).tobytes())
        for n, x in zip(leaf_names(tree), leaves, strict=True)
    ]


def saved(checkpointer, *steps):
    for step in steps:
        checkpointer.save(step, make_state(step), META)
    checkpointer.wait()
    return checkpointer
