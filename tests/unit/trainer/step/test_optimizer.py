"""Optimizers at unit learning rate against optax's own; decay on matrices only."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from draws import draw_normal

from trainer.models.blocks import unstack_layers
from trainer.models.roles import Role
from trainer.step.clip_and_decay import optimizer_chain
from trainer.step.optimizers import OPTIMIZERS


def layers(table, kernel, bias, gain):
    c_fc = {"kernel": kernel, "bias": bias}
    return {"wte": table, "h": {0: {"c_fc": c_fc, "ln_1": gain}}}


PARAMS = layers(jnp.ones((4, 3)), jnp.ones((3, 5)), jnp.ones(5), jnp.ones(3))
ROLES = layers(Role("table"), Role("column"), Role("bias"), Role("gain"))
MASK = layers(True, True, False, False)  # matrices decay
BETAS = {"b1": 0.9, "b2": 0.95}
SETTINGS = {
    "adamw": BETAS | {"eps": 1e-8},
    "lion": BETAS,
    "adafactor": {},
    "sgd": {"momentum": 0.9},
    "muon": BETAS | {"eps": 1e-8, "momentum": 0.9},
}
GRADS = jax.tree.map(lambda p: draw_normal(p.size, p.shape), PARAMS)
EPS = np.finfo(np.float32).eps
norm_of = jax.jit(optax.global_norm)


def optimizer(name, decay, clip_norm, roles=ROLES):
    settings = OPTIMIZERS[name](name, 1.0, decay, clip_norm, **SETTINGS[name])
    return optimizer_chain(settings, roles)


DECAYS = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1, "mask": MASK}


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("adamw", lambda lr: optax.adamw(lr, **DECAYS)),
        ("lion", lambda lr: optax.lion(lr, **DECAYS)),
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
    ours = optimizer(name, decay, 0.5)
    reference = optax.chain(optax.clip_by_global_norm(0.5), theirs(lr))
    a, b = ours.init(PARAMS), reference.init(PARAMS)
    norm = norm_of(GRADS)
    our_update, their_update = jax.jit(ours.update), jax.jit(reference.update)
    for _ in range(3):
        actual, a = our_update(GRADS, a, PARAMS, grad_norm=norm)
        expected, b = their_update(GRADS, b, PARAMS)
        for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
            np.testing.assert_allclose(lr * x, y, rtol=4 * EPS)


def test_muon_updates_hidden_matrices_orthogonally_and_the_rest_by_adam():
    tx = optimizer("muon", 0.0, 0.0)
    updates, _ = jax.jit(tx.update)(GRADS, tx.init(PARAMS), PARAMS)
    layer = updates["h"][0]
    singular = np.linalg.svd(layer["c_fc"]["kernel"], compute_uv=False)
    # Newton-Schulz brings all singular values near one another
    assert singular.max() / singular.min() < 2
    # Adam's first step with Nesterov momentum, whatever the gradient
    first = 1 + 0.9 * 0.1 / (1 - 0.9**2)
    for update in (layer["ln_1"], updates["wte"]):
        np.testing.assert_allclose(np.abs(update), first, rtol=1e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stacked_layers_are_updated_as_unrolled_ones(name):
    # Large enough for adafactor to factor, layers of different size for its clip and
    # scale per tensor.
    sizes = np.float32([0.1, 3.0])[:, None, None]
    kernel, table = map(
        np.asarray, (draw_normal(0, (2, 128, 130)), draw_normal(1, (4, 3)))
    )
    stacked = {"h": {"kernel": kernel * sizes}, "wpe": table}
    grads = {"h": {"kernel": kernel[::-1] * sizes[::-1]}, "wpe": np.sin(table)}
    roles = {"h": {"kernel": Role("column", stacked=True)}, "wpe": Role("table")}
    layer = {"kernel": Role("column")}
    unrolled = {"h": {0: layer, 1: layer}, "wpe": Role("table")}

    def updates(grads, params, roles):
        tx = optimizer(name, 0.1, 1.0, roles)
        state, norm, step = (
            tx.init(params),
            norm_of(grads),
            jax.jit(tx.update),
        )
        for _ in range(2):
            update, state = step(grads, state, params, grad_norm=norm)
        return update

    actual = unstack_layers(updates(grads, stacked, roles))
    expected = updates(unstack_layers(grads), unstack_layers(stacked), unrolled)
    # Sums of 128 x 130 squares in another order; muon's iteration multiplies matrices
    # of 128.
    tolerance = 128 * EPS * (16 if name == "muon" else 1)
    for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
