"""Gather and scatter: what is filled in, and sums of very many."""

import jax
import jax.numpy as jnp
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from propagated import scalify

from scalify_core import as_scaled_array, asarray

HALF = jnp.float16


@pytest.mark.parametrize("scale", [8.0, None])
def test_a_number_to_fill_with_is_a_logical_one(scale):
    x = as_scaled_array(jnp.asarray([8.0, -16.0, 4.0, 24.0]), scale, dtype=HALF)
    actual = scalify(
        lambda x: x.at[jnp.asarray([0, 9])].get(mode="fill", fill_value=5.0)
    )(x)
    assert_array_equal(asarray(actual), [8.0, 5.0])


def test_sums_of_very_many_rows_stay_within_fp16():
    count = 200_000
    ones = as_scaled_array(jnp.ones(count), 1.0, dtype=HALF)
    actual = scalify(
        lambda x: jax.ops.segment_sum(x, jnp.zeros(count, jnp.int32), num_segments=4)
    )(ones)
    assert_allclose(asarray(actual), [count, 0, 0, 0], rtol=2.0**-11)
