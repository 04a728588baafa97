"""What happens without a rule: the right numbers, and no warning (which in these tests
would be an error)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import HALF
from jax import lax
from numpy.testing import assert_allclose, assert_array_equal
from propagated import scalify

import scalify_core
from scalify_core import ScaledArray, as_scaled_array, asarray
from scalify_core.debug.testing import check_scalify
from scalify_core.static import composite

X = ScaledArray(jnp.asarray([[4.0, 16.0, 1.0], [9.0, 2.0, 0.5]]), 4.0)


def test_a_composite_without_a_rule_is_right_and_silent():
    @composite(name="halved_root")
    def halved_root(x):
        return jnp.sqrt(x) / 2

    x = as_scaled_array(jnp.asarray([4.0, 16.0]), 4.0)
    assert_array_equal(asarray(scalify(halved_root)(x)), [1.0, 2.0])
    check_scalify(halved_root, X, grad=True)


def test_primitives_without_a_rule_are_right_and_silent():
    def fold(a, b):
        return a + b * 1.0  # which JAX does not know to be a sum

    def fun(x):
        window = (1, 2), (1, 1), "valid"
        folds = lax.reduce(x, 0.0, fold, (1,)), lax.reduce_window(x, 0.0, fold, *window)
        return *folds, jnp.imag(jnp.conj(lax.complex(x, 2 * x))), jnp.abs(x + 1j)

    for dtype in (jnp.float32, HALF):
        check_scalify(fun, X, dtype=dtype, reduction=4)


def test_a_function_with_a_vmap_of_its_own_has_the_scales_of_its_equations():
    @jax.custom_batching.custom_vmap
    def product(a, b):
        return a @ b

    @product.def_vmap
    def _(size, batched, a, b):
        a, b = (
            jnp.broadcast_to(x, (size, *x.shape)) if not of else x
            for x, of in zip((a, b), batched, strict=True)
        )
        return jax.vmap(jnp.dot)(a, b), True

    a, b = (
        ScaledArray(jax.random.normal(jax.random.key(i), (4, 4), HALF), 2.0**40)
        for i in range(2)
    )
    # not 1, at which FP16 would overflow
    assert float(scalify(product)(a, b).scale) == 2.0**81
    check_scalify(product, a, b, dtype=jnp.float32, reduction=4)
    check_scalify(
        jax.vmap(product, in_axes=(0, None)),
        ScaledArray(a.data[None], 2.0**40),
        b,
        reduction=4,
    )


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap], ids=["jit", "vmap"])
def test_callbacks_and_prints_see_logical_values(transform, capfd):
    seen = []

    def told(x):
        jax.debug.callback(lambda x: seen.append(np.array(x)), x)
        jax.debug.print("first {x}", x=x.ravel()[0])
        return x * 2

    out = transform(scalify(told))(ScaledArray(X.data.astype(HALF), 2.0**20))
    jax.block_until_ready(out)
    jax.effects_barrier()
    assert all(x.dtype == np.float32 for x in seen)
    assert_array_equal(np.reshape(seen, (2, 3)), X.data * 2.0**20)
    assert f"first {4 * 2**20}" in capfd.readouterr().out.replace(".0", "")


def test_a_composite_without_a_rule_runs_in_float32_behind_a_cast():
    square = composite(lambda x: x * x, name="square_without_a_rule")
    x = as_scaled_array(jnp.full(4, 100.0), dtype=HALF)
    fun = lambda x: square(10 * x.astype(HALF)) / 1e4
    actual = asarray(scalify_core.scalify(fun)(x))
    assert_allclose(actual, 100.0, rtol=2**-10)


@pytest.mark.parametrize("change", [-1.0, 0.75])
def test_a_fill_value_outlives_a_constant_that_multiplies_it(change):
    x = ScaledArray(jnp.zeros((2, 2), HALF), 1.0)

    def both(x):
        d = jnp.maximum(x, 1e-12) * change
        return d @ d, 1 / d

    _, actual = scalify(both)(x)
    assert np.all(np.isfinite(asarray(actual)))
