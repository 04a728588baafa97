"""The rules of the functions, where the usual training step does not lead: under vmap, and with run-time scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalify_core as sc
from scalify_core import as_scaled_array, asarray, scalify

B, N, D, V = 3, 8, 4, 16
# Of FP32 sums of at most 64 terms, in another order.
RTOL = 64 * float(jnp.finfo(jnp.float32).eps)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def assert_near(found, expected, rtol=RTOL):
    """Within `rtol` of the largest element."""
    for a, b in zip(jax.tree.leaves(asarray(found)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * float(jnp.abs(b).max()))


X, HEAD, TARGETS = normal(0, B, N, D), normal(1, V, D), jax.random.randint(jax.random.key(2), (B, N), 0, V)


def loss(x, head, targets):
    return sc.linear_cross_entropy(x, head, targets)


LOSSES = {
    "sum": lambda x, head: jnp.sum(jax.vmap(loss, (0, None, 0))(x, head, TARGETS)),
    "mean": lambda x, head: jnp.mean(jax.vmap(loss, (0, None, 0))(x, head, TARGETS)),
    "weighted": lambda x, head: jnp.sum(jnp.arange(1.0, 4.0) * jax.vmap(loss, (0, None, 0))(x, head, TARGETS)),
    "a head each": lambda x, head: jnp.mean(jax.vmap(loss)(x, jnp.stack([head, 2 * head, -head]), TARGETS)),
}


@pytest.mark.parametrize("scale", [1.0, None])
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_of_a_batched_linear_cross_entropy_is_that_of_the_plain_program(name, scale):
    gradient = jax.grad(LOSSES[name], (0, 1))
    assert_near(scalify(gradient)(*as_scaled_array((X, HEAD), scale)), gradient(X, HEAD))


def test_gradients_per_example_of_linear_cross_entropy_are_those_of_the_plain_program():
    def per_example(x, head):
        gradients = jax.vmap(jax.grad(loss, (0, 1)), (0, None, 0))
        twice = jax.vmap(lambda x: gradients(x, head, TARGETS), in_axes=1, out_axes=1)
        return twice(jnp.stack([x, 2 * x], axis=1))

    assert_near(scalify(per_example)(*as_scaled_array((X, HEAD), 1.0)), per_example(X, HEAD))
