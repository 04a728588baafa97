"""Loops that start at a constant which is there to lose: the lowest number, for a
maximum. It sets no scale."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import F32, assert_near
from draws import draw_normal
from jax import lax
from numpy.testing import assert_allclose, assert_array_equal

import scalify_core
from scalify_core import ScaledArray, as_scaled_array, asarray

LOWEST, HALF = float(jnp.finfo(F32).min), jnp.float16


@pytest.fixture(params=["auto", "static"])
def scalify(request):
    return functools.partial(scalify_core.scalify, scales=request.param)


def sizes_of(scalify, *sizes):
    """The sizes of data at which the policy is right: beside run-time scales,
    propagated ones leave such a carry at scale 1, as in plain code of the format."""
    return (1.0,) if scalify.keywords["scales"] == "static" else sizes


def running_maximum(start):
    def fun(x):
        return lax.scan(lambda m, t: (jnp.maximum(m, t), m + t), jnp.full(8, start), x)[
            0
        ]

    return fun


def nearest(start):
    def fun(x):
        def body(carry, row):
            i, best, at = carry
            d = jnp.abs(row - x[5]).sum() + jnp.abs(x[5]).sum()
            return (
                i + 1,
                jnp.where(d < best, d, best),
                jnp.where(d < best, i, at),
            ), None

        return lax.scan(body, (0, F32(-start), -1), x)[0][1:]

    return fun


def online_softmax(start):
    """Attention block by block; the causal mask leaves some rows of a block without
    anything."""

    def fun(x):
        q, blocks = x[:4] / jnp.max(jnp.abs(x)), x.reshape(4, 4, 8)

        def body(carry, block):
            i, m, total, out = carry
            scores = q @ (block / jnp.max(jnp.abs(x))).T
            scores = jnp.where(
                jnp.arange(4)[:, None] + 4 >= 4 * i + jnp.arange(4)[None], scores, start
            )
            new = jnp.maximum(m, scores.max(-1))
            kept = jnp.where(jnp.isfinite(new), new, 0.0) if np.isinf(start) else new
            weights, decay = jnp.exp(scores - kept[:, None]), jnp.exp(m - kept)
            return (
                i + 1,
                new,
                total * decay + weights.sum(-1),
                out * decay[:, None] + weights @ block,
            ), None

        _, _, total, out = lax.scan(
            body, (0, jnp.full(4, start), jnp.zeros(4), jnp.zeros((4, 8))), blocks
        )[0]
        return out / total[:, None]

    return fun


def close(actual, expected, dtype):
    # Sixteen turns, each with a few roundings.
    assert_near(actual, expected, 64 * float(jnp.finfo(dtype).eps))


@functools.cache
def plain(program, start):
    """The program without scales, compiled once for all that are compared with it."""
    return jax.jit(program(start))


@pytest.mark.parametrize("program", [running_maximum, nearest, online_softmax])
def test_what_a_loop_starts_at_does_not_set_its_scale(program, scalify):
    for start in (LOWEST, -float("inf")):
        # one program for all sizes, where they are not in it
        fun = jax.jit(scalify(program(start)))
        for size in sizes_of(scalify, 2.0**-20, 2.0**40):
            scaled = as_scaled_array(draw_normal(0, (16, 8)) * size, dtype=HALF)
            close(fun(scaled), plain(program, start)(asarray(scaled)), HALF)


def test_start_of_a_loop_under_other_transformations(scalify):
    scaled = as_scaled_array(draw_normal(0, (3, 16, 8)), 1.0, dtype=HALF)
    fun = online_softmax(LOWEST)

    def programs(x):
        gradient = jax.grad(lambda x: (jax.vmap(fun)(x) ** 2).sum())
        return (
            jax.vmap(jax.checkpoint(fun))(x),
            lax.map(jax.jit(fun), x),
            gradient(x),
        )

    close(jax.jit(scalify(programs))(scaled), jax.jit(programs)(asarray(scaled)), HALF)


def test_a_start_that_nothing_was_compared_with_stays_far_away(scalify):
    """Half of the elements meet nothing; what is computed of them is as if they were
    infinite."""

    def fun(x):
        m = lax.scan(
            lambda m, t: (jnp.where(jnp.arange(8) < 4, jnp.maximum(m, t), m), None),
            jnp.full(8, LOWEST),
            x,
        )[0]
        return (
            jnp.exp(m - x[0]),
            jnp.maximum(m, x[0]),
            jnp.minimum(m, -(x[0] ** 2))[:4],
            m,
        )

    jitted = jax.jit(scalify(fun))
    for size in sizes_of(scalify, 2.0**-10, 1.0, 2.0**10):
        scaled = as_scaled_array(draw_normal(0, (16, 8)) * size, dtype=HALF)
        actual = asarray(jitted(scaled))
        expected = fun(asarray(scaled))
        close(actual[1:3], expected[1:3], HALF)
        close(actual[3][:4], expected[3][:4], HALF)
        assert_array_equal(actual[0][4:], 0)
        assert (actual[3][4:] <= -1000 * size).all()


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_scales_that_differ_from_turn_to_turn_carry_a_start_along(kind, scalify):
    """The maximum of layers of 2^-30, 2^30, 2^-30, ..., some of whose elements are
    masked throughout."""
    exponents = jnp.array([-30.0, 30.0, -30.0, 0.0])
    x = draw_normal(0, (4, 8))
    scaled = (
        ScaledArray(x, 2.0**exponents) if kind == "dynamic" else as_scaled_array(x, 1.0)
    )

    def fun(x):
        free = jnp.arange(8) < 4
        return lax.scan(
            lambda m, t: (jnp.where(free, jnp.maximum(m, t), m), m),
            jnp.full(8, -1e30),
            x,
        )

    (actual, each), (expected, each_expected) = (
        asarray(jax.jit(scalify(fun))(scaled)),
        fun(asarray(scaled)),
    )
    assert_allclose(actual[:4], expected[:4], rtol=1e-6)
    assert_allclose(each[1:, :4], each_expected[1:, :4], rtol=1e-6)
    assert (each[:, 4:] < -1e6).all()


def test_a_large_start_that_counts_is_not_lost(scalify):
    """An average that begins at a million, and numbers near one: the start is as good
    as they are."""

    def fun(x):
        return lax.scan(lambda c, t: (0.5 * c + t, c), jnp.full(8, 1e6), x)

    x = draw_normal(0, (40, 8))
    is_static = scalify.keywords["scales"] == "static"
    for scale in (1.0,) if is_static else (1.0, None):
        for dtype, rtol in ((F32, 1e-5), (jnp.float16, 0.02)):
            scaled = as_scaled_array(x, scale, dtype=dtype)
            (last, each), (expected, each_expected) = (
                asarray(jax.jit(scalify(fun))(scaled)),
                fun(asarray(scaled)),
            )
            assert_allclose(last, expected, rtol=rtol, atol=rtol)
            assert_allclose(each[:12], each_expected[:12], rtol=rtol)


def test_a_body_with_effects_is_run_as_often_as_it_turns(scalify):
    seen = []

    def fun(x):
        def body(m, t):
            jax.debug.callback(lambda: seen.append(1))
            return jnp.maximum(m, t), None

        return lax.scan(body, jnp.full(8, -1e30), x)[0]

    x = draw_normal(0, (16, 8))
    actual = asarray(jax.jit(scalify(fun))(as_scaled_array(x)))
    jax.effects_barrier()
    assert_allclose(actual, x.max(0), rtol=1e-6)
    assert len(seen) == 16
