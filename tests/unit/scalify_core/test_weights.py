"""Master weights: what an update leaves behind, scales that stay, and the event that
moves them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from beside_plain import HALF
from draws import draw_normal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

from scalify_core import ScaledArray, as_scaled_array, asarray, scaled_state
from scalify_core.numerics.formats import BF16, E4M3, FP16, counter_bits
from scalify_core.optim.weights import (
    apply_updates,
    apply_with_compensation,
    moving_average,
    scaled_params,
)

KINDS = {
    "fp16_per_layer": (
        FP16,
        lambda x: ScaledArray(x.astype(HALF), jnp.full(x.shape[:1], 2.0**-6)),
    ),
    "bf16_plain": (BF16, lambda x: x.astype(jnp.bfloat16)),
}


STEPS = 33


def after_small_updates(kind, rounding, compensation=()):
    """Weights of 1 after updates of a quarter of the spacing above 1: how many spacings
    they have moved; and the compensation, in updates."""
    fmt, make = KINDS[kind]
    w = make(jnp.ones((64, 256)))
    unit = 2.0**-6 if isinstance(w, ScaledArray) else 1.0
    update = jnp.full(w.shape, unit * fmt.epsilon / 4)
    how = {"rounding": rounding, "seed": 0}

    def body(i, carry):
        return apply_with_compensation(carry[0], update, carry[1], **how, step=i)

    new, lost = jax.lax.fori_loop(0, STEPS, body, (w, compensation))
    assert new.dtype == fmt.dtype
    moved = (np.asarray(asarray(new), np.float64) / unit - 1) / fmt.epsilon
    return moved, jax.tree.map(lambda x: x / update, lost)


@pytest.mark.parametrize("kind", KINDS)
def test_small_updates_move_a_weight_in_expectation_only_if_rounded_stochastically(
    kind,
):
    assert_array_equal(after_small_updates(kind, "nearest")[0], 0)
    moved, _ = after_small_updates(kind, "stochastic")
    # Each step is a Bernoulli trial of probability 1/4: six standard deviations of the
    # mean of all.
    tolerance = 6 * np.sqrt(STEPS * 0.25 * 0.75 / moved.size)
    assert moved.mean() == pytest.approx(STEPS / 4, abs=tolerance)
    assert moved.std() == pytest.approx(np.sqrt(STEPS * 0.25 * 0.75), rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_compensation_keeps_the_rounding_errors_which_move_the_weight_later(kind):
    zeros = jnp.zeros((64, 256), jnp.bfloat16)
    moved, lost = after_small_updates(kind, "nearest", zeros)
    assert_array_equal(moved, STEPS // 4)
    assert_array_equal(lost, 1)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_large_updates_saturate_and_what_is_not_finite_stays_so(rounding):
    params = [ScaledArray(jnp.array([6e4, -6e4, 1, 1], HALF), 0.5)]
    update = [jnp.array([1e5, -1e5, jnp.nan, jnp.inf])]
    add = functools.partial(apply_updates, rounding=rounding, seed=0, step=0)
    (new,) = jax.jit(add)(params, update)
    assert_array_equal(np.asarray(new.data), [65504, -65504, np.nan, np.inf])
    assert new.scale == 0.5


def test_the_sum_on_eight_devices_is_bitwise_that_on_one_and_depends_on_seed_and_step():
    params = scaled_params(draw_normal(0, (64, 32)), HALF)
    update = 1e-4 * draw_normal(1, (64, 32))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shards = jax.device_put((params, update), NamedSharding(mesh, P("data")))

    @jax.jit
    def add(params, update, seed, step):
        how = {"rounding": "stochastic", "seed": seed, "step": step}
        return apply_updates(params, update, **how).data

    single, sharded = add(params, update, 0, 5), add(*shards, 0, 5)
    assert sharded.sharding.shard_shape(sharded.shape) == (8, 32)
    assert_array_equal(single, sharded)
    for seed, step in ((1, 5), (0, 6)):
        assert np.any(single != add(params, update, seed, step))


def test_the_first_weight_and_the_first_moment_draw_different_bits():
    x = ScaledArray(jnp.zeros(2**14, E4M3.dtype), 1.0)
    half = jnp.full(2**14, E4M3.min_subnormal / 2)
    add = functools.partial(apply_updates, rounding="stochastic", seed=7, step=1)
    moved = jax.jit(add)([x], [half])[0].data
    bits = jax.jit(counter_bits, static_argnums=0)((2**14,), 7, 1, 0)
    moment = jax.jit(E4M3.stochastic_round)(half, bits)
    same = np.equal(*(np.asarray(y, np.float32) > 0 for y in (moved, moment)))
    # Independent fair coins: six standard deviations.
    assert abs(np.mean(same) - 0.5) < 6 * 0.5 / 2**7


def test_master_weights_have_static_scales_and_fresh_biases_room_to_grow():
    params = {"w": 3e-3 * jnp.ones(64), "b": jnp.zeros(4), "id": jnp.arange(3)}
    scaled = scaled_params(params, HALF)
    assert (scaled["w"].scale, scaled["b"].scale) == (2.0**-8, 2.0**-6)
    assert scaled["w"].is_static
    assert_allclose(np.asarray(scaled["w"]), params["w"], rtol=FP16.epsilon / 2)
    assert scaled["id"].dtype == jnp.int32


def test_an_unknown_rounding_is_refused():
    with pytest.raises(ValueError, match="valid: nearest, stochastic"):
        apply_updates({}, {}, rounding="up", seed=0, step=0)


@pytest.mark.parametrize("scale_shape", [(), (2,)])
def test_weights_that_are_zero_at_run_time_scales_learn(scale_shape):
    """Their scale is the smallest there is: kept, it would saturate each update at
    1e-33."""
    w = ScaledArray(jnp.zeros((2, 4), HALF), jnp.full(scale_shape, 2.0**-126))
    add = jax.jit(lambda w, update, accept: apply_updates(w, update, accept=accept))
    exact = np.zeros((2, 4), np.float32)
    # from a warm-up on, and far up
    for size in (0.0, 1e-9, 1e-3, -1e-2, 1.0, 100.0, 1e5):
        update = size * np.linspace(0.5, 1, 8, dtype=np.float32).reshape(2, 4)
        w, exact = add(w, update, True), exact + update
        limit = 2.0**-9
        assert_allclose(np.asarray(w), exact, rtol=limit, atol=limit * abs(size))
    assert_array_equal(np.asarray(add(w, 1e9 * exact, False)), np.asarray(w))


@pytest.mark.parametrize("scale_shape", [(), (1,)])
def test_a_run_time_scale_follows_weights_that_shrink(scale_shape):
    """By a tenth a step, to 2^-45: at its first scale FP16 ends at 2^-24."""

    def shrink(n, carry):
        p, exact, moves = carry
        how = {"rounding": "stochastic", "seed": 0, "step": n}
        new = apply_updates(p, -0.1 * asarray(p), **how)
        return new, exact * 0.9, moves + jnp.sum(new.scale != p.scale)

    p = as_scaled_array(draw_normal(0, (64,)), dtype=HALF)
    p = ScaledArray(p.data, p.scale.reshape(scale_shape))
    p, exact, moves = jax.lax.fori_loop(0, 300, shrink, (p, asarray(p), 0))
    # Roundings to one of two neighbors, each off by at most an epsilon, add up as their
    # root.
    error = jnp.linalg.norm(asarray(p) - exact) / jnp.linalg.norm(exact)
    assert error < FP16.epsilon * np.sqrt(300)
    assert jnp.abs(p.data).max() > 2.0**-5
    assert 0 < moves < 16  # seldom, and by many octaves


def test_compensation_is_unchanged_by_a_refused_update_and_zero_beyond_the_format():
    params, lost = jnp.ones(4, jnp.bfloat16), jnp.full(4, 2.0**-12, jnp.bfloat16)
    add = jax.jit(apply_with_compensation)
    unchanged = add(params, params * jnp.nan, lost, accept=False)
    for x, y in zip(unchanged, (params, lost), strict=True):
        assert_array_equal(np.float32(x), np.float32(y))
    top = ScaledArray(jnp.full(4, 6e4, HALF), 0.5)
    new, rest = add(top, jnp.full(4, 1e6), lost)
    assert_array_equal(new.data, 65504)
    assert_array_equal(np.float32(rest), 0)


@pytest.mark.parametrize("other", [{"a": 1.0, "z": 2.0}, [1.0, 2.0]])
def test_updates_of_another_tree_are_refused(other):
    params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    with pytest.raises(ValueError, match="updates is not a tree like params"):
        apply_updates(params, other)
    with pytest.raises(ValueError, match="leaf_indices is not a tree like params"):
        apply_updates(params, params, leaf_indices=other)


def test_a_moving_average_in_half_precision_follows_its_parameters():
    average, params = (
        as_scaled_array(jnp.full(4096, x), dtype=HALF) for x in (1.0, 1.2)
    )
    step = jax.jit(lambda x, n: moving_average(x, params, 0.999, seed=0, step=n))
    for number in range(100):
        average = step(average, number)
    assert average.dtype == HALF
    expected = 1.2 - 0.2 * 0.999**100
    assert_allclose(np.mean(asarray(average)), expected, atol=2e-3)
    with pytest.raises(ValueError, match="params is not a tree like"):
        moving_average(average, [params], 0.999, seed=0, step=0)


def test_zeros_at_a_large_scale_and_integers_are_updated():
    zeros = as_scaled_array(jnp.zeros(4), jnp.float32(2.0**99), jnp.float16)
    params = {"w": zeros, "steps": jnp.int32(3)}
    new = apply_updates(params, {"w": jnp.full(4, 2.0**-30), "steps": jnp.int32(1)})
    np.testing.assert_array_equal(asarray(new["w"]), np.full(4, 2.0**-30))
    assert new["steps"] == 4


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_numbers_of_python_are_updated_as_by_optax(rounding):
    params = {"w": as_scaled_array(jnp.ones(3), dtype=HALF), "slope": 0.25, "count": 2}
    updates = {"w": jnp.ones(3), "slope": 0.5, "count": 1}
    new = apply_updates(params, updates, rounding=rounding, seed=0, step=1)
    assert_array_equal(asarray(new["w"]), 2 * np.ones(3))
    assert (float(new["slope"]), int(new["count"])) == (0.75, 3)
    tx = scaled_state(optax.adam(1.0), mu=HALF, nu=HALF, seed=0)
    state = tx.init(params)
    changes, _ = tx.update({"w": jnp.ones(3), "slope": -2.0, "count": 0}, state, params)
    assert_allclose((changes["w"][0], changes["slope"]), (-1, 1), rtol=2.0**-9)
    average = moving_average({"slope": 0.25}, {"slope": 0.5}, 0.5, seed=0, step=1)
    assert float(average["slope"]) == 0.375


def test_numbers_of_python_do_not_become_master_weights():
    assert scaled_params({"w": jnp.ones(3), "rate": 0.3}, HALF)["rate"] == 0.3
