"""Weights whose update keeps what rounding loses: the state, through conversions and
training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from precisions import abstract, batch, bits, copied, policy, step_inputs, workload

from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.optim.weights import wide
from trainer.models.roles import select_roles
from trainer.run.converting import convert_state, exact_weights
from trainer.run.phases import enter_phase
from trainer.step.state import from_checkpoint_form, to_checkpoint_form
from trainer.workload import abstract_state, compile_step, first_state


def kahan(*trainable, **more):
    w = workload("bf16_pure", weights_rounding="kahan", **more)
    return w._replace(trainable=trainable)


@functools.cache
def compiled(*trainable):
    w = kahan(*trainable)
    state = from_checkpoint_form(to_checkpoint_form(first_state(w, seed=0)))
    return state, compile_step(w, abstract(w), state)


def take(steps, *trainable):
    """The state after so many steps that train all, or the named parameters."""
    state, step = compiled(*trainable)
    for n in range(steps):
        state, metrics = step(copied(state), batch(kahan()), step_inputs(n, 1e-2))
        assert metrics["finite"]
    return state


def distance(a, b):
    """The norm of a difference of weights over that of the second."""
    squares = off = 0.0
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        expected = np.asarray(y, np.float64)
        off += np.sum((np.asarray(x, np.float64) - expected) ** 2)
        squares += np.sum(expected**2)
    return np.sqrt(off / squares)


@pytest.mark.parametrize("preset", ["bf16_pure", "scalify_fp8_fp16"])
def test_two_bytes_a_parameter_are_kept_in_bf16(preset):
    state = first_state(workload(preset, weights_rounding="kahan"), seed=0)
    compensation = jax.tree.leaves(state.kahan_compensation)
    assert {str(x.dtype) for x in compensation} == {"bfloat16"}
    params = jax.tree.leaves(state.params, is_leaf=is_scaled_array)
    assert sum(x.nbytes for x in compensation) == 2 * sum(x.size for x in params)
    exact = first_state(workload("fp32"), seed=0).params
    assert distance(exact_weights(state), exact) < 2.0**-16
    in_fp32 = policy("bf16", weights_rounding="kahan")
    assert not in_fp32.keeps_kahan_compensation
    assert not workload(preset).model.policy.keeps_kahan_compensation
    assert first_state(workload(preset), seed=0).kahan_compensation == ()


def test_a_step_that_is_not_finite_changes_nothing():
    state = take(1)
    gain = state.params["ln_f"]["scale"]
    state.params["ln_f"]["scale"] = jnp.full_like(gain, jnp.nan)
    state_bits = bits(state)
    _, step = compiled()
    after, metrics = step(copied(state), batch(kahan()), step_inputs(1, 1e-2))
    assert not metrics["finite"]
    assert bits(after) == state_bits


@pytest.mark.parametrize("target", ["fp32", "bf16_pure"])
def test_the_compensation_is_part_of_the_weights_in_another_precision(target):
    state = to_checkpoint_form(take(3))
    converted = convert_state(workload(target), state, kahan().model.policy, seed=0)
    form = jax.tree.structure(abstract_state(workload(target)))
    assert jax.tree.structure(to_checkpoint_form(converted)) == form
    assert converted.kahan_compensation == ()
    exact = exact_weights(state)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(a.dtype)),
        converted.params,
        exact,
    )
    assert distance(exact, wide(state.params)) > 2.0**-12  # or nothing was shown


def test_a_run_goes_on_with_it_from_a_precision_without():
    w = workload("fp32")
    state = to_checkpoint_form(first_state(w, seed=0))
    converted = convert_state(kahan(), state, w.model.policy, seed=0)
    form = jax.tree.structure(abstract_state(kahan()))
    assert jax.tree.structure(to_checkpoint_form(converted)) == form
    assert distance(exact_weights(converted), state.params) < 2.0**-16


def test_it_is_kept_of_the_trained_part_alone_also_in_a_phase_that_trains_another():
    w, part = kahan(), kahan("embeddings")
    state = to_checkpoint_form(take(2, "embeddings"))
    form = jax.tree.structure(state.kahan_compensation)
    roles = w.model.roles
    assert form == jax.tree.structure(select_roles(roles, ["embeddings"]))
    entered = enter_phase(w, state, part, seed=0)
    assert jax.tree.structure(entered.kahan_compensation) == jax.tree.structure(roles)
    assert distance(exact_weights(entered), exact_weights(state)) < 2.0**-16
    back = enter_phase(part, entered, w, seed=0)
    assert jax.tree.structure(back.kahan_compensation) == form


def test_on_eight_devices_each_has_its_part_of_the_compensation():
    state = abstract_state(kahan(devices=8))
    compensation = state.kahan_compensation
    assert jax.tree.map(lambda x: x.sharding, compensation) == jax.tree.map(
        lambda x: x.sharding, state.params
    )
    assert not compensation["wte"]["embedding"].sharding.is_fully_replicated
