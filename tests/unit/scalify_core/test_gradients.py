"""Gradients are taken inside; outside only those of plain arguments, and all else is
refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import draw_normal
from jax import lax
from numpy.testing import assert_allclose

from scalify_core import ScaledArray, as_scaled_array, asarray, scalify

F32, HALF, E4M3 = jnp.float32, jnp.float16, jnp.float8_e4m3fn
X = draw_normal(0, (4, 8))
W = draw_normal(1, (8, 8)) / 4
INSIDE = r"scalify\(jax.grad\(f\)\)"
ROUNDINGS = {F32: 1e-6, jnp.bfloat16: 2.0**-7, HALF: 2.0**-9, E4M3: 2.0**-9}


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def relative(actual, expected):
    actual = np.asarray(asarray(actual), np.float32)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


WAYS = {"eager": lambda f: f, "jit": jax.jit}
REFUSED = {
    "scalify": lambda w: asarray(scalify(loss)(w, X)),
    "jit of scalify": lambda w: jax.jit(scalify(loss))(w, X),
    "scan": lambda w: lax.scan(
        lambda c, x: (c + scalify(loss)(w, x[None]), None), 0.0, X
    )[0],
    "asarray": lambda w: jnp.sum(asarray(w) ** 2),
    "unscale": lambda w: jnp.sum(w.unscale() ** 2),
    "rescale": lambda w: jnp.sum(asarray(w.rescale(F32(4)))),
    "an index": lambda w: jnp.sum(asarray(w[0])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_gradient_of_a_scaled_array_is_refused_outside(name):
    for way, scale, dtype in (
        (WAYS["eager"], 2.0**-2, HALF),
        (jax.jit, F32(2.0**-2), F32),
    ):
        with pytest.raises(TypeError, match=INSIDE):
            way(jax.grad(REFUSED[name]))(ScaledArray(W.astype(dtype), scale))


@pytest.mark.parametrize("scale", [None, 0.5, F32(0.5)])
def test_a_gradient_through_as_scaled_array_is_refused(scale):
    of_plain = lambda w: asarray(scalify(loss)(as_scaled_array(w, scale), X))
    for fun in (of_plain, lambda w: jnp.sum(asarray(as_scaled_array(w, scale)))):
        with pytest.raises(TypeError, match=INSIDE):
            jax.grad(fun)(W)


def test_forward_mode_is_refused_with_respect_to_either():
    w = as_scaled_array(W, dtype=HALF)
    with pytest.raises(TypeError, match=INSIDE):
        jax.jvp(lambda w: scalify(loss)(w, X), (w,), (w,))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: scalify(loss)(w, x), (X,), (X,))


@pytest.mark.parametrize(
    "second", [jax.hessian, lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))]
)
def test_a_second_derivative_is_refused_outside(second):
    w = as_scaled_array(W, dtype=HALF)
    with pytest.raises(
        TypeError, match=r"forward-mode|second derivative from outside; take it inside"
    ):
        second(lambda x: scalify(loss)(w, x))(X)


USES = {
    "two": lambda f: lambda x: f(x) + f(2 * x),
    "scan": lambda f: (
        lambda x: lax.scan(lambda c, y: (c + f(y[None]), None), 0.0, x)[0]
    ),
    "vmap": lambda f: lambda x: jnp.mean(jax.vmap(lambda row: f(row[None]))(x)),
}


@pytest.mark.parametrize(
    ("use", "dtype"), zip(USES, (jnp.bfloat16, HALF, E4M3), strict=True)
)
def test_a_plain_argument_keeps_its_gradient(use, dtype):
    (w,) = as_scaled_array((W,), dtype=dtype)
    expected = jax.grad(USES[use](lambda x: loss(asarray(w), x)))(X)
    for way in WAYS.values():
        actual = way(jax.grad(USES[use](lambda x: scalify(loss)(w, x))))(X)
        assert actual.dtype == F32
        assert relative(actual, expected) < ROUNDINGS[dtype]


@pytest.mark.parametrize("scales", ["auto", "static"])
def test_the_gradient_of_a_result_that_has_the_range_of_float32(scales):
    w = as_scaled_array(W, F32(4))
    fun = scalify(lambda w, x: jnp.sin(x @ w), scales=scales)
    actual = jax.grad(
        lambda x: jnp.sum(asarray(fun(w, x)) ** 2 + asarray(fun(w, 2 * x)))
    )(X)
    of_plain = lambda x: jnp.sum(jnp.sin(x @ W) ** 2 + jnp.sin(2 * x @ W))
    assert relative(actual, jax.grad(of_plain)(X)) < 1e-6


def test_the_gradient_of_a_narrow_result_is_refused():
    w = as_scaled_array(W, dtype=HALF)
    narrow, wide = (
        scalify(lambda w, x, to=to: (x @ w).astype(to)) for to in (HALF, F32)
    )
    for read in (asarray, lambda y: y.data.astype(F32)):
        with pytest.raises(
            TypeError,
            match=r"the gradient through a result in float16.*return it in FP32",
        ):
            jax.grad(lambda x, read=read: jnp.sum(read(narrow(w, x))))(X)
    actual = jax.grad(lambda x: jnp.sum(asarray(wide(w, x)) ** 2))(X)
    assert (
        relative(actual, jax.grad(lambda x: jnp.sum((x @ asarray(w)) ** 2))(X))
        < 2.0**-9
    )


def root(a):
    """By Newton's method, until it is right: a loop of unknown length."""
    going_on = lambda carry: jnp.any(jnp.abs(carry**2 - a) > 1e-2 * a)
    return lax.while_loop(going_on, lambda x: 0.5 * (x + a / x), a)


A = jnp.abs(X) + 0.1


@pytest.mark.parametrize("way", WAYS)
def test_results_that_are_not_differentiated_need_no_gradient(way):
    def fun(w, a, n):
        return jnp.sum((a @ w) ** 3), {"root": root(a), "at": jnp.argmax(a), "n": n + 1}

    w = as_scaled_array(W, dtype=HALF)
    actual, others = WAYS[way](jax.grad(scalify(fun), argnums=1, has_aux=True))(w, A, 3)
    expected, plain = jax.grad(fun, argnums=1, has_aux=True)(asarray(w), A, 3)
    assert relative(actual, expected) < 2.0**-9
    assert_allclose(others["root"], plain["root"], rtol=1e-6)
    assert (others["at"], others["n"]) == (plain["at"], 4)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(lambda a: jnp.sum(scalify(fun)(w, a, 3)[1]["root"]))(A)


def test_of_arguments_that_are_not_differentiated_no_gradient_is_computed():
    def fun(w, x, a):
        return jnp.sum((x @ w) ** 2) + jnp.sum(root(a))

    w = as_scaled_array(W, dtype=HALF)
    actual = jax.grad(scalify(fun), argnums=1)(w, X, A)
    assert relative(actual, jax.grad(fun, argnums=1)(asarray(w), X, A)) < 2.0**-9


def test_a_scalar_result_in_float32_is_a_plain_array():
    w = as_scaled_array(W, dtype=HALF)
    to_float32 = lambda w, x: loss(w, x).astype(F32)
    for way in WAYS.values():
        actual = way(scalify(to_float32))(w, X)
        assert isinstance(actual, jax.Array)
        assert jnp.isfinite(actual)
        assert actual < 1
        assert float(np.mean([actual, actual])) == float(actual)
        assert lax.cond(actual < 1, lambda x: x, lambda x: -x, actual) == actual
