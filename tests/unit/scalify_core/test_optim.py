"""Narrow optimiser state: what is stored, what survives, and that every bit is a
function of seed and step."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose

from scalify_core import ScaledArray, as_scaled_array, tree
from scalify_core.numerics.formats import BF16, E4M3, E5M2, FP16, FloatFormat
from scalify_core.optim import Stored, scaled_state

HALF, FP8 = {"mu": FP16, "nu": FP16}, {"mu": E4M3, "nu": E5M2}


def adam_state(state):
    """The ScaleByAdamState of a wrapped scale_by_adam or chain that begins with it."""
    inner = state.inner_state
    return inner if hasattr(inner, "nu") else inner[0]


def second_moment(state, key="w"):
    """What the optimiser will see, in NumPy."""
    return np.square(np.asarray(adam_state(state).nu[key]))


def run(tx, gradient, steps, state=None, params=None):
    """State and last updates after `steps` steps on one gradient."""
    state = tx.init(gradient) if state is None else state

    @jax.jit
    def advance(state, gradient):
        return jax.lax.fori_loop(
            0, steps, lambda _, c: tx.update(gradient, c[1], params), (gradient, state)
        )

    updates, state = advance(state, gradient)
    return state, updates


def gradients(key, shape=(64, 32)):
    """Leaves of several sizes; every other row of `wte` is unseen."""
    keys = jax.random.split(jax.random.key(key), 3)
    wte = jax.random.normal(keys[0], shape) * (jnp.arange(shape[0]) % 2)[:, None]
    return {
        "wte": wte,
        "w": 1e-3 * jax.random.normal(keys[1], shape),
        "b": 30 * jax.random.normal(keys[2], shape[-1:]),
    }


def test_state_on_eight_devices_is_bitwise_the_state_on_one():
    tx = optax.chain(scaled_state(optax.scale_by_adam(0.9, 0.99), **FP8, seed=3))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def shard(x):
        return jax.device_put(
            x, NamedSharding(mesh, P("data") if x.ndim and x.shape[0] % 8 == 0 else P())
        )

    grads = [gradients(i) for i in range(3)]
    single, sharded = tx.init(grads[0]), jax.tree.map(shard, tx.init(grads[0]))
    step = jax.jit(tx.update)
    for grad in grads:
        _, single = step(grad, single)
        _, sharded = step(jax.tree.map(shard, grad), sharded)
    data = sharded[0].inner_state.mu["wte"].data
    assert data.sharding.shard_shape(data.shape) == (8, 32)
    assert_same_bits(single, sharded)


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_state_is_a_function_of_seed_and_step_alone():
    def runner(seed):
        tx = scaled_state(optax.scale_by_adam(0.9, 0.95), mu=E4M3, nu=E5M2, seed=seed)
        step = jax.jit(tx.update)

        def after(steps, state):
            for _ in range(steps):
                _, state = step(gradients(0), state)
            return state

        return after, tx.init(gradients(0))

    after, start = runner(1)
    state = after(6, start)
    assert_same_bits(state, after(3, after(3, start)))  # as after a resume
    repeated, start = runner(1)
    assert_same_bits(state, repeated(6, start))
    other, start = runner(2)
    same = np.asarray(state.inner_state.mu["w"].data) == np.asarray(
        other(6, start).inner_state.mu["w"].data
    )
    assert 0.1 < np.mean(same) < 0.9


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
    tx = scaled_state(
        optax.trace(0.0), fields={"trace": Stored(fmt, sqrt=sqrt)}, seed=0
    )
    for value in (1.03, 0.3, 0.0071):
        x = jnp.full(n, value).at[0].set(4.0)  # the first sets the scale
        state, _ = run(tx, x, 1)
        stored = np.asarray(state.inner_state.trace, np.float64)[1:]
        low, high = stored.min(), stored.max()
        expected = float(np.sqrt(np.float32(value)) if sqrt else np.float32(value))
        assert low <= expected <= high
        p = (expected - low) / (high - low)
        # The standard deviation of a mean of n draws of two values. Bits and FP32
        # arithmetic: 2^-16 of their distance.
        tolerance = (high - low) * (6 * np.sqrt(p * (1 - p) / n) + 2.0**-16)
        assert abs(stored.mean() - expected) < tolerance


def test_an_e5m2_second_moment_settles_at_its_value_only_if_rounded_stochastically():
    n = 2**14
    gradient = {"w": jnp.full(n, 0.37)}
    ratio = {}
    for rounding in ("stochastic", "nearest"):
        tx = scaled_state(
            optax.scale_by_adam(0.9, 0.95),
            fields={"nu": Stored(E5M2, True, rounding)},
            seed=0,
        )
        state, _ = run(tx, gradient, 200)
        high = second_moment(state).mean() / 0.37**2
        state, _ = run(tx, {"w": jnp.full(n, 0.37 / 4)}, 200, state)
        ratio[rounding] = high, second_moment(state).mean() / (0.37 / 4) ** 2
    # The root goes between two neighbours, at most epsilon apart relatively, which
    # moves the mean of its square by less than epsilon^2. A rounding has at most half
    # of that distance as its standard deviation, twice that in the square; steps add up
    # with weights b2^k; six standard deviations of the mean of n elements.
    tolerance = (
        E5M2.epsilon**2 + 6 * E5M2.epsilon / np.sqrt(n * (1 - 0.95**2)) + 0.95**200
    )
    assert ratio["stochastic"] == pytest.approx((1, 1), abs=tolerance)
    # To nearest it stops half way up, where a step is less than half an ulp, and does
    # not come down at all.
    assert ratio["nearest"][0] < 0.5
    assert ratio["nearest"][1] == pytest.approx(16 * ratio["nearest"][0])


def test_rows_never_seen_get_no_update_and_nothing_is_nan():
    tx = scaled_state(optax.scale_by_adam(0.9, 0.95, eps=0.0), **FP8, seed=0)
    zeros = jax.tree.map(jnp.zeros_like, gradients(0))
    state, updates = run(tx, zeros, 5)
    assert all(np.all(np.asarray(u) == 0) for u in jax.tree.leaves(updates))
    state, updates = run(tx, gradients(0), 5, state)
    for u in jax.tree.leaves(updates):
        assert np.all(np.isfinite(u))
    assert np.all(np.asarray(updates["wte"])[::2] == 0)
    assert np.all(np.asarray(updates["wte"])[1::2] != 0)
    for moment in (state.inner_state.mu, state.inner_state.nu):
        assert np.all(np.asarray(moment["wte"])[::2] == 0)


@pytest.mark.parametrize("formats", [HALF, FP8], ids=["fp16", "fp8"])
def test_a_small_element_takes_no_exploding_step(formats):
    # Elements at 2^-12 of the RMS, and a large one that sets the scale.
    gradient = {"w": jnp.full(1024, 2.0**-13).at[0].set(30.0).at[1:512].set(1.0)}
    tx = scaled_state(optax.scale_by_adam(0.9, 0.95), **formats, seed=0)
    state = tx.init(gradient)
    step = jax.jit(tx.update)
    for i in range(40):
        updates, state = step(gradient, state)
        # Narrow moments may differ by the spacing of their formats; both from E4M3's
        # and E5M2's smallest numbers up.
        assert np.max(np.abs(updates["w"])) < 4, i
    assert np.all(np.asarray(state.inner_state.nu["w"].data) != 0)


def test_fp8_updates_are_as_good_for_rows_of_any_size():
    # Gradients of one size per row, from 1 down to 2^-24 of the largest: seldom seen
    # rows of an embedding.
    gradient = {"w": jnp.full((13, 1024), 1.0) * 4.0 ** -jnp.arange(13.0)[:, None]}
    adam = optax.scale_by_adam(0.9, 0.95, eps=0)

    def updates_of(**how):
        return run(scaled_state(adam, **how, seed=0), gradient, 60)[1]

    nu = Stored(E5M2, sqrt=True)
    relative = {"mu": Stored(E4M3, relative_to="nu"), "nu": nu}
    updates = updates_of(fields=relative)
    assert_same_bits(updates, updates_of(mu=E4M3, nu=E5M2))  # the default
    sizes = np.sqrt(np.mean(np.square(updates["w"]), axis=1))
    assert_allclose(sizes, sizes[0], rtol=0.05)
    # a step of m / sqrt(v), v having the noise of two mantissa bits
    assert sizes[0] == pytest.approx(1, abs=0.25)
    updates = updates_of(fields={"mu": Stored(E4M3), "nu": nu})
    sizes = np.sqrt(np.mean(np.square(updates["w"]), axis=1))
    assert sizes[-1] > 2 * sizes[0] or sizes[-1] < sizes[0] / 2


def test_the_scale_of_a_quotient_is_a_constant_and_holds_all_that_adam_can_reach():
    tx = scaled_state(optax.scale_by_adam(0.9, 0.999), mu=E4M3, nu=E5M2, seed=0)
    # The largest quotient: v grown from gradients that rise as b1 / b2 does per step
    # backwards.
    state = tx.init({"w": jnp.zeros(256)})
    step = jax.jit(tx.update)
    for i in range(60):
        _, state = step({"w": jnp.full(256, (0.999 / 0.9) ** i)}, state)
    quotient = np.asarray(state.inner_state.mu["w"])
    assert state.inner_state.mu["w"].scale == 2.0**-4
    assert 5 < quotient.mean() < 0.1 / np.sqrt(0.001 * (1 - 0.81 / 0.999)) * 1.25
    assert quotient.max() < 28


def test_a_positive_second_moment_is_never_stored_as_zero():
    v = jnp.array([1.0, 1e-20, 1e-30, 0.0], jnp.float32)
    for fmt, rounding in (
        (E4M3, "stochastic"),
        (E5M2, "nearest"),
        (FP16, "nearest"),
        (FP16, "stochastic"),
    ):
        tx = scaled_state(
            optax.trace(0.0), fields={"trace": Stored(fmt, True, rounding)}, seed=0
        )
        data = np.asarray(run(tx, v, 1)[0].inner_state.trace.data, np.float32)
        assert np.array_equal(data > 0, [True, True, True, False])
        assert data[2] == fmt.min_subnormal


@pytest.mark.parametrize("fmt", [E4M3, FP16], ids=str)
def test_the_largest_magnitude_is_in_the_upper_octave_and_never_saturates(fmt):
    tx = scaled_state(
        optax.trace(0.0), fields={"trace": Stored(fmt, rounding="nearest")}, seed=0
    )
    for peak in (1.0, 1.99, 447.9, 448.1, 1e-20, 1e20, 57344.0, 65504.0):
        state, _ = run(tx, jnp.array([peak, -peak / 3], jnp.float32), 1)
        assert (
            fmt.max / 2
            <= float(np.asarray(state.inner_state.trace.data, np.float32)[0])
            <= fmt.max
        )
        assert_allclose(
            np.asarray(state.inner_state.trace),
            [peak, -peak / 3],
            rtol=fmt.epsilon / 2 + 2**-22,
        )


def test_a_tensor_of_zeros_or_nan_keeps_its_scale():
    tx = scaled_state(
        optax.trace(0.5), fields={"trace": Stored(FP16, rounding="nearest")}, seed=0
    )
    state, _ = run(tx, jnp.array([3.0, 4.0]), 1)
    scale = state.inner_state.trace.scale
    broken, _ = run(tx, jnp.array([jnp.nan, 1.0]), 1, state)
    assert broken.inner_state.trace.scale == scale
    assert np.isnan(np.asarray(broken.inner_state.trace.data)[0])
    tx = scaled_state(
        optax.trace(0.0), fields={"trace": Stored(FP16, rounding="nearest")}, seed=0
    )
    assert run(tx, jnp.zeros(2), 1, state)[0].inner_state.trace.scale == scale


WRAPPED = {
    "adamw": (lambda: optax.adamw(1e-2, b2=0.95), FP8),
    "lion": (lambda: optax.lion(1e-3), {"mu": E4M3}),
    "momentum": (
        lambda: optax.sgd(1e-2, momentum=0.9),
        {"fields": {"trace": Stored(E4M3)}},
    ),
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
    a, b = plain.init(params), tx.init(params)
    update, plain_update = jax.jit(tx.update), jax.jit(plain.update)
    for i in range(3):
        expected, a = plain_update(gradients(i), a, params)
        actual, b = update(gradients(i), b, params)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert any(isinstance(x, ScaledArray) for x in tree.leaves(b))
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == jnp.float32
        cosine = np.sum(x * y) / np.sqrt(np.sum(x * x) * np.sum(y * y))
        assert cosine > 0.97


def test_gradients_and_parameters_may_be_scaled_or_narrow():
    tx = scaled_state(optax.adamw(1e-2, weight_decay=0.1), mu=FP16, nu=FP16, seed=0)
    grads = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array([4.0])}
    params = {"w": jnp.array([1.0, 2.0, -4.0]), "b": jnp.array([0.5])}
    expected, expected_state = tx.update(grads, tx.init(params), params)
    for kind in (
        lambda t: as_scaled_array(t, 4.0, E5M2.dtype),
        lambda t: jax.tree.map(lambda x: x.astype(BF16.dtype), t),
    ):
        updates, state = tx.update(kind(grads), tx.init(kind(params)), kind(params))
        assert_same_bits((updates, state), (expected, expected_state))


REFUSED = [
    (optax.lion(1e-3), HALF, "field 'nu'; it has some in ['mu']"),
    (
        optax.adam(1e-3),
        {"fields": {f: Stored(E4M3, relative_to=g) for f, g in ("mn", "nm")}},
        "relative itself",
    ),
    (optax.adam(1e-3), {"mu": FP16, "fields": {"mu": Stored(E4M3)}}, "given twice"),
    (optax.adam(1e-3), {"mu": FloatFormat.parse("e3m3")}, "no native dtype"),
    (optax.adam(1e-3), {"mu": FP16, "rounding": "up"}, "valid: nearest, stochastic"),
    (optax.adam(1e-3), {"nu": None}, "None has no FloatFormat"),
    (
        optax.sgd(0.1, momentum=0.9),
        {"fields": {"trace": jnp.float16}},
        "fields['trace'] is <class 'jax.numpy.float16'>, expected a Stored",
    ),
    (
        optax.sgd(1e-2, momentum=0.9),
        {"mu": E4M3},
        "field 'mu'; it has some in ['trace'], which fields= stores",
    ),
    # without scalars
    (
        optax.contrib.prodigy(),
        FP8,
        "in ['exp_avg', 'exp_avg_sq', 'grad_sum', 'params0'], which fields= stores",
    ),
]


@pytest.mark.parametrize(("tx", "given", "says"), REFUSED)
def test_what_cannot_be_stored_is_refused_with_what_to_give_instead(tx, given, says):
    with pytest.raises((ValueError, TypeError), match=re.escape(says)):
        scaled_state(tx, seed=0, **given).init({"w": jnp.ones(8)})
