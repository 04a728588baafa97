"""The traps of low precision that lie in scale propagation, one test each; and
rescales, which move a power of two between data and scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import assert_near, normal
from numpy.testing import assert_allclose, assert_array_equal
from propagated import scalify

import scalify_core as sc
from scalify_core import ScaledArray, as_scaled_array, asarray
from scalify_core.numerics.formats import E4M3, E5M2

HALF = jnp.float16


def rms(x):
    return float(jnp.sqrt(jnp.mean(jnp.square(x.data.astype(jnp.float32)))))


# Creep.


def test_creep_of_equal_sums_in_matrix_products_and_reductions():
    a, b = as_scaled_array((normal(0, 256, 768), normal(1, 768, 256)), 1.0, dtype=HALF)
    assert 0.7 <= rms(scalify(jnp.matmul)(a, b)) <= 1.42
    assert 0.7 <= rms(scalify(lambda a: a.sum(0))(a)) <= 1.42
    added = scalify(lambda a: jnp.zeros((4, 768)).at[jnp.arange(256) % 4].add(a))(a)
    assert 0.7 <= rms(added) <= 1.42


# Casts that do not saturate.


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float16])
def test_casts_saturate_and_keep_what_is_not_finite(dtype):
    x = ScaledArray(jnp.asarray([3.4e38, -3.4e38, 1.0, jnp.nan, jnp.inf]), 1.0)
    out = np.float32(scalify(lambda x: x.astype(dtype))(x).data)
    limit = float(jnp.finfo(dtype).max)
    assert_array_equal(out[:3], [limit, -limit, 1])
    assert not np.isfinite(out[3:]).any()


# A forward cast that differentiation removes.

CAST = jnp.asarray([1.01, -3.3, 0.77])
WAYS = {
    "plain": lambda fun: fun(CAST),
    "scaled": lambda fun: asarray(scalify(fun)(as_scaled_array(CAST, 1.0))),
}


@pytest.mark.parametrize("way", WAYS)
def test_cast_on_forward_acts_in_the_differentiated_function(way):
    # The gradient of sum(cast(x)^2) is 2 cast(x): it shows whether the forward pass was
    # rounded.
    gradient = jax.grad(lambda x: jnp.sum(sc.static.cast_on_forward(x, E4M3) ** 2))
    assert_array_equal(WAYS[way](gradient), 2 * E4M3.quantize(CAST))


@pytest.mark.parametrize("way", WAYS)
def test_cast_on_backward_rounds_the_gradient_only(way):
    both = jax.value_and_grad(
        lambda x: jnp.sum(sc.static.cast_on_backward(x, E5M2) ** 3)
    )
    value, gradient = WAYS[way](both)
    exact = 3 * CAST**2
    assert_allclose(value, jnp.sum(CAST**3), rtol=1e-6)
    assert float(jnp.abs(gradient - exact).max()) > 0
    assert_allclose(gradient, exact, rtol=2.0**-3)
    if way == "plain":
        assert_array_equal(gradient, E5M2.quantize(exact))


# Constants, masks and zeros.


@pytest.mark.parametrize("constant", [0.0, -np.inf, np.nan, 1e30])
def test_constant_operands_take_the_others_scale(constant):
    x = as_scaled_array(normal(0, 4, 8) * 2.0**-20, 2.0**-20, dtype=HALF)
    for fun in (
        lambda x: jnp.where(x > 0, x, constant),
        lambda x: jnp.maximum(x, constant),
        lambda x: jnp.concatenate([x, jnp.full((1, 8), constant)]),
        lambda x: jnp.pad(x, 1, constant_values=constant),
    ):
        assert scalify(fun)(x).scale == 2.0**-20


def test_broadcast_zeros_have_any_scale():
    x = as_scaled_array(normal(0, 8) * 2.0**-30, 2.0**-30, dtype=HALF)
    jitted = jax.jit(lambda n: (jnp.zeros(8) * n, jnp.arange(8)))
    for fun in (
        lambda x: jnp.zeros((4, 8)) + x[None] + 0.0,
        lambda x: jnp.zeros((3, 8)).at[1].add(x),
        lambda x: jitted(2.0)[0] + x,
        lambda x: np.zeros(8, np.float32) + x,
        lambda x: jnp.where(x > 0, x, jnp.zeros_like(jitted(2.0)[0])),
    ):
        assert scalify(fun)(x).scale == 2.0**-30


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


def test_the_gradient_of_a_bias_in_front_of_a_rescale_is_summed_before_it_is_rounded():
    """Beside rows that cancel, the others are below FP16's smallest number at the
    measured scale."""
    sign = (-1.0) ** jnp.arange(512)
    column = jnp.where(jnp.arange(512) < 8, sign, 1.3 * 2.0**-28)
    gradient = jnp.broadcast_to(column[:, None], (512, 16))

    def gradients(x, w, bias):
        layer = lambda w, bias: sc.static.dynamic_rescale_rms_grad(x @ w + bias[None])
        return jax.vjp(layer, w, bias)[1](jnp.cos(0 * x) * gradient)

    args = normal(1, 512, 16), normal(1, 16, 16), normal(1, 16)
    # the product reads the gradient in FP16
    _, of_bias = scalify(gradients)(*as_scaled_array(args, 1.0, dtype=HALF))
    exact = np.sum(np.float64(gradient), 0)
    assert_allclose(asarray(of_bias), exact, rtol=0.05)


def test_a_sum_of_what_was_rescaled_is_the_sum_of_the_values():
    """The sum goes back to the values before the rescale: one change of scale."""
    x, y = (
        as_scaled_array(normal(i, 512) * 2.0**e, 2.0**e, dtype=HALF)
        for i, e in enumerate((-20, -17))
    )

    def total(x, y):
        x, y = (sc.static.dynamic_rescale_rms(z * 2.0**-3) for z in (x, y))
        return x + y, x - 2 * y

    actual, expected = scalify(total)(x, y), total(*asarray((x, y)))
    assert_near(actual, expected, 2.0**-11)
    assert all(0.5 <= rms(z) <= 2 for z in actual)
    # On a GPU the scalars of both rescales are computed by the kernel that computes
    # those of the sum.
    of_sum = jax.jit(scalify(lambda x, y: total(x, y)[0])).trace(x, y)
    text = of_sum.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("optimization_barrier") == 1


FUNCTIONS = {
    "set_scaling": lambda x: sc.static.set_scaling(x, 4.0),
    "rebalance": lambda x: sc.static.rebalance(x, 2.0),
    "rebalance_grad": lambda x: sc.static.rebalance_grad(x, 2.0),
    "get_data_scale": lambda x: sc.static.get_data_scale(x)[0],
    "dynamic_rescale_max_grad": sc.static.dynamic_rescale_max_grad,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rescaling_functions_mean_nothing_in_plain_arithmetic(name):
    assert_array_equal(FUNCTIONS[name](normal(0, 8)), normal(0, 8))


@pytest.mark.parametrize(("name", "scale"), [("set_scaling", 4.0), ("rebalance", 2.0)])
def test_scales_are_set_and_moved_inside(name, scale):
    actual = scalify(FUNCTIONS[name])(as_scaled_array(normal(0, 8), 1.0))
    assert actual.scale == scale
    assert_array_equal(asarray(actual), normal(0, 8))


@pytest.mark.parametrize("as_scale", [float, jnp.float32])
def test_the_scale_of_a_gradient_is_moved(as_scale):
    gradient = lambda x, g: jax.vjp(FUNCTIONS["rebalance_grad"], x)[1](g)[0]
    g = ScaledArray(normal(1, 8), as_scale(0.5))
    actual = scalify(gradient)(as_scaled_array(normal(0, 8), 1.0), g)
    assert actual.scale == 1.0
    assert_array_equal(asarray(actual), asarray(g))


def test_scales_are_read_inside():
    x = as_scaled_array(normal(0, 8), 0.25)
    data, scale = scalify(sc.static.get_data_scale)(x)
    assert_array_equal(data, normal(0, 8) * 4)
    assert float(scale) == 0.25
