"""Training with narrow optimiser state, and steps that are not accepted."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from scalify_core.numerics.formats import E4M3, E5M2, FP16
from scalify_core.optim import scaled_state


def classification(seed=0):
    """Logistic regression that does not separate, features of very different frequency:
    loss function and start."""
    rng = np.random.default_rng(seed)
    frequency = 1 / np.arange(1, 65)
    x = (rng.random((512, 64)) < frequency) * rng.normal(size=(512, 64))
    y = (x @ rng.normal(size=64) * 2 + rng.normal(size=512) > 0).astype(np.float32)
    x = jnp.asarray(x, jnp.float32)

    def loss_fn(params):
        logits = x @ params["w"] + params["b"]
        return jnp.mean(jax.nn.softplus(logits) - y * logits)

    return loss_fn, {"w": jnp.zeros(64), "b": jnp.zeros(1)}


def train(tx):
    """The losses of 300 steps."""
    loss_fn, params = classification()

    def step(carry, _):
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, length=300)[1])
    return np.asarray(run((params, tx.init(params))))


def test_adam_with_fp16_state_tracks_fp32_adam_over_300_steps():
    adam = optax.adam(2e-2, b2=0.95)
    fp32 = train(adam)
    fp16, fp8 = (
        train(scaled_state(adam, mu=mu, nu=nu, seed=0))
        for mu, nu in ((FP16, FP16), (E4M3, E5M2))
    )
    fall = float(fp32[0] - fp32[-1])
    assert fall > 0.2
    # Rounding m to nearest is worth epsilon/2 a step, of which 1/(1 - b1) accumulate,
    # and so is the loss's descent.
    assert_allclose(fp16, fp32, atol=fall * FP16.epsilon / 2 / (1 - 0.9))
    assert fp8[-1] == pytest.approx(fp32[-1], abs=0.02 * fall)


def test_what_is_not_accepted_leaves_the_state():
    params = {"w": jnp.ones((8, 16)), "b": jnp.zeros(16)}
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.5), params)
    tx = scaled_state(optax.scale_by_adam(), mu=E4M3, nu=E5M2, seed=0)
    update = jax.jit(tx.update)
    _, state = update(grads, tx.init(params), params)
    worse = jax.tree.map(lambda g: g * jnp.nan, grads)
    _, same = update(worse, state, params, accept=jnp.asarray(False))
    equal(same, state)
    equal(
        update(grads, state, params, accept=jnp.asarray(True)),
        update(grads, state, params),
    )


def equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
