"""Optimisers at unit learning rate against optax's own, decay on matrices only, the
schedules' values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainer.errors import UserError
from trainer.models.gpt2.family import FAMILY
from trainer.models.roles import Role
from trainer.step.clip_and_decay import matrix_mask, optimizer_from_roles
from trainer.step.optimizers import OPTIMIZERS

PARAMS = {
    "wte": {"embedding": jnp.ones((4, 3))},
    "h": {
        0: {
            "c_fc": {"kernel": jnp.ones((3, 5)), "bias": jnp.ones(5)},
            "ln_1": {"scale": jnp.ones(3)},
        }
    },
}
ROLES = {
    "wte": {"embedding": Role("table")},
    "h": {
        0: {
            "c_fc": {"kernel": Role("column"), "bias": Role("bias")},
            "ln_1": {"scale": Role("gain")},
        }
    },
}
MASK = matrix_mask(ROLES)
BETAS = {"b1": 0.9, "b2": 0.95}
SETTINGS = {
    "adamw": BETAS | {"eps": 1e-8},
    "lion": BETAS,
    "adafactor": {},
    "sgd": {"momentum": 0.9},
    "muon": BETAS | {"eps": 1e-8, "momentum": 0.9},
}
GRADS = jax.tree.map(
    lambda p: jax.random.normal(jax.random.key(p.size), p.shape), PARAMS
)
EPS = np.finfo(np.float32).eps


def test_decay_is_on_kernels_and_embeddings_only_stacked_or_not():
    assert matrix_mask(ROLES) == {
        "wte": {"embedding": True},
        "h": {0: {"c_fc": {"kernel": True, "bias": False}, "ln_1": {"scale": False}}},
    }


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        (
            "adamw",
            lambda lr: optax.adamw(lr, b1=0.9, b2=0.95, weight_decay=0.1, mask=MASK),
        ),
        (
            "lion",
            lambda lr: optax.lion(lr, b1=0.9, b2=0.95, weight_decay=0.1, mask=MASK),
        ),
        (
            "sgd",
            lambda lr: optax.chain(
                optax.trace(0.9), optax.add_decayed_weights(0.1, MASK), optax.scale(-lr)
            ),
        ),
        ("adafactor", lambda lr: optax.adafactor(lr)),
    ],
)
def test_updates_times_the_learning_rate_are_those_of_optax(name, theirs):
    lr = 2.0**-7  # a power of two: multiplying by it rounds nothing
    decay = 0.0 if name == "adafactor" else 0.1
    ours = optimizer_from_roles(
        name, weight_decay=decay, clip_norm=1.0, **SETTINGS[name]
    )(ROLES)
    reference = optax.chain(optax.clip_by_global_norm(1.0), theirs(lr))
    a, b = ours.init(PARAMS), reference.init(PARAMS)
    for _ in range(3):
        ua, a = ours.update(GRADS, a, PARAMS)
        ub, b = reference.update(GRADS, b, PARAMS)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(lr * x, y, rtol=4 * EPS), ua, ub
        )


def test_muon_updates_hidden_matrices_orthogonally_and_the_rest_by_adam():
    tx = optimizer_from_roles(
        "muon", weight_decay=0.0, clip_norm=0.0, **SETTINGS["muon"]
    )(ROLES)
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    singular = np.linalg.svd(updates["h"][0]["c_fc"]["kernel"], compute_uv=False)
    # Newton-Schulz brings all singular values near one another
    assert singular.max() / singular.min() < 2
    # Adam's first step with Nesterov momentum, whatever the gradient
    first = 1 + 0.9 * 0.1 / (1 - 0.9**2)
    np.testing.assert_allclose(
        np.abs(updates["h"][0]["ln_1"]["scale"]), first, rtol=1e-3
    )
    np.testing.assert_allclose(np.abs(updates["wte"]["embedding"]), first, rtol=1e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_is_the_same_in_every_optimizer(name):
    with_decay, without = (
        optimizer_from_roles(name, weight_decay=decay, clip_norm=0.0, **SETTINGS[name])(
            ROLES
        )
        for decay in (0.1, 0.0)
    )
    zero = jax.tree.map(jnp.zeros_like, PARAMS)
    a, _ = with_decay.update(zero, with_decay.init(PARAMS), PARAMS)
    b, _ = without.update(zero, without.init(PARAMS), PARAMS)
    for decays, x, y in zip(*map(jax.tree.leaves, (MASK, a, b)), strict=True):
        np.testing.assert_allclose(x - y, -0.1 if decays else 0.0, rtol=4 * EPS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stacked_layers_are_updated_as_unrolled_ones(name):
    def normal(key, *shape):
        return jax.random.normal(jax.random.key(key), shape)

    # Large enough for adafactor to factor, layers of different size for its clip and
    # scale per tensor.
    stacked = {
        "h": {"kernel": normal(0, 2, 128, 130) * jnp.array([0.1, 3.0])[:, None, None]},
        "wpe": {"embedding": normal(1, 4, 3)},
    }
    grads = jax.tree.map(
        lambda p: (
            normal(p.size, *p.shape)
            * jnp.linspace(0.1, 9, p.shape[0]).reshape(-1, *[1] * (p.ndim - 1))
        ),
        stacked,
    )
    roles = {
        "h": {"kernel": Role("column", stacked=True)},
        "wpe": {"embedding": Role("table")},
    }
    unrolled = {
        "h": {i: {"kernel": Role("column")} for i in range(2)},
        "wpe": {"embedding": Role("table")},
    }
    make = optimizer_from_roles(name, weight_decay=0.1, clip_norm=1.0, **SETTINGS[name])

    def updates(grads, params, roles):
        tx = make(roles)
        state = tx.init(params)
        for _ in range(2):
            update, state = tx.update(grads, state, params)
        return update

    unstack_layers = FAMILY.unstack_layers
    ours = updates(grads, stacked, roles)
    theirs = updates(unstack_layers(grads), unstack_layers(stacked), unrolled)
    # Sums of 128 x 130 squares in another order; muon's iteration multiplies matrices
    # of 128.
    tolerance = 128 * EPS * (16 if name == "muon" else 1)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance),
        unstack_layers(ours),
        theirs,
    )


def test_an_unknown_optimiser_lists_the_valid_ones():
    with pytest.raises(UserError, match="adamw"):
        optimizer_from_roles("adam", weight_decay=0.0, clip_norm=0.0)
