"""Small arrays as rows of stacks: the same bits as one by one, and programs that do not
grow with their number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_array_equal

from scalify_core import ScaledArray
from scalify_core.numerics.formats import E4M3, E5M2
from scalify_core.optim import scaled_state
from scalify_core.optim.weights import LARGE, apply_updates
from trainer.step.stacking import NO_STACKS, Stacks

SHAPES = {"a": (12,), "b": (5, 12), "c": (12,), "d": (7,), "e": (12,), "f": (7,)}
SHAPES |= {"g": (LARGE,)}


def arrays(seed, dtype=jnp.float16):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=shape), dtype)
        for name, shape in SHAPES.items()
    }


def weights(seed=0):
    return {
        name: ScaledArray(x, 2.0 ** (i - 6))
        for i, (name, x) in enumerate(arrays(seed).items())
    }


def stacks_of(params):
    return Stacks.of(params, dict.fromkeys(params, 0))


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def test_vectors_of_a_shape_and_a_kind_are_put_together():
    params = weights()
    stacked = stacks_of(params).stack(params)
    shapes = {name: x.shape for name, x in stacked.items() if x is not None}
    assert shapes == {"a": (3, 12), "b": (5, 12), "d": (2, 7), "g": (LARGE,)}
    kinds = dict.fromkeys(params, 0) | {"c": 1}
    assert Stacks.of(params, kinds).stack(params)["a"].shape == (2, 12)


@pytest.mark.parametrize("accept", [None, False])
def test_a_step_on_stacks_is_bitwise_the_step_on_each_array(accept):
    params, stacks = weights(), stacks_of(weights())
    accept = None if accept is None else jnp.asarray(accept)
    tx = scaled_state(
        optax.chain(optax.scale_by_adam(0.9, 0.95), optax.scale(-1e-3)),
        mu=E4M3,
        nu=E5M2,
        seed=3,
    )

    one_by_one, together = (
        jax.jit(functools.partial(step_on, s, tx, accept=accept))
        for s in (NO_STACKS, stacks)
    )
    actual = expected = params, tx.init(params)
    for i in range(3):
        gradients = {
            name: ScaledArray(x, jnp.float32(2.0**-i))
            for name, x in arrays(10 + i).items()
        }
        expected = one_by_one(*expected, gradients)
        actual = together(*actual, gradients)
        equal(actual, expected)
    moved = any((actual[0][name].data != params[name].data).any() for name in params)
    assert moved == (accept is None or bool(accept))


def step_on(stacks, tx, params, state, gradients, number=None, accept=None):
    """Parameters and state after an update of them in stacks."""
    old, inner = stacks.stack(params), stacks.leaf_indices(state.inner_state)
    given = stacks.stack(gradients), stacks.stack(state)
    updates, new = tx.update(*given, old, accept=accept, leaf_indices=inner)
    new_params = apply_updates(
        old,
        updates,
        rounding="stochastic",
        seed=3,
        step=state.step if number is None else number,
        accept=accept,
        leaf_indices=stacks.leaf_indices(params),
    )
    return stacks.unstack(new_params, params), stacks.unstack(new, state)
