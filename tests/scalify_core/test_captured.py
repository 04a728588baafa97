"""What a scalified function reads besides its arguments is what plain JAX would read at that call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalify_core import as_scaled_array, asarray, captured, scalify

HALF = jnp.float16
BATCH = np.ones((4, 8), np.float32)
SETTINGS = {"rate": 1.0, "masks": [np.ones(8, np.float32)]}


def weights():
    return as_scaled_array(jnp.ones((8, 3)), dtype=HALF)


def loss(w):
    return jnp.sum((BATCH @ w) ** 2)


def through_a_helper(w):
    return loss(w) + 1


def of_settings(w):
    return jnp.sum((SETTINGS["masks"][0] * SETTINGS["rate"]) @ w)


FUNCTIONS = {
    "a global": loss,
    "grad": jax.grad(loss),
    "a helper's": jax.value_and_grad(through_a_helper),
    "a lambda's": lambda w: jax.tree.map(lambda x: jnp.sum(BATCH @ x), w),
    "partial": functools.partial(lambda scale, w: scale * loss(w), 2.0),
    "scalify": scalify(loss),
    "in a dictionary": of_settings,
}


def norm(tree):
    return float(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(asarray(tree))))


@pytest.mark.parametrize("scales", ["auto", "static"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_variable_that_is_another_one_is_read_anew(name, scales, monkeypatch):
    fun = scalify(FUNCTIONS[name], scales=scales)
    first = norm(fun(weights()))
    monkeypatch.setitem(globals(), "BATCH", 2 * BATCH)
    monkeypatch.setitem(SETTINGS, "rate", 2.0)
    second = norm(fun(weights()))
    jax.clear_caches()
    expected = norm(scalify(FUNCTIONS[name], scales=scales)(weights()))
    assert second == expected != first


def test_a_variable_of_a_closure_is_read_anew_also_without_scaled_arguments():
    def loss(w):
        return jnp.sum(batch @ w)

    fun = scalify(loss)
    for batch in (BATCH, 3 * BATCH):  # noqa: B007 (it is what `loss` reads)
        for w in (weights(), jnp.ones((8, 3))):
            assert norm(fun(w)) == norm(loss(asarray(w)))


def test_what_is_the_same_is_not_traced_again(monkeypatch):
    traces = []

    def loss(w):
        traces.append(None)
        return jnp.sum(BATCH @ w) * SETTINGS["rate"]

    fun = scalify(loss, scales="static")
    fun(weights())
    count = len(traces)
    monkeypatch.setitem(globals(), "UNREAD", 1)
    monkeypatch.setitem(SETTINGS, "rate", float("1.0"))  # another object, the same number
    fun(weights())
    assert len(traces) == count


def test_what_is_found():
    large, small = list(range(20_000)), [1, 2]

    def recursive(n):
        return recursive(n - 1) + len(large) + len(small) + BATCH.size

    found = captured.captured(recursive)
    assert any(x is large for x in found)
    assert any(x is BATCH for x in found)
    assert {x for x in found if isinstance(x, int)} == {1, 2}
    assert len(found) == 4
    assert any(x is BATCH for x in captured.captured(jax.grad(loss)))
    traced = []
    jax.make_jaxpr(lambda x: traced.append(captured.captured(lambda: x)) or x)(1.0)
    assert traced == [[]]
