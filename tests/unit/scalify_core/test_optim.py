"""Narrow optimizer state, and optimizers under scalify: what is stored, what survives,
and that every bit is a function of seed and step."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from beside_plain import normal
from numpy.testing import assert_allclose
from optax import contrib

from scalify_core import (
    PrecisionWarning,
    ScaledArray,
    as_scaled_array,
    asarray,
    scalify,
    tree,
)
from scalify_core.numerics.formats import E4M3, E5M2, FP16, FloatFormat, is_float
from scalify_core.optim import Stored, scaled_state
from scalify_core.static import dynamic_rescale_rms

HOW = Stored(FP16)
HALF, FP8 = {"mu": FP16, "nu": FP16}, {"mu": E4M3, "nu": E5M2}


def run(tx, gradient, steps, state=None):
    """State and last updates after `steps` steps on one gradient."""
    state = tx.init(gradient) if state is None else state
    step = jax.jit(tx.update)
    for _ in range(steps):
        updates, state = step(gradient, state)
    return state, updates


def traced(fmt, rounding="nearest", *, sqrt=False, decay=0.0):
    """A state of one field, which is the gradient."""
    fields = {"trace": Stored(fmt, sqrt, rounding)}
    return scaled_state(optax.trace(decay), fields=fields, seed=0)


def gradients(key):
    """Leaves of several sizes; every other row of `wte` is unseen."""
    wte = normal(key, 64, 32) * (jnp.arange(64) % 2)[:, None]
    return {"wte": wte, "w": 1e-3 * normal(key + 1, 64, 32), "b": 30 * normal(key, 32)}


def test_both_moments_of_a_leaf_and_all_leaves_draw_different_bits():
    tx = scaled_state(
        optax.scale_by_adam(0.0, 0.0),
        fields={"mu": Stored(E4M3), "nu": Stored(E4M3, sqrt=True)},
        seed=0,
    )
    # half way between two E4M3 numbers, and nearly so in the square
    x = jnp.full(2**12, 1.0 + 1 / 16)
    state, _ = run(tx, {"a": x, "b": x}, 1)
    both = (state.inner_state.mu, state.inner_state.nu)
    drawn = [np.asarray(moment[leaf]) > 1 for moment in both for leaf in "ab"]
    for one, other in itertools.combinations(drawn, 2):
        # Independent fair coins agree half the time; 6 standard deviations of the
        # binomial.
        assert abs(np.mean(one == other) - 0.5) < 0.02 + 6 * 0.5 / 2**6


@pytest.mark.parametrize(("fmt", "sqrt"), [(E4M3, False), (E5M2, True)], ids=str)
def test_stochastic_storage_is_unbiased(fmt, sqrt):
    n = 2**16
    for value in (1.03, 0.0071):
        x = jnp.full(n, value).at[0].set(4.0)  # the first sets the scale
        state, _ = run(traced(fmt, "stochastic", sqrt=sqrt), x, 1)
        stored = np.asarray(state.inner_state.trace, np.float64)[1:]
        low, high = stored.min(), stored.max()
        expected = float(jnp.sqrt(x[1]) if sqrt else x[1])
        p = (expected - low) / (high - low)
        assert 0 <= p <= 1
        # The standard deviation of a mean of n draws of two values. Bits and FP32
        # arithmetic: 2^-16 of their distance.
        tolerance = (high - low) * (6 * np.sqrt(p * (1 - p) / n) + 2.0**-16)
        assert abs(stored.mean() - expected) < tolerance


def test_the_step_is_counted_where_nothing_is_stored_narrow_too():
    state, _ = run(scaled_state(optax.scale_by_adam(), seed=0), gradients(0), 3)
    assert state.step == 3


def test_rows_never_seen_get_no_update_and_nothing_is_nan():
    tx = scaled_state(optax.scale_by_adam(0.9, 0.95, eps=0.0), **FP8, seed=0)
    zeros = jax.tree.map(jnp.zeros_like, gradients(0))
    state, updates = run(tx, zeros, 5)
    assert not any(np.any(u) for u in jax.tree.leaves(updates))
    state, updates = run(tx, gradients(0), 5, state)
    assert all(np.all(np.isfinite(u)) for u in jax.tree.leaves(updates))
    is_seen = jnp.arange(64) % 2 == 1
    mu, nu = state.inner_state.mu["wte"], state.inner_state.nu["wte"]
    for rows in (updates["wte"], mu, nu):
        assert np.array_equal(np.any(np.asarray(rows), axis=1), is_seen)
    # quotients near 1 fill the upper octave
    assert 224 <= np.abs(mu.data.astype(np.float32)).max() * 1.25 < 448 * 1.25
    assert state.step == 10  # random bits are a function of it


def test_fp8_updates_are_as_good_for_rows_of_any_size():
    # Gradients of one size per row, from 1 down to 2^-24 of the largest: seldom seen
    # rows of an embedding.
    gradient = {"w": jnp.full((13, 1024), 1.0) * 4.0 ** -jnp.arange(13.0)[:, None]}
    nu = Stored(E5M2, sqrt=True)

    def sizes(**storage):
        tx = scaled_state(optax.scale_by_adam(0.9, 0.95, eps=0), **storage, seed=0)
        _, updates = run(tx, gradient, 60)
        return np.sqrt(np.mean(np.square(updates["w"]), axis=1))

    relative = sizes(fields={"mu": Stored(E4M3, relative_to="nu"), "nu": nu})
    assert np.array_equal(relative, sizes(**FP8))  # the default
    assert_allclose(relative, relative[0], rtol=0.05)
    # a step of m / sqrt(v), v having the noise of two mantissa bits
    assert relative[0] == pytest.approx(1, abs=0.25)
    absolute = sizes(fields={"mu": Stored(E4M3), "nu": nu})
    assert absolute[-1] > 2 * absolute[0] or absolute[-1] < absolute[0] / 2


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize(
    "plain", [contrib.adopt(1e-3), optax.novograd(1e-3), optax.adamax(1e-3)]
)
def test_fp8_moments_suit_optimisers_whose_moments_have_other_units(plain, size):
    """A `mu` that is not in units of the root of `nu` saturated, or became zeros."""
    tx = scaled_state(plain, seed=0, **FP8)
    totals = []
    for optimizer in (plain, tx):
        params = {"w": jnp.zeros((32, 16))}
        state, total = optimizer.init(params), 0.0
        step = jax.jit(optimizer.update)
        for i in range(20):
            gradient = {"w": size * (2 + normal(i, 32, 16))}
            updates, state = step(gradient, state, params)
            total += updates["w"]
        totals.append(total)
    off = np.linalg.norm(totals[1] - totals[0]) / np.linalg.norm(totals[0])
    # twenty roundings of a root to two bits, half of them independent
    assert off < jnp.finfo(E5M2.dtype).eps / 2


def test_muons_own_moment_is_stored_in_fp8_beside_those_of_adam():
    params = {"w": normal(0, 8, 8), "b": normal(1, 8)}
    tx = scaled_state(contrib.muon(1e-3), seed=0, **FP8)
    state = tx.init(params)
    moments = [x for x in tree.leaves(state) if isinstance(x, ScaledArray)]
    assert {x.dtype for x in moments} == {E4M3.dtype, E5M2.dtype}
    assert all(x.dtype != E4M3.dtype or x.size in (8, 64) for x in moments)


def test_a_negative_number_has_no_root_and_is_not_stored_as_zero():
    tx = traced(FP16, sqrt=True)
    state, _ = run(tx, {"w": jnp.float32([4.0, -1.0, 0.0])}, 1)
    stored = np.asarray(asarray(state.inner_state.trace["w"]))
    np.testing.assert_array_equal(stored, np.float32([2.0, np.nan, 0.0]))


def test_gradients_that_optax_has_scaled_leaf_by_leaf_are_not_numbers():
    """Data and scale were both multiplied: the update was too small by that factor."""
    gradient = as_scaled_array({"w": jnp.full(8, 0.125)}, dtype=jnp.float16)
    halved = jax.tree.map(lambda x: 0.3 * x, gradient)
    tx = scaled_state(optax.sgd(0.1, momentum=0.9), seed=0, fields={"trace": HOW})
    state = tx.init({"w": jnp.zeros(8)})
    with pytest.warns(PrecisionWarning, match=r"scaled_state: \['w'\] reads as NaN"):
        updates, _ = tx.update(halved, state)
    assert np.isnan(updates["w"]).all()
    updates, _ = jax.jit(tx.update)(halved, state)
    assert np.isnan(updates["w"]).all()
    assert np.isnan(jax.jit(tree.global_norm)(halved))


def test_the_state_is_updated_inside_a_shard_map():
    """XLA ended the process: an empty constant met a barrier."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    tx = scaled_state(optax.trace(0.9), seed=0, fields={"trace": HOW})
    gradient = {"w": normal(0, 16, 4)}

    def update(gradient):
        return tx.update(gradient, tx.init(gradient))[0]

    mapped = jax.shard_map(update, mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(jax.jit(mapped)(gradient)["w"], gradient["w"])


def test_a_positive_second_moment_is_never_stored_as_zero():
    v = jnp.array([1.0, 1e-20, 1e-30, 0.0], jnp.float32)
    for fmt, rounding in ((E4M3, "stochastic"), (E5M2, "nearest"), (FP16, "nearest")):
        state, _ = run(traced(fmt, rounding, sqrt=True), v, 1)
        data = np.asarray(state.inner_state.trace.data, np.float32)
        assert np.array_equal(data > 0, [True, True, True, False])
        assert data[2] == fmt.min_subnormal


@pytest.mark.parametrize("fmt", [E4M3, FP16], ids=str)
def test_the_largest_magnitude_is_in_the_upper_octave_and_never_saturates(fmt):
    for peak in (1.0, 1.99, 447.9, 448.1, 1e-20, 1e20, 65504.0):
        x = jnp.array([peak, -peak / 3], jnp.float32)
        stored = run(traced(fmt), x, 1)[0].inner_state.trace
        assert fmt.max / 2 <= float(stored.data[0]) <= fmt.max
        assert_allclose(np.asarray(stored), x, rtol=fmt.epsilon / 2 + 2**-22)


@pytest.mark.parametrize("formats", [HALF, FP8], ids=["fp16", "fp8"])
def test_a_rejected_update_leaves_the_state_as_it_was(formats):
    """Its data and its scales: new scales would multiply the old moments."""
    tx = scaled_state(optax.scale_by_adam(), **formats, seed=0)
    state, _ = run(tx, gradients(0), 3)
    larger = jax.tree.map(lambda x: 1000 * x, gradients(1))
    _, rejected = jax.jit(tx.update)(larger, state, accept=jnp.bool_(False))
    jax.tree.map(np.testing.assert_array_equal, rejected, state)


def test_a_tensor_of_zeros_or_nan_keeps_its_scale():
    tx = traced(FP16)
    state, _ = run(tx, jnp.array([3.0, 4.0]), 1)
    for x in (jnp.array([jnp.nan, 1.0]), jnp.zeros(2)):
        stored = run(tx, x, 1, state)[0].inner_state.trace
        assert stored.scale == state.inner_state.trace.scale
        assert np.array_equal(np.isnan(stored.data), np.isnan(x))


WRAPPED = {
    "adamw": (lambda: optax.adamw(1e-2, b2=0.95), FP8),
    # Its updates are twice as many as its gradients: of the fast and slow weights.
    "lookahead": (lambda: optax.lookahead(optax.adam(1e-2), 1, 0.5), HALF),
    "masked": (
        lambda: optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.masked(optax.adam(1e-2), {"wte": True, "w": True, "b": False}),
        ),
        HALF,
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_optimisers_make_the_updates_of_their_plain_twins(name):
    make, stored = WRAPPED[name]
    plain, tx = make(), scaled_state(make(), **stored, seed=0)
    params = jax.tree.map(jnp.ones_like, gradients(0))
    if name == "lookahead":
        params = optax.LookaheadParams.init_synced(params)
    a, b = plain.init(params), tx.init(params)
    update, plain_update = jax.jit(tx.update), jax.jit(plain.update)
    for i in range(3):
        expected, a = plain_update(gradients(i), a, params)
        actual, b = update(gradients(i), b, params)
    assert any(isinstance(x, ScaledArray) for x in tree.leaves(b))
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == jnp.float32
        cosine = np.sum(x * y) / np.sqrt(np.sum(x * x) * np.sum(y * y))
        assert cosine > 0.97


def test_an_update_inside_of_scalify_is_refused_with_where_it_belongs():
    """There the state's ScaledArrays are plain arrays, without scales."""
    tx = scaled_state(optax.adam(1e-2), **HALF, seed=0)
    w = as_scaled_array(jnp.ones(8), dtype=jnp.float16)
    with pytest.raises(TypeError, match=r"scaled_state.*outside of scalify"):
        scalify(lambda w, state: tx.update(w, state, w))(w, tx.init(w))


REFUSED = [
    (optax.lion(1e-3), HALF, "field 'nu'; it has some in ['mu']"),
    (
        optax.adam(1e-3),
        {"fields": {f: Stored(E4M3, relative_to=g) for f, g in ("mn", "nm")}},
        "relative itself",
    ),
    (optax.adam(1e-3), {"mu": FP16, "fields": {"mu": Stored(E4M3)}}, "given twice"),
    (optax.adam(1e-3), {"mu": FloatFormat.parse("e3m3")}, "no native dtype"),
    (optax.adam(1e-3), {"fields": {"mu": HALF}}, "expected a Stored"),
]


@pytest.mark.parametrize(("tx", "given", "says"), REFUSED)
def test_what_cannot_be_stored_is_refused_with_what_to_give_instead(tx, given, says):
    with pytest.raises((ValueError, TypeError), match=re.escape(says)):
        scaled_state(tx, seed=0, **given).init({"w": jnp.ones(8)})


STEPS = 30


def rescaled(tree):
    """The scale of its RMS in each step: the rules' upper bounds would add up."""
    return jax.tree.map(lambda x: dynamic_rescale_rms(x) if is_float(x) else x, tree)


def losses_of(tx, dtype):
    """Losses of a regression: plain (`dtype` None), or scaled with data of `dtype`."""
    params = {"w": normal(0, 8, 4) / 8**0.5, "b": jnp.zeros(4)}
    x = normal(2, 32, 8)
    y = jnp.sin(x @ normal(3, 8, 4)) + 1.0

    def loss_of(params, x):
        out = jnp.tanh(x @ params["w"] + params["b"][None])
        return jnp.mean((out - y) ** 2)

    def step(params, state, x):
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, state = tx.update(grads, state, params)
        return rescaled(optax.apply_updates(params, updates)), rescaled(state), loss

    state = tx.init(params)
    if dtype is not None:
        params, state, x = as_scaled_array((params, state, x), dtype=dtype)
        step = scalify(step)
    step = jax.jit(step)
    losses = []
    for _ in range(STEPS):
        params, state, loss = step(params, state, x)
        losses.append(float(asarray(loss)))
    return np.array(losses)


def test_in_fp32_data_the_losses_are_those_of_the_plain_twin():
    """The bias begins as zeros, so the first trust ratios of LAMB are quotients by or
    of zero, which are discarded."""
    lamb = optax.lamb(1e-2)
    assert_allclose(losses_of(lamb, jnp.float32), losses_of(lamb, None), rtol=1e-5)


@pytest.mark.parametrize(
    "tx",
    [optax.adafactor(1e-2, min_dim_size_to_factor=4), contrib.muon(1e-2)],
    ids=["adafactor", "muon"],
)
def test_in_fp16_data_it_learns_as_well(tx):
    losses, expected = losses_of(tx, jnp.float16), losses_of(tx, None)
    assert np.all(np.isfinite(losses))
    assert expected[-1] < 0.9 * expected[0]
    # The means over the last ten steps: single losses jump where a sign-based optimizer
    # flips one sign.
    assert np.mean(losses[-10:]) == pytest.approx(np.mean(expected[-10:]), rel=0.01)
