"""Results that have no gradient, as those of a loop of unknown length, beside results that have: as in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalify_core import as_scaled_array, asarray, scalify

A = jnp.abs(jax.random.normal(jax.random.key(0), (16,))) + 0.1


def root(a):
    """By Newton's method, until it is right."""
    going_on = lambda carry: jnp.any(jnp.abs(carry**2 - a) > 1e-2 * a)
    return lax.while_loop(going_on, lambda x: 0.5 * (x + a / x), a)


def loss_and_root(a):
    return jnp.sum(a**3), {"root": root(a), "at": jnp.argmax(a), "mean": jnp.mean(a)}


def solved_and_root(a):
    solution, _ = jax.scipy.sparse.linalg.cg(lambda v: v * (1 + a**2), a, maxiter=20)
    return jnp.sum(solution * a), {"root": jax.jit(root)(a)}


def asked(fun, **options):
    """The gradient of the first result, taken outside, and the others."""

    def outside(a):
        loss, others = scalify(fun, **options)(a)
        return asarray(loss), others

    return jax.grad(outside, has_aux=True)


@pytest.mark.parametrize("options", [{}, {"scales": "static"}, {"check": True}], ids=str)
@pytest.mark.parametrize("way", [lambda f: f, jax.jit])
@pytest.mark.parametrize("fun", [loss_and_root, solved_and_root])
def test_results_that_are_not_differentiated_need_no_gradient(fun, way, options):
    a = as_scaled_array(A, dtype=jnp.float16)
    found, others = asarray(way(asked(fun, **options))(a))
    expected, expected_others = jax.grad(fun, has_aux=True)(asarray(a))
    np.testing.assert_allclose(found, expected, rtol=4e-3 if options.get("scales") else 2.0**-11)
    np.testing.assert_allclose(others["root"], expected_others["root"], rtol=2e-2)


def test_of_a_batch_and_behind_a_stopped_gradient_too():
    batch = as_scaled_array(jnp.stack([A, 2 * A]), jnp.float32([[1], [1]]))
    found, _ = jax.vmap(asked(loss_and_root))(batch)
    np.testing.assert_allclose(asarray(found), 3 * asarray(batch) ** 2, rtol=1e-6)

    def weighted(a):
        loss, others = scalify(loss_and_root)(a)
        return asarray(loss) * jnp.sum(lax.stop_gradient(asarray(others["root"]))) + asarray(others["mean"])

    expected = lambda a: jnp.sum(a**3) * jnp.sum(lax.stop_gradient(root(a))) + jnp.mean(a)
    a = as_scaled_array(A)
    np.testing.assert_allclose(asarray(jax.jit(jax.grad(weighted))(a)), jax.grad(expected)(A), rtol=1e-5)


def test_a_gradient_that_does_not_exist_is_refused():
    def of_both(a):
        loss, others = scalify(loss_and_root)(a)
        return asarray(loss) + jnp.sum(asarray(others["root"]))

    with pytest.raises(ValueError, match=r"gradient of results \[3\] is asked for.*lax.while_loop.*lax.scan"):
        jax.grad(of_both)(as_scaled_array(A, dtype=jnp.float16))
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(lambda a: jnp.sum(asarray(scalify(root)(a))))(as_scaled_array(A, dtype=jnp.float16))
