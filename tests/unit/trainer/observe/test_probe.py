"""Probes: the identity, whose slot's gradient is what was seen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import HALF
from draws import draw_normal
from numpy.testing import assert_allclose, assert_array_equal
from propagated import scalify

from scalify_core import ScaledArray, asarray
from scalify_core.numerics.formats import E4M3, E5M2, FloatFormat
from scalify_core.ops.functional import gelu
from trainer.observe.probe import FIGURES, SLOT, figures, probe

EMPTY = jnp.zeros(SLOT)


def normal(seed, shape=(64, 32)):
    return draw_normal(seed, shape)


def seen(**formats):
    """Loss gradient and figures of `x`, whose gradient is `3 * weight`."""

    def loss(x, weight, slot):
        return jnp.sum(3 * weight * probe(x, slot, **formats))

    return jax.grad(loss, (0, 2))


def test_the_slots_gradient_is_the_figures_of_the_array_and_of_its_gradient():
    x, weight = 2 * normal(0), normal(1)
    gradient, actual = jax.jit(seen())(x, weight, EMPTY)
    assert_array_equal(gradient, 3 * weight)
    assert_array_equal(actual, [figures(x), figures(3 * weight)])
    assert dict(zip(FIGURES, actual[0].tolist(), strict=True))["rms"] == pytest.approx(
        2, rel=0.1
    )


def test_under_scalify_the_figures_are_those_of_data_and_scale():
    x = ScaledArray((normal(0) * 4).astype(HALF), 2.0**-3)
    weight = ScaledArray(normal(1).astype(HALF), 2.0**-9)
    gradient, actual = jax.jit(scalify(seen()))(x, weight, EMPTY)
    assert_array_equal(actual[0], figures(x))
    assert_array_equal(actual[1], figures(gradient))
    assert actual[0, 0] == -3
    assert actual[1, 0] == np.log2(float(gradient.scale))


@pytest.mark.parametrize("scale", [None, 2.0**-4])
def test_the_formats_are_those_of_the_casts_to_come(scale):
    x, weight = 300 * normal(0), 1e-5 * normal(1)
    function = seen(
        forward=functools.partial(figures, fmt=E4M3),
        backward=functools.partial(figures, fmt=E5M2),
    )
    if scale is None:
        gradient, actual = jax.jit(function)(x, weight, EMPTY)
    else:
        gradient, actual = jax.jit(scalify(function))(
            ScaledArray(x, scale), ScaledArray(weight, scale), EMPTY
        )
        gradient = gradient.data
    saturated, lost = (
        np.mean(np.abs(x) > 448),
        np.mean(np.asarray(E5M2.quantize(gradient)) == 0),
    )
    assert saturated > 0.1
    assert lost > 0.1
    assert actual[0, FIGURES.index("saturated")] == pytest.approx(saturated, abs=1e-6)
    assert actual[1, FIGURES.index("underflow")] == pytest.approx(lost, abs=1e-6)


def layers(x, weights, slots, *, remat):
    """A scan over layers with a probe in each."""

    def layer(x, parameters):
        weight, slot = parameters
        return gelu(x @ weight) if slot is None else gelu(probe(x @ weight, slot)), None

    body = jax.checkpoint(layer) if remat else layer
    return jnp.mean(jnp.square(jax.lax.scan(body, x, (weights, slots))[0]))


@pytest.mark.parametrize(("remat", "scaled"), [(True, False), (False, True)])
def test_every_step_of_a_scan_has_its_own_figures_and_the_gradient_is_bitwise_that_without_probes(
    remat, scaled
):
    x, weights = normal(0, (16, 32)), normal(1, (3, 32, 32)) / 4
    function = functools.partial(layers, remat=remat)
    with_probes, without = jax.grad(function, (1, 2)), jax.grad(function, 1)
    if scaled:
        with_probes, without = scalify(with_probes), scalify(without)
        x, weights = (
            ScaledArray(x.astype(HALF), 1.0),
            ScaledArray((weights * 4).astype(HALF), 0.25),
        )
    gradient, actual = jax.jit(with_probes)(x, weights, jnp.zeros((3, *SLOT)))
    right = jax.jit(without)(x, weights, None)
    assert_array_equal(asarray(gradient), asarray(right))
    h, rms = asarray(x), []
    for weight in asarray(weights):
        h = h @ weight
        rms.append(float(jnp.sqrt(jnp.mean(jnp.square(h)))))
        h = gelu(h)
    size = (
        actual[:, 0, FIGURES.index("rms")]
        * 2.0 ** actual[:, 0, FIGURES.index("exponent")]
    )
    # Data in FP16: one rounding of each element and layer, and those of the layers
    # before.
    assert_allclose(size, rms, rtol=3 * 2**-10 if scaled else 1e-5)


def test_a_probe_takes_no_rounding_away_from_the_others_who_read_its_array():
    """What a matrix product reads and something else too is rounded once for both: it
    is read through the probe.

    Where it is differentiated, which is what probes are for.
    """

    def function(x, weight, slot):
        def outputs(x, slot):
            squares = x * x
            product = (squares if slot is None else probe(squares, slot)) @ weight
            return product, squares + 1

        return jax.vjp(outputs, x, slot)[0]

    x = ScaledArray(normal(0).astype(HALF), 1.0)
    weight = ScaledArray(normal(1, (32, 8)).astype(HALF), 1.0)
    for actual, right in zip(
        scalify(function)(x, weight, EMPTY),
        scalify(function)(x, weight, None),
        strict=True,
    ):
        assert_array_equal(actual.data, right.data)


def test_a_probe_without_a_derivative_is_the_identity():
    x = normal(0)
    assert_array_equal(probe(x, EMPTY, forward=FloatFormat.parse("e3m4")), x)
    scaled = ScaledArray(x.astype(HALF), 0.5)
    out = scalify(probe)(scaled, EMPTY)
    assert_array_equal(out.data, scaled.data)
    assert out.scale == 0.5
