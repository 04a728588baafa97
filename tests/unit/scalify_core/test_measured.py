"""Measured scales: what scale propagation by rules gets wrong on programs that nobody
prepared for it, kind by kind.

Each program is an ordinary function of float32 arrays, and is held to its plain FP32
result: of FP16 data within a few roundings of the result's norm, whatever the sizes of
its values.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import quick
from jax import lax
from measured_and_plain import HALF, ROUNDINGS, SIZES, both, error, normal

from scalify_core import ScaledArray, as_scaled_array, asarray, scalify
from scalify_core.interpreter.measured.products import reads_in
from scalify_core.numerics.formats import FP16

# Results of operations that have no scale of their own.

UNSCALED = {
    "exp of large": lambda x: jnp.exp(8 + jnp.tanh(x)),
    "exp of small": lambda x: jnp.exp(-30 + jnp.tanh(x)),
    "exp in a product": lambda x: jnp.exp(-30 + jnp.tanh(x)) @ jnp.ones((8, 4)),
    "power": lambda x: jnp.abs(x * 1e4) ** 1.7,
    "product of all": lambda x: jnp.prod(20 + jnp.tanh(x), 0),
    "cumulative product": lambda x: jnp.cumprod(3 + jnp.tanh(x), 0),
    "cholesky": lambda x: jnp.linalg.cholesky(1e9 * (x.T @ x + jnp.eye(8))),
    "inverse": lambda x: jnp.linalg.inv(1e-7 * (jnp.eye(8) * 9 + x[:8])),
    "singular values": lambda x: jnp.linalg.svd(1e9 * x, compute_uv=False),
    "plain factor above the format": lambda x: x * jnp.full(x.shape, 1e8),
    "plain factor below the format": lambda x: x * jnp.full(x.shape, 1e-9),
    "plain term above the format": lambda x: (
        x + jnp.broadcast_to(jnp.arange(8.0), x.shape) * 1e5
    ),
    "logsumexp of large": lambda x: jax.nn.logsumexp(1e5 * x, -1),
}


@pytest.mark.parametrize("name", UNSCALED)
@pytest.mark.parametrize("static", quick([False, True], False))
def test_results_of_any_size_are_neither_clipped_nor_lost(name, static):
    # A table in FP32 would make FP32 of it.
    actual, expected = both(
        lambda x: UNSCALED[name](x).astype(x.dtype), normal(0, 16, 8), static=static
    )
    assert error(actual, expected) <= ROUNDINGS[HALF]
    assert actual.dtype == HALF


def test_an_operand_that_closes_over_the_range_of_the_format_is_exact():
    for factor in (1e8, 1e-8):
        actual = jax.jit(scalify(lambda a, c: a * c))(
            as_scaled_array(normal(0, 64), dtype=HALF), jnp.float32(factor)
        )
        assert error(actual, normal(0, 64) * factor) <= ROUNDINGS[HALF]


def test_infinities_and_nan_pass_products_and_have_no_part_in_scales():
    x = normal(0, 16, 16).at[3, 5].set(jnp.inf).at[7, 2].set(jnp.nan)
    w = jnp.abs(normal(1, 16, 16))
    actual = asarray(
        jax.jit(scalify(jnp.matmul))(
            ScaledArray(x.astype(HALF), jnp.float32(1)), as_scaled_array(w, dtype=HALF)
        )
    )
    expected = x @ w
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(actual), np.isinf(expected))
    finite = np.isfinite(expected)
    assert (
        np.abs(actual - expected)[finite].max()
        <= 8 * FP16.epsilon * np.abs(expected[finite]).max()
    )


# Correlated sums: neither sqrt(N) nor any other power of a length is right for all.


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", quick([1, 8, 16], 8))
def test_chains_of_stochastic_products(length, size):
    def chain(p, v):
        for _ in range(length):
            v = jax.nn.softmax(p) @ v
        return v

    actual, expected = both(chain, normal(0, 64, 64), jnp.full(64, size))
    assert error(actual, expected) <= 2 * length * FP16.epsilon


def residual(x, ws, layer):
    for w in ws:
        x = layer(x, jnp.tanh, w)
    return jnp.mean(
        x**2 * jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=x.dtype), x.shape)
    )


def normalised(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


NETS = {
    "pre": lambda x, f, w: x + f(normalised(x) @ w),
    "post": lambda x, f, w: normalised(x + f(x @ w)),
    "none": lambda x, f, w: x + f(x @ w) / 4,
}


@pytest.mark.parametrize("kind", quick(NETS, "pre", "post"))
@pytest.mark.parametrize("depth", quick([4, 16], 4))
@pytest.mark.parametrize("loss_scale", quick([2.0**-70, 1.0], 2.0**-70))
def test_gradients_of_deep_residual_nets_are_as_right_as_those_of_plain_fp16(
    kind, depth, loss_scale
):
    ws = tuple(normal(i, 32, 32) / 6 for i in range(depth))
    gradient = jax.grad(lambda ws, x: loss_scale * residual(x, ws, NETS[kind]))
    actual, expected = both(gradient, ws, normal(99, 16, 32))
    # Plain FP16 rounds every intermediate value; here only what is stored for products
    # is rounded: fewer times.
    narrow = jax.jit(jax.grad(lambda ws, x: residual(x, ws, NETS[kind])))(
        *jax.tree.map(lambda x: x.astype(HALF), (ws, normal(99, 16, 32)))
    )
    allowed = error(
        jax.tree.map(lambda g: g.astype(jnp.float32) * loss_scale, narrow), expected
    )
    assert error(actual, expected) <= allowed


@pytest.mark.parametrize("tokens", quick([2**12, 2**16, 2**20, 2**24], 2**24))
def test_gradients_of_a_mean_over_many_tokens(tokens):
    t = 512
    labels = jax.random.randint(jax.random.key(2), (t,), 0, 64)

    def loss(w, h):
        losses = optax.softmax_cross_entropy_with_integer_labels(h @ w, labels)
        return losses.sum() / tokens

    actual, expected = both(jax.grad(loss, (0, 1)), normal(0, 16, 64), normal(1, t, 16))
    assert error(actual, expected) <= ROUNDINGS[HALF]


# Loops.


@pytest.mark.parametrize("exponent", [-120, -100, -55, -20, 0, 20, 55, 100, 120])
def test_fp32_data_is_as_plain_at_every_scale(exponent):
    def normed(x):
        unit = x / jnp.max(jnp.abs(x))
        return (
            unit / jnp.sqrt(jnp.sum(unit * unit, -1, keepdims=True)),
            x - jnp.mean(x),
            x * 2 + 1e-30 * x,
        )

    x = ScaledArray(normal(0, 8, 16), jnp.float32(2.0**exponent))
    plain = jax.jit(normed)(asarray(x))
    assert error(jax.jit(scalify(normed))(x), plain) <= 1e-6


@pytest.mark.parametrize("exponent", [-55, -30, 0, 30, 55])
def test_a_vector_over_its_norm_at_dynamic_scales(exponent):
    x = ScaledArray(normal(0, 4, 8), jnp.float32(2.0**exponent))
    fun = lambda a: a / jnp.sqrt(jnp.sum(a * a, -1, keepdims=True))
    assert error(jax.jit(scalify(fun))(x), fun(asarray(x))) <= 1e-6


@pytest.mark.parametrize("product", [False, True])
def test_a_batch_of_while_loops_ends_each_by_its_own_condition(product):
    w = jnp.full((1, 1), 2.0)

    def grown(x):
        def body(c):
            return (c[None] @ w)[0] + 1 if product else c * 2 + 1

        return lax.while_loop(
            lambda c: c[0] < 50.0, body, x[None] if product is None else x
        )

    x = jnp.arange(1.0, 5.0)[:, None]
    actual = jax.jit(scalify(jax.vmap(grown)))(as_scaled_array(x, dtype=HALF))
    np.testing.assert_allclose(
        asarray(actual), jax.vmap(grown)(x), rtol=ROUNDINGS[HALF]
    )
    outside = jax.jit(jax.vmap(scalify(grown)))(ScaledArray(x.astype(HALF), 1.0))
    np.testing.assert_allclose(
        asarray(outside), jax.vmap(grown)(x), rtol=ROUNDINGS[HALF]
    )


def test_collectives_over_the_axis_of_a_vmap():
    x = normal(0, 4, 8)
    fun = jax.vmap(lambda t: t - lax.pmean(t, "i"), axis_name="i")
    assert (
        error(
            jax.jit(scalify(fun))(as_scaled_array(x, dtype=HALF)),
            fun(as_scaled_array(x, dtype=HALF).unscale()),
        )
        <= (ROUNDINGS[HALF])
    )
    inner = scalify(lambda t: t @ t - lax.pmean(t @ t, "i"))
    actual = jax.vmap(
        lambda t: asarray(inner(as_scaled_array(t, dtype=HALF))), axis_name="i"
    )(x)
    squares = jnp.sum(x * x, -1)
    np.testing.assert_allclose(
        actual, squares - squares.mean(), atol=8 * FP16.epsilon * float(squares.max())
    )


def test_a_ring_of_devices_with_products_in_its_loop():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    ring = [(i, (i + 1) % 4) for i in range(4)]

    def attend(q, k):
        def turn(_, state):
            total, k = state
            return total + q @ k.T, lax.ppermute(k, "d", ring)

        return lax.fori_loop(0, 4, turn, (jnp.zeros((2, 2)) + 0 * q[:2, :2], k))[0]

    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    actual, expected = both(mapped, 1e-6 * normal(0, 8, 16), 1e5 * normal(1, 8, 16))
    assert error(actual, expected) <= ROUNDINGS[HALF]


def test_nested_branches_are_looked_at_once():
    reads_in.cache_clear()
    evaluations = []

    def leaf(x):
        evaluations.append(None)
        return x @ x

    def nested(x, depth):
        if depth == 0:
            return leaf(x)
        return lax.cond(
            x[0, 0] > depth, lambda x: nested(x, depth - 1), lambda x: x + depth, x
        )

    actual, expected = both(lambda x: nested(x, 12), normal(0, 4, 4) + 20)
    assert error(actual, expected) <= ROUNDINGS[HALF]
    # traced under scalify and plain, by `cond` once for its shapes
    assert len(evaluations) <= 4
    assert reads_in.cache_info().misses <= 3 * 12 + 3


# Around it.


def test_no_warning_names_what_is_right():
    def fun(x):
        jax.debug.callback(lambda _: None, x)
        windowed = lax.reduce_window(x, 0.0, lax.add, (2,), (1,), "SAME")
        z = jnp.fft.fft(x)
        return (
            windowed
            + jnp.real(z * jnp.conj(z)) * 1e-3
            + jax.scipy.special.expi(jnp.abs(x) + 1)
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual, expected = both(fun, normal(0, 16), dtype=jnp.float32)
    assert error(actual, expected) <= 1e-5


@pytest.mark.parametrize(
    "wrap", [jax.checkpoint, jax.jit, lambda f: f], ids=["remat", "jit", "plain"]
)
def test_gradients_through_scan_remat_and_jit(wrap):
    ws = normal(0, 6, 16, 16) / 4

    def loss(ws, x):
        out, kept = lax.scan(
            wrap(lambda h, w: (h + jnp.tanh(normalised(h) @ w), jnp.sum(h))), x, ws
        )
        return jnp.mean(out**2) + 1e-3 * jnp.sum(kept)

    actual, expected = both(jax.grad(loss, (0, 1)), ws, normal(1, 8, 16))
    assert error(actual, expected) <= 8 * FP16.epsilon


def test_layers_of_a_stack_with_scales_of_their_own_are_scanned():
    sizes = jnp.array([1e-6, 1.0, 1e6])[:, None, None]
    ws = normal(0, 3, 16, 16) * sizes
    scaled = ScaledArray((ws / sizes).astype(HALF), jnp.ones(3))
    scaled = ScaledArray(scaled.data, 2.0 ** jnp.round(jnp.log2(sizes[:, 0, 0])))
    fun = lambda ws, x: lax.scan(lambda h, w: (h, jnp.tanh(h) @ w), x, ws)[1]
    x = as_scaled_array(normal(1, 4, 16), dtype=HALF)
    actual, expected = (
        asarray(jax.jit(scalify(fun))(scaled, x)),
        fun(asarray(scaled), asarray(x)),
    )
    for layer in (1, 2):
        assert error(actual[layer], expected[layer]) <= ROUNDINGS[HALF]


def test_equations_that_nobody_needs_are_left_out():
    actual = jax.make_jaxpr(scalify(jax.grad(lambda x: jnp.sum(jnp.sin(x)))))(
        as_scaled_array(normal(0, 4), dtype=HALF)
    )
    assert "sin " not in str(actual).replace("cos", "")


def test_other_scales_are_refused_in_one_line():
    with pytest.raises(ValueError, match="scales='dynamic', expected \"auto\""):
        scalify(jnp.sin, scales="dynamic")
