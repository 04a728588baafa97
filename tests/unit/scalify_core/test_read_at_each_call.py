"""What a scalified function reads besides its arguments is what plain JAX, which is not
jitted, reads at that call."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalify_core import as_scaled_array, asarray, scalify

HALF = jnp.float16
BATCH = np.ones((4, 8), np.float32)


def weights():
    return as_scaled_array(jnp.ones((8, 3)), dtype=HALF)


def loss(w):
    return jnp.sum((BATCH @ w) ** 2)


FUNCTIONS = {
    "a global": loss,
    "grad": jax.grad(loss),
    "partial": functools.partial(lambda scale, w: scale * loss(w), 2.0),
}


def norm(tree):
    return float(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(asarray(tree))))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_variable_that_is_another_one_is_read_anew(name, monkeypatch):
    fun = scalify(FUNCTIONS[name])
    first = norm(fun(weights()))
    monkeypatch.setitem(globals(), "BATCH", 2 * BATCH)
    second = norm(fun(weights()))
    expected = norm(scalify(FUNCTIONS[name])(weights()))
    assert second == expected != first


def test_a_variable_of_a_closure_is_read_anew_also_without_scaled_arguments():
    def loss(w):
        return jnp.sum(batch @ w)

    fun = scalify(loss)
    for batch in (BATCH, 3 * BATCH):  # noqa: B007 (it is what `loss` reads)
        for w in (weights(), jnp.ones((8, 3))):
            assert norm(fun(w)) == norm(loss(asarray(w)))


def test_a_step_under_jit_is_traced_once():
    traces = []

    def loss(w):
        traces.append(None)
        return jnp.sum(BATCH @ w)

    step = jax.jit(scalify(jax.grad(loss)))
    step(weights())
    count = len(traces)
    step(weights())
    assert len(traces) == count


def test_a_call_holds_nothing_once_it_is_done():
    large = jnp.full((1024,), 3.0)
    held = weakref.ref(large)
    fun = scalify(jax.grad(lambda w: jnp.sum(w) * jnp.sum(large)))
    fun(weights())
    large = jnp.ones((1024,))
    fun(weights())
    gc.collect()
    assert held() is None


def test_a_call_that_fails_leaves_no_trace_of_what_it_read():
    factor, fails = 1.0, False

    def loss(w):
        out = factor * jnp.sum(BATCH @ w)
        if fails:
            raise RuntimeError
        return out

    fun = scalify(loss)
    first = norm(fun(weights()))
    factor, fails = 2.0, True
    with pytest.raises(RuntimeError):
        fun(weights())
    factor, fails = 1.0, False
    assert norm(fun(weights())) == first


def test_values_of_a_surrounding_transformation_are_read_anew():
    @jax.jit
    def both(x):
        fun = scalify(lambda w: jnp.sum(w) * now)
        now = x
        first = asarray(fun(weights()))
        now = 3 * x
        return first, asarray(fun(weights()))

    first, second = both(2.0)
    assert float(second) == 3 * float(first)


class Model:
    rate = 1.0


CHANGED_IN_PLACE = {
    "an attribute": (Model, lambda x: setattr(x, "rate", 3.0), lambda x: x.rate),
    "a list": (lambda: [2.0, 3.0], lambda x: x.append(x[0]), sum),
    "a static argument": (Model, lambda x: setattr(x, "rate", 3.0), None),
}


@pytest.mark.parametrize("scales", ["auto", "static"])
@pytest.mark.parametrize("name", CHANGED_IN_PLACE)
def test_what_is_changed_in_place_is_read_anew(name, scales):
    made, change, read = CHANGED_IN_PLACE[name]
    kept, is_static = made(), read is None
    fun = lambda w, x=kept: jnp.sum(w) * (x.rate if is_static else read(x))
    scaled = scalify(fun, scales=scales)
    call = lambda: norm(scaled(weights(), *([kept] if is_static else [])))
    first = call()
    change(kept)
    assert call() != first
