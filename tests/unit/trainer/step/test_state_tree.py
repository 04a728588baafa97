"""Checksums of arrays: of every bit and its place, whatever the sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from trainer.step.state_tree import checksum, checksums


def test_a_checksum_does_not_depend_on_the_sharding():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a", "b")))
    assert checksums([x]) == checksums([spread])


@pytest.mark.parametrize(
    "dtype", [jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32, jnp.bool_]
)
def test_every_single_bit_changes_the_checksum(dtype):
    itemsize = np.dtype(dtype).itemsize
    raw = (
        np.random.default_rng(0)
        .integers(0, 2 if dtype == jnp.bool_ else 256, 12 * itemsize)
        .astype(np.uint8)
    )
    whole = checksums([jnp.asarray(raw.view(dtype))])
    for bit in range(0, raw.size * 8, 8 if dtype == jnp.bool_ else 1):
        changed = raw.copy()
        changed[bit // 8] ^= 1 << (bit % 8)
        assert checksums([jnp.asarray(changed.view(dtype))]) != whole, bit


def test_a_checksum_tells_places_apart():
    x = jnp.arange(6.0)
    assert (
        len(
            {checksums([x])[0], checksums([x[::-1]])[0], checksums([jnp.roll(x, 1)])[0]}
        )
        == 3
    )


def test_two_changes_that_cancel_in_one_sum_change_the_checksum():
    x = jnp.arange(1.0, 9.0)
    assert checksums([x.at[2].multiply(-1).at[5].multiply(-1)]) != checksums([x])
    # Scrambled as in the first sum, these two differ in the highest bit alone.
    a, b = np.array([0xBFFB7D7D, 0xE7CC1AF0], np.uint32).view(np.float32)
    first, changed = (
        np.asarray(checksum(x.at[2].set(p).at[5].set(q))) for p, q in ((a, b), (b, a))
    )
    assert first[0] == changed[0]
    assert first[1] != changed[1]


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (7,), (12, 5), (2, 3, 35)])
def test_a_checksum_is_the_documented_sum(shape):
    """Written out in Python."""
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    total = [0, 0]
    for index in np.ndindex(shape):
        for which, (seed, scramble) in enumerate(
            ((0x9E3779B1, 0x7FEB352D), (0x85EBCA77, 0x846CA68B))
        ):
            word = int(x[index].view(np.uint32))
            word = (word ^ word >> (16, 15)[which]) * scramble % 2**32
            term = word ^ word >> (15, 16)[which]
            for axis, i in enumerate(index or (0,)):
                odd = ((i + 1) * seed + axis * 0x27D4EB2F) % 2**32
                odd = (odd ^ odd >> 15) * 0x2C1B3C6D % 2**32
                odd = (odd ^ odd >> 12) * 0x297A2D39 % 2**32
                term *= (odd ^ odd >> 15) | 1
            total[which] = (total[which] + term) % 2**32
    assert checksum(jnp.asarray(x)).tolist() == total
