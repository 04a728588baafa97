"""Arithmetic on the leaves of ScaledArrays, outside of scalify: what has become no
scale reads as NaN, and is told."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from beside_plain import F32
from draws import draw_normal
from numpy.testing import assert_array_equal

from scalify_core import (
    PrecisionWarning,
    ScaledArray,
    as_scaled_array,
    asarray,
    optim,
    scalify,
    weights,
)

HALF = jnp.float16
told_elsewhere = pytest.mark.filterwarnings(
    "ignore:.*reads as NaN:scalify_core.PrecisionWarning"
)
W = 0.01 * draw_normal(1, (8, 8))
READ = {
    "asarray": asarray,
    "scalify": lambda x: asarray(scalify(lambda x: x * 1.0)(x)),
    "jit of scalify": lambda x: asarray(jax.jit(scalify(lambda x: x @ x))(x)),
}


@told_elsewhere
@pytest.mark.parametrize("way", READ)
def test_a_scale_that_became_no_power_of_two_is_not_a_number(way):
    a, b = as_scaled_array(W, F32(2)), as_scaled_array(W, F32(0.5))
    for wrong in (
        jax.tree.map(lambda x, y: (x + y) / 2, a, b),
        jax.tree.map(lambda x: 0.1 * x, a),
    ):
        assert np.isnan(READ[way](wrong)).all()
    assert np.isnan(READ[way](jax.tree.map(jnp.negative, a))).all()
    assert np.isnan(READ[way](ScaledArray(W, F32(3)))).all()


@told_elsewhere
def test_data_beside_a_scale_that_became_zero_is_not_a_number_and_zeros_are_zeros():
    a, b = as_scaled_array(W, F32(2)), as_scaled_array(2 * W, F32(2))
    zeros = jax.tree.map(jnp.zeros_like, as_scaled_array(W, dtype=HALF))
    for read in (READ["asarray"], READ["scalify"]):
        assert np.isnan(read(jax.tree.map(jnp.subtract, b, a))).all()
        assert_array_equal(read(zeros), np.zeros_like(W))
        assert_array_equal(jax.jit(read)(zeros), np.zeros_like(W))


def test_who_reads_what_is_no_number_is_told_by_name():
    tree = {"layer": {"w": as_scaled_array(W, dtype=HALF)}}
    # warnings are errors in these tests
    assert np.isfinite(asarray(tree)["layer"]["w"]).all()
    wrong = jax.tree.map(lambda g: 0.1 * g, tree)
    with pytest.warns(
        PrecisionWarning,
        match=r"asarray: \['layer'\]\['w'\] reads as NaN.*scalify\(jax.grad",
    ):
        asarray(wrong)
    # a number that is none is not told
    assert np.isnan(asarray(as_scaled_array(jnp.full(3, jnp.nan)))).all()


def test_weights_that_optax_has_updated_leaf_by_leaf_are_told_where_they_are_used_next():
    params = {"w": as_scaled_array(W, dtype=HALF)}
    loss_of = scalify(jax.value_and_grad(lambda params: jnp.sum(params["w"] ** 2)))
    _, gradient = loss_of(params)
    sgd = optax.sgd(0.1)
    updates, _ = sgd.update(gradient, sgd.init(params))
    updated = optax.apply_updates(params, updates)
    with pytest.warns(
        PrecisionWarning,
        match=(
            r"argument: \[0\]\['w'\] reads as NaN.*use weights.apply_updates and optim"
        ),
    ):
        loss, _ = loss_of(updated)
    assert np.isnan(asarray(loss))
    # at no cost where it is compiled
    assert "callback" not in str(jax.make_jaxpr(loss_of)(updated))
    updates, _ = sgd.update(asarray(gradient), sgd.init(params))
    right = scalify(optax.apply_updates)(params, updates)
    assert np.isfinite(asarray(loss_of(right)[0]))


def test_who_forgets_the_scaled_state_is_told_or_has_weights_that_are_no_numbers():
    params = {
        "w": as_scaled_array(W, dtype=HALF),
        "b": as_scaled_array(W[:1], dtype=HALF),
    }
    gradient_of = scalify(
        jax.grad(lambda params: jnp.sum((params["w"] + params["b"]) ** 2))
    )

    def step(tx, params, state):
        updates, state = tx.update(gradient_of(params), state, params)
        return (
            weights.apply_updates(
                params, updates, rounding="stochastic", seed=0, step=0
            ),
            state,
        )

    adam = optax.adam(1e-2)
    with pytest.warns(
        PrecisionWarning,
        match=r"the update: \['b'\] \(and 1 more\) reads as NaN.*optim.scaled_state",
    ):
        step(adam, params, adam.init(params))
    actual, _ = jax.jit(functools.partial(step, adam))(params, adam.init(params))
    assert all(np.isnan(asarray(x)).all() for x in actual.values())
    # As it is meant nothing is said, and there is no callback in the program.
    scaled = optim.scaled_state(adam, mu=HALF, nu=HALF, seed=0)
    for tx in (scaled, adam._replace(update=scalify(adam.update))):
        actual, _ = step(tx, params, tx.init(params))
        assert all(np.isfinite(asarray(x)).all() for x in actual.values())
        assert "callback" not in str(
            jax.make_jaxpr(functools.partial(step, tx))(params, tx.init(params))
        )
