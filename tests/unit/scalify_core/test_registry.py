"""Without a rule: the right numbers, and no warning (which in these tests would be an
error). Closures and attributes are read at each call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import HALF
from numpy.testing import assert_allclose, assert_array_equal
from propagated import scalify

import scalify_core
from scalify_core import ScaledArray, as_scaled_array, asarray
from scalify_core.debug.testing import check_scalify
from scalify_core.static import composite

X = ScaledArray(jnp.asarray([[4.0, 16.0, 1.0], [9.0, 2.0, 0.5]]), 4.0)


def test_a_composite_without_a_rule_is_right_and_silent():
    halved_root = composite(lambda x: jnp.sqrt(x) / 2, name="halved_root")
    x = as_scaled_array(jnp.asarray([4.0, 16.0]), 4.0)
    assert_array_equal(asarray(scalify(halved_root)(x)), [1.0, 2.0])
    check_scalify(halved_root, X, grad=True)


def test_a_function_with_a_vmap_of_its_own_has_the_scales_of_its_equations():
    @jax.custom_batching.custom_vmap
    def product(a, b):
        return a @ b

    @product.def_vmap
    def _(size, batched, a, b):
        assert (size, batched) == (1, [True, False])
        return a @ b, True

    a, b = (
        ScaledArray(jax.random.normal(jax.random.key(i), (4, 4), HALF), 2.0**40)
        for i in range(2)
    )
    # not 1, at which FP16 would overflow
    assert float(scalify(product)(a, b).scale) == 2.0**81
    mapped = jax.vmap(product, in_axes=(0, None))
    check_scalify(mapped, ScaledArray(a.data[None], 2.0**40), b, reduction=4)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap], ids=["jit", "vmap"])
def test_callbacks_see_logical_values(transform):
    seen = []

    def fun(x):
        jax.debug.callback(lambda x: seen.append(np.array(x)), x)
        return x * 2

    transform(scalify(fun))(ScaledArray(X.data.astype(HALF), 2.0**20))
    jax.effects_barrier()
    assert all(x.dtype == np.float32 for x in seen)
    assert_array_equal(np.reshape(seen, (2, 3)), X.data * 2.0**20)


def test_a_composite_without_a_rule_runs_in_float32_behind_a_cast():
    square = composite(lambda x: x * x, name="square_without_a_rule")
    x = as_scaled_array(jnp.full(4, 100.0), dtype=HALF)
    fun = lambda x: square(10 * x.astype(HALF)) / 1e4
    actual = asarray(scalify_core.scalify(fun)(x))
    assert_allclose(actual, 100.0, rtol=2**-10)


def test_a_fill_value_outlives_a_constant_that_multiplies_it():
    fun = lambda x: 1 / (jnp.maximum(x, 1e-12) * -0.75)
    actual = scalify(fun)(ScaledArray(jnp.zeros(2, HALF), 1.0))
    assert np.all(np.isfinite(asarray(actual)))


BATCH = np.ones((4, 8), np.float32)
WEIGHTS = as_scaled_array(jnp.ones((8, 3)), dtype=HALF)


def test_a_variable_of_a_closure_is_read_anew_also_without_scaled_arguments():
    def loss(w):
        return jnp.sum(batch @ w)

    fun = scalify_core.scalify(loss)
    for batch in (BATCH, 3 * BATCH):  # noqa: B007 (it is what `loss` reads)
        for w in (WEIGHTS, jnp.ones((8, 3))):
            assert float(asarray(fun(w))) == float(loss(asarray(w)))
