"""Gradients taken outside of scalify, of arguments with static scales: their structure forces that scale on them.

None can be right of a gradient that is far larger or smaller, so the program says so by itself, and only then.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalify_core import PrecisionWarning, ScaledArray, as_scaled_array, asarray, scalify

HALF = jnp.float16
X = jax.random.normal(jax.random.key(0), (4, 8))
W = jax.random.normal(jax.random.key(1), (8, 8))


def loss_of(size, **options):
    scaled = scalify(lambda params, x: size * jnp.sum(jnp.tanh(x @ params["w"])), **options)
    return lambda params, x: asarray(scaled(params, x))


def scanned(fun):
    return lambda *args: lax.scan(lambda carry, _: (carry, fun(*args)), 0.0, None, length=2)[1]


def batched(fun):
    return lambda *args: jax.vmap(lambda _: fun(*args))(jnp.arange(2))


WAYS = {"eager": lambda f: f, "jit": jax.jit, "scan": scanned, "vmap": batched, "remat": jax.checkpoint}


def run(fun, *args):
    jax.block_until_ready(fun(*args))
    jax.effects_barrier()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [HALF, jnp.float8_e5m2])
def test_a_gradient_that_its_static_scale_loses_is_named_while_the_program_runs(way, dtype):
    params = {"w": ScaledArray(W.astype(dtype), 1.0)}
    run(WAYS[way](jax.grad(loss_of(1.0))), params, X)  # warnings are errors in these tests
    # Its last bits, all of it, and all of it on the other side.
    for size in (2.0**-24, 2.0**-60, 2.0**60):
        with pytest.warns(PrecisionWarning, match=r"gradient of params\['w'\] is lost: in float.* static scale 2\^0 "):
            run(WAYS[way](jax.grad(loss_of(size))), params, X)


def test_in_fp32_it_is_said_of_scales_that_leave_no_range():
    for scale, size in ((2.0**100, 2.0**-60), (2.0**-100, 2.0**60)):
        with pytest.warns(PrecisionWarning, match="in float32 at the static scale"):
            run(jax.grad(loss_of(size)), {"w": ScaledArray(W, 1.0).rescale(scale)}, X)
    program = jax.make_jaxpr(jax.grad(loss_of(2.0**-60)))({"w": ScaledArray(W, 1.0)}, X)
    assert "callback" not in str(program)


def test_run_time_scales_and_gradients_taken_inside_lose_nothing_and_have_no_callback():
    params, size = {"w": as_scaled_array(W, dtype=HALF)}, 2.0**-60
    expected = jax.grad(loss_of(1.0))(asarray(params), X)["w"] * size
    for fun in (jax.grad(loss_of(size)), scalify(jax.grad(lambda p, x: size * jnp.sum(jnp.tanh(x @ p["w"]))))):
        assert "callback" not in str(jax.make_jaxpr(fun)(params, X))
        np.testing.assert_allclose(asarray(fun(params, X)["w"]) / size, expected / size, atol=2e-2)


def test_nothing_is_said_or_computed_of_arguments_that_are_not_differentiated():
    data = ScaledArray(X.astype(HALF), 1.0)
    gradient = jax.grad(loss_of(2.0**-60))
    assert "callback" not in str(jax.make_jaxpr(gradient)({"w": as_scaled_array(W, dtype=HALF)}, data))
    run(gradient, {"w": as_scaled_array(W, dtype=HALF)}, data)
    with pytest.warns(PrecisionWarning, match="gradient of x is lost"):
        run(jax.grad(loss_of(2.0**-60), argnums=1), {"w": as_scaled_array(W, dtype=HALF)}, data)


def test_the_same_is_said_of_logical_values_taken_outside():
    w = ScaledArray(W.astype(HALF), 1.0)
    with pytest.warns(PrecisionWarning, match="gradient of a ScaledArray is lost"):
        run(jax.grad(lambda w: 2.0**-40 * jnp.sum(asarray(w))), w)


def test_it_is_shown_once_as_python_shows_warnings():
    gradient = jax.jit(jax.grad(loss_of(2.0**-60)))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            run(gradient, {"w": ScaledArray(W.astype(HALF), 1.0)}, X)
    assert len(seen) == 1


def test_cotangents_that_are_missing_are_zeros():
    scaled = scalify(lambda x, n: (x * 2.0, jnp.exp(x), n + 1))
    x = ScaledArray(X.astype(HALF), 1.0)
    found = jax.grad(lambda x: asarray(scaled(x, 3)[0]).sum())(x)
    np.testing.assert_array_equal(asarray(found), 2 * np.ones(X.shape))
