"""Collectives of values whose scales differ from device to device, or from one batched element to the next."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec
from propagated import scalify

import scalify_core as sc
from scalify_core import ScaledArray, as_scaled_array

SCALES = 2.0 ** jnp.arange(0.0, 16.0, 2.0)
# Of sums of 8 terms in FP32.
RTOL = 8 * float(jnp.finfo(jnp.float32).eps)


def rows():
    return jax.random.normal(jax.random.key(0), (8, 4))


@pytest.mark.parametrize("check_vma", [True, False])
def test_sum_over_devices_of_what_each_rescaled_for_itself(check_vma):
    mesh = Mesh(np.asarray(jax.devices()), "d", axis_types=(AxisType.Auto,))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec(), check_vma=check_vma
    )
    def summed(x):
        return lax.psum(sc.dynamic_rescale_rms(x).sum(0), "d")

    x = rows() * SCALES[:, None]
    found = jax.jit(scalify(summed))(as_scaled_array(x, 1.0))
    np.testing.assert_allclose(found, x.sum(0), rtol=0, atol=RTOL * np.abs(x).max())


@pytest.mark.parametrize("collective", [lax.psum, lax.pmax, lax.all_gather])
def test_collective_over_a_batch_axis_whose_elements_have_scales_of_their_own(collective):
    def fun(x):
        return x - collective(x, "i")

    x = rows() * SCALES[:, None]
    if collective is lax.all_gather:
        fun = functools.partial(lax.all_gather, axis_name="i")
    found = jax.vmap(scalify(fun), axis_name="i")(ScaledArray(rows(), SCALES))
    expected = jax.vmap(fun, axis_name="i")(x)
    np.testing.assert_allclose(found, expected, rtol=0, atol=RTOL * np.abs(x).max())
