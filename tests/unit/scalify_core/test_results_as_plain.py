"""Results are stored with the dtypes that plain code of the same formats gives them."""

import jax
import jax.numpy as jnp
import optax
import pytest
from beside_plain import normal
from numpy.testing import assert_allclose, assert_array_equal

from scalify_core import as_scaled_array, asarray, scalify
from scalify_core.array.scaled_array import is_scaled_array

F32, HALF, E4M3 = jnp.float32, jnp.float16, jnp.float8_e4m3fn


def dtypes(tree):
    return {
        x.dtype.type
        for x in jax.tree.leaves(tree, is_leaf=is_scaled_array)
        if jnp.issubdtype(x.dtype, jnp.floating)
    }


def test_an_optimiser_step_leaves_state_in_float32_and_parameters_narrow():
    tx = optax.adam(1e-2)

    def step(params, state, gradient):
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    scaled_step = jax.jit(scalify(step))
    params, gradient = as_scaled_array(
        (normal(0, 16, 16), normal(1, 16, 16)), dtype=HALF
    )
    plain, exact = asarray(params), asarray(gradient)
    state = like = tx.init(plain)
    for _ in range(3):
        params, state = scaled_step(params, state, gradient)
        plain, like = step(plain, like, exact)
        assert dtypes(params) == {HALF}
        assert dtypes(state) == {F32}
    close = lambda x, y: assert_allclose(x, y, rtol=1e-6)
    jax.tree.map(close, asarray(state), like)
    assert_allclose(asarray(params), plain, rtol=3 * 2.0**-11, atol=1e-6)


def mean_square(x, w):
    return jnp.mean((x @ w).astype(F32) ** 2)


@pytest.mark.parametrize("dtype", [HALF, jnp.bfloat16, E4M3])
def test_a_loss_that_plain_code_has_in_float32_is_so_and_gradients_are_as_narrow_as_what_they_are_of(
    dtype,
):
    x, w = as_scaled_array((normal(0, 8, 16), normal(1, 16, 16)), dtype=dtype)
    assert scalify(mean_square)(x, w).dtype == F32
    loss, gradient = scalify(jax.value_and_grad(mean_square))(x, w)
    assert (loss.dtype, gradient.dtype) == (F32, HALF if dtype == E4M3 else dtype)
    product = jnp.matmul(*asarray((x, w)), precision="highest")
    # operands are what they were
    tolerance = 2.0**-9 if dtype == jnp.bfloat16 else 2.0**-20
    assert_allclose(asarray(loss), jnp.mean(product**2), rtol=tolerance)


NARROW = {
    "a sum of its own": lambda x, y: (x + y).astype(x.dtype),
    "a mean": lambda x, y: jnp.mean(x),
    "beside a scalar of Python": lambda x, y: x * 1.5,
}


@pytest.mark.parametrize("name", NARROW)
def test_what_is_narrow_in_plain_code_is_narrow(name):
    x, y = (
        as_scaled_array(normal(0, 8, 16), dtype=HALF),
        as_scaled_array(normal(1, 8, 16), dtype=F32),
    )
    assert NARROW[name](asarray(x).astype(HALF), asarray(y)).dtype == HALF
    assert scalify(NARROW[name])(x, y).dtype == HALF


def test_data_in_eight_bits_counts_as_sixteen_and_what_is_cast_to_eight_has_eight():
    x = as_scaled_array(normal(0, 8, 16), dtype=E4M3)
    assert scalify(jnp.transpose)(x).dtype == HALF
    assert scalify(lambda x: x.T.astype(E4M3))(x).dtype == E4M3
    assert scalify(lambda x: x.T.astype(F32))(x).dtype == F32


TABLE = jnp.linspace(0.5, 1.5, 16)[None]


def test_what_promotion_makes_float32_in_plain_code_is_float32():
    x, w = as_scaled_array((normal(0, 8, 16), normal(1, 16, 16)), dtype=HALF)

    def fun(x, w, rate):
        return (
            x * TABLE,
            w - rate * w.T,
            jnp.mean(x * TABLE),
            x * 1.5,
            x * TABLE.astype(x.dtype),
        )

    rate = jnp.float32(0.1)
    expected = [
        y.dtype for y in fun(asarray(x).astype(HALF), asarray(w).astype(HALF), rate)
    ]
    assert expected == [F32, F32, F32, HALF, HALF]
    assert [y.dtype for y in scalify(fun)(x, w, rate)] == expected


OF_ITS_SHAPE = {
    "an average": lambda g, state: 0.9 * state + 0.1 * g,
    "a gradient": jax.grad(
        lambda g, state: jnp.mean(jnp.tanh(g.T @ jnp.tanh(g @ state.T))), 1
    ),
}


@pytest.mark.parametrize("name", OF_ITS_SHAPE)
def test_a_state_in_float32_stays_so(name):
    g, state, fun = (
        as_scaled_array(normal(0, 8, 16), dtype=HALF),
        normal(1, 8, 16),
        OF_ITS_SHAPE[name],
    )
    actual = scalify(fun)(g, state)
    assert {actual.dtype.type, jax.jit(scalify(fun))(g, state).dtype.type} == {F32}
    assert_allclose(
        asarray(actual),
        fun(asarray(g), state),
        rtol=1e-6,
        atol=2.0**-11 * ("gradient" in name),
    )
    assert scalify(fun)(g, state.astype(HALF)).dtype == HALF


ONLY_CAST = {
    "with another result": lambda x: (x.astype(F32), x * 2)[0],
    "in a loop": lambda x: jax.lax.scan(
        lambda carry, row: (carry, row.astype(F32)), 0.0, x
    )[1],
}


@pytest.mark.parametrize("dtype", [HALF, E4M3])
@pytest.mark.parametrize("name", ONLY_CAST)
def test_an_argument_that_is_only_cast_is_float32_with_every_bit(name, dtype):
    x = as_scaled_array(normal(0, 8, 16) * 2.0**-40, dtype=dtype)
    actual = scalify(ONLY_CAST[name])(x)
    assert actual.dtype == F32
    assert_array_equal(asarray(actual), asarray(x))
    assert scalify(lambda x: (x, x.astype(F32)))(x)[0].dtype == dtype


def test_what_is_asked_for_within_a_nested_scalify_is_float32():
    x, w = as_scaled_array((normal(0, 8, 16), normal(1, 16, 16)), dtype=HALF)
    inner = scalify(lambda x: jnp.sin(x.astype(F32)))
    assert scalify(lambda x: inner(x))(x).dtype == F32

    def fun(x, w):
        return jnp.sum(jnp.sin(x.astype(F32)) @ w.astype(F32))

    actual = scalify(lambda x, w: scalify(fun)(x, w))(x, w)
    assert_allclose(asarray(actual), fun(*asarray((x, w))), rtol=2.0**-18)
    assert scalify(fun)(*asarray((x, w))) == jax.jit(fun)(*asarray((x, w)))
