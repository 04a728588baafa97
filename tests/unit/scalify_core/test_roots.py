"""A result of which the program takes a root, a logarithm or a reciprocal is not zero
where it is not zero."""

import jax
import jax.numpy as jnp
import optax
import pytest
from beside_plain import HALF, normal
from numpy.testing import assert_allclose

from scalify_core import as_scaled_array, asarray, scalify

SIZES = 10.0 ** jnp.linspace(-4, 3, 16)[:, None]
X = as_scaled_array(normal(0, 16, 4), dtype=HALF)


def squares(x):
    return (SIZES.astype(x.dtype) * x) ** 2  # 46 octaves, and FP16 has 40


# What is returned, and what is taken of it, or of what it makes.
TAKEN = {
    "sqrt": lambda v: jnp.sqrt(v),
    "log": lambda v: jnp.log(v),
    "power": lambda v: v**-0.5,
    "moved": lambda v: jnp.sqrt(v.T[None]),
    "in a branch": lambda v: jax.lax.cond(v.sum() > 0, jnp.sqrt, jnp.square, v),
    "in a loop": lambda v: jax.lax.while_loop(
        lambda carry: carry[0] < 1,
        lambda carry: (carry[0] + 1, jnp.sqrt(carry[1])),
        (0, v),
    )[1],
    "in a checkpoint": jax.checkpoint(lambda v: jnp.sqrt(v * 2)),
}


@pytest.mark.parametrize("called", [False, True], ids=["", "made in a call"])
@pytest.mark.parametrize("what", TAKEN)
def test_what_is_taken_of_it_again_is_finite(what, called):
    def step(x):
        v = squares(x)
        return v, TAKEN[what](v)

    scaled_step = scalify(jax.jit(step) if called else step)
    actual, v = asarray(scaled_step(X)[0]), step(asarray(X))[0]
    assert (actual > 0).all()
    assert_allclose(actual, v, rtol=2**-10, atol=2.0**-38 * v.max())


def test_of_what_nothing_is_taken_small_numbers_may_be_zeros():
    assert not asarray(scalify(squares)(X)).all()


def test_what_a_scan_carries_and_takes_the_root_of_is_finite():
    def steps(x):
        def update(v, g):
            v = 0.5 * v + g
            return v, jnp.sqrt(v)

        grads = jnp.stack([squares(x)] * 3)
        return jax.lax.scan(update, squares(x), grads)[0]

    actual, exact = scalify(steps)(X), steps(asarray(X))
    assert (asarray(actual) > 0).all()
    assert_allclose(asarray(actual), exact, rtol=2**-9, atol=2.0**-38 * exact.max())


def test_the_sign_stays_and_zeros_stay():
    x = as_scaled_array(jnp.array([1.0, -1.0, 0.0, 1.0]), dtype=HALF)
    sizes = jnp.array([1e-14, 1e-14, 1.0, 1.0])
    actual, _ = scalify(lambda x: (lambda v: (v, 1 / v))(x * sizes.astype(x.dtype)))(x)
    assert jnp.sign(asarray(actual)).tolist() == [1, -1, 0, 1]


OPTIMISERS = {
    "adam": optax.adam,
    "rmsprop": optax.rmsprop,
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_no_update_of_an_optimiser_is_larger_than_in_the_plain_program(name):
    sizes, tx = 10.0 ** jnp.linspace(-4, 3, 64)[:, None], OPTIMISERS[name](1e-2)
    gradient = jax.grad(lambda p: jnp.sum(sizes * jnp.tanh(p) ** 2))

    def step(p, state):
        updates, state = tx.update(gradient(p), state, p)
        return optax.apply_updates(p, updates), state

    def largest_update(fun, p, state):
        first = asarray(p)
        for _ in range(8):
            p, state = fun(p, state)
        return float(jnp.abs(asarray(p) - first).max())

    params = as_scaled_array(normal(1, 64, 8), dtype=HALF)
    state = tx.init(asarray(params))
    plain = largest_update(jax.jit(step), asarray(params), state)
    actual = largest_update(
        jax.jit(scalify(step)), params, as_scaled_array(state, dtype=HALF)
    )
    assert 0.9 * plain < actual < 1.35 * plain
