"""Optax optimisers under scalify, on parameters and state that are scaled: losses of
their plain twins."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import quick
from numpy.testing import assert_allclose
from optax import contrib

from scalify_core import as_scaled_array, asarray, scalify
from scalify_core.static import dynamic_rescale_rms

STEPS = 30
OPTIMISERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    # The bias begins as zeros, so its first trust ratios are quotients by or of zero,
    # which are discarded.
    "lamb": lambda: optax.lamb(1e-2),
    "muon": lambda: contrib.muon(1e-2),
}


def problem():
    """A regression by a small network: parameters, inputs, targets."""
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "fc_in": {
            "kernel": jax.random.normal(keys[0], (8, 16)) / 8**0.5,
            "bias": jnp.zeros(16),
        },
        "fc_out": {"kernel": jax.random.normal(keys[1], (16, 4)) / 16**0.5},
    }
    x = jax.random.normal(keys[2], (32, 8))
    y = jnp.sin(x @ jax.random.normal(keys[3], (8, 4))) + 1.0
    return params, x, y


def settled(tree):
    """What goes round a loop gets the scale of its RMS each time, or the rules' caution
    would add up over the steps."""
    return jax.tree.map(
        lambda x: (
            dynamic_rescale_rms(x) if jnp.issubdtype(x.dtype, jnp.floating) else x
        ),
        tree,
    )


def make_step(tx):
    def loss_fn(params, x, y):
        hidden = jnp.tanh(x @ params["fc_in"]["kernel"] + params["fc_in"]["bias"][None])
        out = hidden @ params["fc_out"]["kernel"]
        return jnp.mean((out - y) ** 2)

    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return settled(optax.apply_updates(params, updates)), settled(state), loss

    return step


def run(name, dtype):
    """Losses of 50 steps: plain (`dtype` None), or scaled with data of `dtype`."""
    params, x, y = problem()
    tx = OPTIMISERS[name]()
    state = tx.init(params)
    step = make_step(tx)
    if dtype is not None:
        params, state, x = as_scaled_array((params, state, x), dtype=dtype)
        step = scalify(step)
    step = jax.jit(step)
    losses = []
    for _ in range(STEPS):
        params, state, loss = step(params, state, x, y)
        losses.append(float(asarray(loss)))
    return np.array(losses)


@functools.cache
def plain(name):
    """The losses of the plain twin."""
    return run(name, None)


@pytest.mark.parametrize("name", quick(OPTIMISERS, "lamb"))
def test_in_fp32_data_the_losses_are_those_of_the_plain_twin(name):
    assert_allclose(run(name, jnp.float32), plain(name), rtol=1e-5)


@pytest.mark.parametrize("name", quick(OPTIMISERS, "adamw", "muon"))
def test_in_fp16_data_it_learns_as_well(name):
    losses, expected = run(name, jnp.float16), plain(name)
    assert np.all(np.isfinite(losses))
    assert expected[-1] < 0.9 * expected[0]
    # The means over the last ten steps: single losses jump where a sign-based optimiser
    # flips one sign.
    assert np.mean(losses[-10:]) == pytest.approx(np.mean(expected[-10:]), rel=0.01)
