"""Checksums of arrays: of every bit and its place, whatever the sharding."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from trainer.step.checksum import checksum, checksums


def test_a_checksum_does_not_depend_on_the_sharding():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a", "b")))
    assert checksums([x]) == checksums([spread])


@pytest.mark.parametrize(
    "dtype", [jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32, jnp.bool_]
)
def test_every_single_bit_changes_the_checksum(dtype):
    # A boolean is a byte of which only the first bit may be set.
    values, bits = (2, 8) if dtype == jnp.bool_ else (256, 1)
    rng, size = np.random.default_rng(0), 12 * np.dtype(dtype).itemsize
    raw = rng.integers(0, values, size).astype(np.uint8)
    expected = checksums([jnp.asarray(raw.view(dtype))])
    for bit in range(0, raw.size * 8, bits):
        changed = raw.copy()
        changed[bit // 8] ^= 1 << (bit % 8)
        assert checksums([jnp.asarray(changed.view(dtype))]) != expected, bit


@pytest.mark.parametrize(
    ("shape", "sums"),
    [
        ((), [1853299093, 239750418]),
        ((0, 3), [0, 0]),
        ((2, 3, 35), [1665476795, 955580770]),
    ],
)
def test_a_checksum_is_that_of_saved_checkpoints(shape, sums):
    """Those of whole runs: e2e/test_saved_runs.py."""
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    assert jax.jit(checksum)(x if shape else np.float32(1)).tolist() == sums
