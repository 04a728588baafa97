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
from trainer.step.clip_and_decay import optimizer_from_roles
from trainer.step.moments import storage_by_field, store_moments
from trainer.step.optimizers import OPTIMIZERS, AdamW, Lion, Moment, Optimizer

KERNEL = {"kernel": jnp.ones((16, 16)), "bias": jnp.ones(16)}
PARAMS = {"wte": {"embedding": jnp.ones((8, 16))}, "h": {0: {"c_fc": KERNEL}}}
ROLES = {
    "wte": {"embedding": Role("table")},
    "h": {0: {"c_fc": {"kernel": Role("column"), "bias": Role("bias")}}},
}
SETTINGS = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "momentum": 0.9}


def policy(**changes):
    return dataclasses.replace(compose_config([]).precision.policy, **changes)


def select(whole, part):
    if not isinstance(part, dict):
        return whole
    return {key: select(whole[key], part[key]) for key in part}


def plain(name, roles=ROLES):
    own = {field.name for field in dataclasses.fields(OPTIMIZERS[name])}
    settings = {key: value for key, value in SETTINGS.items() if key in own}
    return optimizer_from_roles(name, weight_decay=0.1, clip_norm=1.0, **settings)(
        roles
    )


def stored(name, **changes):
    return jax.eval_shape(
        store_moments(plain(name), name, policy(**changes), 0).init, PARAMS
    )


def fields(state):
    """Names and data formats of the scaled arrays of a state."""
    actual = set()
    for path, x in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_scaled_array):
        if is_scaled_array(x):
            names = [
                key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)
            ]
            actual.add((names[-1], str(x.data.dtype)))
    return actual


@pytest.mark.parametrize(
    ("name", "changes", "found"),
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
    name, changes, found
):
    assert fields(stored(name, **changes)) == found


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ({"h": {0: {"c_fc": {"kernel": 0}}}}, {("mu", "bfloat16")}),
        ({"wte": {"embedding": 0}}, {("mu", "bfloat16"), ("nu", "float16")}),
    ],
)
def test_muon_may_train_only_one_of_its_two_parts(part, found):
    params, roles = select(PARAMS, part), select(ROLES, part)
    narrow = policy(mu="bf16", nu="fp16")
    tx = store_moments(plain("muon", roles), "muon", narrow, 0)
    state = tx.init(params)
    assert fields(state) == found
    updates, _ = tx.update(params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_roots_and_quotients_are_stored_of_those_moments_that_say_so():
    def storage(name, **changes):
        return storage_by_field(name, policy(**changes), stored(name))

    how = storage("adamw", mu="e4m3", nu="e5m2")
    assert (how["mu"].sqrt, how["mu"].relative_to, how["nu"].sqrt) == (
        False,
        "nu",
        True,
    )
    wider = storage("adamw", mu="fp16", nu="fp16")
    assert wider["mu"].relative_to is None
    assert storage("adamw", mu="e4m3")["mu"].relative_to is None
    assert storage("muon", mu="e4m3", nu="e5m2")["mu"].relative_to is None
    assert [x.rounding for x in wider.values()] == ["nearest", "stochastic"]


def test_what_an_entry_forgets_is_an_error_when_the_state_is_made(monkeypatch):
    class Forgetful(Lion):
        moments = ()

    monkeypatch.setitem(OPTIMIZERS, "lion", Forgetful)
    with pytest.raises(
        UserError,
        match="optimizer=lion has a state field 'mu' that its entry Forgetful",
    ):
        stored("lion")


def test_a_moment_that_the_state_does_not_have_is_an_error_when_it_is_made(monkeypatch):
    class Hopeful(Lion):
        moments = (*Lion.moments, Moment("nu", "nu", sqrt=True))

    monkeypatch.setitem(OPTIMIZERS, "lion", Hopeful)
    with pytest.raises(
        UserError, match=r"optimizer=lion has no state field 'nu', .* fields are mu"
    ):
        stored("lion")


def test_an_entry_without_moments_is_no_entry():
    with pytest.raises(TypeError, match="Silent does not say its `moments`"):

        class Silent(Optimizer):
            pass


def test_an_entry_that_does_not_make_a_transformation_is_no_entry():
    with pytest.raises(TypeError, match="Idle has no method `scale_by`"):

        class Idle(Optimizer):
            moments = ()


def test_a_cousin_of_adam_is_one_entry(monkeypatch):
    class NAdam(AdamW):
        moments = AdamW.moments

        def scale_by(self, roles):
            return optax.scale_by_adam(self.b1, self.b2, self.eps, nesterov=True)

    monkeypatch.setitem(OPTIMIZERS, "nadam", NAdam)
    assert fields(stored("nadam", mu="e4m3", nu="e5m2")) == {
        ("mu", "float8_e4m3fn"),
        ("nu", "float8_e5m2"),
    }


def test_a_state_of_one_transformation_is_checked_whole(monkeypatch):
    """Not only the fields that the policy stores: what stays in FP32 is there too."""
    both = optax.chain(optax.scale_by_adam(), optax.trace(0.9))
    tx = store_moments(both, "adamw", policy(), 0)
    with pytest.raises(UserError, match="optimizer=adamw has a state field 'trace'"):
        jax.eval_shape(tx.init, PARAMS)
