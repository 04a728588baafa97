"""Loops: starts that every element replaces, bodies within bodies, batches of loops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import propagated
import pytest
from beside_plain import F32, assert_near, pairs
from draws import draw_normal
from jax import lax
from numpy.testing import assert_allclose, assert_array_equal

import scalify_core
from scalify_core import as_scaled_array, asarray
from scalify_core.interpreter import registry

LOWEST, HALF = float(jnp.finfo(F32).min), jnp.float16
SOME = jnp.arange(8) < 4


@pytest.fixture(params=["auto", "static"])
def scalify(request):
    return functools.partial(scalify_core.scalify, scales=request.param)


def sizes_for(scalify, *sizes):
    """The sizes of data at which the policy is right: beside run-time scales,
    propagated ones leave such a carry at scale 1, as in plain code of the format."""
    return (1.0,) if scalify.keywords["scales"] == "static" else sizes


def running_maximum(start):
    def body(m, t):
        return jnp.maximum(m, t), m + t

    return lambda x: lax.scan(body, jnp.full(8, start), x)[0]


def online_softmax(start):
    """Attention block by block; the causal mask leaves some rows of a block without
    anything."""

    def fun(x):
        x = x / jnp.max(jnp.abs(x))
        q, blocks = x[:4], x.reshape(4, 4, 8)

        def body(carry, block):
            i, m, total, out = carry
            visible = jnp.arange(4)[:, None] + 4 >= 4 * i + jnp.arange(4)[None]
            scores = jnp.where(visible, q @ block.T, start)
            new = jnp.maximum(m, scores.max(-1))
            finite = jnp.where(jnp.isfinite(new), new, 0.0)
            weights, decay = jnp.exp(scores - finite[:, None]), jnp.exp(m - finite)
            total = total * decay + weights.sum(-1)
            return (i + 1, new, total, out * decay[:, None] + weights @ block), None

        init = 0, jnp.full(4, start), jnp.zeros(4), jnp.zeros((4, 8))
        _, _, total, out = lax.scan(body, init, blocks)[0]
        return out / total[:, None]

    return fun


def close(actual, expected):
    # Sixteen iterations, each with a few roundings.
    assert_near(actual, expected, 64 * float(jnp.finfo(HALF).eps))


@pytest.mark.parametrize("program", [running_maximum, online_softmax])
def test_the_start_of_a_loop_does_not_set_its_scale(program, scalify):
    for start in (LOWEST, -float("inf")):
        # one program for all sizes, where they are not in it
        fun = jax.jit(scalify(program(start)))
        for size in sizes_for(scalify, 2.0**-20, 2.0**40):
            scaled = as_scaled_array(draw_normal(0, (16, 8)) * size, dtype=HALF)
            close(fun(scaled), program(start)(asarray(scaled)))


def maximum_of_some(start):
    """Half of the elements meet nothing."""

    def body(m, t):
        return jnp.where(SOME, jnp.maximum(m, t), m), m

    return lambda x: lax.scan(body, jnp.full(8, start), x)


def test_a_start_that_nothing_was_compared_with_stays_far_away(scalify):
    """Results of such elements are as if they were infinite."""

    def fun(x):
        m = maximum_of_some(LOWEST)(x)[0]
        at_most = jnp.minimum(m, -(x[0] ** 2))
        return jnp.exp(m - x[0])[4:], jnp.maximum(m, x[0]), at_most[:4], m

    jitted = jax.jit(scalify(fun))
    for size in sizes_for(scalify, 2.0**-10, 2.0**10):
        scaled = as_scaled_array(draw_normal(0, (16, 8)) * size, dtype=HALF)
        actual, expected = asarray(jitted(scaled)), fun(asarray(scaled))
        assert_array_equal(actual[0], 0)
        close((*actual[1:3], actual[3][:4]), (*expected[1:3], expected[3][:4]))
        assert (actual[3][4:] <= -1000 * size).all()


def test_a_large_start_that_counts_is_not_lost(scalify):
    """An average that begins at a million, and numbers near one."""

    def fun(x):
        return lax.scan(lambda c, t: (0.5 * c + t, c), jnp.full(8, 1e6), x)

    x = as_scaled_array(draw_normal(0, (40, 8)), 1.0, dtype=HALF)
    last, each = asarray(jax.jit(scalify(fun))(x))
    expected, each_expected = fun(asarray(x))
    assert_allclose(last, expected, rtol=0.02, atol=0.02)
    assert_allclose(each[:12], each_expected[:12], rtol=0.02)


def branch(inner):
    return lambda x: lax.cond(x.sum() > 0, inner, lambda x: 1.5 * inner(x), x)


def turns(inner):
    return lambda x: lax.scan(
        lambda c, _: (0.5 * inner(c) + x, None), x, None, length=3
    )[0]


def nest(depth):
    """Two branches, a loop, two branches, ...; `atan` is innermost alone."""
    fun = jnp.arctan
    for level in range(depth):
        fun = turns(fun) if level % 3 == 2 else branch(fun)
    return fun


def test_nested_control_flow_is_evaluated_in_proportion_to_its_depth(monkeypatch):
    evaluated = []
    rule = registry.rules["atan"]
    fun = lambda *args: evaluated.append(1) or rule.fun(*args)
    monkeypatch.setitem(registry.rules, "atan", dataclasses.replace(rule, fun=fun))
    counts = []
    for depth in (3, 9):
        evaluated.clear()
        x = as_scaled_array(jnp.ones(4), 1.0, dtype=HALF)
        jax.jit(propagated.scalify(nest(depth))).trace(x)
        counts.append(len(evaluated))
    # Three times as deep, and nine times as many for two more loops, each of which takes
    # three looks at its body. Branches that are looked at anew for each look from
    # outside would make it 2^6 times as many.
    assert 0 < counts[1] <= 3 * 9 * counts[0], counts


# A batch of loops, each of which ends when its own predicate says so.


def random_walk(a):
    """Integers and keys beside the values, and a constant to start at."""

    def body(carry):
        i, key, total, most = carry
        noise = jax.random.uniform(jax.random.fold_in(key, i))
        return i + 1, key, total + a * noise, jnp.maximum(most, noise)

    return lax.while_loop(
        lambda c: jnp.abs(c[2]) < 4, body, (0, jax.random.key(0), 0.0 * a, -1e30)
    )[0::2]


def test_elements_of_a_batch_end_when_their_own_predicate_says_so(scalify):
    # Numbers that FP16 holds exactly, and away from where a rounding would be one
    # iteration more.
    x = jnp.array([0.25, 1.0, 2.375, 0.875, 3.0, 1.75])
    scaled, expected = as_scaled_array(x, 1.0, dtype=HALF), jax.vmap(random_walk)(x)
    for actual in (
        jax.jit(scalify(jax.vmap(random_walk)))(scaled),
        jax.vmap(scalify(random_walk))(scaled),
    ):
        for a, b in pairs(actual, expected):
            assert_allclose(a, b, rtol=64 * 2.0**-10, atol=64 * 2.0**-10)
