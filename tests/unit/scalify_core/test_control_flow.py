"""Loops and branches at propagated scales: the values of the plain program, in FP16
data."""

import jax
import jax.numpy as jnp
import optax
import pytest
from beside_plain import HALF, assert_near
from draws import draw_normal
from jax import lax
from numpy.testing import assert_allclose, assert_array_equal
from propagated import scalify

import scalify_core as core
from scalify_core import ScaledArray, as_scaled_array, asarray

X = draw_normal(0, (4, 8))
W = draw_normal(1, (8, 8)) / 3
LAYERS = draw_normal(2, (12, 8, 8)) / 3
SMALL = as_scaled_array(draw_normal(0, (16, 8)) * 2.0**-20, 2.0**-20, dtype=HALF)


def layer(c, w):
    return c + jnp.tanh(c @ w), None


def layers(x, ws):
    return lax.scan(jax.checkpoint(layer), x, ws)[0]


def handed_on(x):
    turn = lambda c, x: ((x, c[0], c[1]), x + c[1] + c[2])
    return lax.scan(turn, (jnp.zeros(8),) * 3, x)


def gradient_of_a_branch(x, w):
    total = lambda w: lax.cond(x.sum() > 0, lambda: (x @ w).sum(), lambda: 0.0)
    return jax.grad(total)(w)


PROGRAMS = {
    "gradient of layers": (
        jax.grad(lambda x, ws: (layers(x, ws) ** 2).mean(), 1),
        X,
        LAYERS,
    ),
    "fifty sums": (
        lambda x: lax.fori_loop(0, 50, lambda i, c: c + x, jnp.zeros_like(x)),
        X,
    ),
    "handed on": (handed_on, X),
    "no turns": (
        lambda x: lax.scan(lambda c, x: (c + x, x * 2), jnp.zeros(8), x[:0]),
        X,
    ),
    "branch with a constant": (
        lambda x, w: lax.cond(x.sum() < 0, lambda: x @ w, lambda: jnp.zeros_like(x)),
        X,
        W,
    ),
    "gradient of a branch": (gradient_of_a_branch, X, W),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_gives_the_plain_values(name):
    fun, *args = PROGRAMS[name]
    expected = jax.jit(fun)(*args)
    actual = jax.jit(scalify(fun))(*as_scaled_array(args, 1.0, dtype=HALF))
    # Twelve layers, or fifty sums, each of which rounds a few times.
    assert_near(actual, expected, 64 * float(jnp.finfo(HALF).eps))
    for leaf in jax.tree.leaves(actual, is_leaf=lambda x: isinstance(x, ScaledArray)):
        if isinstance(leaf, ScaledArray):
            assert leaf.dtype == HALF


@pytest.mark.parametrize(
    ("loop", "factor"), [("scan", 2.0), ("while", 1.5), ("scan", -0.625)]
)
def test_carry_that_is_multiplied_in_each_turn_is_followed(loop, factor):
    def fun(x):
        if loop == "scan":
            return lax.scan(lambda c, _: (c * factor, None), x, None, length=40)[0]
        turn = lambda c: (c[0] + 1, c[1] * factor)
        return lax.while_loop(lambda c: c[0] < 40, turn, (0, x))[1]

    x = as_scaled_array(X, 1.0, dtype=HALF)
    actual, expected = asarray(jax.jit(scalify(fun))(x)), asarray(x) * factor**40
    # A rounding of FP16 in each turn; numbers of 1/8 are normal there, whatever the
    # power of two.
    atol = 2.0**-24 * 8 * factor**40
    assert_allclose(actual, expected, rtol=40 * 2.0**-11, atol=atol)


def unit(x, w):
    turn = lambda i, c: (c @ w) / jnp.linalg.norm(c @ w)
    return lax.fori_loop(0, 100, turn, x)


def averaged(x, w):
    turn = lambda c, _: (0.9 * c + x @ w, None)
    return lax.scan(turn, jnp.zeros((4, 8)), None, length=100)[0]


def clipped(x, w):
    return optax.clip_by_global_norm(1.0).update((x, w), optax.EmptyState())[0]


@pytest.mark.parametrize(
    ("fun", "w"), [(layers, LAYERS), (unit, W), (averaged, W), (clipped, W)]
)
def test_static_scales_stay_static(fun, w):
    out = scalify(fun)(*as_scaled_array((X, w), 1.0))
    assert all(x.is_static for x in (out if isinstance(out, tuple) else (out,)))


@pytest.mark.parametrize("other", [lambda x: x * 2.0**20, jnp.ones_like])
def test_branches_with_scales_far_apart_preserve_both(other):
    def fun(first, x):
        return lax.cond(first, lambda x: x * 2.0**-20, other, x)

    for first in (True, False):
        actual = jax.jit(scalify(fun))(first, SMALL)
        assert_array_equal(asarray(actual), fun(first, asarray(SMALL)))


def test_constants_that_begin_a_loop_have_any_scale():
    def turn(carry, y):
        h, m = carry
        return (0.9 * h + y, jnp.maximum(m, y)), h

    fun = lambda x: lax.scan(turn, (jnp.zeros(8), jnp.full(8, -jnp.inf)), x)
    (h, m), hs = jax.jit(scalify(fun))(SMALL)
    assert max(y.scale for y in (h, m, hs)) <= 2.0**-16


def test_a_call_that_donates_a_computed_array_leaves_the_argument():
    """`x * 2` has the data of `x`, at another scale."""
    donating = jax.jit(jnp.matmul, donate_argnums=0)
    x, w = ScaledArray(X.astype(HALF), 1.0), ScaledArray(W.astype(HALF), 1.0)
    scalify(lambda x, w: donating(x * 2, w))(x, w)
    assert not x.data.is_deleted()
    scalify(donating)(x, w)  # this argument is the user's to donate
    assert x.data.is_deleted()


def test_an_empty_array_has_a_scale_for_each_of_its_rows():
    x = ScaledArray(jnp.zeros((0, 8), HALF), jnp.ones(0))
    assert_array_equal(
        asarray(scalify(lambda x: x @ W + x.sum())(x)), jnp.zeros((0, 8))
    )


@pytest.mark.parametrize("scales", ["auto", "static"])
def test_an_index_of_another_call_compiles_nothing(scales, caplog):
    row = core.scalify(jax.jit(lambda x, i: x[i] * 0.5), scales=scales)
    row(SMALL, 1)
    caplog.clear()
    with jax.log_compiles():
        out = row(SMALL, 3)
    assert not [m for m in caplog.messages if "Compiling" in m]
    assert_array_equal(asarray(out), asarray(SMALL)[3] * 0.5)


@pytest.mark.parametrize("scales", ["auto", "static"])
def test_an_integer_that_is_made_a_float_sets_no_scale(scales):
    # The call inside gets the number as an argument.
    clipped = core.scalify(jax.jit(lambda x: jnp.clip(x, 0, 1)), scales=scales)
    out = clipped(SMALL)
    assert out.scale < 2.0**-15
    assert_array_equal(asarray(out), jnp.clip(asarray(SMALL), 0, 1))
