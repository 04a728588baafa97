"""The traps of low precision that lie in scale propagation, one test each: each fails
when its remedy is taken out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import normal
from numpy.testing import assert_allclose, assert_array_equal
from propagated import scalify

import scalify_core as sc
from scalify_core import ScaledArray, as_scaled_array, asarray
from scalify_core.numerics.formats import E4M3, E5M2

HALF = jnp.float16


def rms(x):
    return float(jnp.sqrt(jnp.mean(jnp.square(x.data.astype(jnp.float32)))))


# 1. Creep.


def test_creep_of_the_residual_stream_over_48_layers():
    def layer(h, w):
        return h + sc.functional.layer_norm(h, jnp.ones(64), None) @ w, None

    h = as_scaled_array(normal(0, 256, 64), 1.0, dtype=HALF)
    ws = as_scaled_array(normal(1, 48, 64, 64) / 8, 0.125, dtype=HALF)
    x = scalify(lambda h, ws: jax.lax.scan(layer, h, ws)[0])(h, ws)
    assert 1 / 4 <= rms(x) <= 4, (rms(x), x.scale)


def test_creep_of_equal_sums_in_matrix_products_and_reductions():
    a, b = as_scaled_array((normal(0, 256, 768), normal(1, 768, 256)), 1.0, dtype=HALF)
    assert 0.7 <= rms(scalify(jnp.matmul)(a, b)) <= 1.42
    assert 0.7 <= rms(scalify(lambda a: a.sum(0))(a)) <= 1.42
    added = scalify(lambda a: jnp.zeros((4, 768)).at[jnp.arange(256) % 4].add(a))(a)
    assert 0.7 <= rms(added) <= 1.42


# 2. Casts that do not saturate.


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float16])
def test_casts_saturate_and_keep_what_is_not_finite(dtype):
    x = ScaledArray(jnp.asarray([3.4e38, -3.4e38, jnp.nan, jnp.inf, 1.0]), 1.0)
    out = np.float32(scalify(lambda x: x.astype(dtype))(x).data)
    limit = float(jnp.finfo(dtype).max)
    assert abs(out[0]) <= limit
    assert out[0] > limit * 0.99
    assert out[1] == -out[0]
    assert np.isnan(out[2])
    assert not np.isfinite(out[3])
    assert out[4] == 1


def test_results_of_arithmetic_saturate():
    x = as_scaled_array(jnp.asarray([60000.0, 1.0]), 1.0, dtype=HALF)
    assert float(scalify(lambda x: jnp.exp(jnp.log(x) + 1.0))(x).data[0]) == 65504


# 3. A forward cast that differentiation removes.


def test_cast_on_forward_acts_in_the_differentiated_function():
    x = jnp.asarray([1.01, -3.3, 0.77])
    # The gradient of sum(cast(x)^2) is 2 cast(x): it shows whether the forward pass was
    # rounded.
    gradient = jax.grad(lambda x: jnp.sum(sc.static.cast_on_forward(x, E4M3) ** 2))
    for actual in (gradient(x), asarray(scalify(gradient)(as_scaled_array(x, 1.0)))):
        assert_array_equal(actual, 2 * E4M3.quantize(x))


def test_cast_on_backward_rounds_the_gradient_only():
    x = jnp.asarray([1.01, -3.3, 0.77])
    both = jax.value_and_grad(
        lambda x: jnp.sum(sc.static.cast_on_backward(x, E5M2) ** 3)
    )
    exact = 3 * x**2
    assert_array_equal(both(x)[1], E5M2.quantize(exact))
    for value, gradient in (both(x), asarray(scalify(both)(as_scaled_array(x, 1.0)))):
        assert_allclose(value, jnp.sum(x**3), rtol=1e-6)
        assert float(jnp.abs(gradient - exact).max()) > 0
        assert_allclose(gradient, exact, rtol=2.0**-3)


# 4. A power that is traced, as in Adam: 0.95**t leaves FP16 at t = 190.


def test_power_with_traced_exponent_is_no_scale():
    out = scalify(lambda x, b, t: x * b**t)(
        *as_scaled_array((jnp.ones(3), jnp.float32(0.95)), 2.0), jnp.int32(150)
    )
    assert_allclose(asarray(out), 0.95**150 * np.ones(3), rtol=1e-4)


# Constants, masks and zeros.


@pytest.mark.parametrize("constant", [0.0, -np.inf, np.nan, 1e30])
def test_constant_operands_take_the_others_scale(constant):
    x = as_scaled_array(normal(0, 4, 8) * 2.0**-20, 2.0**-20, dtype=HALF)
    for fun in (
        lambda x: jnp.where(x > 0, x, constant),
        lambda x: jnp.maximum(x, constant),
        lambda x: jnp.concatenate([x, jnp.full((1, 8), constant)]),
        lambda x: jnp.pad(x, 1, constant_values=constant),
    ):
        assert scalify(fun)(x).scale == 2.0**-20


@pytest.mark.parametrize("constant", [0, 2**20])
@pytest.mark.parametrize(
    "fun",
    [
        lambda x, c: jax.jit(jnp.where)(x > 0, x, c),
        lambda x, c: jnp.clip(x, c, c + 1),
        lambda x, c: jax.checkpoint(
            lambda x: jnp.pad(jnp.tanh(x) * x, 1, constant_values=c)
        )(x),
    ],
    ids=["jit", "clip", "checkpoint"],
)
def test_constants_that_are_integers_take_the_others_scale(fun, constant):
    """Inside of `jnp.where` and the like, which are jitted, they are operands that are
    converted to floats."""
    x = as_scaled_array(normal(0, 4, 8) * 2.0**-20, 2.0**-20, dtype=HALF)
    out = scalify(lambda x: fun(x, constant))(x)
    assert out.scale <= 2.0**-20
    if not constant:  # others saturate
        assert_allclose(asarray(out), fun(asarray(x), 0), rtol=2**-9, atol=2.0**-45)


def test_integers_that_count_are_no_part_of_a_traced_function():
    """Only those that become floats are: an index that differs from call to call costs
    no trace."""

    @jax.jit
    def taken(x, i):
        return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)

    x = as_scaled_array(normal(0, 4, 8), 1.0, dtype=HALF)
    text = (
        jax.jit(scalify(lambda x: sum(taken(x, i) for i in range(4))))
        .lower(x)
        .as_text()
    )
    assert text.count("call @taken") == 4
    assert text.count("func.func private @taken") == 1


def test_broadcast_zeros_have_any_scale():
    x = as_scaled_array(normal(0, 8) * 2.0**-30, 2.0**-30, dtype=HALF)
    out = scalify(lambda x: jnp.zeros((4, 8)) + x[None] + 0.0)(x)
    assert out.scale == 2.0**-30
    scattered = scalify(lambda x: jnp.zeros((3, 8)).at[1].add(x))(x)
    assert scattered.scale == 2.0**-30
    jitted = jax.jit(lambda n: (jnp.zeros(8) * n, jnp.arange(8)))
    for zeros in (
        lambda: jitted(2.0)[0],
        lambda: np.zeros(8, np.float32),
        lambda: jnp.zeros_like(jitted(2.0)[0]),
    ):
        assert scalify(lambda x, z=zeros: z() + x)(x).scale == 2.0**-30
        assert scalify(lambda x, z=zeros: jnp.where(x > 0, x, z()))(x).scale == 2.0**-30


def test_small_literals_are_not_rounded_away_while_tracing():
    out = scalify(lambda x: x + 1e-8)(
        as_scaled_array(jnp.zeros(3), 2.0**-27, dtype=HALF)
    )
    assert_allclose(asarray(out), 1e-8, rtol=2**-11)


# Range: scales that multiply past FP32.


def test_products_of_extreme_scales_stay_in_range():
    big, small = ScaledArray(jnp.ones(4), 2.0**100), ScaledArray(jnp.ones(4), 2.0**-65)
    squared = scalify(jnp.square)(small)
    assert 2.0**-126 <= squared.scale <= 2.0**126
    assert_array_equal(
        asarray(scalify(lambda x: jnp.square(x) * 2.0**100)(small)), 2.0**-30
    )
    assert not np.isnan(asarray(scalify(lambda x: x * x)(big))).any()
    assert_array_equal(asarray(scalify(lambda x: x * x / x)(big)), 2.0**100)


def test_comparisons_do_not_form_huge_or_tiny_values():
    big = ScaledArray(jnp.asarray([1.0, -1.0]), 2.0**126)
    tiny = ScaledArray(jnp.asarray([1.0, 1.0]), 2.0**-126)
    assert_array_equal(scalify(lambda a, b: a > b)(big, tiny), [True, False])
    assert_array_equal(scalify(lambda a: a * 0.25 > 0)(tiny), [True, True])
    assert_array_equal(scalify(lambda a: -a < 0)(tiny), [True, True])


# The norm's epsilon, and the gradient of the loss.


@pytest.mark.parametrize("exponent", [-60, 60])
def test_epsilon_of_a_norm_means_the_same_at_every_scale(exponent):
    x = normal(0, 4, 64) * 2.0**exponent
    w = jnp.ones(64)
    out = scalify(lambda x: sc.functional.layer_norm(x, w, None))(
        as_scaled_array(x, 2.0**exponent)
    )
    assert_allclose(
        asarray(out), sc.functional.layer_norm(x, w, None), rtol=1e-5, atol=1e-30
    )


def test_gradient_of_the_logits_survives_fp16():
    tokens, vocab = 1024, 4096
    logits, targets = 3 * normal(0, tokens, vocab), jnp.zeros(tokens, jnp.int32)
    gradient = scalify(jax.grad(sc.functional.cross_entropy))(
        as_scaled_array(logits, 1.0, dtype=HALF), targets
    )
    plain = jax.grad(sc.functional.cross_entropy)(logits.astype(HALF), targets)
    assert float(jnp.mean(plain == 0)) > 0.7
    assert float(jnp.mean(gradient.data == 0)) < 0.01


# Attention's own.


def test_queries_and_keys_far_below_their_scale_have_finite_gradients():
    """As in one projection of queries, keys and values whose values are large: the
    logits' scale is then 2^24."""
    q, k, v = (normal(i, 2, 64, 2, 16) for i in range(3))

    def loss(q, k, v):
        return jnp.sum(sc.functional.attention(q, k, v) * normal(3, 2, 64, 2, 16))

    low = [as_scaled_array(x, 2.0**12, dtype=HALF) for x in (q, k)]
    actual = scalify(jax.grad(loss, (0, 1, 2)))(
        *low, as_scaled_array(v, 1.0, dtype=HALF)
    )
    for gradient, right in zip(actual, jax.grad(loss, (0, 1, 2))(q, k, v), strict=True):
        # Data at 2^-12 keeps 24-12 binary places: 2^-13 of its RMS, in the logits,
        # which sums over 16 and 64 average.
        assert jnp.linalg.norm(asarray(gradient) - right) < 2**-8 * jnp.linalg.norm(
            right
        )


# Gather and scatter: what is filled in, and sums of very many.


@pytest.mark.parametrize("scale", [8.0, None])
def test_a_number_to_fill_with_is_a_logical_one(scale):
    x = as_scaled_array(jnp.asarray([8.0, -16.0, 4.0, 24.0]), scale, dtype=HALF)
    actual = scalify(
        lambda x: x.at[jnp.asarray([0, 9])].get(mode="fill", fill_value=5.0)
    )(x)
    assert_array_equal(asarray(actual), [8.0, 5.0])


def test_sums_of_very_many_rows_stay_within_fp16():
    count = 200_000
    ones = as_scaled_array(jnp.ones(count), 1.0, dtype=HALF)
    actual = scalify(
        lambda x: jax.ops.segment_sum(x, jnp.zeros(count, jnp.int32), num_segments=4)
    )(ones)
    assert_allclose(asarray(actual), [count, 0, 0, 0], rtol=2.0**-11)
