"""Training with narrow optimiser state, and steps that are not accepted."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import quick

from scalify_core import ScaledArray, as_scaled_array, asarray, scalify, tree
from scalify_core.numerics.formats import E4M3, E5M2, FP16
from scalify_core.optim import scaled_state
from scalify_core.static import dynamic_rescale_rms

FORMATS = {"fp16": {"mu": FP16, "nu": FP16}, "fp8": {"mu": E4M3, "nu": E5M2}}


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


def train(tx, steps=300):
    """Loss of every step."""
    loss_fn, params = classification()

    def step(carry, _):
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    return np.asarray(
        jax.jit(lambda c: jax.lax.scan(step, c, length=steps))(
            (params, tx.init(params))
        )[1]
    )


def test_adam_with_fp16_state_tracks_fp32_adam_over_300_steps():
    losses = {
        name: train(tx)
        for name, tx in {
            "fp32": optax.adam(2e-2, b2=0.95),
            "fp16": scaled_state(optax.adam(2e-2, b2=0.95), mu=FP16, nu=FP16, seed=0),
            "fp8": scaled_state(optax.adam(2e-2, b2=0.95), mu=E4M3, nu=E5M2, seed=0),
        }.items()
    }
    fall = float(losses["fp32"][0] - losses["fp32"][-1])
    assert fall > 0.2
    # Rounding m to nearest is worth epsilon/2 a step, of which 1/(1 - b1) accumulate,
    # and so is the loss's descent.
    np.testing.assert_allclose(
        losses["fp16"], losses["fp32"], atol=fall * FP16.epsilon / 2 / (1 - 0.9)
    )
    assert losses["fp8"][-1] == pytest.approx(losses["fp32"][-1], abs=0.02 * fall)


@pytest.mark.slow  # 300 calls; its steps: test_optax_optimisers.py
def test_the_optimiser_itself_under_scalify_in_fp16_data_trains():
    # The plain route of the module's docstring: every value of the state in FP16,
    # scales by the rules.
    loss_fn, params = classification()
    tx = optax.adam(2e-2, b2=0.95)

    def settled(state):
        return jax.tree.map(
            lambda x: (
                dynamic_rescale_rms(x) if jnp.issubdtype(x.dtype, jnp.floating) else x
            ),
            state,
        )

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return settled(updates), settled(state)

    state = as_scaled_array(tx.init(params), dtype=jnp.float16)
    update, grad_fn = jax.jit(scalify(update)), jax.jit(jax.value_and_grad(loss_fn))
    losses = []
    for _ in range(300):
        loss, grads = grad_fn(params)
        updates, state = update(
            as_scaled_array(grads, dtype=jnp.float16), state, params
        )
        params = jax.tree.map(jnp.add, params, asarray(updates))
        losses.append(float(loss))
    moments = tree.leaves((state[0].mu, state[0].nu))
    assert all(isinstance(x, ScaledArray) and x.dtype == jnp.float16 for x in moments)
    expected = train(tx)
    assert losses[-1] == pytest.approx(
        expected[-1], abs=0.02 * float(expected[0] - expected[-1])
    )


@pytest.mark.parametrize(
    "settings",
    quick(
        [{"mu": E4M3, "nu": E5M2}, {"mu": FP16, "nu": FP16}, {}],
        {"mu": E4M3, "nu": E5M2},
    ),
)
def test_what_is_not_accepted_leaves_the_state(settings):
    params = {"w": jnp.ones((8, 16)), "b": jnp.zeros(16)}
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.5), params)
    tx = scaled_state(optax.scale_by_adam(), seed=0, **settings)
    update = jax.jit(tx.update)
    _, state = update(grads, tx.init(params), params)
    worse = jax.tree.map(lambda g: g * jnp.nan, grads)
    _, same = update(worse, state, params, accept=jnp.asarray(False))
    for x, y in zip(jax.tree.leaves(same), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(
            np.asarray(x, np.float32), np.asarray(y, np.float32)
        )
    expected, plain = update(grads, state, params)
    actual, accepted = update(grads, state, params, accept=jnp.asarray(True))
    for x, y in zip(
        jax.tree.leaves((actual, accepted)),
        jax.tree.leaves((expected, plain)),
        strict=True,
    ):
        np.testing.assert_array_equal(
            np.asarray(x, np.float32), np.asarray(y, np.float32)
        )
