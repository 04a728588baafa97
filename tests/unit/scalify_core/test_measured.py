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
from beside_plain import (
    F32,
    HALF,
    ROUNDINGS,
    assert_near,
    both,
    case,
    check,
    error,
    normal,
    scaled,
)
from jax import lax
from numpy.testing import assert_allclose, assert_array_equal

import scalify_core as sc
from scalify_core import ScaledArray, asarray, scalify
from scalify_core.interpreter.measured.products import reads_in
from scalify_core.numerics.formats import FP16

X, SQUARE, STACK = normal(0, 16, 8), normal(1, 16, 16), normal(2, 6, 16, 16) / 4

# Results of operations that have no scale of their own.
UNSCALED = {
    "exp of large": lambda x: jnp.exp(8 + jnp.tanh(x)),
    "exp in a product": lambda x: jnp.exp(-30 + jnp.tanh(x)) @ jnp.ones((8, 4)),
    "product of all": lambda x: jnp.prod(20 + jnp.tanh(x), 0),
    "singular values": lambda x: jnp.linalg.svd(1e9 * x, compute_uv=False),
    "factor above the format": lambda x: x * jnp.full(x.shape, 1e8),
    "term above the format": lambda x: (
        x + jnp.broadcast_to(jnp.arange(8.0), x.shape) * 1e5
    ),
    "logsumexp of large": lambda x: jax.nn.logsumexp(1e5 * x, -1),
}


def chain(p, v):
    """Correlated sums: neither sqrt(N) nor any other power of a length is right."""
    for _ in range(8):
        v = jax.nn.softmax(p) @ v
    return v


def mean_over_many_tokens(w, h):
    labels = jax.random.randint(jax.random.key(2), (512,), 0, 64)
    losses = optax.softmax_cross_entropy_with_integer_labels(h @ w, labels)
    return losses.sum() / 2**24


def normalised(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def layers(ws, x):
    layer = lambda h, w: (h + jnp.tanh(normalised(h) @ w), jnp.sum(h))
    out, kept = lax.scan(jax.checkpoint(layer), x, ws)
    return jnp.mean(out**2) + 1e-3 * jnp.sum(kept)


def ring(q, k):
    """Products in a loop over devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",))
    around = [(i, (i + 1) % 4) for i in range(4)]

    def attend(q, k):
        def turn(_, state):
            total, k = state
            return total + q @ k.T, lax.ppermute(k, "d", around)

        return lax.fori_loop(0, 4, turn, (jnp.zeros((2, 2)) + 0 * q[:2, :2], k))[0]

    spec = jax.P("d")
    return jax.shard_map(attend, mesh=mesh, in_specs=(spec, spec), out_specs=spec)(q, k)


def grown(through):
    """Layers that grow or shrink from one to the next."""
    scan = lambda ws, x: lax.scan(through(lambda h, w: (h @ w, None)), x, ws)[0]
    return jax.grad(lambda ws, x: jnp.sum(scan(ws, x)))


PROGRAMS = {
    # A table in FP32 would make FP32 of it.
    **{
        name: case(lambda x, fun=fun: fun(x).astype(x.dtype), X)
        for name, fun in UNSCALED.items()
    },
    "static scales": case(UNSCALED["exp of large"], X, static=True),
    **{
        f"stochastic products of {size}": case(
            chain, normal(0, 64, 64), jnp.full(64, size), roundings=16
        )
        for size in (2.0**-60, 2.0**60)
    },
    **{
        f"products of 2^{a} and 2^{b}": case(
            lambda x, w, a=a, b=b: (jnp.tanh(x) * 2.0**a) @ (jnp.tanh(w) * 2.0**b),
            normal(0, 8, 16),
            SQUARE,
        )
        for a, b in ((-55, -55), (-90, 80), (90, 30))
    },
    "many tokens": case(
        jax.grad(mean_over_many_tokens, (0, 1)), normal(0, 16, 64), normal(1, 512, 16)
    ),
    "gradient of scan of remat": case(
        jax.grad(layers, (0, 1)), STACK, normal(1, 8, 16), roundings=8
    ),
    "ring": case(ring, 1e-6 * normal(0, 8, 16), 1e5 * normal(1, 8, 16)),
    "mean over a vmap": case(
        jax.vmap(lambda t: t - lax.pmean(t, "i"), axis_name="i"), normal(0, 4, 8)
    ),
    **{
        f"scan of {name}, times {gain}": case(
            grown(through), gain * STACK, normal(1, 8, 16), axis=0, roundings=8
        )
        for name, through, gain in (
            ("layers", lambda f: f, 2.0**5),
            ("remat", jax.checkpoint, 2.0**-5),
        )
    },
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_as_right_as_in_float32(name):
    PROGRAMS[name]()


def test_gradients_of_a_deep_residual_net_are_as_right_as_those_of_plain_fp16():
    def net(ws, x):
        for w in ws:
            x = x + jnp.tanh(normalised(x) @ w)
        return jnp.mean(x**2 * jnp.arange(32, dtype=x.dtype)[None])

    args = tuple(normal(i, 32, 32) / 6 for i in range(4)), normal(99, 16, 32)
    scale = 2.0**-70
    actual, expected = both(jax.grad(lambda *args: scale * net(*args)), *args)
    # Plain FP16 rounds every intermediate value; here only what is stored for products
    # is rounded: fewer times.
    narrow = jax.jit(jax.grad(net))(*jax.tree.map(lambda x: x.astype(HALF), args))
    of_narrow = jax.tree.map(lambda g: g.astype(F32) * scale, narrow)
    assert error(actual, expected) <= error(of_narrow, expected)


def test_infinities_and_nan_pass_products_and_have_no_part_in_scales():
    x = SQUARE.at[3, 5].set(jnp.inf).at[7, 2].set(jnp.nan)
    w = jnp.abs(normal(0, 16, 16))
    halves = ScaledArray(x.astype(HALF), F32(1))
    actual = asarray(jax.jit(scalify(jnp.matmul))(halves, *scaled(w)))
    expected = x @ w
    assert_array_equal(np.isnan(actual), np.isnan(expected))
    assert_array_equal(np.isinf(actual), np.isinf(expected))
    finite = np.isfinite(expected)
    assert_near(actual[finite], expected[finite], 8 * FP16.epsilon)


@pytest.mark.parametrize("dtype", [HALF, jnp.bfloat16])
def test_rows_of_zeros_stay_zeros_beside_products_beyond_fp32(dtype):
    x = (normal(0, 8, 16) * 2.0**70).at[:4].set(0)
    actual, _ = both(lambda x, w: (x @ w)[:4], x, SQUARE * 2.0**80, dtype=dtype)
    assert_array_equal(asarray(actual), 0)


def test_fp32_data_is_as_plain_at_every_scale():
    def normed(x):
        unit = x / jnp.max(jnp.abs(x))
        return (
            unit / jnp.sqrt(jnp.sum(unit * unit, -1, keepdims=True)),
            x - jnp.mean(x),
            x * 2 + 1e-30 * x,
        )

    norms = lambda x: x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))
    for fun, exponents in ((normed, (-120, -100, -20, 20, 120)), (norms, (-55, 0, 55))):
        actual, plain = jax.jit(scalify(fun)), jax.jit(fun)
        for exponent in exponents:
            x = ScaledArray(X, F32(2.0**exponent))
            assert error(actual(x), plain(asarray(x))) <= 1e-6, exponent


def halved(b):
    return b * jnp.asarray(0.5, b.dtype) + jnp.ones(3, b.dtype)


NARROW = {
    "scan": lambda x, w, b: lax.scan(
        lambda c, _: ((jnp.tanh(c[0] @ w), halved(c[1])), c[1]), (x, b), None, 3
    ),
    "while": lambda x, w, b: lax.while_loop(
        lambda c: c[0] < 3,
        lambda c: (c[0] + 1, jnp.tanh(c[1] @ w), halved(c[2])),
        (0, x, b),
    ),
    "cond": lambda x, w, b: lax.cond(
        x[0, 0] > 9,
        lambda x: ((x @ w).astype(b.dtype), b),
        lambda x: (jnp.ones(x.shape, b.dtype), halved(b)),
        x,
    ),
}


@pytest.mark.parametrize("kind", NARROW)
def test_numbers_of_a_narrow_dtype_that_no_scale_has_pass_control_flow(kind):
    def fun(x, w):
        out = NARROW[kind](x, w, jnp.zeros(3, HALF))
        return jax.tree.map(lambda y: halved(y) if y.shape == (3,) else y, out)

    args = normal(0, 8, 16), SQUARE / 4
    check(fun, *args)
    assert sc.explain(fun, *scaled(*args)).first_loss is None


def test_a_carry_that_becomes_float64_in_a_loop_is_scaled():
    def fun(x, w):
        turn = lambda c, _: ((jnp.tanh(c[0] @ w), c[1] * 0.5 + jnp.sum(c[0])), None)
        return lax.scan(turn, (x, jnp.zeros((), jnp.float64)), None, 3)[0][1]

    with jax.enable_x64(True):
        actual = scalify(fun)(*scaled(normal(0, 4, 4), normal(1, 4, 4)))
    assert isinstance(actual, ScaledArray)
    assert actual.dtype == jnp.float64


def test_a_sum_over_a_vmap_that_is_outside():
    x = normal(0, 4, 8)
    inner = scalify(lambda t: t @ t - lax.pmean(t @ t, "i"))
    of_one = lambda t: asarray(inner(*scaled(t)))
    squares = jnp.sum(x * x, -1)
    actual = jax.vmap(of_one, axis_name="i")(x)
    limit = 8 * FP16.epsilon * float(squares.max())
    assert_allclose(actual, squares - squares.mean(), atol=limit)


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

    check(lambda x: nested(x, 12), normal(0, 4, 4) + 20)
    # traced under scalify and plain, by `cond` once for its shapes
    assert len(evaluations) <= 4
    assert reads_in.cache_info().misses <= 3 * 12 + 3


def test_no_warning_names_what_is_right():
    def fun(x):
        jax.debug.callback(lambda _: None, x)
        windowed = lax.reduce_window(x, 0.0, lax.add, (2,), (1,), "SAME")
        z = jnp.fft.fft(x)
        squares = jnp.real(z * jnp.conj(z)) * 1e-3
        return windowed + squares + jax.scipy.special.expi(jnp.abs(x) + 1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual, expected = both(fun, normal(0, 16), dtype=F32)
    assert error(actual, expected) <= 1e-5


def test_layers_of_a_stack_with_scales_of_their_own_are_scanned():
    scales = 2.0 ** jnp.array([-20.0, 0, 20])
    stack = ScaledArray(normal(0, 3, 16, 16).astype(HALF), scales)
    fun = lambda ws, x: lax.scan(lambda h, w: (h, jnp.tanh(h) @ w), x, ws)[1]
    (x,) = scaled(normal(1, 4, 16))
    actual, expected = jax.jit(scalify(fun))(stack, x), fun(*asarray((stack, x)))
    assert error(asarray(actual)[1:], expected[1:], 0) <= ROUNDINGS[HALF]


def test_equations_that_nobody_needs_are_left_out():
    gradient = scalify(jax.grad(lambda x: jnp.sum(jnp.sin(x))))
    actual = jax.make_jaxpr(gradient)(*scaled(normal(0, 4)))
    assert "sin " not in str(actual).replace("cos", "")


def test_other_scales_are_refused_in_one_line():
    with pytest.raises(ValueError, match="scales='dynamic', expected \"auto\""):
        scalify(jnp.sin, scales="dynamic")


def test_fp8_products_under_vmap_keep_residuals_with_the_batch_in_front():
    args = jnp.moveaxis(normal(0, 16, 16, 16), 0, 1), SQUARE

    def gradient(dot_general):
        product = lambda x, w: dot_general(x, w, (((1,), (0,)), ((), ())))
        batched = jax.vmap(product, in_axes=(1, None))
        return jax.grad(lambda *args: jnp.sum(batched(*args) ** 2), (0, 1))

    actual = jax.jit(scalify(gradient(sc.fp8_dot_general)))(*scaled(*args))
    expected = gradient(lax.dot_general)(*args)
    assert error(actual, expected) <= sc.numerics.formats.E5M2.epsilon / 2


def local_sum(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def sum_of_all(w, x):
    return lax.psum(local_sum(w, x), "d")


@pytest.mark.parametrize(
    ("loss", "check_vma"),
    [(local_sum, True), (sum_of_all, False)],
)
def test_gradients_inside_a_shard_map_are_those_of_the_plain_program_there(
    loss, check_vma
):
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,))
    args = scaled(normal(0, 8, 8), normal(1, 8, 8))
    replicated, split = jax.P(), jax.P("d")
    leaf = lambda spec: ScaledArray.tree_unflatten(None, (spec, replicated))

    def on_devices(fun, specs):
        # Each device's own: without check_vma, JAX sums no gradients of what devices
        # have in common.
        body = lambda w, x: asarray(fun(w, x))[None]
        how = {"in_specs": specs, "out_specs": split, "check_vma": check_vma}
        return jax.jit(jax.shard_map(body, mesh=mesh, **how))

    gradient = jax.grad(loss)
    expected = on_devices(gradient, (replicated, split))(*asarray(args))
    actual = on_devices(scalify(gradient), (leaf(replicated), leaf(split)))(*args)
    assert error(actual, expected) <= ROUNDINGS[HALF]
