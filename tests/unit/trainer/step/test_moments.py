"""An optimiser's entry says what its state keeps; what it forgets, or names in vain, is
refused when a run starts."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

from scalify_core.array.scaled_array import is_scaled_array
from trainer.config.composition import compose_config
from trainer.errors import UserError
from trainer.models.roles import Role
from trainer.step.clip_and_decay import optimizer_chain
from trainer.step.moments import storage_by_field, with_moment_storage
from trainer.step.optimizers import OPTIMIZERS, Lion, Moment

KERNEL = {"kernel": jnp.ones((16, 16)), "bias": jnp.ones(16)}
PARAMS = {"wte": {"embedding": jnp.ones((8, 16))}, "h": {0: {"c_fc": KERNEL}}}
ROLES = {
    "wte": {"embedding": Role("table")},
    "h": {0: {"c_fc": {"kernel": Role("column"), "bias": Role("bias")}}},
}
SETTINGS = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "momentum": 0.9}


def policy(**changes):
    return dataclasses.replace(compose_config([]).precision.policy, **changes)


def plain(name, roles=ROLES):
    names = {field.name for field in dataclasses.fields(OPTIMIZERS[name])}
    settings = {key: value for key, value in SETTINGS.items() if key in names}
    return optimizer_chain(OPTIMIZERS[name](name, 1.0, 0.1, 1.0, **settings), roles)


def stored(name, **changes):
    tx = with_moment_storage(plain(name), name, policy(**changes), 0)
    return jax.eval_shape(tx.init, PARAMS)


def fields(state):
    """Return names and data formats of the scaled arrays of a state."""
    result = set()
    for path, x in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_scaled_array):
        if is_scaled_array(x):
            names = [k.name for k in path if isinstance(k, jax.tree_util.GetAttrKey)]
            result.add((names[-1], str(x.data.dtype)))
    return result


@pytest.mark.parametrize(
    ("name", "changes", "stored_fields"),
    [
        (
            "adamw",
            {"mu": "e4m3", "nu": "e5m2"},
            {("mu", "float8_e4m3fn"), ("nu", "float8_e5m2")},
        ),
        ("lion", {"mu": "fp16"}, {("mu", "float16")}),
        ("sgd", {"mu": "fp16"}, {("trace", "float16")}),
        ("muon", {"mu": "bf16", "nu": "fp16"}, {("mu", "bfloat16"), ("nu", "float16")}),
        ("adafactor", {}, set()),
    ],
)
def test_the_moments_that_an_entry_names_are_stored_as_the_policy_says(
    name, changes, stored_fields
):
    assert fields(stored(name, **changes)) == stored_fields


def test_roots_and_quotients_are_stored_of_the_moments_that_say_so():
    def storage(name, **changes):
        return storage_by_field(name, policy(**changes), stored(name))

    narrow = storage("adamw", mu="e4m3", nu="e5m2")
    assert (narrow["mu"].sqrt, narrow["nu"].sqrt) == (False, True)
    assert narrow["mu"].relative_to == "nu"
    wider = storage("adamw", mu="fp16", nu="fp16")
    assert [x.rounding for x in wider.values()] == ["nearest", "stochastic"]
    others = wider, storage("adamw", mu="e4m3"), storage("muon", mu="e4m3", nu="e5m2")
    assert [moments["mu"].relative_to for moments in others] == [None, None, None]


class Forgetful(Lion):
    moments = ()


class Hopeful(Lion):
    moments = (*Lion.moments, Moment("nu", "nu"))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (Forgetful, "optimizer=lion has a state field 'mu' that its entry Forgetful"),
        (Hopeful, r"optimizer=lion has no state field 'nu', .* fields are mu"),
    ],
)
def test_moments_that_the_state_does_not_have_are_an_error_when_it_is_made(
    monkeypatch, entry, message
):
    monkeypatch.setitem(OPTIMIZERS, "lion", entry)
    with pytest.raises(UserError, match=message):
        stored("lion")


def test_a_state_of_one_transformation_is_checked_whole():
    """Also its fields that stay in FP32."""
    both = optax.chain(optax.scale_by_adam(), optax.trace(0.9))
    tx = with_moment_storage(both, "adamw", policy(), 0)
    with pytest.raises(UserError, match="optimizer=adamw has a state field 'trace'"):
        jax.eval_shape(tx.init, PARAMS)
