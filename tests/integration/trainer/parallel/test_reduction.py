"""Means over devices: right in every format, without overflow, without bias, in a fixed
order where that is asked."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from scalify_core.numerics.formats import BF16, E4M3, FP16, FP32
from trainer.parallel.mesh import make_mesh
from trainer.parallel.reduction import mean_over_devices

DEVICES = 8


@functools.cache
def program(shape, split, fmt, deterministic=False, sizes=(2, 4)):
    """From [devices, *shape], a row for each device in the order of the mesh, to the
    mean."""
    mesh = make_mesh(*sizes)
    spec = [None] * len(shape)
    if split is not None:
        spec[split] = "fsdp"

    def of_device(x, seed):
        return mean_over_devices(
            x[0], split, fmt, deterministic=deterministic, seed=seed, leaf_index=3
        )

    rows = PartitionSpec(("data", "fsdp"))
    mapped = jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(rows, PartitionSpec()),
        out_specs=PartitionSpec(*spec),
        check_vma=False,
    )
    return jax.jit(mapped)


def normal(shape, scale=1.0):
    # Of sizes that differ from device to device by two octaves.
    sizes = 2.0 ** (np.arange(DEVICES) % 3 - 1)
    return (
        np.random.default_rng(0).normal(size=(DEVICES, *shape)).T * sizes * scale
    ).T.astype(np.float32)


def bound(x, fmt):
    """The error of one rounding of each term and of one of the mean, by at most one
    step of the format each (stochastic).

    The scale puts the largest magnitude into the upper octave, from max/2 on.
    """
    scale = np.abs(x).max() / (min(fmt.max, FP16.max) / 2)
    step = lambda v: np.maximum(np.abs(v) * fmt.epsilon, fmt.min_subnormal * scale)
    first = step(x).mean(0)
    sums = DEVICES * FP32.epsilon * np.abs(x).mean(0)
    return first + step(np.abs(x.mean(0)) + first) + sums


def error(x, split, fmt):
    """The error of the mean over the devices, and its bound."""
    mean = program(x.shape[1:], split, fmt)(x, 7)
    assert mean.dtype == jnp.float32
    exact = x.astype(np.float64)
    return np.abs(mean - exact.mean(0)), bound(exact, fmt)


@pytest.mark.parametrize(
    ("fmt", "split"), [(FP32, 0), (BF16, 1), (FP16, 0), (E4M3, None), (E4M3, 1)]
)
def test_the_mean_is_right_to_the_rounding_of_the_format(fmt, split):
    # 15 elements are not split evenly
    actual, limit = error(normal((12, 20) if split is not None else (5, 3)), split, fmt)
    assert (actual <= limit).all()


@pytest.mark.parametrize("fmt", [FP16, E4M3])
def test_no_size_overflows_or_underflows(fmt):
    for size in (2.0**-40, 2.0**40):
        actual, limit = error(normal((12, 20), size), 0, fmt)
        assert (actual <= limit).all()
    # All devices at the largest number: in the format itself a sum of two would be
    # infinite.
    largest = np.full((DEVICES, 12, 20), FP16.max, np.float32)
    mean = program((12, 20), 0, fmt)(largest, 7)
    np.testing.assert_allclose(mean, FP16.max, rtol=fmt.epsilon)


def test_what_is_not_finite_stays_so():
    x = normal((12, 20))
    x[3, 2, 5] = math.inf
    for fmt in (E4M3, FP16):
        mean = program((12, 20), 0, fmt)(x, 7)
        assert not np.isfinite(mean[2, 5])


def test_fp8_is_right_in_expectation():
    x = normal((12, 20))
    run = program((12, 20), 0, E4M3)
    # One after the other: with all in flight XLA has aborted here, once.
    actual = np.mean([np.asarray(run(x, seed)) for seed in range(64)], axis=0)
    exact = x.astype(np.float64)
    off = np.abs(actual - exact.mean(0))
    # Independent errors: five standard deviations of the mean of 64, each error at most
    # its bound.
    assert (off <= 5 / 8 * bound(exact, E4M3)).all()
    single, _ = error(x, 0, E4M3)
    assert np.sqrt(np.mean(off**2)) < 0.2 * np.sqrt(np.mean(single**2))


@pytest.mark.parametrize("split", [None, 0])
def test_the_deterministic_sum_goes_through_the_devices_in_order(split):
    x = normal((12, 20))
    x[0], x[5] = 1e6, -1e6  # in another order, another sum
    total = x[0]
    for part in x[1:]:
        total = total + part
    actual = program((12, 20), split, FP32, True)(x, 7)
    np.testing.assert_array_equal(actual, total / DEVICES)
    assert (x.sum(0, dtype=np.float64).astype(np.float32) != total).any()


def test_devices_round_equal_numbers_independently():
    """With the same random bits everywhere, a mean would be off as one device is."""
    row = np.random.default_rng(1).normal(size=(512,)).astype(np.float32)
    mean = program((512,), 0, E4M3, sizes=(1, DEVICES))(
        np.tile(row, (DEVICES, 1)), jnp.uint32(5)
    )
    # One rounding has the variance of a step^2 / 6, and a step is at least half of
    # epsilon times the number: eight have 1 / sqrt(48) = 0.14 of it, one has 0.2 to 0.4.
    step = E4M3.epsilon * np.abs(row)
    assert np.linalg.norm(mean - row) < 0.18 * np.linalg.norm(step)
