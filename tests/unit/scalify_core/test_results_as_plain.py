"""Results are stored with the dtypes that plain code of the same formats gives them,
and as numbers that their readers can take a root of."""

import jax
import jax.numpy as jnp
import pytest
from beside_plain import F32, HALF, normal
from numpy.testing import assert_allclose, assert_array_equal

from scalify_core import as_scaled_array, asarray, scalify

E4M3 = jnp.float8_e4m3fn


@pytest.mark.parametrize("dtype", [HALF, jnp.bfloat16, E4M3])
def test_a_loss_is_float32_as_in_plain_code_and_gradients_are_narrow(dtype):
    mean_square = lambda x, w: jnp.mean((x @ w).astype(F32) ** 2)
    x, w = as_scaled_array((normal(0, 8, 16), normal(1, 16, 16)), dtype=dtype)
    loss, gradient = scalify(jax.value_and_grad(mean_square))(x, w)
    assert (loss.dtype, gradient.dtype) == (F32, HALF if dtype == E4M3 else dtype)
    product = jnp.matmul(*asarray((x, w)), precision="highest")
    # operands are what they were
    tolerance = 2.0**-9 if dtype == jnp.bfloat16 else 2.0**-20
    assert_allclose(asarray(loss), jnp.mean(product**2), rtol=tolerance)


NARROW = {
    "a sum of its own": lambda x, y: (x + y).astype(x.dtype),
    "beside a scalar of Python": lambda x, y: x * 1.5,
}


@pytest.mark.parametrize("name", NARROW)
def test_results_that_are_narrow_in_plain_code_are_narrow(name):
    x, y = (as_scaled_array(normal(0, 8, 16), dtype=dtype) for dtype in (HALF, F32))
    assert scalify(NARROW[name])(x, y).dtype == HALF


def test_data_in_eight_bits_counts_as_sixteen_and_what_is_cast_to_eight_has_eight():
    x = as_scaled_array(normal(0, 8, 16), dtype=E4M3)
    assert scalify(jnp.transpose)(x).dtype == HALF
    assert scalify(lambda x: x.T.astype(E4M3))(x).dtype == E4M3
    assert scalify(lambda x: x.T.astype(F32))(x).dtype == F32


def test_results_that_promotion_makes_float32_in_plain_code_are_float32():
    table = jnp.linspace(0.5, 1.5, 16)[None]
    x, w = as_scaled_array((normal(0, 8, 16), normal(1, 16, 16)), dtype=HALF)

    def fun(x, w, rate):
        return x * table, w - rate * w.T, jnp.mean(x * table), x * table.astype(x.dtype)

    actual = scalify(fun)(x, w, jnp.float32(0.1))
    assert [y.dtype for y in actual] == [F32, F32, F32, HALF]


OF_ITS_SHAPE = {
    "an average": lambda g, state: 0.9 * state + 0.1 * g,
    "a gradient": jax.grad(
        lambda g, state: jnp.mean(jnp.tanh(g.T @ jnp.tanh(g @ state.T))), 1
    ),
}


@pytest.mark.parametrize("name", OF_ITS_SHAPE)
def test_a_state_in_float32_stays_so(name):
    g, state = as_scaled_array(normal(0, 8, 16), dtype=HALF), normal(1, 8, 16)
    fun = OF_ITS_SHAPE[name]
    actual = scalify(fun)(g, state)
    assert actual.dtype == F32
    atol = 2.0**-11 if "gradient" in name else 0
    assert_allclose(asarray(actual), fun(asarray(g), state), rtol=1e-6, atol=atol)
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


SIZES = 10.0 ** jnp.linspace(-4, 3, 16)[:, None]
X = as_scaled_array(normal(0, 16, 4), dtype=HALF)


def squares(x):
    return (SIZES.astype(x.dtype) * x) ** 2  # 46 octaves, and FP16 has 40


# A function of a value that is returned, too, and whether the value is made in a call.
READERS = {
    "sqrt": (jnp.sqrt, False),
    "log": (jnp.log, True),
    "branch": (
        lambda v: jax.lax.cond(v.sum() > 0, jnp.sqrt, jnp.square, v),
        False,
    ),
    # the second iteration takes the root
    "loop": (
        lambda v: jax.lax.while_loop(
            lambda carry: carry[0] < 2,
            lambda carry: (carry[0] + 1, carry[2], jnp.sqrt(carry[1])),
            (0, jnp.ones_like(v), v),
        )[1:],
        False,
    ),
    "checkpoint": (jax.checkpoint(lambda v: jnp.sqrt(v * 2)), True),
}


@pytest.mark.parametrize("name", READERS)
def test_a_value_that_a_root_or_logarithm_reads_is_not_zero(name):
    read, is_called = READERS[name]

    def step(x):
        v = squares(x)
        return v, read(v)

    actual, exact = (
        scalify(jax.jit(step) if is_called else step)(X)[0],
        squares(asarray(X)),
    )
    assert (asarray(actual) > 0).all()
    assert_allclose(asarray(actual), exact, rtol=2**-10, atol=2.0**-38 * exact.max())


def test_of_what_nothing_is_taken_small_numbers_may_be_zeros():
    assert not asarray(scalify(squares)(X)).all()


def test_what_a_scan_carries_and_takes_the_root_of_is_finite():
    def steps(x):
        def update(v, g):
            v = 0.5 * v + g
            return v, jnp.sqrt(v)

        grads = jnp.stack([squares(x)] * 3)
        return jax.lax.scan(update, squares(x), grads)

    (actual, _), (exact, _) = scalify(steps)(X), steps(asarray(X))
    assert (asarray(actual) > 0).all()
    assert_allclose(asarray(actual), exact, rtol=2**-9, atol=2.0**-38 * exact.max())


def test_the_sign_stays_and_zeros_stay():
    x = as_scaled_array(jnp.array([1.0, -1.0, 0.0, 1.0]), dtype=HALF)
    sizes = jnp.array([1e-14, 1e-14, 1.0, 1.0])
    actual, _ = scalify(lambda x: (lambda v: (v, 1 / v))(x * sizes.astype(x.dtype)))(x)
    assert jnp.sign(asarray(actual)).tolist() == [1, -1, 0, 1]
