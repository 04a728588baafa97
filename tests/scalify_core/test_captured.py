"""What a scalified function reads besides its arguments is what plain JAX would read at that call."""

import dataclasses
import functools
from unittest import mock

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

    def recursive(n, default=7):
        return recursive(n - 1) + len(large) + len(small) + BATCH.size + default

    found = captured.captured(recursive)
    assert any(x is large for x in found)
    assert any(x is BATCH for x in found)
    assert {x for x in found if isinstance(x, int)} == {1, 2, 7}
    cyclic = {1: 1.0, "a": 2.0}  # keys that nothing sorts
    cyclic["self"] = cyclic
    assert {x for x in captured.captured(lambda: cyclic) if isinstance(x, float)} == {1.0, 2.0}
    assert any(x is BATCH for x in captured.captured(jax.grad(loss)))
    weight = as_scaled_array(jnp.ones(3), dtype=HALF)
    assert any(x is weight.data for x in captured.captured(lambda: weight))
    anything = mock.MagicMock()
    assert captured.captured(anything) == [anything]
    assert 1.0 in captured.captured(lambda: HELD)


def test_an_activation_or_a_key_that_is_another_one_is_seen():
    activation, tables = jnp.tanh, {"a": BATCH, "b": 2 * BATCH}
    fun = scalify(lambda w: jnp.sum(activation(tables["a"] @ w / 100)))
    first = norm(fun(weights()))
    tables = {"b": BATCH, "a": 2 * BATCH}
    assert norm(fun(weights())) != first
    tables = {"a": BATCH, "b": 2 * BATCH}
    assert norm(fun(weights())) == first
    activation = lambda x: x
    assert norm(fun(weights())) != first


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


@jax.tree_util.register_pytree_node_class
class Untidy:
    def __init__(self, rate):
        self.rate = rate

    def tree_flatten(self):
        raise RuntimeError

    @classmethod
    def tree_unflatten(cls, *_):
        return cls(0.0)


def by_hand(fun):
    called = jax.custom_vjp(fun)
    called.defvjp(lambda w: (fun(w), w), lambda w, g: (jax.tree.map(lambda x: x * g, w),))
    return called


class Loss:
    def __call__(self, w):
        return self.of(w)

    @staticmethod
    def of(w):
        return jnp.sum(w) * CHOICE


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Held:
    rate: float

    def times(self, x):
        return self.rate * x


CHOICE: object = None
HELD = Held(1.0)
LOSS = Loss()
CHOICES = {
    "ufunc": (jnp.add, jnp.multiply, lambda w: jnp.sum(CHOICE(w, w / 2))),
    "activation": (jax.nn.relu, jnp.exp, lambda w: jnp.sum(CHOICE(w))),
    "dtype": (jnp.int32, jnp.float32, lambda w: jnp.sum(jnp.asarray(1.5, CHOICE) * w)),
    "slice": (slice(0, 2), slice(0, 4), lambda w: jnp.sum(w[CHOICE])),
    "range": (range(2), range(4), lambda w: sum(jnp.sum(w) for _ in CHOICE)),
    "object": (mock.Mock(rate=1.0), mock.Mock(rate=2.0), lambda w: jnp.sum(w) * CHOICE.rate),
    "a global's method": (1.0, 2.0, lambda w: LOSS.of(w)),
    "a callable object": (1.0, 2.0, Loss()),
    "custom_vjp": (1.0, 2.0, by_hand(lambda w: jnp.sum(w) * CHOICE)),
    "what cannot be taken apart": (Untidy(1.0), Untidy(2.0), lambda w: jnp.sum(w) * CHOICE.rate),
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_is_chosen_may_be_of_any_kind(name, monkeypatch):
    first, second, fun = CHOICES[name]
    scaled, found = scalify(fun), []
    for choice in (first, second, first):
        monkeypatch.setitem(globals(), "CHOICE", choice)
        found.append(norm(scaled(weights())))
    assert found[0] == found[2] != found[1]
