"""Trees: norms, what other libraries store of them; and arithmetic on the
leaves of ScaledArrays outside of scalify, which reads as NaN and is told."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from beside_plain import F32, HALF
from draws import draw_normal
from jax import export
from numpy.testing import assert_allclose, assert_array_equal

from scalify_core import (
    PrecisionWarning,
    ScaledArray,
    as_scaled_array,
    asarray,
    optim,
    scalify,
    weights,
)
from scalify_core.array.tree import global_norm, leaves, register_flax


def test_the_norm_of_nothing_is_zero_and_infinities_and_nan_stay():
    assert global_norm({}) == 0
    assert jnp.isinf(global_norm([jnp.array([jnp.inf])]))
    assert jnp.isnan(global_norm([jnp.array([jnp.nan, 1.0])]))


@pytest.mark.parametrize("size", [2.0**-100, 300.0])
def test_the_norm_of_a_tree_is_finite_whatever_its_formats_are(size):
    half = ScaledArray(jnp.full(100, 1.5, HALF), F32(2.0 ** np.round(np.log2(size))))
    tree = {"scaled": half, "plain": jnp.full(4, size, F32), "count": jnp.int32(7)}
    expected = np.linalg.norm([*np.asarray(half, np.float64), *[size] * 4])
    assert_allclose(np.float64(jax.jit(global_norm)(tree)), expected, rtol=1e-6)


@pytest.mark.parametrize("scale", [4.0, F32(4), F32([4, 2])])
def test_flax_stores_scaled_arrays(scale):
    register_flax()
    x = {"w": ScaledArray(jnp.arange(6, dtype=HALF).reshape(2, 3), scale)}
    like = jax.tree.map(jnp.zeros_like, x)
    actual = flax.serialization.from_bytes(like, flax.serialization.to_bytes(x))["w"]
    assert actual.is_static == x["w"].is_static
    assert actual.dtype == HALF
    assert_array_equal(asarray(actual), asarray(x["w"]))


@pytest.mark.parametrize("scale", [4.0, F32(4)])
def test_an_exported_program_takes_scaled_arrays(scale):
    pytest.importorskip("flatbuffers", reason="jax.export writes with it")
    x = ScaledArray(jnp.arange(6, dtype=HALF), scale)
    fun = jax.jit(scalify(lambda x: x * 3))
    program = export.deserialize(export.export(fun)(x).serialize())
    assert_array_equal(asarray(program.call(x)), asarray(fun(x)))


EXPORTED = {
    "product over the batch": lambda x, w: x.T @ jnp.tanh(x @ w),
    "attention": lambda x, w: jax.nn.softmax(x @ x.T) @ x,
    "one sum for each": lambda x, w: jnp.einsum("bi,bi->b", x, x @ w),
    "scan": lambda x, w: jax.lax.scan(lambda c, y: (c + y @ w, c @ w), w[0], x),
    "gradient": jax.grad(lambda x, w: jnp.mean((x @ w) ** 2).astype(jnp.float32), 1),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_program_takes_batches_of_any_size(name):
    fun = scalify(EXPORTED[name])
    w = as_scaled_array(draw_normal(2, (4, 4)), dtype=HALF)
    batches = [as_scaled_array(draw_normal(n, (n, 4)), dtype=HALF) for n in (3, 8)]
    data = jax.ShapeDtypeStruct(export.symbolic_shape("b, 4"), HALF)
    shape = ScaledArray(data, jax.ShapeDtypeStruct((), F32))
    compiled = jax.jit(fun)
    program = export.export(compiled)(shape, w)
    for x in batches:
        for actual, expected in zip(
            *map(leaves, (program.call(x, w), compiled(x, w))), strict=True
        ):
            assert actual.dtype == expected.dtype
            actual, expected = map(np.asarray, (actual, expected))
            error = np.abs(actual - expected)
            assert np.max(error) <= 2.0**-9 * np.max(np.abs(expected))


told_elsewhere = pytest.mark.filterwarnings(
    "ignore:.*reads as NaN:scalify_core.PrecisionWarning"
)
W = 0.01 * draw_normal(1, (8, 8))
READ = {
    "asarray": asarray,
    "scalify": lambda x: asarray(scalify(lambda x: x * 1.0)(x)),
    "jit of scalify": lambda x: asarray(jax.jit(scalify(lambda x: x @ x))(x)),
}
A, B = as_scaled_array(W, F32(2)), as_scaled_array(2 * W, F32(0.5))
NO_SCALE = {
    "no power of two": jax.tree.map(lambda x: 0.1 * x, A),
    "a sum": jax.tree.map(jnp.add, A, B),
    "negative": jax.tree.map(jnp.negative, A),
    "zero": jax.tree.map(jnp.subtract, A, as_scaled_array(2 * W, F32(2))),
    "of rows, one NaN": ScaledArray(W, jnp.array([np.nan] + 7 * [3], F32)),
}


@told_elsewhere
@pytest.mark.parametrize("way", READ)
def test_data_at_a_scale_that_is_none_is_not_a_number_and_zeros_are_zeros(way):
    for name, wrong in NO_SCALE.items():
        # docs/trust.md: a difference of equal scales is not seen under `jit`
        if name != "zero" or "jit" not in way:
            assert np.isnan(READ[way](wrong)).all()
    zeros = jax.tree.map(jnp.zeros_like, as_scaled_array(W, dtype=HALF))
    assert_array_equal(READ[way](zeros), np.zeros_like(W))


def test_asarray_names_the_leaf_that_reads_as_nan():
    tree = {"layer": {"w": as_scaled_array(W, dtype=HALF)}}
    # warnings are errors in these tests
    assert np.isfinite(asarray(tree)["layer"]["w"]).all()
    with pytest.warns(
        PrecisionWarning,
        match=r"asarray: \['layer'\]\['w'\] reads as NaN.*scalify\(jax.grad",
    ):
        asarray(jax.tree.map(lambda g: 0.1 * g, tree))
    # a number that is none is not told
    assert np.isnan(asarray(as_scaled_array(jnp.full(3, jnp.nan)))).all()


PARAMS = {
    "w": as_scaled_array(W, dtype=HALF),
    "b": as_scaled_array(W[:1], dtype=HALF),
}


def loss_of(params):
    return jnp.sum((params["w"] + params["b"]) ** 2)


def test_weights_that_optax_has_updated_leaf_by_leaf_are_told_where_they_are_used():
    gradient_of = scalify(jax.grad(loss_of))
    sgd = optax.sgd(0.1)
    updates, _ = sgd.update(gradient_of(PARAMS), sgd.init(PARAMS))
    updated = optax.apply_updates(PARAMS, updates)
    message = r"\[0\]\['b'\] .*reads as NaN.*use weights.apply_updates and optim"
    with pytest.warns(PrecisionWarning, match=message):
        gradient_of(updated)
    # at no cost where it is compiled
    assert "callback" not in str(jax.make_jaxpr(gradient_of)(updated))


def test_who_forgets_the_scaled_state_is_told_or_has_weights_that_are_no_numbers():
    def step(tx, params, state):
        updates, state = tx.update(scalify(jax.grad(loss_of))(params), state, params)
        return weights.apply_updates(params, updates)

    adam = optax.adam(1e-2)
    with pytest.warns(
        PrecisionWarning,
        match=r"the update: \['b'\] \(and 1 more\) reads as NaN.*optim.scaled_state",
    ):
        step(adam, PARAMS, adam.init(PARAMS))
    compiled = jax.jit(functools.partial(step, adam))(PARAMS, adam.init(PARAMS))
    assert all(np.isnan(asarray(x)).all() for x in compiled.values())
    # As it is meant nothing is said.
    tx = optim.scaled_state(adam, mu=HALF, nu=HALF, seed=0)
    actual = step(tx, PARAMS, tx.init(PARAMS))
    assert all(np.isfinite(asarray(x)).all() for x in actual.values())
