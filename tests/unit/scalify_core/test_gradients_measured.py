"""The scale of a gradient that is taken outside is measured, whatever made the gradient and in whatever format it is.

Its structure is that of its argument, so it is stored in the argument's format, also where the arithmetic that it comes
from was plain (complex numbers, integers, callbacks) or wider (FP32 and BF16 beside FP16).
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from scalify_core import PrecisionWarning, ScaledArray, as_scaled_array, asarray, scalify

X, W, C = (jax.random.normal(jax.random.key(i), (4, 16)) for i in range(3))
ROUNDINGS = {jnp.float16: 2.0**-11, jnp.float8_e4m3fn: 2.0**-4, jnp.float8_e5m2: 2.0**-3}
SIZES = (2.0**-40, 1.0, 2.0**40)


def convolution(x, w):
    return jnp.sum(jnp.fft.irfft(jnp.fft.rfft(x) * jnp.fft.rfft(w)) * C)


def complex_rotation(x, w):
    turned = lax.complex(w[:, :8], w[:, 8:]) * jnp.exp(1j * jnp.arange(8.0)[None])
    return jnp.sum(jnp.real(turned) * x[:, :8] + jnp.imag(turned) * x[:, 8:])


def spectral_layer(x, w):
    modes = jnp.fft.rfft(x)[:, :8] * lax.complex(w[:, :8], w[:, 8:])
    return jnp.sum(jnp.fft.irfft(modes, 16) * C)


@jax.custom_vjp
def signed(w, x):
    return jnp.sum(w * x)


def by_signs(w, kept):
    return jnp.sign(kept).astype(jnp.int8).astype(jnp.float32) * np.float32(1e-9), jnp.zeros_like(kept)


signed.defvjp(lambda w, x: (signed(w, x), x), lambda x, g: by_signs(None, x))


def sign_compression(x, w):
    return signed(w, x)


@jax.custom_vjp
def through_bits(w, x):
    return jnp.sum(w * x)


through_bits.defvjp(
    lambda w, x: (through_bits(w, x), x),
    lambda x, g: (
        lax.bitcast_convert_type(lax.bitcast_convert_type(x * g, jnp.int32) & np.int32(-(2**12)), jnp.float32),
        jnp.zeros_like(x),
    ),
)


def bits(x, w):
    return through_bits(w, x)


@jax.custom_vjp
def called_back(w, x):
    return jnp.sum(w * x)


called_back.defvjp(
    lambda w, x: (called_back(w, x), x),
    lambda x, g: (jax.pure_callback(np.asarray, jax.typeof(x), x), jnp.zeros_like(x)),
)


def callback(x, w):
    return called_back(w, x)


FUNCTIONS = [convolution, complex_rotation, spectral_layer, sign_compression, bits, callback]


def both(fun, x, w, way=jax.jit):
    """The gradient of the second argument that is taken outside, and that of plain FP32."""
    found = way(jax.grad(lambda x, w: asarray(scalify(fun)(x, w)), 1))(x, w)
    return found, np.asarray(jax.grad(fun, 1)(asarray(x), asarray(w)))


def error(found, expected):
    found, expected = (np.asarray(x, np.float64) for x in (asarray(found), expected))
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ROUNDINGS)
@pytest.mark.parametrize("fun", FUNCTIONS)
def test_a_gradient_that_plain_arithmetic_made_has_a_scale_of_its_own(fun, dtype, size):
    found, expected = both(fun, as_scaled_array(size * X, dtype=dtype), as_scaled_array(W, dtype=dtype))
    assert found.dtype == dtype
    assert error(found, expected) < ROUNDINGS[dtype]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wide", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", ROUNDINGS)
@pytest.mark.parametrize("scales", ["auto", "static"])
def test_a_gradient_that_wider_data_takes_part_in_has_a_scale_of_its_own(scales, dtype, wide, size):
    x, w = as_scaled_array(size * X, dtype=wide), as_scaled_array(W, dtype=dtype)
    loss = lambda x, w: jnp.sum(jnp.tanh(w) * x)
    found = jax.grad(lambda w: asarray(scalify(loss, scales=scales)(x, w)))(w)
    expected = jax.grad(loss, 1)(asarray(x), asarray(w))
    assert error(found, expected) < ROUNDINGS[dtype] + (2.0**-7 if wide == jnp.bfloat16 else 0)


@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_one_element_of_many_does_not_saturate(dtype):
    w = as_scaled_array(jnp.ones(2**20), dtype=dtype)
    assert asarray(jax.grad(lambda w: 3 * asarray(w)[0])(w))[0] == 3


def test_each_layer_of_a_stack_has_a_scale_of_its_own():
    layers = ScaledArray(jnp.stack([W, W]).astype(jnp.float16), jnp.ones(2))
    sizes = jnp.array([2.0**-40, 2.0**40])
    found, expected = both(lambda s, w: convolution(X, w[0]) * s[0] + convolution(X, w[1]) * s[1], sizes, layers)
    for layer in range(2):
        assert error(asarray(found)[layer], expected[layer]) < 2.0**-11


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e5m2])
@pytest.mark.parametrize("power", [-118, -120, -122, -124])
def test_a_gradient_near_the_smallest_numbers_of_float32_is_no_zero(power, dtype):
    found, expected = both(
        lambda s, w: jnp.sum(jnp.sin(w)) * s, jnp.float32(2.0**power), as_scaled_array(W, dtype=dtype)
    )
    assert error(found, expected) < ROUNDINGS[dtype]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_a_gradient_of_nothing_but_infinities_or_nan_is_that_and_nothing_is_said(dtype):
    for number in (np.inf, -np.inf, np.nan):
        found, _ = both(lambda s, w: jnp.sum(w) * s, jnp.float32(number), as_scaled_array(W, dtype=dtype))
        np.testing.assert_array_equal(asarray(found), np.full_like(W, number))  # warnings are errors in these tests


@pytest.mark.filterwarnings("ignore:.*reads as NaN:scalify_core.PrecisionWarning")
@pytest.mark.parametrize("read", [asarray, jax.jit(asarray), lambda x: asarray(scalify(lambda x: x * 1.0)(x))])
def test_a_gradient_that_an_infinite_norm_has_clipped_to_nothing_is_no_number(read):
    w = as_scaled_array(jax.random.normal(jax.random.key(1), (64, 64)), dtype=jnp.float16)
    gradient = jax.grad(lambda w: asarray(scalify(lambda w: jnp.sum(jnp.sin(w)))(w)))(w)
    clip = optax.clip_by_global_norm(1.0)
    clipped, _ = clip.update(gradient, clip.init(w))
    assert not np.asarray(clipped.data).any()
    assert np.isnan(read(clipped)).all()
    with pytest.warns(PrecisionWarning, match="reads as NaN"):
        asarray(clipped)
    zeros = jax.tree.map(lambda g: jnp.where(False, g, 0), gradient)
    assert not np.asarray(read(zeros)).any()
