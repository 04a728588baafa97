"""Weights whose update keeps what rounding loses: the state, through checkpoints and
conversions, and training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import slow
from precisions import abstract, batch, bits, copied, hyper, policy, workload

from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.optim.weights import wide
from trainer.config.composition import compose_config
from trainer.errors import UserError
from trainer.models.roles import select_roles
from trainer.run.converting import convert_state, exact_weights
from trainer.run.phases import enter_phase
from trainer.step.state import from_checkpoint_form, to_checkpoint_form
from trainer.workload import abstract_state, compile_step, first_state


def kahan(preset, **more):
    return workload(preset, weights_rounding="kahan", **more)


COMPILED = {}


def compiled(w, state):
    """The step of a workload of `precisions`, each made once, for states of one form
    and of the same scales."""
    key = id(w), jax.tree.structure(state)
    if key not in COMPILED:
        # a workload that is kept keeps its id
        COMPILED[key] = w, compile_step(w, abstract(w), state)
    return COMPILED[key][1]


def take(w, steps, start=0, state=None, lr=1e-2):
    state = (
        from_checkpoint_form(to_checkpoint_form(first_state(w, seed=0)))
        if state is None
        else state
    )
    step, metrics = compiled(w, state), []
    for n in range(start, start + steps):
        state, row = step(copied(state), batch(w, n % 2), hyper(n, lr))
        metrics.append(float(row["loss"]))
    return state, metrics


def gap(a, b):
    """The norm of a difference of weights over that of the second."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    return float(
        np.sqrt(
            sum(jnp.sum((x - y) ** 2) for x, y in pairs)
            / sum(jnp.sum(y**2) for _, y in pairs)
        )
    )


@pytest.mark.parametrize("preset", ["bf16_pure", slow("scalify_fp8_fp16")])
def test_two_bytes_a_parameter_are_kept_in_bf16(preset):
    w = kahan(preset)
    state = first_state(w, seed=0)
    assert {str(x.dtype) for x in jax.tree.leaves(state.kahan_compensation)} == {
        "bfloat16"
    }
    count = sum(x.size for x in jax.tree.leaves(state.params, is_leaf=is_scaled_array))
    assert sum(x.nbytes for x in jax.tree.leaves(state.kahan_compensation)) == 2 * count
    assert not workload(preset).model.policy.keeps_kahan_compensation
    assert not policy(
        "bf16", weights_rounding="kahan"
    ).keeps_kahan_compensation  # weights in FP32
    assert first_state(workload(preset), seed=0).kahan_compensation == ()
    assert (
        gap(exact_weights(state), first_state(workload("fp32"), seed=0).params)
        < 2.0**-16
    )


def test_a_step_that_is_not_finite_changes_nothing():
    w = kahan("bf16_pure")
    state, _ = take(w, 1)
    gain = state.params["ln_f"]["scale"]
    state.params["ln_f"]["scale"] = jnp.full_like(gain, jnp.nan)
    before = bits(state)
    after, metrics = compiled(w, state)(copied(state), batch(w), hyper(1, 1e-2))
    assert not metrics["finite"]
    assert bits(after) == before


@pytest.mark.parametrize("target", ["fp32", "bf16_pure"])
def test_what_was_kept_is_part_of_the_weights_in_another_precision(target):
    w = kahan("bf16_pure")
    state = to_checkpoint_form(take(w, 3)[0])
    converted = convert_state(workload(target), state, w.model.policy, seed=0)
    assert jax.tree.structure(to_checkpoint_form(converted)) == jax.tree.structure(
        abstract_state(workload(target))
    )
    assert converted.kahan_compensation == ()
    exact = exact_weights(state)
    for a, b in zip(
        jax.tree.leaves(converted.params), jax.tree.leaves(exact), strict=True
    ):
        np.testing.assert_array_equal(a, b.astype(a.dtype))
    assert gap(exact, wide(state.params)) > 2.0**-12  # or nothing was shown


def test_a_run_goes_on_with_it_from_a_precision_without():
    target = kahan("bf16_pure")
    state = to_checkpoint_form(take(workload("fp32"), 3)[0])
    converted = convert_state(target, state, workload("fp32").model.policy, seed=0)
    assert jax.tree.structure(to_checkpoint_form(converted)) == jax.tree.structure(
        abstract_state(target)
    )
    assert gap(exact_weights(converted), state.params) < 2.0**-16
    assert np.isfinite(
        take(target, 1, start=3, state=from_checkpoint_form(converted))[1]
    ).all()


def test_it_is_kept_of_the_trained_part_alone_also_in_a_phase_that_trains_another():
    w = kahan("bf16_pure")
    part = w._replace(trainable=("embeddings",))
    state = first_state(part, seed=0)
    assert jax.tree.structure(state.kahan_compensation) == jax.tree.structure(
        select_roles(w.model.roles, ["embeddings"])
    )
    state = to_checkpoint_form(take(part, 2, state=state)[0])
    exact = exact_weights(state)
    entered = enter_phase(w, state, part, seed=0)
    assert jax.tree.structure(entered.kahan_compensation) == jax.tree.structure(
        w.model.roles
    )
    assert gap(exact_weights(entered), exact) < 2.0**-16
    assert jax.tree.structure(
        enter_phase(part, entered, w, seed=0).kahan_compensation
    ) == jax.tree.structure(state.kahan_compensation)


def test_replicas_that_train_apart_refuse_it_in_a_line():
    with pytest.raises(
        UserError,
        match=(
            r"weights_rounding=kahan .* diloco.replicas=2 replicas; choose stochastic"
        ),
    ):
        compose_config(
            [
                "precision=bf16_pure",
                "precision.weights_rounding=kahan",
                "parallel=diloco",
                "diloco.replicas=2",
            ]
        )


def test_on_eight_devices_each_has_its_part_of_what_is_kept():
    state = abstract_state(kahan("bf16_pure", devices=8))
    for p, lost in zip(
        jax.tree.leaves(state.params),
        jax.tree.leaves(state.kahan_compensation),
        strict=True,
    ):
        assert lost.sharding == p.sharding
    assert not state.kahan_compensation["wte"]["embedding"].sharding.is_fully_replicated
