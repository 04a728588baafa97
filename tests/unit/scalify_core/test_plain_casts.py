"""Plain arrays that a program casts to FP16, as the cotangents of a bare sum are, and
bodies of reductions behind such casts: neither zero nor infinite at any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalify_core import ScaledArray, as_scaled_array, asarray, explain, scalify

F16, F32 = jnp.float16, jnp.float32
ROUNDING = 2.0**-10


@pytest.fixture(scope="module")
def ones():
    return as_scaled_array(jnp.ones(64), dtype=F16)


def cast(x):
    return x.astype(F16)


FORWARD = {
    "direct": cast,
    "jit": jax.jit(cast),
    "remat": jax.checkpoint(cast),
    "scan": lambda x: lax.scan(lambda carry, row: (carry, cast(row)), 0.0, x)[1],
    "cond": lambda x: lax.cond(x[0] > 0, cast, lambda x: cast(2 * x), x),
    "relu": lambda x: jax.nn.relu(cast(x)),
    "vmap": jax.vmap(cast),
}


@pytest.mark.parametrize("scales", ["auto", "static"])
@pytest.mark.parametrize("size", [1.0, 1e-9, 1e7])
@pytest.mark.parametrize("forward", FORWARD.values(), ids=FORWARD)
def test_a_bare_sum_of_a_cast_has_its_gradient(forward, size, scales, ones):
    loss = lambda x: jnp.sum(forward(x).astype(F32)) * size
    for scaled in (f := scalify(jax.grad(loss), scales=scales), jax.jit(f)):
        np.testing.assert_allclose(asarray(scaled(ones)), size, rtol=ROUNDING)


@pytest.mark.parametrize("size", [1e-9, 1e7])
def test_both_gradients_of_a_product_of_casts(size):
    rows, w = as_scaled_array((jnp.ones(8), jnp.ones((8, 4))), dtype=F16)
    loss = lambda x, w: jnp.sum((cast(x) @ cast(w)).astype(F32)) * size
    of_x, of_w = asarray(scalify(jax.grad(loss, (0, 1)))(rows, w))
    np.testing.assert_allclose(of_x, 4 * size, rtol=ROUNDING)
    np.testing.assert_allclose(of_w, size, rtol=ROUNDING)


@pytest.mark.parametrize("size", [1e-9, 1e7])
def test_a_plain_batch_that_is_cast_keeps_its_range(size, ones):
    batch = jnp.linspace(1.0, 2.0, 64) * size
    f = lambda x, batch: (jnp.dot(x, cast(batch)), cast(batch) * 3)
    total, tripled = scalify(f)(ones, batch)
    np.testing.assert_allclose(asarray(total), batch.sum(), rtol=ROUNDING)
    np.testing.assert_allclose(asarray(tripled), 3 * batch, rtol=2 * ROUNDING)
    assert isinstance(tripled, ScaledArray)


def test_constants_that_float16_holds_stay_plain(ones):
    out = scalify(lambda x: (x, jnp.full(3, 0.5, F32).astype(F16)))(ones)[1]
    assert not isinstance(out, ScaledArray)


def outer(x):
    return lax.dot_general(x, x, (((), ()), ((), ())), preferred_element_type=F16)[0]


def combined(a, b):
    return jnp.where(a > b, a + b, (b.astype(F32) + a).astype(F16))


ZERO = np.float16(0)
REDUCTIONS = {
    "reduce": lambda x: lax.reduce(
        x, ZERO, lambda a, b: (a + b) * ZERO.dtype.type(1), [0]
    ),
    "combined": lambda x: lax.reduce(x, ZERO, combined, [0]),
    "pair": lambda x: lax.reduce(
        (x, x), (ZERO, ZERO), lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])), [0]
    )[0],
    "window": lambda x: lax.reduce_window(x, ZERO, combined, (64,), (1,), "VALID")[0],
}


@pytest.mark.parametrize("size", [1e-9, 1e5])
@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)
def test_the_body_of_a_reduction_adds_up_logical_numbers(reduction, size, ones):
    f = scalify(lambda x: reduction(cast(x * size)))
    np.testing.assert_allclose(asarray(f(ones)), 64 * size, rtol=2 * ROUNDING)


@pytest.mark.parametrize("size", [1e-9, 1e5])
def test_an_update_of_the_users_adds_up_logical_numbers(size, ones):
    f = lambda x: cast(x * size).at[jnp.arange(4)].apply(lambda y: y * 2)
    np.testing.assert_allclose(
        asarray(scalify(f)(ones))[:4], 2 * size, rtol=2 * ROUNDING
    )


@pytest.mark.parametrize("size", [1e-5, 1e5])
def test_an_outer_product_of_casts_is_of_logical_numbers(size, ones):
    f = lambda x: outer(cast(x * size))
    np.testing.assert_allclose(asarray(scalify(f)(ones)), size**2, rtol=4 * ROUNDING)


@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)
def test_explain_compares_a_reduction_with_float32(reduction, ones):
    report = explain(lambda x: reduction(cast(x * 1e-9)), ones)
    assert report.first_loss is None
    assert max(report.errors) < 2 * ROUNDING


def test_explain_compares_a_bare_gradient_with_float32(ones):
    report = explain(jax.grad(lambda x: jnp.sum(cast(x).astype(F32)) * 1e-9), ones)
    assert report.first_loss is None
    assert max(report.errors) < 2 * ROUNDING
