"""Gradients are taken inside. Outside there are only those with respect to plain
arguments; all others are refused."""

import jax
import jax.numpy as jnp
import pytest
from beside_plain import F32, HALF, error
from draws import draw_normal
from jax import lax
from numpy.testing import assert_allclose

from scalify_core import ScaledArray, as_scaled_array, asarray, scalify

E4M3 = jnp.float8_e4m3fn
X = draw_normal(0, (4, 8))
W = draw_normal(1, (8, 8)) / 4
HALF_W = as_scaled_array(W, dtype=HALF)
INSIDE = r"scalify\(jax.grad\(f\)\)"
ROUNDINGS = {jnp.bfloat16: 2.0**-7, HALF: 2.0**-9, E4M3: 2.0**-9}
WAYS = {"eager": lambda f: f, "jit": jax.jit}


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def summed(x):
    """A loop of calls of a scalified function."""
    add = lambda w: lambda total, row: (total + scalify(loss)(w, row[None]), None)
    return lambda w: lax.scan(add(w), 0.0, x)[0]


OF_A_SCALED_ARRAY = {
    "scalify": lambda w: asarray(scalify(loss)(w, X)),
    "scan": summed(X),
    "asarray": lambda w: jnp.sum(asarray(w) ** 2),
    "unscale": lambda w: jnp.sum(w.unscale() ** 2),
    "rescale": lambda w: jnp.sum(asarray(w.rescale(F32(4)))),
    "an index": lambda w: jnp.sum(asarray(w[0])),
}


@pytest.mark.parametrize("name", OF_A_SCALED_ARRAY)
def test_a_gradient_of_a_scaled_array_is_refused_outside(name):
    gradient = jax.grad(OF_A_SCALED_ARRAY[name])
    for refused, scale, dtype in (
        (gradient, 2.0**-2, HALF),
        (jax.jit(gradient), F32(2.0**-2), F32),
    ):
        with pytest.raises(TypeError, match=INSIDE):
            refused(ScaledArray(W.astype(dtype), scale))


def through_as_scaled_array(w):
    return scalify(loss)(as_scaled_array(w), X)


def of_plain(x):
    return scalify(loss)(HALF_W, x)


SECOND = "second derivative from outside; take it inside"
OTHERS = {
    "entry": (lambda: jax.grad(through_as_scaled_array)(W), INSIDE),
    "tangent": (
        lambda: jax.jvp(lambda w: scalify(loss)(w, X), (HALF_W,), (HALF_W,)),
        INSIDE,
    ),
    "tangent of plain": (lambda: jax.jvp(of_plain, (X,), (X,)), "forward-mode"),
    "hessian": (lambda: jax.hessian(of_plain)(X), f"forward-mode|{SECOND}"),
    "second": (
        lambda: jax.grad(lambda x: jnp.sum(jax.grad(of_plain)(x) ** 2))(X),
        SECOND,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_derivatives_are_refused_outside(name):
    derivative, message = OTHERS[name]
    with pytest.raises(TypeError, match=message):
        derivative()


USES = {
    "two": lambda f: lambda x: f(x) + f(2 * x),
    "vmap": lambda f: lambda x: jnp.mean(jax.vmap(lambda row: f(row[None]))(x)),
}


@pytest.mark.parametrize(
    ("use", "dtype"), [("two", jnp.bfloat16), ("two", E4M3), ("vmap", HALF)]
)
def test_a_plain_argument_has_its_gradient(use, dtype):
    w = as_scaled_array(W, dtype=dtype)
    expected = jax.grad(USES[use](lambda x: loss(asarray(w), x)))(X)
    for way in WAYS.values():
        actual = way(jax.grad(USES[use](lambda x: scalify(loss)(w, x))))(X)
        assert actual.dtype == F32
        assert error(actual, expected) < ROUNDINGS[dtype]


@pytest.mark.parametrize("scales", ["auto", "static"])
def test_a_result_with_the_range_of_float32_has_its_gradient(scales):
    fun = scalify(lambda w, x: jnp.sin(x @ w), scales=scales)
    total = lambda f: lambda x: jnp.sum(asarray(f(x)) ** 2 + asarray(f(2 * x)))
    actual = jax.grad(total(lambda x: fun(as_scaled_array(W, F32(4)), x)))(X)
    assert error(actual, jax.grad(total(lambda x: jnp.sin(x @ W)))(X)) < 1e-6


def test_the_gradient_of_a_narrow_result_is_refused():
    product = scalify(lambda w, x: (x @ w).astype(HALF))
    refused = r"the gradient through a result in float16.*return it in FP32"
    for read in (asarray, lambda y: y.data.astype(F32)):
        with pytest.raises(TypeError, match=refused):
            jax.grad(lambda x, read=read: jnp.sum(read(product(HALF_W, x))))(X)


def root(a):
    """By Newton's method, until it is right: a loop of unknown length."""
    is_off = lambda carry: jnp.any(jnp.abs(carry**2 - a) > 1e-2 * a)
    return lax.while_loop(is_off, lambda x: 0.5 * (x + a / x), a)


A = jnp.abs(X) + 0.1


@pytest.mark.parametrize("way", WAYS)
def test_undifferentiated_arguments_and_results_need_no_gradient(way):
    def fun(w, x, a, n):
        others = {"root": root(x), "at": jnp.argmax(x), "n": n + 1}
        return jnp.sum((x @ w) ** 3) + jnp.sum(root(a)), others

    gradient = lambda f: jax.grad(f, argnums=1, has_aux=True)
    actual, others = WAYS[way](gradient(scalify(fun)))(HALF_W, A, A, 3)
    expected, plain = gradient(fun)(asarray(HALF_W), A, A, 3)
    assert error(actual, expected) < 2.0**-9
    assert_allclose(others["root"], plain["root"], rtol=1e-6)
    assert (others["at"], others["n"]) == (plain["at"], 4)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(lambda x: jnp.sum(scalify(fun)(HALF_W, x, A, 3)[1]["root"]))(A)


def test_a_scalar_result_in_float32_is_a_plain_array():
    for way in WAYS.values():
        actual = way(scalify(lambda w, x: loss(w, x).astype(F32)))(HALF_W, X)
        assert isinstance(actual, jax.Array)
        assert 0 < actual < 1
