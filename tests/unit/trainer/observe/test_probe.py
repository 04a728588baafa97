"""Probes: the identity, whose slot's gradient is the figures of the array and of its
gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import HALF
from draws import draw_normal
from numpy.testing import assert_allclose, assert_array_equal
from propagated import scalify

from scalify_core import ScaledArray, asarray
from scalify_core.ops.functional import gelu
from trainer.observe.probe import SLOT_SHAPE, array_figures, probe
from trainer.observe.records import FIGURE_NAMES

EMPTY = jnp.zeros(SLOT_SHAPE)


def normal(seed, shape=(64, 32)):
    return draw_normal(seed, shape)


def with_figures(x, slot):
    return probe(x, slot, forward=array_figures, backward=array_figures)


def probed_gradient():
    """Return a function of the gradient `3 * weight` of `x`, and its figures."""

    def loss(x, weight, slot):
        return jnp.sum(3 * weight * with_figures(x, slot))

    return jax.grad(loss, (0, 2))


def test_the_slots_gradient_is_the_figures_of_the_array_and_of_its_gradient():
    x, weight = 2 * normal(0), normal(1)
    gradient, actual = jax.jit(probed_gradient())(x, weight, EMPTY)
    assert_array_equal(gradient, 3 * weight)
    assert_array_equal(actual, [array_figures(x), array_figures(3 * weight)])


def test_under_scalify_the_figures_are_those_of_data_and_scale():
    x = ScaledArray((normal(0) * 4).astype(HALF), 2.0**-3)
    weight = ScaledArray(normal(1).astype(HALF), 2.0**-9)
    gradient, actual = jax.jit(scalify(probed_gradient()))(x, weight, EMPTY)
    assert_array_equal(actual, [array_figures(x), array_figures(gradient)])
    assert actual[0, 0] == -3
    assert actual[1, 0] == np.log2(float(gradient.scale))


@pytest.mark.parametrize("scaled", [False, True])
def test_every_step_of_a_scan_has_its_own_figures_and_the_gradient_that_it_has_without(
    scaled,
):
    def loss(x, weights, slots):
        @jax.checkpoint
        def layer(x, parameters):
            weight, slot = parameters
            product = x @ weight
            return gelu(product if slot is None else with_figures(product, slot)), None

        return jnp.mean(jnp.square(jax.lax.scan(layer, x, (weights, slots))[0]))

    x, weights = normal(0, (16, 32)), normal(1, (3, 32, 32)) / 4
    with_probes, without = jax.grad(loss, (1, 2)), jax.grad(loss, 1)
    if scaled:
        with_probes, without = scalify(with_probes), scalify(without)
        x = ScaledArray(x.astype(HALF), 1.0)
        weights = ScaledArray((weights * 4).astype(HALF), 0.25)
    gradient, actual = jax.jit(with_probes)(x, weights, jnp.zeros((3, *SLOT_SHAPE)))
    expected = jax.jit(without)(x, weights, None)
    assert_array_equal(asarray(gradient), asarray(expected))
    h = asarray(x)
    for weight, (forward, _) in zip(asarray(weights), actual, strict=True):
        h = h @ weight
        size = dict(zip(FIGURE_NAMES, forward.tolist(), strict=True))
        expected = jnp.sqrt(jnp.mean(jnp.square(h)))
        # Data in FP16: one rounding of each element and layer, and those of the layers
        # before.
        tolerance = 3 * 2**-10 if scaled else 1e-5
        assert_allclose(size["rms"] * 2.0 ** size["exponent"], expected, rtol=tolerance)
        h = gelu(h)
