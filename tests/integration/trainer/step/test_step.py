"""The step as users run it, jitted and sharded: accumulation, skipping, no
recompilation, any number of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalify_core.optim import scaled_state
from trainer.data import Batch
from trainer.models.roles import Role
from trainer.parallel.mesh import make_mesh, place_batch, replicated
from trainer.precision.gradients import plain
from trainer.step.clip_and_decay import optimizer_from_roles
from trainer.step.state import init_state
from trainer.step.step import Hyper, OptimizerSetup, first_true, make_train_step

V, T, B = 16, 8, 16
ROLES = {
    "wte": {"embedding": Role("table")},
    "head": {"kernel": Role("column")},
    "gain": {"scale": Role("gain")},
}
COMMON = {"weight_decay": 0.1, "clip_norm": 1.0}
OWN = {
    "adamw": {"b1": 0.9, "b2": 0.95, "eps": 1e-8},
    "lion": {"b1": 0.9, "b2": 0.95},
    "adafactor": {},
    "sgd": {"momentum": 0.9},
    "muon": {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "momentum": 0.9},
}


def loss_fn(params, tokens, segments, key):
    """A bigram model: small, and its gradient is not finite where `params["gain"]` is
    not."""
    logits = (
        params["wte"]["embedding"][tokens[:, :-1]]
        @ params["head"]["kernel"]
        * params["gain"]["scale"]
    )
    logp = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1))


def make(devices=1, accum=1, name="adamw"):
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "wte": {"embedding": jax.random.normal(keys[0], (V, 32))},
        "head": {"kernel": jax.random.normal(keys[1], (32, V))},
        "gain": {"scale": jnp.ones(())},
    }
    optimizer = scaled_state(
        optimizer_from_roles(name, **COMMON | OWN[name])(ROLES), seed=0
    )
    mesh = make_mesh(devices)
    state = jax.device_put(
        init_state(params, optimizer, jax.random.key(1)), replicated(mesh)
    )
    tokens = np.random.default_rng(0).integers(0, V, (B, T + 1), dtype=np.int32)
    return (
        state,
        jax.jit(
            make_train_step(plain(loss_fn), OptimizerSetup(lambda seed: optimizer))
        ),
        place_batch(Batch(tokens, None), accum=accum, mesh=mesh),
    )


def hyper(step=0, lr=1e-2):
    return Hyper(np.float32(lr), np.int32(step), np.uint32(0))


def equal_bits(a, b):
    raw = lambda x: (
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    )
    return all(
        np.array_equal(raw(x), raw(y))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("accum", [2, 4])
def test_accumulation_equals_one_big_batch(accum):
    whole_state, step, whole = make()
    parts_state, _, parts = make(accum=accum)
    for n in range(3):
        whole_state, a = step(whole_state, whole, hyper(n))
        parts_state, b = step(parts_state, parts, hyper(n))
    # FP32 sums of B*T terms in another order; Adam divides, so compare at some 1e3
    # epsilon.
    eps = 1e3 * np.finfo(np.float32).eps
    np.testing.assert_allclose(a["loss"], b["loss"], rtol=eps)
    np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=eps)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=eps, atol=eps),
        whole_state.params,
        parts_state.params,
    )


@pytest.mark.parametrize("devices", [2, 8])
def test_losses_are_those_of_one_device_up_to_reduction_order(devices):
    one, step, batch_one = make()
    many, _, batch_many = make(devices=devices)
    for n in range(5):
        one, a = step(one, batch_one, hyper(n))
        many, b = step(many, batch_many, hyper(n))
        np.testing.assert_allclose(
            a["loss"], b["loss"], rtol=1e3 * np.finfo(np.float32).eps
        )


def test_a_step_that_is_not_finite_changes_no_bit_of_the_state():
    state, step, batch = make()
    state, _ = step(state, batch, hyper())
    bad = jax.tree.map(lambda x: x, state)
    bad.params["gain"]["scale"] = jnp.full((), jnp.nan)
    after, metrics = step(bad, batch, hyper(1))
    assert not metrics["finite"]
    assert metrics["bad_leaf"] == 0
    assert equal_bits(
        (after.params["wte"], after.params["head"], after.opt_state, after.key),
        (bad.params["wte"], bad.params["head"], bad.opt_state, bad.key),
    )


def test_the_learning_rate_and_the_step_do_not_recompile():
    state, step, batch = make()
    for n in range(4):
        state, _ = step(state, batch, hyper(n, lr=10.0**-n))
    assert step._cache_size() == 1


def test_first_true_is_the_index_or_minus_one():
    assert first_true(jnp.array([False, True, True])) == 1
    assert first_true(jnp.array([False, False])) == -1


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "sgd", "muon"])
def test_every_optimizer_learns(name):
    state, step, batch = make(name=name)
    state, first = step(state, batch, hyper())
    for n in range(1, 30):
        state, last = step(state, batch, hyper(n))
    assert last["loss"] < first["loss"] - 0.1
