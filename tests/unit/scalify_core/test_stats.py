"""stats.summarize: figures counted by hand, in every format, for plain arrays,
ScaledArrays and stacks of layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import HALF
from numpy.testing import assert_allclose, assert_array_equal

from scalify_core.array.scaled_array import ScaledArray
from scalify_core.debug.stats import Summary, summarize
from scalify_core.numerics.formats import BF16, E4M3, E5M2, FP16, FP32

FORMATS = [E4M3, E5M2, FP16, BF16, FP32]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_figures_of_eight_known_numbers(fmt):
    sub, normal = fmt.min_subnormal, fmt.min_normal
    data = jnp.asarray(
        np.array([0, 0, sub, -sub, normal, 1, -fmt.max, 2], np.float32).astype(
            fmt.dtype
        )
    )
    s = jax.jit(summarize)(ScaledArray(data, 2.0**-20))
    assert s.exponent == -20
    assert s.zeros == 2 / 8
    assert s.underflow == 4 / 8  # at most: two zeros and two subnormals
    assert jax.jit(lambda x: summarize(x, zeros=False))(data).underflow == 2 / 8
    assert s.saturated == 1 / 8
    expected = np.sqrt(np.mean(np.square(np.asarray(data, np.float64))))
    assert_allclose(s.rms, expected, rtol=8 * FP32.epsilon)


def test_plain_arrays_have_scale_one_and_other_leaves_are_left_out():
    x = jnp.array([3.0, -4.0])
    out = summarize(
        {
            "w": x,
            "step": jnp.int32(3),
            "key": jax.random.key(0),
            "s": ScaledArray(x, 4.0),
        }
    )
    assert out["step"] is None
    assert out["key"] is None
    assert_allclose(out["w"].rms, np.sqrt(12.5), rtol=4 * FP32.epsilon)
    assert out["w"].exponent == 0
    assert out["s"].exponent == 2
    assert out["s"].rms == out["w"].rms


def test_underflow_of_a_cast_to_come_is_counted_exactly():
    # E4M3 rounds to zero up to and including half of its smallest number.
    half = E4M3.min_subnormal / 2
    data = jnp.array(
        [0.0, half, half * 1.01, half / 3, 1.0, 448.0, 449.0, np.inf], HALF
    )
    s = summarize(ScaledArray(data, 1.0), fmt=E4M3)
    assert s.underflow == 2 / 8
    assert s.zeros == 1 / 8
    assert s.saturated == 2 / 8


def test_underflow_against_exact_values_tells_true_zeros_from_lost_ones():
    exact = jnp.array([0.0, 1e-9, 1e-3, 2e-9])
    s = summarize({"g": exact.astype(HALF)}, exact={"g": exact})["g"]
    assert s.underflow == 2 / 4
    assert s.zeros == 3 / 4
    scaled = summarize(
        ScaledArray(exact.astype(HALF), 1.0), exact=ScaledArray(exact, 1.0)
    )
    assert scaled.underflow == 2 / 4


def test_a_stack_of_layers_has_figures_for_each_layer():
    data = jnp.stack(
        [jnp.ones((2, 4)), jnp.zeros((2, 4)), jnp.full((2, 4), 3.0)]
    ).astype(HALF)
    for scale in (
        jnp.array([1.0, 0.5, 2.0**90]),
        jnp.array([1.0, 0.5, 2.0**90]).reshape(3, 1, 1),
    ):
        s = jax.jit(summarize)(ScaledArray(data, scale))
        assert_array_equal(s.exponent, [0, -1, 90])
        assert_array_equal(s.rms, [1, 0, 3])
        assert_array_equal(s.zeros, [0, 1, 0])


@pytest.mark.parametrize("exponent", [-125, -100, -70, 70, 100, 126])
def test_rms_is_right_where_squares_leave_fp32(exponent):
    x = jnp.float32(2.0**exponent) * jnp.array([1.0, 1.0, 0.0, 0.0])
    assert_allclose(
        summarize(x).rms, 2.0**exponent * np.sqrt(0.5), rtol=4 * FP32.epsilon
    )


def test_what_is_not_finite_shows():
    assert np.isnan(summarize(jnp.array([1.0, np.nan])).rms)
    assert not np.isfinite(summarize(jnp.array([1.0, np.inf])).rms)
    assert summarize(jnp.array([1.0, np.inf], HALF)).saturated == 0.5


def test_all_figures_are_arrays_so_that_a_step_can_return_them():
    out = jax.jit(lambda t: summarize(t, fmt=E4M3))(
        {"a": jnp.ones(3), "b": ScaledArray(jnp.ones(3), jnp.float32(2))}
    )
    assert isinstance(out["a"], Summary)
    assert len(jax.tree.leaves(out)) == 10


def test_two_references_at_once_and_unknown_formats_are_errors():
    with pytest.raises(ValueError, match="not both"):
        summarize(jnp.ones(2), fmt=E4M3, exact=jnp.ones(2))
    with pytest.raises(ValueError, match="FloatFormat"):
        summarize(jnp.ones(2, jnp.float8_e4m3b11fnuz))
