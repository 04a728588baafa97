"""Replicas that train apart: one alone trains as without, they agree after a round, and
resume in the middle of one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from precisions import batch, bits, copied, step_inputs, workload

from scalify_core import weights
from scalify_core.array.scaled_array import is_scaled_array
from trainer.compiled.sync_bytes import sync_bytes_of
from trainer.config.composition import compose_config
from trainer.config.fields import to_tree
from trainer.errors import UserError
from trainer.parallel.diloco import DiLoCoSettings, bytes_of_sync
from trainer.parallel.mesh import abstract_batch, make_mesh
from trainer.parallel.replicas import with_rescaled_params
from trainer.run.checkpoint import Checkpointer
from trainer.run.start import restore_state
from trainer.step.state import from_checkpoint_form, to_checkpoint_form
from trainer.step.weight_rescale import rescale_params
from trainer.workload import (
    compile_step,
    first_state,
)

leaves = jax.tree.leaves
tree_leaves = functools.partial(
    jax.tree_util.tree_leaves_with_path, is_leaf=is_scaled_array
)
AVERAGE = DiLoCoSettings(
    2, 2, "fp32", 1.0, 0.0, feedback=False, fragments=1, participants=2, last_step=100
)
NARROW = AVERAGE._replace(format="fp8", lr=0.7, momentum=0.9, feedback=True)


def task_of(diloco, preset="fp32", sizes=(1,)):
    """A task on one device, or on as many for each replica as `sizes` says."""
    devices = jax.devices()[: 1 if sizes == (1,) else None]
    mesh = make_mesh(*sizes, num_replicas=diloco.num_replicas, devices=devices)
    return workload(preset)._replace(mesh=mesh, diloco=diloco)


def first(task):
    return from_checkpoint_form(first_state(task, 0))


@functools.cache
def made(diloco, sizes=(1,)):
    """The task, its first state and its compiled step; without replicas for None."""
    task = task_of(diloco, sizes=sizes) if diloco else workload("fp32")
    state = first(task)
    tokens = abstract_batch(1, 16, 16, document_mask=False, mesh=task.mesh)
    return task, state, compile_step(task, tokens, state)


def trained(steps, diloco, sizes=(1,), start=0, state=None):
    """The state after these steps, from the first or a given one, and the losses."""
    task, first, step = made(diloco, sizes)
    state, losses = copied(first if state is None else state), []
    for i in range(start, steps):
        state, metrics = step(state, batch(task, i), step_inputs(i, 1e-2))
        losses.append(float(metrics["loss"]))
    return state, losses


def restored(folder, state, saved_settings, task):
    """The state with which a task goes on from a checkpoint of another one."""
    with Checkpointer(folder / "checkpoints") as checkpointer:
        checkpointer.save(3, to_checkpoint_form(state), meta_of(saved_settings))
        checkpointer.wait()
        state = from_checkpoint_form(restore_state(checkpointer, task).state)
    assert jax.tree.structure(state) == jax.tree.structure(first(task))
    return state


@functools.cache
def config_of(*overrides):
    return to_tree(compose_config(overrides))


def meta_of(diloco):
    """Of a checkpoint: its configuration, which says the form of the state."""
    meta = {
        "precision": dataclasses.asdict(workload("fp32").model.policy),
        "trainable": [],
    }
    if diloco is None:
        return meta | {"config": config_of()}
    saved = {
        "replicas": diloco.num_replicas,
        "outer_momentum": diloco.momentum,
        "error_feedback": diloco.feedback,
        "outer_grad": diloco.format,
    }
    config = config_of("parallel=diloco")
    return meta | {"config": config | {"diloco": config["diloco"] | saved}}


def of_replica(tree, k):
    return [np.asarray(x[k]).tobytes() for x in leaves(tree)]


def assert_close(actual, expected, roundings):
    """Off by so many roundings of FP32 of the largest element at most."""
    trees = leaves(actual), leaves(expected)
    for a, b in zip(*trees, strict=True):
        atol = roundings * np.finfo(np.float32).eps * np.abs(b).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def test_one_replica_that_exchanges_every_step_trains_as_a_run_without_replicas():
    expected, losses = trained(3, None)
    alone = AVERAGE._replace(num_replicas=1, participants=1, sync_every=1)
    actual, same_losses = trained(3, alone)
    assert same_losses == losses
    # Outer weights - (outer weights - new ones) is exact where both are near each
    # other: else one rounding.
    assert_close(actual.params, expected.params, roundings=2)


def test_replicas_differ_inside_a_round_and_have_the_outer_weights_after_it():
    state, _ = trained(1, NARROW)
    params = state.diloco.states.params
    assert of_replica(params, 0) != of_replica(params, 1)
    outer = bits(state.params)
    state, _ = trained(2, NARROW, start=1, state=state)
    assert bits(state.params) != outer
    for k in range(2):
        assert of_replica(state.diloco.states.params, k) == bits(state.params)
    moments = state.diloco.states.opt_state
    assert of_replica(moments, 0) != of_replica(moments, 1)
    assert any(np.any(np.asarray(x)) for x in leaves(state.diloco.residuals))


@pytest.mark.slow  # on one device: the others
def test_a_replica_may_be_several_devices():
    alone, losses = trained(3, AVERAGE)
    actual, same_losses = trained(3, AVERAGE, sizes=(1, 4))
    np.testing.assert_allclose(same_losses, losses, rtol=100 * np.finfo(np.float32).eps)
    trees = leaves(actual.params), leaves(alone.params)
    for a, b in zip(*trees, strict=True):
        # Sums in another order, and steps of Adam, which where gradients are next to
        # nothing may have either sign.
        assert np.mean(np.abs(np.asarray(a) - np.asarray(b)) > 1e-4) < 0.01


def test_new_scales_leave_the_values_and_are_those_of_replicas_and_outer_weights():
    state = first(task_of(NARROW, "scalify_fp8_fp16"))
    paths = [jax.tree_util.keystr(path) for path, _ in tree_leaves(state.params)]
    halved = rescale_params(state.params, dict.fromkeys(paths, 0.5))
    moved = with_rescaled_params(state, halved)
    for new, old in ((moved, state), (moved.diloco.states, state.diloco.states)):
        assert bits(weights.wide(new.params)) == bits(weights.wide(old.params))
    pairs = tree_leaves(moved.params), tree_leaves(moved.diloco.states.params)
    for (_, outer), (_, replicas) in zip(*pairs, strict=True):
        assert replicas.scale == outer.scale
    assert bits(moved.params) != bits(state.params)


@pytest.mark.parametrize("count", [1, 3])
def test_a_run_goes_on_with_fewer_replicas_or_more(tmp_path, count):
    half, _ = trained(3, NARROW)
    task = task_of(NARROW._replace(num_replicas=count, participants=count))
    state = restored(tmp_path, half, NARROW, task)
    assert bits(state.params) == bits(half.params)
    assert bits(state.diloco.momentum) == bits(half.diloco.momentum)
    new, old = state.diloco, half.diloco
    for k in range(count):
        moments = of_replica(old.states.opt_state, k % 2)
        assert of_replica(new.states.opt_state, k) == moments
        if k < 2:
            params, residuals = (
                of_replica(tree, k) for tree in (old.states.params, old.residuals)
            )
        else:  # a new one begins with the outer weights
            params = bits(half.params)
            residuals = bits([np.zeros_like(x[0]) for x in leaves(old.residuals)])
        assert of_replica(new.states.params, k) == params
        assert of_replica(new.residuals, k) == residuals
    keys = [jax.random.key_data(key).tobytes() for key in new.states.key]
    assert len(set(keys)) == count


def test_another_run_may_go_on_without_an_outer_momentum_and_feedback_or_with_them(
    tmp_path,
):
    """They begin with zeros; weights and moments are the same."""
    half, _ = trained(3, NARROW)
    without = restored(tmp_path / "without", half, NARROW, task_of(AVERAGE))
    state = restored(tmp_path / "with", without, AVERAGE, task_of(NARROW))
    for other in (without, state):
        assert bits(other.params) == bits(half.params)
        assert bits(other.diloco.states) == bits(half.diloco.states)
        for tree in (other.diloco.residuals, other.diloco.momentum):
            assert not any(np.any(np.asarray(x)) for x in leaves(tree))


def test_the_state_of_replicas_is_refused_by_a_run_without(tmp_path):
    with pytest.raises(UserError, match=r"diloco\.replicas=2 replicas.*init_from"):
        restored(tmp_path, trained(1, NARROW)[0], NARROW, workload("fp32"))


def test_replicas_go_on_from_what_was_trained_without_them(tmp_path):
    state, _ = trained(3, None)
    replicas = restored(tmp_path, state, None, task_of(NARROW))
    assert bits(replicas.params) == bits(state.params)
    for k in range(2):
        assert of_replica(replicas.diloco.states.params, k) == bits(state.params)
        assert of_replica(replicas.diloco.states.opt_state, k) == bits(state.opt_state)
    _, losses = trained(5, NARROW, start=3, state=replicas)
    assert np.isfinite(losses).all()


def test_replicas_that_are_not_drawn_stay_as_they_were_until_the_exchange():
    diloco = AVERAGE._replace(num_replicas=4, participants=1)
    state, losses = trained(1, diloco)
    (drawn,) = np.flatnonzero(diloco.participating(np.uint32(0), np.int32(0)))
    for k in range(4):
        same = of_replica(state.diloco.states.params, k) == bits(state.params)
        assert same == (k != drawn)
    assert np.isfinite(losses).all()
    state, _ = trained(2, diloco, start=1, state=state)
    for k in range(4):
        assert of_replica(state.diloco.states.params, k) == bits(state.params)


def synced_after_three(change):
    """A state after three steps, and after a sync of it with what `change` makes
    of its replicas."""
    state, _ = trained(3, NARROW)
    broken = copied(dataclasses.replace(state, diloco=change(state.diloco)))
    sync = made(NARROW)[2].syncs[0]
    return state, sync(broken, np.int32(4), np.uint32(0))


def test_weights_that_are_not_finite_change_nothing():
    """Neither the outer weights nor the momentum nor what earlier roundings have lost,
    which is sent with the next."""

    def change(diloco):
        params = jax.tree.map(lambda x: x.at[1].set(jnp.nan), diloco.states.params)
        states = dataclasses.replace(diloco.states, params=params)
        return dataclasses.replace(diloco, states=states)

    before, after = synced_after_three(change)
    for name in ("momentum", "residuals"):
        expected = getattr(before.diloco, name)
        assert bits(getattr(after.diloco, name)) == bits(expected)
        assert any(np.any(np.asarray(x)) for x in leaves(expected))
    assert bits(after.params) == bits(before.params)
    for k in range(2):
        assert of_replica(after.diloco.states.params, k) == bits(after.params)


def test_a_residual_that_is_not_finite_is_dropped_so_that_exchanges_go_on():
    expected = []

    def change(diloco):
        first, *others = (np.array(x) for x in leaves(diloco.residuals))
        index = (0,) * first.ndim
        first[index] = np.inf
        broken = [jnp.array(x) for x in (first, *others)]
        first[index] = 0
        expected.extend([first, *others])
        residuals = jax.tree.unflatten(jax.tree.structure(diloco.residuals), broken)
        return dataclasses.replace(diloco, residuals=residuals)

    _, after = synced_after_three(change)
    assert bits(after.diloco.residuals) == bits(expected)


def test_the_bytes_of_a_round_are_fewer_by_the_steps_and_the_format():
    """They are those of the compiled sync: test_diloco.py."""
    diloco = NARROW._replace(sync_every=100, fragments=2, last_step=1000)
    actual = sync_bytes_of(task_of(diloco))
    # One byte for four, every hundredth step; a byte a tensor for its scale.
    assert 395 < actual.reduction <= 400
    # Three of four parts, twice: FP8 and the mean's FP8, and a scale each.
    assert bytes_of_sync(1000, 3, NARROW._replace(num_replicas=4)) == 0.75 * 2006
    first, second = actual.fragments
    assert max(first, second) < 0.7 * (first + second)
    sent = [actual.up_to(step) for step in (49, 50, 100, 1000)]
    assert sent == [0, second, first + second, 10 * (first + second) + second]
    assert actual.seconds(1.0) == max(first, second) * 8e-9
