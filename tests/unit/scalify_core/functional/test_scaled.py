"""The rules of the functions, where the usual training step does not lead: under vmap,
and with run-time scales."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import assert_near, normal
from numpy.testing import assert_array_equal
from propagated import scalify

import scalify_core as sc
from scalify_core import as_scaled_array, asarray
from scalify_core.ops.functional.attention import _attention
from scalify_core.ops.functional.embedding import materialized

B, N, D, V = 3, 8, 4, 16
# Of FP32 sums of at most 64 terms, in another order.
RTOL = 64 * float(jnp.finfo(jnp.float32).eps)

near = functools.partial(assert_near, rtol=RTOL)


X, HEAD, TARGETS = (
    normal(0, B, N, D),
    normal(1, V, D),
    jax.random.randint(jax.random.key(2), (B, N), 0, V),
)


def loss(x, head, targets):
    return sc.functional.linear_cross_entropy(x, head, targets)


def shared_head(x, head):
    return jnp.mean(jax.vmap(loss, (0, None, 0))(x, head, TARGETS))


def head_each(x, head):
    return jnp.mean(jax.vmap(loss)(x, jnp.stack([head, 2 * head, -head]), TARGETS))


@pytest.mark.parametrize(("fun", "scale"), [(shared_head, 1.0), (head_each, None)])
def test_gradient_of_a_batched_linear_cross_entropy_is_that_of_the_plain_program(
    fun, scale
):
    gradient = jax.grad(fun, (0, 1))
    near(scalify(gradient)(*as_scaled_array((X, HEAD), scale)), gradient(X, HEAD))


# Run-time scales: what is far from 1 is neither zero nor infinite in FP16.

HALF = jnp.float16
# FP16 operands as they are given, some dozens of roundings of FP16 results on the way
# to the gradients.
HALF_RTOL = 32 * float(jnp.finfo(HALF).eps)


def half(x, exponent, dynamic):
    scale = 2.0**exponent
    return sc.ScaledArray(x.astype(HALF), jnp.float32(scale) if dynamic else scale)


@pytest.mark.parametrize("size", [16, 128])
def test_sums_over_all_queries_saturate_though_the_kernel_does_not(monkeypatch, size):
    """cuDNN's kernel stores infinity beyond 65504: the sum of 1024 times 128."""
    bwd = _attention.bwd

    def overflowing(residuals, gradient, **static):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), (residuals, gradient))
        out = bwd(*wide, **static)
        return tuple(None if x is None else x.astype(HALF) for x in out)

    monkeypatch.setattr(_attention, "bwd", overflowing)
    # 1024 queries attend to the first of their keys.
    q, k = jnp.full((1, 1024, 1, 8), 4.0), jnp.zeros((1, 1024, 1, 8)).at[:, 0].set(4)
    gradient = size + normal(1, *q.shape)

    def gradients(q, k, v, gradient):
        return jax.vjp(sc.functional.attention, q, k, v)[1](gradient)

    operands = (
        half(x, 0, dynamic=False) for x in (q, k, normal(0, *q.shape), gradient)
    )
    dv = scalify(gradients)(*operands)[2]
    # A result of an expected RMS of 1/12 is stored at a scale of 1/16.
    assert dv.scale == 1 / 16
    assert_array_equal(dv.data[0, 0], 65504.0)


ANGLES = jnp.arange(1.0, 65.0)[:, None] * 100 ** -(jnp.arange(4.0)[None] / 4)
TABLES = jnp.cos(ANGLES), jnp.sin(ANGLES)


def rotated(x):
    """With its gradient for a gradient of the same size."""
    out, pull = jax.vjp(lambda x: sc.functional.rope(x, *TABLES), x)
    return out, pull(x[:, ::-1])


def grouped(q, k, v):
    """The same of an attention of six heads over two."""
    out, pull = jax.vjp(lambda *qkv: sc.functional.attention(*qkv), q, k, v)
    return out, pull(normal(3, *q.shape))


def rms(x):
    return float(jnp.sqrt(jnp.mean(jnp.square(x.data.astype(jnp.float32)))))


@pytest.mark.parametrize(("dynamic", "exponent"), [(False, -60), (True, 60)])
def test_a_rotation_changes_no_scale(exponent, dynamic):
    x = half(normal(0, 2, 64, 3, 8), exponent, dynamic)
    out, gradient = actual = scalify(rotated)(x)
    assert_near(actual, rotated(asarray(x)), float(jnp.finfo(HALF).eps))
    for y in (out, *gradient):
        assert (y.dtype, float(y.scale)) == (HALF, 2.0**exponent)
        # which are 1536 roundings of 2^-11
        assert rms(y) == pytest.approx(rms(x), rel=1e-3)


@pytest.mark.parametrize(
    ("dynamic", "exponents"),
    [("", (20, -20, 60)), ("qkv", (-60, 60, 0)), ("q", (-30, 30, -30))],
)
def test_grouped_attention_and_its_gradients_at_any_scales(exponents, dynamic):
    """Keys and values that three query heads share: their gradients are sums over
    these."""
    shapes = (2, 64, 6, 8), (2, 64, 2, 8), (2, 64, 2, 8)
    args = [
        half(normal(i, *shapes[i]), exponents[i], name in dynamic)
        for i, name in enumerate("qkv")
    ]
    out, gradients = actual = scalify(grouped)(*args)
    assert_near(actual, grouped(*asarray(args)), HALF_RTOL)
    for y in (out, *gradients):
        assert 0.25 <= rms(y) <= 4


@pytest.mark.parametrize(
    ("dynamic", "exponent", "narrow"),
    [("x", -30, False), ("x head", 20, False), ("", -30, True), ("x head", 20, True)],
)
def test_linear_cross_entropy_keeps_its_scales(exponent, dynamic, narrow):
    x = half(X[0], exponent, "x" in dynamic)
    head = half(HEAD, -exponent, "head" in dynamic)
    fun = jax.value_and_grad(
        lambda *args: sc.functional.linear_cross_entropy(
            *args, TARGETS[0], narrow_logits=narrow
        ),
        (0, 1),
    )
    actual, wide = scalify(fun)(x, head), fun(*asarray((x, head)))
    assert_near(actual, wide, HALF_RTOL)
    # The arrays of the plain program are FP32, and so are its narrow logits; here they
    # are where the scales are those of run time.
    if narrow:
        assert (float(asarray(actual[0])) == float(wide[0])) == bool(dynamic)


# 2^-126: of zeros, which have the smallest scale; None: a plain array.
@pytest.mark.parametrize("exponents", [(3, 5), (0, -126), (0, None), (100, -100)])
def test_a_layer_norm_takes_gain_and_bias_at_any_scales(exponents):
    gain, bias = exponents
    parameters = [sc.ScaledArray(normal(3, D), 2.0**gain), normal(4, D)]
    if bias is not None:
        parameters[1] = sc.ScaledArray(normal(4, D) * (bias != -126), 2.0**bias)

    def with_gradient(x, *parameters):
        out, pull = jax.vjp(sc.functional.layer_norm, x, *parameters)
        return out, pull(normal(5, N, D))[0]

    out, dx = scalify(with_gradient)(as_scaled_array(X[0], 1.0), *parameters)
    near((out, dx), with_gradient(X[0], *asarray(parameters)))
    if bias != 5:  # a bias that is larger than the gain sets the size
        assert 0.25 <= rms(out) <= 4
    assert 0.25 <= rms(dx) <= 4


@pytest.mark.parametrize(
    "norm",
    [
        lambda x: sc.functional.layer_norm(x, jnp.ones(D), None),
        lambda x: sc.functional.rms_norm(x, jnp.ones(D)),
    ],
)
def test_a_norm_of_a_row_of_zeros_is_zeros(norm):
    x = as_scaled_array(X[0].at[1].set(0) * 2.0**120, 2.0**120)
    assert_array_equal(asarray(scalify(norm)(x))[1], 0)
    gradient = scalify(jax.grad(lambda x: norm(x)[0, 0]))(x)
    assert np.isfinite(gradient.data).all()


@pytest.mark.parametrize("scale", [2.0**-12, 1.0, 2.0**12])
def test_the_epsilon_of_a_norm_is_that_of_logical_values(scale):
    x = X[0] * 2.0**-9  # a variance near the epsilon of 1e-5
    gain = jnp.ones(D)
    for norm in (
        lambda x: sc.functional.layer_norm(x, gain, None),
        lambda x: sc.functional.rms_norm(x, gain),
    ):
        near(scalify(norm)(as_scaled_array(x, scale)), norm(x))


@pytest.mark.parametrize(
    ("fun", "outer", "inner"),
    [
        (sc.static.dynamic_rescale_rms, 2, None),
        (sc.static.dynamic_rescale_max_grad, 1, 0),
        (materialized, 2, 1),
    ],
)
def test_functions_that_only_change_scales_keep_the_axes_of_vmap(fun, outer, inner):
    inside = fun if inner is None else jax.vmap(fun, in_axes=inner)
    mapped = jax.vmap(inside, in_axes=outer)

    def loss(x):
        y = mapped(x)
        return jnp.sum(y * jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))

    x = jnp.arange(24.0).reshape(2, 3, 4) - 7
    for program in (mapped, jax.grad(loss)):
        actual = scalify(program)(as_scaled_array(x, 0.25))
        assert_array_equal(asarray(actual), program(x))


F = sc.functional
ONE = normal(9, 64, 32)
COMPOSITES = {
    "layer_norm": (F.layer_norm, ONE, normal(6, 32), normal(7, 32)),
    "rms_norm": (F.rms_norm, ONE, normal(6, 32)),
    "gelu": (F.gelu, ONE, normal(6, 32)),
    "swiglu": (F.swiglu, ONE, ONE[::-1]),
    "attention": (F.attention, *(normal(i, 2, 32, 2, 16) for i in range(3))),
    "embedding": (lambda t: F.embedding(t, jnp.arange(48) % 16), normal(3, 16, 32)),
    "cross entropy": (
        lambda x, w: F.linear_cross_entropy(x, w, jnp.arange(64) % 48),
        ONE,
        normal(4, 48, 32),
    ),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_data_near_one_stays_near_one_forward_and_backward(name):
    """Or it creeps over 48 layers."""
    fun, *args = COMPOSITES[name]

    def both(*args):
        out, pull = jax.vjp(fun, *args)
        return out, pull(jnp.ones(()) if out.ndim == 0 else normal(5, *out.shape))

    out, gradients = scalify(both)(*as_scaled_array(tuple(args), 1.0, dtype=HALF))
    for y in (out, *gradients):
        if isinstance(y, sc.ScaledArray):
            assert 1 / 4 <= rms(y) <= 4
