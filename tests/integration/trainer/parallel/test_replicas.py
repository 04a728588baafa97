"""Replicas that train apart: one alone trains as without, they agree after a round, and
resume in the middle of one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import slow
from precisions import batch, bits, copied, hyper, workload

from scalify_core import weights
from scalify_core.array.scaled_array import is_scaled_array
from trainer.compiled.exchange import exchanges_of
from trainer.config.composition import compose_config
from trainer.config.fields import to_tree
from trainer.errors import UserError
from trainer.parallel.diloco import DiLoCoSettings
from trainer.parallel.mesh import abstract_batch, make_mesh
from trainer.parallel.replicas import DiLoCoStep, with_rescaled_params, without_replicas
from trainer.run.checkpoint import Checkpointer
from trainer.run.start import restore_own
from trainer.step.state import from_checkpoint_form, to_checkpoint_form
from trainer.workload import (
    abstract_state,
    compile_step,
    first_state,
    lower_exchange,
)

tree_leaves = functools.partial(
    jax.tree_util.tree_leaves_with_path, is_leaf=is_scaled_array
)
AVERAGE = DiLoCoSettings(
    2, 2, "fp32", 1.0, 0.0, feedback=False, fragments=1, participants=2, last_step=100
)
NARROW = AVERAGE._replace(format="fp8", lr=0.7, momentum=0.9, feedback=True)


def task_of(diloco, preset="fp32", devices=None, sizes=(1,)):
    mesh = make_mesh(
        *sizes,
        replicas=diloco.replicas,
        devices=jax.devices()[:devices] if devices else None,
    )
    return workload(preset)._replace(mesh=mesh, diloco=diloco)


@functools.cache
def made(diloco, preset="fp32", devices=None, sizes=(1,)):
    """TrainTask, first state and compiled step."""
    task = task_of(diloco, preset, devices, sizes)
    state = from_checkpoint_form(first_state(task, 0))
    tokens = abstract_batch(1, 16, 16, document_mask=False, mesh=task.mesh)
    return task, state, compile_step(task, tokens, state)


def trained(steps, *how, start=0, state=None):
    task, first, step = made(*how)
    state, losses = copied(first if state is None else state), []
    for i in range(start, steps):
        state, metrics = step(state, batch(task, i), hyper(i, 1e-2))
        losses.append(float(metrics["loss"]))
    return state, losses


@functools.cache
def config_of(*overrides):
    return to_tree(compose_config(overrides))


def meta_of(diloco):
    """Of a checkpoint: its configuration, which says the form of the state."""
    if diloco is None:
        return {"config": config_of()}
    saved = {
        "replicas": diloco.replicas,
        "outer_momentum": diloco.momentum,
        "error_feedback": diloco.feedback,
        "outer_grad": diloco.format,
    }
    config = config_of("parallel=diloco")
    return {"config": config | {"diloco": config["diloco"] | saved}}


def of_replica(state, k):
    return [np.asarray(x[k]) for x in jax.tree.leaves(state.diloco.states.params)]


def test_one_replica_that_exchanges_every_step_trains_as_a_run_without_replicas():
    task = workload("fp32")
    state = from_checkpoint_form(first_state(task, 0))
    step = compile_step(
        task, abstract_batch(1, 16, 16, document_mask=False, mesh=task.mesh), state
    )
    state, losses = copied(state), []
    for i in range(3):
        state, metrics = step(state, batch(task, i), hyper(i, 1e-2))
        losses.append(float(metrics["loss"]))
    actual, theirs = trained(
        3, AVERAGE._replace(replicas=1, participants=1, sync_every=1)
    )
    assert theirs == losses
    # Outer weights - (outer weights - new ones) is exact where both are near each
    # other: else one rounding.
    for a, b in zip(
        jax.tree.leaves(actual.params), jax.tree.leaves(state.params), strict=True
    ):
        np.testing.assert_allclose(
            a, b, rtol=0, atol=2 * np.finfo(np.float32).eps * np.abs(b).max()
        )


def test_replicas_differ_inside_a_round_and_have_the_outer_weights_after_it():
    one_device = (NARROW, "fp32", 1)  # its step is that of the tests below
    state, _ = trained(1, *one_device)
    assert any(
        (a != b).any()
        for a, b in zip(of_replica(state, 0), of_replica(state, 1), strict=True)
    )
    outer = bits(state.params)
    state, _ = trained(2, *one_device, start=1, state=state)
    assert bits(state.params) != outer
    for k in range(2):
        assert [x.tobytes() for x in of_replica(state, k)] == bits(state.params)
    moments = jax.tree.leaves(state.diloco.states.opt_state)
    assert any((np.asarray(x[0]) != np.asarray(x[1])).any() for x in moments)
    assert any(np.any(np.asarray(x)) for x in jax.tree.leaves(state.diloco.residuals))


def test_the_average_of_replicas_is_that_of_their_weights():
    inside, _ = trained(1, AVERAGE, "fp32", 1)
    _, _, step = made(AVERAGE, "fp32", 1)
    after = step.exchanges[0](copied(inside), np.int32(2), np.uint32(0))
    for outer, replicas in zip(
        jax.tree.leaves(after.params),
        jax.tree.leaves(inside.diloco.states.params),
        strict=True,
    ):
        mean = np.asarray(replicas, np.float64).mean(0)
        np.testing.assert_allclose(
            outer,
            mean,
            rtol=0,
            atol=4 * np.finfo(np.float32).eps * np.abs(replicas).max(),
        )


@pytest.mark.slow  # on one device each: the others
def test_a_replica_may_be_several_devices():
    sizes = (1, 2)
    alone, losses = trained(3, AVERAGE, "fp32", 1)
    actual, theirs = trained(3, AVERAGE, "fp32", 4, sizes)
    assert dict(made(AVERAGE, "fp32", 4, sizes)[0].mesh.shape)["replica"] == 2
    np.testing.assert_allclose(theirs, losses, rtol=100 * np.finfo(np.float32).eps)
    for a, b in zip(
        jax.tree.leaves(actual.params), jax.tree.leaves(alone.params), strict=True
    ):
        # Sums in another order, and steps of Adam, which where gradients are next to
        # nothing may have either sign.
        assert np.mean(np.abs(np.asarray(a) - np.asarray(b)) > 1e-4) < 0.01


@pytest.mark.slow  # of one run: test_precision.py
def test_a_state_of_replicas_goes_through_a_checkpoint_bit_for_bit(tmp_path):
    """In training: e2e/trainer/parallel/test_diloco_runs.py, in FP32."""
    task = task_of(NARROW, "scalify_fp8_fp16")
    state = from_checkpoint_form(first_state(task, 0))
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(3, to_checkpoint_form(state), {})
        checkpointer.wait()
        restored = from_checkpoint_form(
            checkpointer.restore(abstract_state(task)).state
        )
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)


def test_new_scales_leave_replicas_and_outer_weights_what_they_are_and_are_the_same_for_both():
    whole = from_checkpoint_form(first_state(task_of(NARROW, "scalify_fp8_fp16"), 0))
    paths = [jax.tree_util.keystr(path) for path, _ in tree_leaves(whole.params)]
    moved = with_rescaled_params(
        whole, weights.rescale_params(whole.params, dict.fromkeys(paths, 0.5))
    )
    for new, old in ((moved, whole), (moved.diloco.states, whole.diloco.states)):
        assert bits(weights.wide(new.params)) == bits(weights.wide(old.params))
    for (_, outer), (_, settings) in zip(
        tree_leaves(moved.params), tree_leaves(moved.diloco.states.params), strict=True
    ):
        assert settings.scale == outer.scale
    assert bits(moved.params) != bits(whole.params)


@pytest.mark.parametrize("count", [1, slow(3)])
def test_a_run_goes_on_with_fewer_replicas_or_more(tmp_path, count):
    half, _ = trained(3, NARROW, "fp32", 1)
    task = task_of(NARROW._replace(replicas=count, participants=count), "fp32", 1)
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(3, to_checkpoint_form(half), meta_of(NARROW))
        checkpointer.wait()
        state = from_checkpoint_form(restore_own(checkpointer, task).state)
    assert jax.tree.structure(state) == jax.tree.structure(
        from_checkpoint_form(first_state(task, 0))
    )
    assert bits(state.params) == bits(half.params)
    assert bits(state.diloco.momentum) == bits(half.diloco.momentum)
    for k in range(count):
        outer = k >= 2
        expected = (
            bits(half.params) if outer else [x.tobytes() for x in of_replica(half, k)]
        )
        assert [x.tobytes() for x in of_replica(state, k)] == expected
        moments, residuals = (
            jax.tree.leaves(x)
            for x in (state.diloco.states.opt_state, state.diloco.residuals)
        )
        for new, old in zip(
            moments, jax.tree.leaves(half.diloco.states.opt_state), strict=True
        ):
            np.testing.assert_array_equal(new[k], old[k % 2])
        for new, old in zip(
            residuals, jax.tree.leaves(half.diloco.residuals), strict=True
        ):
            np.testing.assert_array_equal(
                new[k], np.zeros_like(old[0]) if outer else old[k]
            )
    keys = [jax.random.key_data(key).tobytes() for key in state.diloco.states.key]
    assert len(set(keys)) == count


@pytest.mark.parametrize(("before", "now"), [(AVERAGE, NARROW), slow(NARROW, AVERAGE)])
def test_another_run_may_go_on_with_an_outer_momentum_and_feedback_or_without(
    tmp_path, before, now
):
    """What was not kept begins with zeros, what was kept and still is goes on, and
    weights and moments are the same."""
    half, _ = trained(3, before, "fp32", 1)
    task = task_of(now, "fp32", 1)
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(3, to_checkpoint_form(half), meta_of(before))
        checkpointer.wait()
        state = from_checkpoint_form(restore_own(checkpointer, task).state)
    assert jax.tree.structure(state) == jax.tree.structure(
        from_checkpoint_form(first_state(task, 0))
    )
    assert bits((state.params, state.diloco.states)) == bits(
        (half.params, half.diloco.states)
    )
    states = [
        (state.diloco.residuals, half.diloco.residuals),
        (state.diloco.momentum, half.diloco.momentum),
    ]
    for new, old in states:
        if old and new:
            assert bits(new) == bits(old)
        assert old or not any(np.any(np.asarray(x)) for x in jax.tree.leaves(new))
    _, losses = trained(5, now, "fp32", 1, start=3, state=state)
    assert np.isfinite(losses).all()


def test_replicas_are_nothing_for_a_run_without(tmp_path):
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(
            3, to_checkpoint_form(trained(1, NARROW, "fp32", 1)[0]), meta_of(NARROW)
        )
        checkpointer.wait()
        with pytest.raises(UserError, match=r"diloco\.replicas=2 replicas.*init_from"):
            restore_own(checkpointer, workload("fp32"))


@pytest.mark.slow  # two runs; below, runs that go on with fewer or more
def test_replicas_go_on_from_what_was_trained_without_them(tmp_path):
    task = workload("scalify_fp8_fp16")
    state = from_checkpoint_form(first_state(task, 0))
    step = compile_step(
        task, abstract_batch(1, 16, 16, document_mask=False, mesh=task.mesh), state
    )
    for i in range(3):
        state, _ = step(copied(state), batch(task, i), hyper(i, 1e-2))
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(3, to_checkpoint_form(state), meta_of(None))
        checkpointer.wait()
        actual = restore_own(checkpointer, task_of(NARROW, "scalify_fp8_fp16"))
    assert actual.step == 3
    replicas = from_checkpoint_form(actual.state)
    assert jax.tree.structure(replicas) == jax.tree.structure(
        made(NARROW, "scalify_fp8_fp16")[1]
    )
    assert bits(replicas.params) == bits(state.params)
    moments = jax.tree.leaves(state.opt_state)
    for k in range(2):
        assert [x.tobytes() for x in of_replica(replicas, k)] == bits(state.params)
        for new, old in zip(
            jax.tree.leaves(replicas.diloco.states.opt_state), moments, strict=True
        ):
            np.testing.assert_array_equal(new[k], old)
    _, losses = trained(7, NARROW, "scalify_fp8_fp16", start=3, state=replicas)
    assert np.isfinite(losses).all()


def test_replicas_that_are_not_drawn_stay_as_they_were_until_the_exchange():
    diloco = AVERAGE._replace(replicas=4, participants=1, sync_every=2)
    state, losses = trained(1, diloco, "fp32", 1)
    (drawn,) = np.flatnonzero(diloco.participating(np.uint32(0), np.int32(0)))
    for k in range(4):
        same = [x.tobytes() for x in of_replica(state, k)] == bits(state.params)
        assert same == (k != drawn)
    assert np.isfinite(losses).all()
    state, _ = trained(2, diloco, "fp32", 1, start=1, state=state)
    for k in range(4):
        assert [x.tobytes() for x in of_replica(state, k)] == bits(state.params)


def exchanged_after_three(**changes):
    """A state after three steps, and after an exchange of it with other leaves of its
    replicas."""
    state, _ = trained(3, NARROW, "fp32", 1)
    sick = dataclasses.replace(state.diloco, **changes)
    broken = copied(dataclasses.replace(state, diloco=sick))
    exchange = made(NARROW, "fp32", 1)[2].exchanges[0]
    return state, exchange(broken, np.int32(4), np.uint32(0))


def test_weights_that_are_not_finite_change_nothing():
    """Neither the outer weights nor the momentum nor what earlier roundings have lost,
    which is sent with the next."""
    states = trained(3, NARROW, "fp32", 1)[0].diloco.states
    broken = jax.tree.map(
        lambda x: x.at[1].set(jnp.nan) if x.ndim else x, states.params
    )
    before, after = exchanged_after_three(
        states=dataclasses.replace(states, params=broken)
    )
    assert bits((after.params, after.diloco.momentum)) == bits(
        (before.params, before.diloco.momentum)
    )
    assert any(np.any(np.asarray(x)) for x in jax.tree.leaves(before.diloco.residuals))
    assert bits(after.diloco.residuals) == bits(before.diloco.residuals)
    for k in range(2):
        assert [x.tobytes() for x in of_replica(after, k)] == bits(after.params)


def test_a_residual_that_is_not_finite_is_dropped_where_it_is_not_so_that_exchanges_go_on():
    residuals = trained(3, NARROW, "fp32", 1)[0].diloco.residuals
    first, *others = (np.array(x) for x in jax.tree.leaves(residuals))
    index = (0,) * first.ndim
    first[index] = np.inf
    sick = jax.tree.unflatten(jax.tree.structure(residuals), [first, *others])
    _, after = exchanged_after_three(residuals=jax.tree.map(jnp.array, sick))
    first[index] = 0
    assert bits(after.diloco.residuals) == bits([first, *others])


def test_the_bytes_of_a_round_are_read_and_fewer_by_the_steps_and_the_format():
    diloco = NARROW._replace(sync_every=100, fragments=2, last_step=1000)
    task = task_of(diloco, "fp32", 2)
    state = from_checkpoint_form(first_state(task, 0))
    programs = [lower_exchange(task, i, state).compile() for i in range(2)]
    actual = exchanges_of(task, DiLoCoStep(None, programs, diloco))
    assert actual.read
    computed = exchanges_of(task)
    assert not computed.read
    assert sum(actual.fragments) == pytest.approx(sum(computed.fragments), rel=1e-3)
    # One byte for four, every hundredth step; a byte a tensor for its scale.
    assert 395 < actual.fewer <= 400
    assert max(actual.fragments) < 0.7 * sum(actual.fragments)
    assert actual.up_to(49) == 0
    assert actual.up_to(50) == actual.fragments[1]
    assert actual.up_to(100) == sum(actual.fragments)
    assert actual.up_to(1000) == pytest.approx(
        10 * sum(actual.fragments) + actual.fragments[1]
    )
    assert actual.seconds(1.0) == max(actual.fragments) * 8e-9


def test_a_state_of_replicas_is_looked_at_as_that_of_a_run_without():
    state, _ = trained(1, NARROW, "fp32", 1)
    seen = without_replicas(state)
    alone = from_checkpoint_form(first_state(workload("fp32"), 0))
    assert jax.tree.structure(seen) == jax.tree.structure(alone)
    assert [x.shape for x in jax.tree.leaves(seen)] == [
        x.shape for x in jax.tree.leaves(alone)
    ]
