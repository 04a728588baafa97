"""Control flow, calls and collectives under scalify: the values of the plain program,
in FP32 and in FP16 data."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from beside_plain import HALF, assert_near
from draws import draw_normal
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal
from propagated import scalify

from scalify_core import ScaledArray, as_scaled_array, asarray
from scalify_core.static import dynamic_rescale_rms

X = draw_normal(0, (4, 8))
W = draw_normal(1, (8, 8)) / 3
LAYERS = draw_normal(2, (12, 8, 8)) / 3


def layer(c, w):
    return c + jnp.tanh(c @ w), None


def per_device(x, w):
    y = jnp.tanh(x @ w)
    return (
        lax.psum(y.sum(0), "d"),
        y,
        lax.pmean(y, "d"),
        lax.all_gather(y, "d", tiled=True),
    )


def sharded(x, w):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=(P("d"), P()),
        out_specs=(P(), P("d"), P(), P("d")),
    )(x, w)


def rescaled_on_each_device(x, w):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    fun = lambda x, w: dynamic_rescale_rms(x @ w)
    return jax.shard_map(fun, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))(x, w)


PROGRAMS = {
    "scan": (
        lambda x, ws: lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, ws),
        X,
        LAYERS,
    ),
    "scan_remat_gradient": (
        lambda x, ws: jax.grad(
            lambda ws: (lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2).mean()
        )(ws),
        X,
        LAYERS,
    ),
    "scan_accumulates_from_zeros": (
        lambda x, ws: lax.scan(lambda c, w: (c + x @ w, None), jnp.zeros((4, 8)), ws)[
            0
        ],
        X,
        LAYERS,
    ),
    "fori_of_fifty_sums": (
        lambda x: lax.fori_loop(0, 50, lambda i, c: c + x, jnp.zeros_like(x)),
        X,
    ),
    "scan_that_hands_on": (
        lambda x: lax.scan(
            lambda c, x: ((x, c[0], c[1]), x + c[1] + c[2]), (jnp.zeros(8),) * 3, x
        ),
        X,
    ),
    "scan_of_length_zero": (
        lambda x: lax.scan(lambda c, x: (c + x, x * 2), jnp.zeros(8), x[:0]),
        X,
    ),
    "while": (
        lambda x: lax.while_loop(
            lambda c: jnp.abs(c).sum() < 1e6, lambda c: c * 2.3 + x, x
        ),
        X,
    ),
    "cond_with_constant": (
        lambda x, w: lax.cond(x.sum() < 0, lambda: x @ w, lambda: jnp.zeros_like(x)),
        X,
        W,
    ),
    "cond_gradient": (
        lambda x, w: jax.grad(
            lambda w: lax.cond(x.sum() > 0, lambda: (x @ w).sum(), lambda: 0.0)
        )(w),
        X,
        W,
    ),
    "switch": (
        lambda x: lax.switch(
            jnp.int32(2), [lambda x: x, lambda x: x * 100, lambda x: x / 64], x
        ),
        X,
    ),
    "shard_map_with_rescale_of_each_shard": (rescaled_on_each_device, X, W),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_gives_the_plain_values(name):
    fun, *args = PROGRAMS[name]
    expected = jax.jit(fun)(*args)
    out = jax.jit(scalify(fun))(*as_scaled_array(args, 1.0, dtype=HALF))
    # Twelve layers, or fifty sums, each of which rounds a few times.
    assert_near(out, expected, 64 * float(jnp.finfo(HALF).eps))
    for leaf in jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, ScaledArray)):
        if isinstance(leaf, ScaledArray):
            assert leaf.dtype == HALF


def test_carry_that_only_adds_keeps_a_static_scale():
    out = scalify(lambda x, ws: lax.scan(layer, x, ws)[0])(
        *as_scaled_array((X, LAYERS), 1.0)
    )
    assert out.is_static


@pytest.mark.parametrize(
    ("loop", "factor"), [("scan", 2.0), ("while", 1.5), ("scan", -0.625)]
)
def test_carry_that_is_multiplied_in_each_turn_is_followed_over_its_whole_way(
    loop, factor
):
    def fun(x):
        if loop == "scan":
            return lax.scan(lambda c, _: (c * factor, None), x, None, length=40)[0]
        return lax.while_loop(
            lambda c: c[0] < 40, lambda c: (c[0] + 1, c[1] * factor), (0, x)
        )[1]

    x = as_scaled_array(X, 1.0, dtype=HALF)
    actual = asarray(jax.jit(scalify(fun))(x))
    # A rounding of FP16 in each turn; numbers of 1/8 are normal there, whatever the
    # power of two.
    assert_allclose(
        actual,
        asarray(x) * factor**40,
        rtol=40 * 2.0**-11,
        atol=2.0**-24 * 8 * factor**40,
    )


def test_carry_that_settles_keeps_a_static_scale():
    def normalised(x, w):
        return lax.fori_loop(0, 100, lambda i, c: (c @ w) / jnp.linalg.norm(c @ w), x)

    def averaged(x, w):
        return lax.scan(
            lambda c, w: (0.9 * c + x @ w, None),
            jnp.zeros((4, 8)),
            w[None].repeat(100, 0),
        )[0]

    for fun in (normalised, averaged):
        assert scalify(fun)(*as_scaled_array((X, W), 1.0)).is_static


def test_layers_of_a_scan_have_scales_of_their_own():
    exponents = jnp.arange(12) % 3 * 10
    layers = ScaledArray(LAYERS, 2.0 ** -exponents.astype(jnp.float32))
    fun = lambda x, ws: lax.scan(lambda c, w: (c, c @ w), x, ws)[1]
    out = scalify(fun)(as_scaled_array(X, 1.0, dtype=HALF), layers.astype(HALF))
    assert out.scale.shape == (12, 1, 1)
    rms = np.sqrt(np.mean(np.square(np.float32(out.data)), axis=(1, 2)))
    assert ((rms > 1 / 4) & (rms < 4)).all()
    assert_allclose(asarray(out), fun(X, asarray(layers)), rtol=0, atol=0.02)


# Scales far apart.


@pytest.mark.parametrize(
    "other", [lambda x: x * 2.0**20, jnp.ones_like], ids=["large", "ones"]
)
def test_branches_whose_scales_are_far_apart_keep_their_own(other):
    x = as_scaled_array(draw_normal(0, (16,)) * 2.0**-20, 2.0**-20, dtype=HALF)

    def fun(first, x):
        return lax.cond(first, lambda x: x * 2.0**-20, other, x)

    scaled = jax.jit(scalify(fun))
    for first in (True, False):
        assert_array_equal(asarray(scaled(first, x)), fun(first, asarray(x)))


def test_clipping_by_the_global_norm_keeps_static_scales_static():
    def clipped(gradients):
        return optax.clip_by_global_norm(1.0).update(gradients, optax.EmptyState())[0]

    gradients = [
        as_scaled_array(2.0**-9 * jnp.ones((64, n)), 2.0**-9, dtype=HALF)
        for n in (1, 64)
    ]
    assert all(x.is_static for x in jax.jit(scalify(clipped))(gradients))


def test_constants_that_begin_a_loop_have_any_scale_however_they_are_used():
    def fun(x):
        def body(carry, y):
            i, h, m = carry
            return (i + 1, 0.9 * h + y, jnp.maximum(m, y)), h

        return jax.lax.scan(body, (0, jnp.zeros(8), -jnp.inf * jnp.ones(8)), x)

    x = as_scaled_array(
        draw_normal(0, (16, 8)) * 2.0**-20,
        2.0**-20,
        dtype=HALF,
    )
    (_, h, m), hs = jax.jit(scalify(fun))(x)
    assert max(y.scale for y in (h, m, hs)) <= 2.0**-16
