"""Rescales under propagated scales: a power of two moves between data and scale, and no
value changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import normal
from numpy.testing import assert_allclose, assert_array_equal
from propagated import scalify

import scalify_core as sc
from scalify_core import ScaledArray, as_scaled_array, asarray

HALF = jnp.float16


def rms(x):
    return float(jnp.sqrt(jnp.mean(jnp.square(x.data.astype(jnp.float32)))))


@pytest.mark.parametrize("name", ["dynamic_rescale_rms", "dynamic_rescale_max"])
def test_rescale_finds_the_power_of_two_and_changes_no_value(name):
    x = as_scaled_array(normal(0, 512) * 2.0**-9, 1.0)
    out = scalify(getattr(sc.static, name))(x)
    assert float(out.scale) == (2.0**-9 if name.endswith("rms") else 2.0**-7)
    assert_array_equal(asarray(out), asarray(x))


@pytest.mark.parametrize("content", [0.0, np.inf, np.nan])
def test_rescale_of_zeros_or_what_is_not_finite_keeps_the_scale(content):
    out = scalify(sc.static.dynamic_rescale_rms)(
        as_scaled_array(jnp.full(4, content), 2.0**-5, dtype=HALF)
    )
    assert float(out.scale) == 2.0**-5


def test_rescale_of_the_gradient_leaves_the_forward_alone():
    def loss(x):
        return jnp.sum(jnp.sin(sc.static.dynamic_rescale_rms_grad(x)) * 2.0**-15)

    x = as_scaled_array(normal(0, 512), 1.0, dtype=HALF)
    gradient = scalify(jax.grad(loss))(x)
    assert 0.7 < rms(gradient) < 1.42
    assert scalify(sc.static.dynamic_rescale_rms_grad)(x).scale == 1.0
    assert_allclose(
        asarray(gradient), jnp.cos(asarray(x)) * 2.0**-15, rtol=2**-9, atol=2.0**-24
    )


def for_cuda(fun, *args):
    """The program that is compiled for a GPU."""
    return jax.jit(fun).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_a_bias_in_front_of_a_rescale_gets_its_gradient_from_what_was_there_before():
    """The sums of what is not rounded yet: beside rows that cancel, the others are
    below FP16's smallest number at the measured scale."""
    sign = (-1.0) ** jnp.arange(512)
    column = jnp.where(jnp.arange(512) < 8, sign, 1.3 * 2.0**-28)
    gradient = jnp.broadcast_to(column[:, None], (512, 16))

    def gradients(x, w, bias):
        def layer(w, bias):
            return sc.static.dynamic_rescale_rms_grad(x @ w + bias[None])

        return jax.vjp(layer, w, bias)[1](jnp.cos(0 * x) * gradient)

    shapes = ((512, 16), (16, 16), (16,))
    args = as_scaled_array([normal(1, *shape) for shape in shapes], 1.0, dtype=HALF)
    _, dbias = scalify(gradients)(*args)  # the product reads it in FP16
    exact = np.sum(np.float64(gradient), 0)
    assert_allclose(asarray(dbias), exact, rtol=0.05)


def test_a_sum_of_what_was_rescaled_is_the_sum_of_the_values():
    """The sum goes back to what was there before the rescale: one change of scale."""
    x, y = (
        as_scaled_array(normal(i, 512) * 2.0**e, 2.0**e, dtype=HALF)
        for i, e in enumerate((-20, -17))
    )

    def total(x, y):
        x, y = (sc.static.dynamic_rescale_rms(z * 2.0**-3) for z in (x, y))
        return x + y, x - 2 * y

    for actual, expected in zip(
        scalify(total)(x, y), total(asarray(x), asarray(y)), strict=True
    ):
        assert_allclose(
            asarray(actual),
            expected,
            rtol=0,
            atol=2.0**-11 * float(jnp.abs(expected).max()),
        )
        assert 0.5 <= rms(actual) <= 2
    # On a GPU the scalars of both rescales are computed by the kernel that computes
    # those of the sum.
    sum_alone = scalify(
        lambda x, y: sc.static.dynamic_rescale_rms(x) + sc.static.dynamic_rescale_rms(y)
    )
    assert for_cuda(sum_alone, x, y).count("optimization_barrier") == 1


def test_rescaling_functions_mean_nothing_in_plain_arithmetic():
    x = normal(0, 8)
    for fun in (
        lambda x: sc.static.set_scaling(x, 4.0),
        sc.static.stop_scaling,
        lambda x: sc.static.get_data_scale(x)[0],
        lambda x: sc.static.rebalance(x, 2.0),
        lambda x: sc.static.rebalance_grad(x, 2.0),
        sc.static.dynamic_rescale_rms,
        sc.static.dynamic_rescale_max,
        sc.static.dynamic_rescale_rms_grad,
        sc.static.dynamic_rescale_max_grad,
    ):
        assert_array_equal(fun(x), x)


def test_scales_are_set_read_moved_and_dropped_inside():
    x = as_scaled_array(normal(0, 8), 1.0)
    assert scalify(lambda x: sc.static.set_scaling(x, 4.0))(x).scale == 4.0
    assert scalify(lambda x: sc.static.rebalance(x, 2.0))(x).scale == 2.0
    gradient = scalify(
        lambda x, g: jax.vjp(lambda x: sc.static.rebalance_grad(x, 2.0), x)[1](g)[0]
    )
    for scale in (0.5, jnp.float32(0.5)):
        g = ScaledArray(normal(1, 8), scale)
        assert gradient(x, g).scale == 1.0
        assert_array_equal(asarray(gradient(x, g)), asarray(g))
    assert not isinstance(scalify(sc.static.stop_scaling)(x), ScaledArray)
    data, scale = scalify(sc.static.get_data_scale)(as_scaled_array(normal(0, 8), 0.25))
    assert_array_equal(data, normal(0, 8) * 4)
    assert float(scale) == 0.25
