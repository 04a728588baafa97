"""DiLoCo: what replicas exchange is right in every format, nothing is lost, and where
they lie changes no bit."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from trainer.parallel.diloco import (
    FORMATS,
    DiLoCoSettings,
    fragments_of,
    sync,
)
from trainer.parallel.mesh import REPLICA, make_mesh

SHAPES = ((5, 3), (4,), (16, 24))  # 15 elements are split over no number of replicas
PLAIN = DiLoCoSettings(
    4, 8, "fp8", 1.0, 0.0, feedback=True, fragments=1, participants=4, last_step=100
)


@functools.cache
def program(diloco, devices, first=0):
    """From [K, ...] of each tensor, seed and step to the means, the losses and whether
    all is finite, over so many devices."""
    mesh = make_mesh(
        1, num_replicas=diloco.num_replicas, devices=jax.devices()[:devices]
    )
    replicas, everywhere = PartitionSpec(REPLICA), PartitionSpec()
    arrays = range(first, first + len(SHAPES))

    def of_device(tensors, seed, step):
        return tuple(sync(tensors, diloco, seed, step, arrays))

    mapped = jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(replicas, everywhere, everywhere),
        out_specs=(everywhere, replicas, everywhere),
        check_vma=False,
    )
    return jax.jit(mapped)


def tensors(replicas=4, size=1.0):
    random = np.random.default_rng(0)
    drawn = [random.normal(size=(replicas, *shape)) * size for shape in SHAPES]
    return [x.astype(np.float32) for x in drawn]


def synced(diloco, values, devices=1, step=8, first=0):
    compiled = program(diloco, devices, first)
    return jax.device_get(compiled(values, np.uint32(7), np.int32(step)))


def spacing(x, diloco):
    """The distance of a format's numbers at `x`, at the scale of the sync: largest
    magnitudes below the maximum."""
    fmt = FORMATS[diloco.format]
    scale = 2.0 ** np.floor(np.log2(np.abs(x).max() * 2 / min(fmt.max, 65504.0)))
    return np.maximum(np.abs(x) * fmt.epsilon, fmt.min_subnormal * scale)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_mean_is_right_to_two_roundings_of_the_format(name):
    diloco = PLAIN._replace(format=name)
    for size in (1.0, 2.0**-40):
        values = tensors(size=size)
        means, lost, _ = synced(diloco, values)
        for x, mean, residual in zip(values, means, lost, strict=True):
            exact = x.astype(np.float64).mean(0)
            bound = spacing(x, diloco)
            # A mean is rounded where magnitudes are at most those of what was sent, up
            # to its own error.
            largest = np.abs(exact) + bound.max(0)
            rounded = largest * FORMATS[name].epsilon + bound.min()
            order = 4 * np.finfo(np.float32).eps * np.abs(x).max()
            assert (np.abs(mean - exact) <= bound.mean(0) + rounded + order).all()
            assert np.abs(residual).max() <= 5 * bound.max()
            assert (name == "fp32") == (not np.any(residual))


@pytest.mark.parametrize("name", ["fp32", "fp8", "fp4"])
def test_where_replicas_lie_changes_no_bit(name):
    diloco = PLAIN._replace(format=name)
    one, two, four = (synced(diloco, tensors(), devices) for devices in (1, 2, 4))
    for a, b, c in zip(*map(jax.tree.leaves, (one, two, four)), strict=True):
        assert a.tobytes() == b.tobytes() == c.tobytes()


@pytest.mark.parametrize("name", ["fp8", "fp4"])
def test_with_feedback_what_was_sent_adds_up_to_what_was_to_be_sent(name):
    diloco, values, rounds = PLAIN._replace(format=name), tensors(), 12
    total = [0.0] * len(SHAPES)
    residuals = [np.zeros_like(x) for x in values]
    for i in range(rounds):
        corrected = [x + r for x, r in zip(values, residuals, strict=True)]
        means, residuals, _ = synced(diloco, corrected, step=8 * (i + 1))
        total = [t + m for t, m in zip(total, means, strict=True)]
    for x, r, t in zip(values, residuals, total, strict=True):
        # All that was not sent is in the residuals: exactly, but for FP32's own
        # rounding.
        exact = rounds * x.mean(0)
        np.testing.assert_allclose(t + r.mean(0), exact, rtol=0, atol=rounds * 1e-5)
        # They do not grow: one rounding of what a replica sends, and of the mean as
        # often as there are replicas.
        assert np.abs(r).max() <= 4 * spacing(4 * x, diloco).max()


def test_fragments_that_are_exchanged_at_one_step_are_rounded_by_bits_of_their_own():
    _, lost, _ = synced(PLAIN, tensors())
    _, other, _ = synced(PLAIN, tensors(), first=len(SHAPES))
    # Independent roundings lose alike no more often than chance has it.
    assert np.mean(lost[2] == other[2]) < 0.75


def test_the_mean_is_that_of_the_replicas_that_are_drawn_and_the_others_lose_nothing():
    diloco = PLAIN._replace(num_replicas=8, participants=3, format="fp32")
    seen = set()
    for step in (8, 16, 24, 32, 40):
        drawn = np.asarray(diloco.participating(np.uint32(7), np.int32(step - 1)))
        assert drawn.sum() == 3
        seen |= set(np.flatnonzero(drawn))
        # All steps of a round draw the same, and the sync at its end.
        np.testing.assert_array_equal(
            drawn, diloco.participating(np.uint32(7), np.int32(step - 8))
        )
        values = tensors(8)
        means, lost, _ = synced(diloco, values, 4, step)
        for x, mean, residual in zip(values, means, lost, strict=True):
            np.testing.assert_allclose(mean, x[drawn].mean(0), rtol=4e-7, atol=4e-7)
            np.testing.assert_array_equal(residual[~drawn], x[~drawn])
            assert not residual[drawn].any()
    assert len(seen) > 4


def test_what_is_not_finite_stays_so():
    for name in ("fp32", "fp8", "fp4"):
        values = tensors()
        values[2][1, 3, 5] = np.inf
        means, _, _ = synced(PLAIN._replace(format=name), values)
        assert not np.isfinite(means[2][3, 5])
        assert np.isfinite(means[0]).all()


def test_fragments_have_each_array_once_and_about_equal_sizes():
    sizes = [4096, 64, 4096, 64, 16384, 64, 8192, 8192]
    for count in (1, 2, 3, 5):
        groups = fragments_of(sizes, count)
        assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
        sums = [sum(sizes[i] for i in group) for group in groups]
        assert max(sums) - min(sums) <= max(sizes)
    assert fragments_of(sizes, 2)[0] != []


def test_each_fragment_is_due_once_a_round_and_all_after_the_last_step():
    diloco = PLAIN._replace(sync_every=6, fragments=3, last_step=23)
    due = {step: diloco.due(step) for step in range(1, 24)}
    assert {step: actual for step, actual in due.items() if actual} == {
        2: [1], 4: [2], 6: [0], 8: [1], 10: [2], 12: [0], 14: [1], 16: [2], 18: [0], 20: [1], 22: [2], 23: [0, 1, 2],
    }  # fmt: skip
    assert PLAIN.due(8) == [0]
    assert PLAIN.due(9) == []
    assert PLAIN.due(100) == [0]
