"""Bodies within bodies are evaluated once each, and a batch of loops ends element by
element."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import propagated
import pytest
from beside_plain import assert_near, pairs
from draws import draw_normal
from families import slow
from jax import lax
from numpy.testing import assert_allclose

import scalify_core
from scalify_core import as_scaled_array, asarray
from scalify_core.interpreter import registry

HALF = jnp.float16


@pytest.fixture(params=["auto", "static"])
def scalify(request):
    return functools.partial(scalify_core.scalify, scales=request.param)


def branch(inner):
    return lambda x: lax.cond(x.sum() > 0, inner, lambda x: 1.5 * inner(x), x)


def turns(inner):
    return lambda x: lax.scan(
        lambda c, _: (0.5 * inner(c) + x, None), x, None, length=3
    )[0]


def counted(inner):
    return lambda x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, 0.5 * inner(c[1]) + x), (0, x)
    )[1]


def nest(depth, *kinds):
    """Of `depth` levels, `kinds` in turn; the innermost has an `atan`, as no other
    has."""
    fun = lambda x: jnp.arctan(x)
    for level in range(depth):
        fun = kinds[level % len(kinds)](fun)
    return fun


@pytest.mark.parametrize(
    ("kinds", "scale"),
    [((branch, branch, turns), 1.0), ((jax.checkpoint, branch, counted), None)],
)
def test_nested_control_flow_is_evaluated_in_proportion_to_its_depth(
    kinds, scale, monkeypatch
):
    evaluated = []
    rule = registry.rules["atan"]
    fun = lambda *args: evaluated.append(1) or rule.fun(*args)
    monkeypatch.setitem(registry.rules, "atan", dataclasses.replace(rule, fun=fun))
    counts = {}
    for depth in (3, 9):
        evaluated.clear()
        jax.jit(propagated.scalify(nest(depth, *kinds))).trace(
            as_scaled_array(jnp.ones(4), scale, dtype=jnp.float16)
        )
        counts[depth] = len(evaluated)
    # Three times as deep. Each level that is looked at anew for each look from outside
    # makes it 2^6 times as many.
    assert 0 < counts[9] <= 5 * counts[3], counts


def test_nested_control_flow_gives_the_plain_values(scalify):
    fun = nest(4, branch, turns, counted)
    for dtype, tolerance in ((jnp.float32, 1e-5), (HALF, 0.02)):
        scaled = as_scaled_array(draw_normal(0, (8,)), dtype=dtype)
        assert_near(jax.jit(scalify(fun))(scaled), fun(asarray(scaled)), tolerance)


# A batch of loops, each of which ends when its own predicate says so.


def counted_apart(a):
    """Integers and keys beside the values, and a constant to start at."""

    def body(carry):
        i, key, total, most = carry
        noise = jax.random.uniform(jax.random.fold_in(key, i))
        return i + 1, key, total + a * noise, jnp.maximum(most, noise)

    return lax.while_loop(
        lambda c: jnp.abs(c[2]) < 4, body, (0, jax.random.key(0), 0.0 * a, -1e30)
    )[0::2]


def newton(a):
    """What has ended would divide zero by zero if it went on."""

    def body(c):
        c = c[1]
        return c, c - (c * c - jnp.abs(a)) / (2 * c)

    return lax.while_loop(
        lambda c: jnp.abs(c[0] - c[1]) > 1e-4 * c[1],
        body,
        (jnp.zeros_like(a), jnp.abs(a) + 1),
    )[1]


def vector_until_long(a):
    return lax.while_loop(
        lambda c: jnp.linalg.norm(c) < 30, lambda c: 1.5 * c, a * jnp.ones(3) + 0.1
    )


@pytest.mark.parametrize("fun", [counted_apart, vector_until_long, slow(newton)])
def test_elements_of_a_batch_end_when_their_own_predicate_says_so(fun, scalify):
    # Numbers that FP16 holds exactly, and away from where a rounding would be one turn
    # more.
    x = jnp.array([0.25, 1.0, 2.375, 0.875, 3.0, 1.75])
    scaled, expected = as_scaled_array(x, 1.0, dtype=HALF), jax.vmap(fun)(x)
    for way in (
        jax.jit(scalify(jax.vmap(fun))),
        jax.vmap(scalify(fun)),
    ):
        for a, b in pairs(way(scaled), expected):
            assert_allclose(a, b, rtol=64 * 2.0**-10, atol=64 * 2.0**-10)
