"""What a scalified function reads besides its arguments is what plain JAX, which is not
jitted, reads at that call."""

import collections
import contextvars
import functools
import gc
import itertools
import math
import types
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalify_core import as_scaled_array, asarray, scalify

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
    expected = norm(scalify(FUNCTIONS[name], scales=scales)(weights()))
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


def by_hand(fun):
    called = jax.custom_vjp(fun)
    called.defvjp(
        lambda w: (fun(w), w), lambda w, g: (jax.tree.map(lambda x: x * g, w),)
    )
    return called


class Loss:
    def __call__(self, w):
        return self.of(w)

    @staticmethod
    def of(w):
        return jnp.sum(w) * CHOICE


CHOICE: object = None
LOSS = Loss()
CHOICES = {
    "ufunc": (jnp.add, jnp.multiply, lambda w: jnp.sum(CHOICE(w, w / 2))),
    "activation": (jax.nn.relu, jnp.exp, lambda w: jnp.sum(CHOICE(w))),
    "dtype": (jnp.int32, jnp.float32, lambda w: jnp.sum(jnp.asarray(1.5, CHOICE) * w)),
    "slice": (slice(0, 2), slice(0, 4), lambda w: jnp.sum(w[CHOICE])),
    "range": (range(2), range(4), lambda w: sum(jnp.sum(w) for _ in CHOICE)),
    "object": (
        mock.Mock(rate=1.0),
        mock.Mock(rate=2.0),
        lambda w: jnp.sum(w) * CHOICE.rate,
    ),
    "a global's method": (1.0, 2.0, lambda w: LOSS.of(w)),
    "a callable object": (1.0, 2.0, Loss()),
    "custom_vjp": (1.0, 2.0, by_hand(lambda w: jnp.sum(w) * CHOICE)),
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_is_chosen_may_be_of_any_kind(name, monkeypatch):
    first, second, fun = CHOICES[name]
    scaled, actual = scalify(fun), []
    for choice in (first, second, first):
        monkeypatch.setitem(globals(), "CHOICE", choice)
        actual.append(norm(scaled(weights())))
    assert actual[0] == actual[2] != actual[1]


class Model:
    rate = 1.0


PAIR = (jnp.float32(2.0), jnp.float32(3.0))
CHANGED_IN_PLACE = {
    "an attribute": (Model, lambda x: setattr(x, "rate", 3.0), lambda x: x.rate),
    "a class's attribute": (
        lambda: type("Own", (Model,), {}),
        lambda x: setattr(x, "rate", 3.0),
        lambda x: x.rate,
    ),
    "an array": (lambda: np.ones(3, np.float32), lambda x: x.fill(3), jnp.sum),
    "a list that gets what it has": (lambda: [*PAIR], lambda x: x.append(x[0]), sum),
    "how lists nest": (
        lambda: [[*PAIR], [*PAIR]],
        lambda x: x[1].append(x[0].pop()),
        lambda x: sum(map(math.prod, x)),
    ),
    "a set": (lambda: {1.0}, lambda x: x.add(3.0), sum),
    "a deque": (lambda: collections.deque([1.0]), lambda x: x.append(3.0), sum),
    "a generator": (lambda: itertools.count(1.0), next, next),
    "a context": (
        lambda: contextvars.ContextVar("c", default=1.0),
        lambda x: x.set(3.0),
        lambda x: x.get(),
    ),
    "a module": (
        lambda: types.ModuleType("m"),
        lambda x: setattr(x, "rate", 3.0),
        lambda x: getattr(x, "rate", 1.0),
    ),
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
