"""Stacks whose layers have scales of their own, far apart: at one for all, the small
ones would be zero in FP16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import draw_normal
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose
from propagated import scalify

from scalify_core import ScaledArray, asarray

EXPONENTS = np.asarray([-30.0, 0.0, -12.0, 20.0])
STACK = ScaledArray(
    draw_normal(0, (4, 6, 8)).astype(jnp.float16),
    jnp.asarray(2.0**EXPONENTS, jnp.float32),
)
ROW = ScaledArray(draw_normal(1, (6, 8)).astype(jnp.float16), 2.0**-5)


@pytest.mark.parametrize(
    "fun",
    [
        lambda w: lax.scan(lambda c, x: (c, 3 * x), 0, w)[1],
        lambda w: jax.vmap(lambda w: w * w * 2)(w),
    ],
)
def test_layers_of_a_loop_keep_their_scale(fun):
    actual = jax.jit(scalify(fun))(STACK)
    assert_allclose(asarray(actual), fun(asarray(STACK)), rtol=2.0**-10)


def test_a_layer_that_is_taken_or_moved_has_the_largest_scale():
    """As a loop is how layers are taken, nothing follows a scale through a slice."""
    stack = ScaledArray(STACK.data, jnp.asarray([2.0, 1.0, 4.0, 0.5]))
    for fun in (lambda w: w[0], lambda w: w.swapaxes(1, 2)[0], lambda w: w[1:3]):
        actual, expected = jax.jit(scalify(fun))(stack), fun(asarray(stack))
        assert actual.scale == 4
        assert_allclose(asarray(actual), expected, atol=2.0**-22)


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: lax.dynamic_update_slice(w, x[None], (2, 0, 0)),
        lambda w, x: w.at[2].add(x),
        lambda w, x: w.at[jnp.array([3, 2, 1, 0])].set(
            jnp.stack([x, 2 * x, 3 * x, 4 * x])
        ),
        lambda w, x: jnp.pad(w, ((1, 1), (0, 0), (0, 0))),
    ],
)
def test_what_is_written_into_a_stack_arrives_at_its_place(fun):
    stack = ScaledArray(STACK.data, jnp.asarray([2.0, 1.0, 4.0, 0.5]))
    for scale in (2.0**-5, jnp.float32(2.0**-5)):
        row = ScaledArray(ROW.data, scale)
        actual, expected = (
            jax.jit(scalify(fun))(stack, row),
            fun(*asarray((stack, row))),
        )
        # One rounding at the largest scale, 4, and that of a sum: numbers below 64
        # there.
        assert_allclose(asarray(actual), expected, rtol=2.0**-10, atol=2.0**-22)


@pytest.mark.parametrize("spec", [P(None, "d"), P(("d", "e"))])
def test_stack_in_shard_map_is_split_with_its_scales(spec):
    mesh = jax.make_mesh((2, 2), ("d", "e"), axis_types=(AxisType.Auto,) * 2)
    fun = lambda w: jax.shard_map(
        lambda w: w * 3, mesh=mesh, in_specs=spec, out_specs=spec
    )(w)
    stack = ScaledArray(STACK.data, jnp.asarray([2.0, 1.0, 4.0, 0.5]))
    expected = 3 * asarray(stack)
    # At the largest scale, 4.
    assert_allclose(
        asarray(jax.jit(scalify(fun))(stack)), expected, rtol=2.0**-10, atol=2.0**-22
    )
