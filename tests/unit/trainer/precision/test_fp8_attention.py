"""FP8 attention as programs for other platforms than CUDA compute it: its error against
FP32, its scales, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import normal
from numpy.testing import assert_allclose, assert_array_equal

import scalify_core as sc
from scalify_core.numerics.amax import measured
from scalify_core.numerics.formats import E4M3
from scalify_core.ops.functional import attention
from trainer.precision import fp8_attention as module
from trainer.precision.fp8_attention import fp8_attention

U = E4M3.epsilon / 2  # relative error of a rounding
settled = jax.jit(module.settled)
backward_scales = jax.jit(module.backward_scales, static_argnums=2)
score_gradient_bound = jax.jit(module.score_gradient_bound, static_argnums=2)
HALF_STEP = E4M3.min_subnormal / 2  # absolute error of a rounding
SHAPES = {  # of q, of k and v
    "causal": ((2, 128, 2, 16), (2, 128, 2, 16)),
    "grouped": ((1, 128, 6, 8), (1, 128, 2, 8)),
    "more keys": ((1, 64, 2, 8), (1, 192, 2, 8)),
}


def operands(name):
    shape_q, shape_k = SHAPES[name]
    return normal(0, *shape_q), normal(1, *shape_k), normal(2, *shape_k)


def rounded(x):
    """The values that are multiplied, and their unit."""
    data, unit = measured(x, E4M3.dtype)
    return np.asarray(data, np.float64) * float(unit), float(unit)


def repeated(x, q):
    return np.repeat(x, q.shape[2] // x.shape[2], axis=2)


def summed(x, k):
    """[B, S, H, K] over the heads of a group."""
    return x.reshape(*k.shape[:3], -1, k.shape[3]).sum(3)


def exact(q, k, v, g, causal):
    """Attention of these operands in FP64: its output, probabilities, the gradients of
    its logits, and the gradients of q, k and v."""
    c, k_all, v_all = q.shape[3] ** -0.5, repeated(k, q), repeated(v, q)
    logits = np.einsum("bthk,bshk->bhts", q, k_all) * c
    if causal:
        logits = np.where(np.tril(np.ones(logits.shape[2:], bool)), logits, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = np.einsum("bhts,bshk->bthk", p, v_all)
    dp = np.einsum("bthk,bshk->bhts", g, v_all)
    delta = np.einsum("bthk,bthk->bht", g, out)[..., None]
    ds = c * p * (dp - delta)
    dq = np.einsum("bhts,bshk->bthk", ds, k_all)
    dk = summed(np.einsum("bhts,bthk->bshk", ds, q), k)
    dv = summed(np.einsum("bhts,bthk->bshk", p, g), k)
    return out, p, ds, (dq, dk, dv)


@pytest.mark.parametrize("name", SHAPES)
def test_output_and_gradients_are_within_the_bounds_of_their_roundings(name):
    causal = name != "more keys"
    q, k, v = operands(name)
    g = normal(3, *q.shape)
    actual, pull = jax.vjp(lambda *x: fp8_attention(*x, causal=causal), q, k, v)
    gradients = pull(g)
    (q8, _), (k8, _), (v8, v_unit), (g8, g_unit) = map(rounded, (q, k, v, g))
    out, p, ds, expected = exact(q8, k8, v8, g8, causal)
    k_all, v_all, c = repeated(k8, q), repeated(v8, q), q.shape[3] ** -0.5
    # FP32 sums of up to 192 numbers, far below the roundings to E4M3
    slack = 1 + 2.0**-10
    p_error = U * p + HALF_STEP / module.P_SCALE * (p > 0)
    out_error = np.einsum("bhts,bshk->bthk", p_error, np.abs(v_all))
    out_error += U * (np.abs(out) + out_error) + HALF_STEP * v_unit
    assert (np.abs(actual - out) <= slack * out_error).all()
    # The gradient of a logit: of the output's error, and of its own rounding.
    scale = pow2_of_bound(v, g, c) / (v_unit * g_unit)
    delta_error = np.einsum("bthk,bthk->bht", np.abs(g8), out_error)[..., None]
    ds_error = c * p * delta_error
    ds_error += U * (np.abs(ds) + ds_error) + HALF_STEP / scale * (p > 0)
    errors = (
        np.einsum("bhts,bshk->bthk", ds_error, np.abs(k_all)),
        summed(np.einsum("bhts,bthk->bshk", ds_error, np.abs(q8)), k8),
        summed(np.einsum("bhts,bthk->bshk", p_error, np.abs(g8)), k8),
    )
    for one, wanted, error in zip(gradients, expected, errors, strict=True):
        # The largest element is at least 1 where the result is rounded.
        largest = np.max(np.abs(wanted) + error)
        bound = error + U * (np.abs(wanted) + error) + HALF_STEP * largest
        assert (np.abs(one - wanted) <= slack * bound).all()
        assert np.max(np.abs(one - wanted)) > 0  # it is rounded at all


def pow2_of_bound(v, g, logit_scale):
    """The factor of the logits' gradients, in units of the data."""
    v8, g8 = (measured(x, E4M3.dtype)[0] for x in (v, g))
    bound = float(score_gradient_bound(v8, g8, logit_scale))
    return 2.0 ** np.floor(np.log2(E4M3.max / bound))


def test_its_error_is_that_of_a_format_with_three_bits():
    """RMS of a rounding to nearest: U / sqrt(3) at the worst significand; a product has
    two operands, and a gradient passes three products."""
    q, k, v = operands("causal")
    g = normal(3, *q.shape)
    expected, pull = jax.vjp(attention, q, k, v)
    actual, pull8 = jax.vjp(fp8_attention, q, k, v)
    for one, other in zip((actual, *pull8(g)), (expected, *pull(g)), strict=True):
        error = np.linalg.norm(one - other) / np.linalg.norm(other)
        assert U / 4 < error < 6 * U / np.sqrt(3)


@pytest.mark.parametrize("power", [-60, -7, 20, 50])
def test_powers_of_two_of_the_operands_change_no_bit(power):
    """So every scale is a power of two of the data, and none is absolute."""
    q, k, v = operands("grouped")
    g = normal(3, *q.shape)
    expected, pull = jax.vjp(fp8_attention, q, k, v)
    moved = jnp.float32(2.0**power)
    actual, pull_moved = jax.vjp(fp8_attention, q * moved, k / moved, v / moved)
    assert_array_equal(actual * moved, expected)
    for one, other, factor in zip(
        pull_moved(g * moved), pull(g), (1 / moved, moved, moved), strict=True
    ):
        assert_array_equal(one / factor, other)


@pytest.mark.parametrize("where", range(4))
def test_an_outlier_saturates_nothing(where):
    arrays = [*operands("causal"), normal(3, *SHAPES["causal"][0])]
    arrays[where] = arrays[where].at[0, 70, 1, 3].set(-(2.0**12))
    q, k, v, g = arrays
    out, pull = jax.vjp(fp8_attention, q, k, v)
    expected, pull_exact = jax.vjp(attention, q, k, v)
    for one, other in zip((out, *pull(g)), (expected, *pull_exact(g)), strict=True):
        largest = np.max(np.abs(other))
        # A row that the outlier decides is one probability, and exact but for the
        # operands' roundings.
        assert_allclose(np.max(np.abs(one)), largest, rtol=4 * U)


def test_zeros_give_zeros():
    q, k, v = (jnp.zeros(SHAPES["causal"][0]) for _ in range(3))
    out, pull = jax.vjp(fp8_attention, q, k, v)
    for x in (out, *pull(q)):
        assert_array_equal(x, 0)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_gradient_that_is_not_finite_stays_so(bad):
    q, k, v = operands("causal")
    _, pull = jax.vjp(fp8_attention, q, k, v)
    g = normal(3, *q.shape).at[0, 5, 0, 0].set(bad)
    assert not any(np.isfinite(x).all() for x in pull(g))


def test_a_key_that_all_queries_see_gets_its_gradient_at_another_scale():
    """128 equal gradients add up in one value, beyond what the guess leaves room
    for."""
    q, k, v = (jnp.zeros((1, 128, 1, 16)) for _ in range(3))
    q, k = q.at[..., 0].set(16.0), k.at[0, 0, 0, 0].set(64.0)
    g = jnp.ones_like(q)
    given, made = measured(g, E4M3.dtype)[0], 128 * 128.0  # in units of the data
    units = jnp.ones(3, jnp.float32)
    scales = backward_scales(module.Operands(given, given, given, units), given, 0.25)
    assert made * float(scales.results[2]) > E4M3.max
    _, pull = jax.vjp(fp8_attention, q, k, v)
    assert_array_equal(pull(g)[2][0, 0], 128.0)


@pytest.mark.parametrize("guess", [2.0**-126, 2.0**-20, 1.0, 2.0**60])
def test_results_get_scales_that_hold_their_largest_element(guess):
    amax = jnp.float32(2.0 ** np.linspace(-110, 110, 331))
    guesses = jnp.full(amax.shape, guess, jnp.float32)
    largest = E4M3.quantize(jnp.minimum(amax * guesses, E4M3.max))
    scales = settled(guesses, amax, largest)
    assert_array_equal(np.frexp(scales)[0], 0.5)  # powers of two
    low, high = module.RESULT_RANGE
    assert (low * (1 - 2**-4) <= amax * scales).all()  # which E4M3 rounds up
    assert (amax * scales <= high).all()
    fits = (low <= amax * np.float32(guess)) & (amax * np.float32(guess) <= high)
    assert_array_equal(scales[fits], np.float32(guess))
    for nothing in (0.0, np.inf, np.nan):
        assert settled(*map(jnp.float32, ([guess], [nothing], [nothing]))) == guess


def test_an_amax_of_an_earlier_call_does_not_move_results_that_fit():
    """XLA may give cuDNN a buffer that holds it, and cuDNN then takes the larger."""
    for largest, scale in ((200.0, 1.0), (0.5, 256.0), (447.0, 1.0)):
        guess, stale = jnp.ones(1), jnp.float32([1e6])
        assert settled(guess, stale, jnp.float32([largest])) == scale


def test_no_gradient_of_a_logit_saturates():
    """The largest that there are: two values are opposite and equally likely."""
    v = jnp.float32([[1.0, 2.0, -2.0], [-1.0, -2.0, 2.0]])[None, :, None]
    zeros, g = jnp.zeros((1, 1, 1, 3)), v[:, 1:] * 3
    for logit_scale in (0.25, 1.0):
        rounded_operands = module.Operands.quantize(zeros, zeros, v)
        g8 = measured(g, E4M3.dtype)[0]
        bound = float(score_gradient_bound(rounded_operands.v, g8, logit_scale))
        scales = backward_scales(rounded_operands, g8, logit_scale)
        data = (np.asarray(x, np.float64) for x in (rounded_operands.v, g8))
        *_, ds, _ = exact(np.zeros((1, 1, 1, 3)), np.zeros((1, 2, 1, 3)), *data, False)
        largest = np.max(np.abs(ds)) * 3**0.5 * logit_scale
        assert_allclose(largest, bound / 2, rtol=1e-6)
        assert E4M3.max / 4 < largest * float(scales.ds) < E4M3.max / 2


@pytest.mark.parametrize("scales", ["static", "auto", "run-time"])
def test_under_scalify_it_rounds_the_same_numbers(scales):
    """Operands of other scales, stored in FP16, of which the rounding to E4M3 is that
    of the numbers themselves; the results are rounded to FP16."""
    units = 2.0**8, 2.0**-6, 2.0**3
    data = [x.astype(jnp.float16) for x in operands("grouped")]
    scaled = [sc.ScaledArray(x, unit) for x, unit in zip(data, units, strict=True)]
    if scales == "run-time":
        scaled = [sc.ScaledArray(x.data, jnp.float32(x.scale)) for x in scaled]
    wide = [x.astype(jnp.float32) * u for x, u in zip(data, units, strict=True)]
    g = normal(3, *data[0].shape)

    def loss(q, k, v):
        return jnp.sum(fp8_attention(q, k, v) * g.astype(q.dtype))

    gradient = jax.value_and_grad(loss, (0, 1, 2))
    expected, expected_gradients = gradient(*wide)
    policy = "auto" if scales == "auto" else "static"
    actual, gradients = sc.scalify(gradient, scales=policy)(*scaled)
    assert_allclose(sc.asarray(actual), expected, rtol=2.0**-8)
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert one.data.dtype == jnp.float16
        # The gradient of the output is FP16, too: some of its E4M3 roundings differ.
        error = np.linalg.norm(sc.asarray(one).astype(jnp.float32) - other)
        assert error < 2.0**-7 * np.linalg.norm(other)


def test_the_gradients_have_the_dtype_of_the_operands():
    q, k, v = (x.astype(jnp.bfloat16) for x in operands("grouped"))
    out, pull = jax.vjp(fp8_attention, q, k, v)
    assert [x.dtype for x in (out, *pull(out))] == [jnp.bfloat16] * 4


def test_the_backward_pass_keeps_a_byte_an_element():
    q, k, v = operands("grouped")
    _, pull = jax.vjp(fp8_attention, q, k, v)
    residual_bytes = sum(x.nbytes for x in jax.tree.leaves(pull))
    log_norms, units = 4 * q.shape[1] * q.shape[2], 3 * 4
    assert residual_bytes == 2 * q.size + 2 * k.size + log_norms + units


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.bfloat16}, "bfloat16, float32 and float32: they need one dtype"),
        ({"window": 3}, "window=3, segments None: FP8 attention has neither"),
        ({"segments": True}, "segments given: FP8 attention has neither"),
        ({"heads": 4}, "queries a multiple of their heads"),
        ({"keys": 64}, "128 queries and 64 keys: causal needs as many"),
    ],
)
def test_other_operands_are_refused(change, message):
    q, k, v = operands("causal")
    q = q.astype(change.pop("q", q.dtype))
    if "heads" in change:
        k = v = normal(1, 2, 128, change.pop("heads"), 16)
    if "keys" in change:
        k = v = normal(1, 2, change.pop("keys"), 2, 16)
    if change.pop("segments", None):
        change["segments"] = jnp.zeros((2, 128), jnp.int32)
    with pytest.raises(ValueError, match=message):
        fp8_attention(q, k, v, **change)


def test_a_window_of_all_keys_is_none():
    arrays = operands("causal")
    assert_array_equal(fp8_attention(*arrays, window=128), fp8_attention(*arrays))
