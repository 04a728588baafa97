"""Master weights: what an update leaves behind, scales that stay, and the event that
moves them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import HALF
from draws import draw_normal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

from scalify_core import ScaledArray, as_scaled_array, asarray
from scalify_core.numerics.formats import BF16, E4M3, FP16, counter_bits
from scalify_core.optim.weights import (
    apply_updates,
    apply_with_compensation,
    kahan_compensation,
    moving_average,
    rescale_params,
    rms_of_params,
    scaled_params,
    wide,
)

KINDS = {
    "fp16_static": (FP16, lambda x: ScaledArray(x.astype(HALF), 2.0**-6)),
    "fp16_per_layer": (
        FP16,
        lambda x: ScaledArray(
            x.astype(HALF), jnp.full(x.shape[:1], 2.0**-6, jnp.float32)
        ),
    ),
    "bf16_plain": (BF16, lambda x: x.astype(jnp.bfloat16)),
}


def scale_of(p):
    return 2.0**-6 if isinstance(p, ScaledArray) else 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_small_updates_move_a_weight_in_expectation_only_if_rounded_stochastically(
    kind,
):
    fmt, make = KINDS[kind]
    params = {"w": make(jnp.ones((64, 256)))}
    scale = scale_of(params["w"])
    # A quarter of the spacing above 1, 32 times.
    update, steps = {"w": jnp.full((64, 256), scale * fmt.epsilon / 4)}, 32

    def after(rounding):
        def body(i, p):
            return apply_updates(p, update, rounding=rounding, seed=0, step=i)

        out = jax.jit(lambda p: jax.lax.fori_loop(0, steps, body, p))(params)["w"]
        assert out.dtype == fmt.dtype
        return np.asarray(out, np.float64) / scale

    assert_array_equal(after("nearest"), 1)
    moved = (after("stochastic") - 1) / fmt.epsilon
    # Each step is a Bernoulli trial of probability 1/4: six standard deviations of the
    # mean of all.
    tolerance = 6 * np.sqrt(steps * 0.25 * 0.75 / moved.size)
    assert moved.mean() == pytest.approx(steps / 4, abs=tolerance)
    assert moved.std() == pytest.approx(np.sqrt(steps * 0.25 * 0.75), rel=0.05)


def test_large_updates_saturate_and_what_is_not_finite_stays_so():
    params = [ScaledArray(jnp.array([6e4, -6e4, 1, 1], HALF), 0.5)]
    for rounding in ("nearest", "stochastic"):
        new = apply_updates(
            params,
            [jnp.array([1e5, -1e5, jnp.nan, jnp.inf])],
            rounding=rounding,
            seed=0,
            step=0,
        )
        assert_array_equal(np.asarray(new[0].data), [65504, -65504, np.nan, np.inf])
        assert new[0].scale == 0.5


def test_fp32_parameters_get_the_plain_sum_and_updates_may_be_scaled():
    params = {"a": jnp.array([1.0, 2.0]), "b": ScaledArray(jnp.array([1.0, 2.0]), 0.25)}
    updates = {
        "a": ScaledArray(jnp.array([3.0, -3.0], HALF), 2.0),
        "b": jnp.array([1e-6, 1.0]),
    }
    new = apply_updates(params, updates, rounding="stochastic", seed=0, step=0)
    assert_array_equal(new["a"], [7.0, -4.0])
    assert_array_equal(new["b"].data, np.float32([1, 2]) + np.float32([4e-6, 4.0]))


def test_the_sum_on_eight_devices_is_bitwise_that_on_one_and_depends_on_seed_and_step():
    params = scaled_params({"w": draw_normal(0, (64, 32))}, HALF)
    update = {"w": 1e-4 * draw_normal(1, (64, 32))}
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))

    @jax.jit
    def add(params, update, seed, step):
        how = {"rounding": "stochastic", "seed": seed, "step": step}
        return apply_updates(params, update, **how)["w"].data

    base = np.asarray(add(params, update, 0, 5))
    sharded = add(*jax.device_put((params, update), rows), 0, 5)
    assert sharded.sharding.shard_shape(sharded.shape) == (8, 32)
    assert_array_equal(base, sharded)
    for seed, step in ((1, 5), (0, 6)):
        assert np.any(base != np.asarray(add(params, update, seed, step)))


def test_the_first_weight_and_the_first_moment_draw_different_bits():
    x = ScaledArray(jnp.zeros(2**14, E4M3.dtype), 1.0)
    half = jnp.full(2**14, E4M3.min_subnormal / 2)
    moved = apply_updates([x], [half], rounding="stochastic", seed=7, step=1)[0].data
    moment = E4M3.stochastic_round(half, counter_bits((2**14,), 7, 1, 0))
    same = np.equal(*(np.asarray(y, np.float32) > 0 for y in (moved, moment)))
    # Independent fair coins: six standard deviations.
    assert abs(np.mean(same) - 0.5) < 6 * 0.5 / 2**7


def test_master_weights_have_static_scales_and_fresh_biases_room_to_grow():
    params = {"w": 3e-3 * jnp.ones(64), "b": jnp.zeros(4), "id": jnp.arange(3)}
    scaled = scaled_params(params, HALF)
    assert scaled["w"].is_static
    assert scaled["w"].scale == 2.0**-8
    assert_allclose(np.asarray(scaled["w"]), params["w"], rtol=FP16.epsilon / 2)
    assert scaled["id"].dtype == jnp.int32
    moved = apply_updates(
        {"b": scaled["b"]}, {"b": jnp.full(4, 1e-3)}, rounding="nearest", seed=0, step=0
    )["b"]
    assert_allclose(np.asarray(moved), 1e-3, rtol=FP16.epsilon / 2)


def test_only_what_is_named_is_rescaled_and_its_values_stay_exactly():
    def data(rms):
        return jnp.array([rms, -rms, rms, rms], HALF)

    params = {
        "kept": ScaledArray(data(0.07), 1.0),
        "low": ScaledArray(data(0.04), 2.0**-3),
        "high": ScaledArray(data(100.0), jnp.float32(2.0)),
        "zero": ScaledArray(jnp.zeros(4, HALF), 1.0),
        "broken": ScaledArray(jnp.full(4, jnp.nan, HALF), 1.0),
        "plain": data(100.0),
    }
    rms = rms_of_params(params)
    expected = {"kept": 0.07, "low": 0.04, "high": 100.0, "zero": 0.0, "broken": np.nan}
    assert list(rms) == [f"['{name}']" for name in sorted(expected)]
    for name, value in expected.items():
        assert_allclose(rms[f"['{name}']"], value, rtol=FP16.epsilon / 2)
    new = rescale_params(params, {"['low']": 2.0**-5, "['high']": 2.0**7})
    assert (new["low"].scale, float(new["high"].scale)) == (2.0**-8, 2.0**8)
    assert new["low"].is_static
    assert not new["high"].is_static
    for name in params:
        assert (new[name] is params[name]) == (name not in ("low", "high"))
        assert_array_equal(np.asarray(new[name]), np.asarray(params[name]))


def test_an_unknown_rounding_is_refused():
    with pytest.raises(ValueError, match="valid: nearest, stochastic"):
        apply_updates({}, {}, rounding="up", seed=0, step=0)


@pytest.mark.parametrize(
    ("rounding", "stacked"), [("nearest", True), ("stochastic", False)]
)
def test_weights_that_are_zero_at_run_time_scales_learn(rounding, stacked):
    """Their scale is the smallest there is: kept, it would saturate each update at
    1e-33."""
    zeros = as_scaled_array({"b": jnp.zeros((2, 4))}, dtype=HALF)
    if stacked:
        zeros = {"b": ScaledArray(zeros["b"].data, jnp.full(2, zeros["b"].scale))}
    step = jax.jit(
        lambda p, u, n: apply_updates(p, u, rounding=rounding, seed=0, step=n)
    )
    exact = np.zeros((2, 4), np.float32)
    # from a warm-up on, and far up
    for n, size in enumerate([0.0, 1e-9, 1e-3, -1e-2, 1.0, 300.0, 1e5]):
        update = np.float32(size) * np.linspace(0.5, 1, 8, dtype=np.float32).reshape(
            2, 4
        )
        zeros, exact = step(zeros, {"b": jnp.asarray(update)}, n), exact + update
        assert_allclose(
            np.asarray(zeros["b"]), exact, rtol=2.0**-9, atol=2.0**-9 * abs(size)
        )
    refused = apply_updates(
        zeros, {"b": 1e9 * exact}, rounding=rounding, seed=0, step=9, accept=False
    )
    assert_array_equal(np.asarray(refused["b"]), np.asarray(zeros["b"]))


def test_a_run_time_scale_follows_weights_that_shrink():
    """By a tenth a step, to 2^-45: at its first scale FP16 ends at 2^-24."""
    p = as_scaled_array(draw_normal(0, (64,)), dtype=HALF)
    exact = asarray(p)
    shrink = jax.jit(
        lambda p, n: apply_updates(
            p, -0.1 * asarray(p), rounding="stochastic", seed=0, step=n
        )
    )
    scales = [float(p.scale)]
    for n in range(300):
        p, exact = shrink(p, n), exact * 0.9
        assert jnp.abs(p.data).max() > 2.0**-5
        scales.append(float(p.scale))
    # Roundings to one of two neighbours, each off by at most an epsilon, add up as
    # their root.
    error = jnp.linalg.norm(asarray(p) - exact) / jnp.linalg.norm(exact)
    assert error < FP16.epsilon * np.sqrt(300)
    assert len(set(scales)) < 16  # seldom, and by many octaves


@pytest.mark.parametrize("kind", KINDS)
def test_what_rounding_loses_is_kept_and_moves_the_weight_later(kind):
    fmt, make = KINDS[kind]
    params = {"w": make(jnp.ones((64, 256))), "b": make(jnp.ones((64,)))}
    scale = scale_of(params["w"])
    size = scale * fmt.epsilon / 4
    update = {"w": jnp.full((64, 256), size), "b": jnp.full(64, size)}
    how = {"rounding": "nearest", "seed": 0}

    def body(i, carry):
        return apply_with_compensation(carry[0], update, carry[1], **how, step=i)

    start = params, kahan_compensation(wide(params), params)
    new, lost = jax.jit(lambda start: jax.lax.fori_loop(0, 33, body, start))(start)
    for name in params:
        moved = np.asarray(asarray(new[name]), np.float64) / scale - 1
        assert_array_equal(moved / fmt.epsilon, 8)
        assert lost[name].dtype == jnp.bfloat16
        assert_array_equal(np.asarray(lost[name], np.float64), size)


def test_nothing_is_kept_of_what_is_not_accepted_or_beyond_the_format():
    params, lost = [jnp.ones(4, jnp.bfloat16)], [jnp.full(4, 2.0**-12, jnp.bfloat16)]
    options = {"rounding": "nearest", "seed": 0, "step": 0}
    new, rest = apply_with_compensation(
        params, [jnp.full(4, jnp.nan)], lost, accept=jnp.asarray(False), **options
    )
    assert_array_equal(np.asarray(new[0], np.float32), 1)
    assert_array_equal(np.asarray(rest[0], np.float32), 2.0**-12)
    top = [ScaledArray(jnp.full(4, 6e4, HALF), 0.5)]
    new, rest = apply_with_compensation(top, [jnp.full(4, 1e6)], lost, **options)
    assert_array_equal(np.asarray(new[0].data, np.float32), 65504)
    assert_array_equal(np.asarray(rest[0], np.float32), 0)


def test_weights_and_what_they_lost_of_their_values_are_nearly_those():
    exact = {"w": draw_normal(0, (64, 64))}
    params = scaled_params(exact, HALF)
    lost = kahan_compensation(exact, params)
    error = np.abs(
        np.asarray(params["w"].unscale())
        + np.asarray(lost["w"], np.float32)
        - np.asarray(exact["w"])
    )
    # FP16 errs by 2^-11 of a number, and BF16 of that by 2^-8.
    assert np.all(error <= 2.0**-19 * np.abs(exact["w"]) + 2.0**-33)
    assert np.any(np.asarray(lost["w"], np.float32))


@pytest.mark.parametrize("updates", [{"a": 1.0, "z": 2.0}, {"a": 1.0}, [1.0, 2.0]])
def test_updates_of_another_tree_are_refused(updates):
    params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    how = {"rounding": "nearest", "seed": 0, "step": 0}
    with pytest.raises(ValueError, match="updates is not a tree like params"):
        apply_updates(params, jax.tree.map(jnp.float32, updates), **how)
    with pytest.raises(ValueError, match="leaf_indices is not a tree like params"):
        apply_updates(params, params, **how, leaf_indices=jax.tree.map(int, updates))


def test_a_moving_average_in_half_precision_follows_its_parameters():
    average = {
        "w": as_scaled_array(jnp.ones(4096), dtype=HALF),
        "b": jnp.ones(4096, jnp.bfloat16),
    }
    full = jnp.full(4096, 1.2)
    params = {"w": as_scaled_array(full, dtype=HALF), "b": full}
    leafwise = jnp.ones(4, HALF)
    step = jax.jit(lambda x, n: moving_average(x, params, 0.999, seed=0, step=n))
    for number in range(100):
        average = step(average, number)
        leafwise = 0.999 * leafwise + HALF(0.001) * HALF(1.2)
    assert (average["w"].dtype, average["b"].dtype) == (HALF, jnp.bfloat16)
    expected = 1.2 - 0.2 * 0.999**100
    assert leafwise[0] == 1
    for x in average.values():
        assert_allclose(
            np.mean(np.asarray(asarray(x)), dtype=np.float64), expected, atol=2e-3
        )
    with pytest.raises(ValueError, match="params is not a tree like"):
        moving_average(average, {"w": params["w"]}, 0.999, seed=0, step=0)
