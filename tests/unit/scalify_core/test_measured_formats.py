"""Measured scales and formats: what is stored, what products read, casts and rescales
of the user's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import HALF, ROUNDINGS, SIZES, both, error, normal
from numpy.testing import assert_allclose, assert_array_equal

import scalify_core as sc
from scalify_core import ScaledArray, as_scaled_array, asarray, scalify
from scalify_core.interpreter.measured import quantize
from scalify_core.interpreter.value import logical
from scalify_core.numerics import amax
from scalify_core.numerics.formats import BF16, E4M3, E5M2, FP16


@pytest.mark.parametrize("fmt", [FP16, BF16, E4M3, E5M2], ids=str)
def test_what_is_stored_fills_its_format_without_saturating(fmt):
    store = jax.jit(lambda x: quantize.quantized(x, fmt.dtype))
    for size in SIZES:
        x = normal(0, 256) * size
        actual = store(x)
        limit = 2 * fmt.epsilon * float(jnp.abs(x).max())
        assert_allclose(logical(actual), x, atol=limit)
        if fmt is not BF16:
            peak = float(jnp.abs(actual.data.astype(jnp.float32)).max())
            top = 2.0 ** amax.top_of(fmt.dtype)
            assert top <= peak <= 2 * top <= fmt.max
    assert_array_equal(logical(quantize.quantized(jnp.zeros(4), fmt.dtype)), 0)
    assert quantize.quantized(jnp.zeros((0, 3)), fmt.dtype).shape == (0, 3)


def test_formats_of_the_range_of_fp32_are_not_measured():
    def measures(dtype):
        args = as_scaled_array((normal(0, 16, 16), normal(1, 16, 16)), dtype=dtype)
        text = jax.jit(scalify(lambda x, w: jnp.tanh(x @ w) @ w)).lower(*args).as_text()
        return "applies stablehlo.maximum" in text  # the largest magnitude

    assert measures(HALF)
    assert not measures(jnp.float32)
    assert not measures(jnp.bfloat16)


def test_products_read_the_format_and_weights_are_not_measured_again():
    w = as_scaled_array(normal(1, 16, 16), dtype=HALF)
    jaxpr = jax.make_jaxpr(scalify(lambda x, w: jnp.tanh(x @ w) @ w.T))(
        as_scaled_array(normal(0, 16, 16), dtype=HALF), w
    )
    text = str(jaxpr)
    assert text.count("reduce_max") == len({"tanh", "result"})
    inner = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert all(x.aval.dtype == HALF for e in inner for x in e.invars)
    assert len(inner) == 2


def test_a_result_that_goes_round_a_loop_of_calls_compiles_once_and_keeps_its_format():
    step = jax.jit(
        scalify(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w))
    )
    w, x = as_scaled_array((normal(0, 8, 8), normal(1, 32, 8)), dtype=HALF)
    plain, expected = jnp.asarray(w), asarray(w)
    for _ in range(20):
        w = step(w, x)
        expected = expected - 0.1 * jax.grad(lambda w: jnp.mean((asarray(x) @ w) ** 2))(
            expected
        )
    assert step._cache_size() == 1
    assert w.dtype == HALF
    assert error(w, expected) <= 20 * FP16.epsilon * float(
        jnp.linalg.norm(plain) / jnp.linalg.norm(expected)
    )


def test_an_argument_that_is_returned_is_returned_as_it_is():
    w = ScaledArray(normal(0, 4).astype(HALF), 2.0**-30)
    actual = scalify(lambda w, x: (w, w + x))(
        w, as_scaled_array(normal(1, 4), dtype=HALF)
    )[0]
    assert actual.is_static
    assert actual.scale == w.scale
    assert_array_equal(actual.data, w.data)


@pytest.mark.parametrize("sizes", [(2.0**-40, 2.0**30), (2.0**30, 2.0**-60)])
def test_fp8_products_cast_at_measured_scales_forward_and_backward(sizes):
    x, w = normal(0, 32, 32) * sizes[0], normal(1, 32, 32) * sizes[1]

    def gradient(dot):
        product = lambda x, w: dot(x, w, (((1,), (0,)), ((), ())))
        loss = lambda x, w: jnp.sum(product(x, w) * normal(2, 32, 32)) * 1e-12
        return jax.grad(loss, (0, 1))

    of_fp8 = gradient(sc.fp8_dot_general)
    actual, _ = both(of_fp8, x, w)
    # A product of casts to three and two bits: errors are independent, and average out
    # to a format's epsilon.
    expected = gradient(jax.lax.dot_general)(x, w)
    assert error(actual, expected) <= E5M2.epsilon / 2
    args = as_scaled_array((x, w), dtype=HALF)
    text = str(jax.make_jaxpr(scalify(of_fp8))(*args))
    assert "f8_e4m3fn" in text
    assert "f8_e5m2" in text


# What acts on scales.


def test_rescales_are_the_identity_and_a_scale_that_is_set_is_kept():
    def fun(x):
        return (
            sc.static.dynamic_rescale_rms(x * 1e-6),
            sc.static.set_scaling(x, 2.0**-3),
            sc.static.stop_scaling(x),
            sc.static.rebalance(x, 4.0),
        )

    x = as_scaled_array(normal(0, 64), dtype=HALF)
    rescaled, kept, plain, rebalanced = jax.jit(scalify(fun))(x)
    assert error(rescaled, asarray(x) * 1e-6) <= ROUNDINGS[HALF]
    assert_array_equal(asarray(kept), asarray(x))
    assert isinstance(plain, jax.Array)
    assert_array_equal(asarray(rebalanced), asarray(x))


@pytest.mark.parametrize("size", [2.0**-60, 2.0**20])
def test_simulated_formats_are_applied_to_data(size):
    fmt = sc.numerics.formats.FloatFormat.parse("e4m3")
    x = as_scaled_array(normal(0, 64) * size)
    actual = asarray(jax.jit(scalify(lambda x: sc.static.cast_on_forward(x, fmt)))(x))
    assert_allclose(actual, asarray(x), rtol=fmt.epsilon, atol=2.0**-9 * size)
    assert not np.array_equal(actual, asarray(x))
