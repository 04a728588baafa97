"""Dtypes that the user asks for, where FP16 or BF16 data would lose the result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.draws import draw_normal

from scalify_core import as_scaled_array, asarray, scalify

F32 = jnp.float32


def error(fun, *arrays, dtype=jnp.float16, jit=True):
    """The error of a scalified function, relative to plain FP32."""
    args = as_scaled_array(arrays, dtype=dtype)
    scaled = scalify(fun)
    actual = np.asarray(
        asarray((jax.jit(scaled) if jit else scaled)(*args)), np.float64
    )
    exact = np.asarray(fun(*asarray(args)), np.float64)
    return np.linalg.norm(actual - exact) / np.linalg.norm(exact)


def distances(x, precision=None):
    """Squared distances by a product, which FP16 operands would make noise."""
    y = x.astype(F32) + 100.3
    squares = (y * y).sum(1)
    return squares[:, None] + squares[None] - 2 * jnp.dot(y, y.T, precision=precision)


def in_custom_vmap(x):
    fun = jax.custom_batching.custom_vmap(distances)
    fun.def_vmap(lambda size, batched, x: (jax.vmap(distances)(x), True))
    return fun(x)


@pytest.mark.parametrize(
    "fun",
    [
        distances,
        in_custom_vmap,
        lambda x: lax.composite(distances, "tests.distances")(x),
        lambda x: distances(x, "F32_F32_F32"),
    ],
    ids=["direct", "custom_vmap", "composite", "algorithm"],
)
def test_products_of_what_the_user_cast_to_float32_are_float32(fun):
    assert error(fun, draw_normal(0, (8, 16))) < 2.0**-11


@pytest.mark.parametrize("size", [1.0, 1e4, 1e-8])
def test_an_algorithm_that_adds_up_in_float16_neither_overflows_nor_vanishes(size):
    x, z = draw_normal(0, (8, 16)), draw_normal(1, (8, 16))
    algorithm = lax.DotAlgorithmPreset.F16_F16_F16
    product = lambda x, z: jnp.dot(x * size, z.T, precision=algorithm) / size
    exact = np.asarray(jnp.dot(x, z.T))
    actual = asarray(scalify(product)(*as_scaled_array((x, z), dtype=jnp.float16)))
    assert np.linalg.norm(actual - exact) < 2.0**-9 * np.linalg.norm(exact)


@pytest.mark.parametrize("jit", [True, False])
def test_a_float32_result_of_bfloat16_operands_is_float32(jit):
    fun = lambda x, z: jnp.matmul(x, z.T, preferred_element_type=F32)
    x, z = draw_normal(0, (8, 16)), draw_normal(1, (8, 16))
    assert error(fun, x, z, dtype=jnp.bfloat16, jit=jit) < 2.0**-20


@pytest.mark.parametrize("lowest", [float(jnp.finfo(F32).min), -1e9])
def test_a_mask_does_not_set_the_scale_of_a_cast(lowest):
    def probabilities(x):
        scores = jnp.where(jnp.tri(8, dtype=bool), x @ x.T, lowest)
        return jax.nn.softmax(scores.astype(jnp.float16))

    for size in (1.0, 0.03):
        assert error(probabilities, size * draw_normal(0, (8, 8))) < 2.0**-8


def test_an_infinite_fill_of_eight_bit_data_is_infinite():
    def probabilities(x):
        ids = jnp.array([0, 3, 99])
        return jax.nn.softmax(
            jnp.take(x, ids, axis=1, mode="fill", fill_value=-jnp.inf)
        )

    x = draw_normal(0, (2, 8))
    assert error(probabilities, x, dtype=jnp.float8_e4m3fn) < 2.0**-9


def test_float64_keeps_its_digits():
    with jax.enable_x64(True):
        fun = lambda x: (x.astype(jnp.float64) + 1e8) - 1e8
        assert error(fun, draw_normal(0, (8,))) < 2.0**-10


def picks(kind, ids, h):
    """Rows of `h`, chosen by the product with one-hot vectors."""
    hot = jax.nn.one_hot(ids, h.shape[0], dtype=h.dtype)
    product = lambda a, b: a @ b
    if kind == "jit":
        return jax.jit(product)(hot, h)
    if kind == "remat":
        return jax.checkpoint(product)(hot, h)
    if kind == "scan, constant":
        return lax.scan(lambda c, a: (c, hot @ a), 0, h.T[..., None])[1][..., 0].T
    if kind == "scan, stack":
        return lax.scan(lambda c, a: (c, a @ h), 0, hot)[1]
    if kind == "cond":
        return lax.cond(h[0, 0] > -9, lambda h: hot @ h, lambda h: h[ids], h)
    zeros = jnp.zeros((ids.size, h.shape[0]), h.dtype)
    return zeros.at[jnp.arange(ids.size), ids].set(1) @ h


KINDS = ["jit", "remat", "scan, constant", "scan, stack", "cond", "scatter"]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_by_one_hot_vectors_are_equal_in_bodies_too(kind):
    ids = jnp.array([3, 0, 5])

    def equal(x):
        h = jnp.tanh(x)
        return jnp.mean((picks(kind, ids, h) == h[ids]).astype(F32))

    x = as_scaled_array(draw_normal(0, (8, 4)), dtype=jnp.float16)
    assert float(asarray(jax.jit(scalify(equal))(x))) == 1
