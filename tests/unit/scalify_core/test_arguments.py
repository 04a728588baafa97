"""Arguments and results of a scalified function that are no arrays: keys, functions,
strings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import draw_normal
from numpy.testing import assert_allclose, assert_array_equal

from scalify_core import (
    PrecisionWarning,
    as_scaled_array,
    asarray,
    explain,
    scalify,
    weights,
)

HALF, E4M3 = jnp.float16, jnp.float8_e4m3fn
X = draw_normal(0, (4, 8))


@pytest.mark.parametrize(("scales", "dtype"), [("auto", HALF), ("static", E4M3)])
def test_typed_keys_may_be_results(dtype, scales):
    x, key = as_scaled_array(X, dtype=dtype), jax.random.key(0)
    fun = scalify(lambda x, key: (x * 2, key, jax.random.split(key)), scales=scales)
    for run in (fun, jax.jit(fun)):
        _, same, both = run(x, key)
        assert same.dtype == both.dtype == key.dtype
        assert jnp.all(both == jax.random.split(key))


def model(x):
    """As an Equinox module: arrays, and functions among the leaves."""
    return {"layers": [x, jnp.tanh], "name": "tower", "depth": 2, "nothing": None}


def called(model, x):
    return model["layers"][1](x @ model["layers"][0].T) * model["depth"]


def test_leaves_that_are_no_arrays_pass_through():
    scaled, x = as_scaled_array(model(X), dtype=HALF), X.astype(HALF)
    assert (scaled["layers"][1], scaled["name"]) == (jnp.tanh, "tower")
    actual = scalify(called)(scaled, x)
    assert_allclose(asarray(actual), called(model(X), X), rtol=2e-2, atol=1e-2)
    assert explain(called, scaled, x).errors[0] < 1e-2
    doubled = scalify(lambda m: m | {"layers": [m["layers"][0] * 2, jnp.tanh]})(scaled)
    assert doubled["layers"][1] is jnp.tanh
    assert (doubled["name"], doubled["nothing"]) == ("tower", None)
    assert_array_equal(asarray(doubled["layers"][0]), 2 * asarray(scaled["layers"][0]))


def test_python_booleans_may_choose_what_python_does():
    """As `inference` of a Dropout in an Equinox module."""
    scaled = as_scaled_array({"w": X, "inference": True}, dtype=HALF)

    def fun(model):
        return model | {"w": model["w"] * (3 if model["inference"] else 2)}

    for scales in ("auto", "static"):
        actual = scalify(fun, scales=scales)(scaled)
        assert actual["inference"] is True
        assert_array_equal(asarray(actual["w"]), 3 * asarray(scaled["w"]).astype(HALF))


@pytest.mark.parametrize("dtype", [jnp.float16, np.float16, np.dtype("float16")])
def test_dtypes_pass_through(dtype):
    scaled = as_scaled_array({"w": X, "dtype": dtype}, dtype=HALF)
    actual = scalify(lambda m: m | {"w": m["w"].astype(m["dtype"])})(scaled)
    assert actual["dtype"] is dtype
    assert_array_equal(asarray(actual["w"]), asarray(scaled["w"]))
    shape = jax.ShapeDtypeStruct((2,), dtype)
    assert scalify(lambda x, shape: shape)(scaled["w"], shape) is shape


def test_numbers_of_python_are_settings_and_no_parameters():
    """As the rate of a Dropout in an Equinox module, and an axis."""
    scaled = as_scaled_array({"w": X, "rate": 0.3, "axis": 1}, dtype=HALF)
    fun = lambda m: m | {"w": jnp.cumsum(m["w"] * m["rate"], m["axis"])}
    for run in (scalify(fun), scalify(fun, scales="static")):
        actual = run(scaled)
        assert (type(actual["rate"]), actual["axis"]) == (float, 1)
        expected = fun(asarray(scaled))["w"]
        assert_allclose(asarray(actual["w"]), expected, rtol=2.0**-9, atol=2e-3)


@pytest.mark.parametrize("scales", ["auto", "static"])
def test_gradients_of_integers_are_results_and_arguments(scales):
    params = as_scaled_array({"table": X, "ids": jnp.array([1, 0, 1])}, dtype=HALF)
    plain = asarray(params)

    def gradient(params):
        loss = lambda p: jnp.sum(p["table"][p["ids"]] ** 2)
        return jax.grad(loss, allow_int=True)(params)

    def step(params, gradients):
        return params["table"] - gradients["table"]

    expected = gradient(plain)
    for run in (lambda f: f, jax.jit):
        actual = run(scalify(gradient, scales=scales))(params)
        assert actual["ids"].dtype == jax.dtypes.float0
        assert_allclose(asarray(actual["table"]), expected["table"], rtol=2.0**-9)
        new = run(scalify(step, scales=scales))(params, actual)
        assert_allclose(asarray(new), step(plain, expected), rtol=2.0**-7, atol=1e-3)
    assert explain(gradient, params).errors[0] < 2.0**-9


def test_updates_are_rounded_to_nearest_by_default():
    params, updates = as_scaled_array(X, dtype=HALF), 0.1 * X
    actual = weights.apply_updates(params, updates)
    assert_allclose(asarray(actual), asarray(params) + updates, rtol=2.0**-11)
    with pytest.raises(ValueError, match=r"stochastic.* needs seed= and step="):
        weights.apply_updates(params, updates, rounding="stochastic")


def test_the_structure_of_a_result_is_that_of_the_trace_with_float32_arrays():
    def fun(x):
        if x.dtype == jnp.float32:
            return x, -x, str(x.dtype)
        return (x,)

    x = as_scaled_array(jnp.arange(4.0), dtype=jnp.float16)
    same, negative, dtype = scalify(fun)(x)
    assert_array_equal(asarray((same, negative)), [asarray(x), -asarray(x)])
    assert dtype == "float32"


def test_a_pullback_may_be_a_result_and_an_argument():
    """A pipeline may run its forward and its backward pass apart."""
    fun = lambda x, w: jnp.tanh(x @ w).astype(jnp.float32)
    x, w = jnp.eye(3), jnp.full((3, 2), 0.5)
    forward = lambda x, w: jax.vjp(fun, x, w)[1]
    args = as_scaled_array((x, w), dtype=jnp.float16)
    pullback = jax.jit(scalify(forward))(*args)
    # The pullback takes FP32 alone, so it has no trace with FP16 residuals.
    with pytest.warns(PrecisionWarning, match="cannot be traced with arrays in the fo"):
        gradients = jax.jit(scalify(lambda f, y: f(y)))(pullback, jnp.ones((3, 2)))
    expected = forward(x, w)(jnp.ones((3, 2)))
    for actual, wanted in zip(asarray(gradients), expected, strict=True):
        assert_allclose(actual, wanted, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("scales", ["auto", "static"])
@pytest.mark.parametrize("run", [lambda fun: fun, jax.jit])
def test_a_reference_is_read_and_written(run, scales):
    def fun(x, total):
        total[...] += x.sum(0)
        return 2 * total[...]

    x, total = as_scaled_array(X, dtype=HALF), jax.new_ref(jnp.ones(8))
    out = run(scalify(fun, scales=scales))(x, total)
    expected = 1 + asarray(x).sum(0)
    # Half of an epsilon of FP16 for each store: of the sum, and of the result.
    assert_allclose(total[...], expected, rtol=2.0**-11)
    assert_allclose(asarray(out), 2 * expected, rtol=2.0**-10)
