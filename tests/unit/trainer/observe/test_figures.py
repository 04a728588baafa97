"""probe.figures, counted by hand, in every format, for plain arrays and
ScaledArrays."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import HALF
from numpy.testing import assert_allclose

from scalify_core.array.scaled_array import ScaledArray
from scalify_core.numerics.formats import BF16, E4M3, E5M2, FP16, FP32
from trainer.observe.probe import FIGURES, figures


def shown(x, **options):
    """Its figures, by name."""
    numbers = jax.jit(functools.partial(figures, **options))(x)
    return types.SimpleNamespace(**dict(zip(FIGURES, numbers, strict=True)))


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16, BF16], ids=str)
def test_figures_of_eight_known_numbers(fmt):
    sub, normal = fmt.min_subnormal, fmt.min_normal
    data = jnp.asarray(
        np.array([0, 0, sub, -sub, normal, 1, -fmt.max, 2], np.float32).astype(
            fmt.dtype
        )
    )
    s = shown(ScaledArray(data, 2.0**-20))
    assert s.exponent == -20
    assert s.underflow == 4 / 8  # at most: two zeros and two subnormals
    assert shown(data, zeros=False).underflow == 2 / 8
    assert s.saturated == 1 / 8
    expected = np.sqrt(np.mean(np.square(np.asarray(data, np.float64))))
    assert_allclose(s.rms, expected, rtol=8 * FP32.epsilon)


def test_plain_arrays_have_scale_one():
    x = jnp.array([3.0, -4.0])
    plain, scaled = shown(x), shown(ScaledArray(x, 4.0))
    assert_allclose(plain.rms, np.sqrt(12.5), rtol=4 * FP32.epsilon)
    assert plain.exponent == 0
    assert scaled.exponent == 2
    assert scaled.rms == plain.rms


def test_underflow_of_a_cast_to_come_is_counted_exactly():
    # E4M3 rounds to zero up to and including half of its smallest number.
    half = E4M3.min_subnormal / 2
    data = jnp.array(
        [0.0, half, half * 1.01, half / 3, 1.0, 448.0, 449.0, np.inf], HALF
    )
    s = shown(ScaledArray(data, 1.0), fmt=E4M3)
    assert s.underflow == 2 / 8
    assert s.saturated == 2 / 8


def test_underflow_against_exact_values_tells_true_zeros_from_lost_ones():
    exact = jnp.array([0.0, 1e-9, 1e-3, 2e-9])
    s = shown(exact.astype(HALF), exact=exact)
    assert s.underflow == 2 / 4
    scaled = shown(ScaledArray(exact.astype(HALF), 1.0), exact=ScaledArray(exact, 1.0))
    assert scaled.underflow == 2 / 4


@pytest.mark.parametrize("exponent", [-125, -70, 126])
def test_rms_is_right_where_squares_leave_fp32(exponent):
    x = jnp.float32(2.0**exponent) * jnp.array([1.0, 1.0, 0.0, 0.0])
    assert_allclose(shown(x).rms, 2.0**exponent * np.sqrt(0.5), rtol=4 * FP32.epsilon)


def test_what_is_not_finite_shows():
    assert np.isnan(shown(jnp.array([1.0, np.nan])).rms)
    assert not np.isfinite(shown(jnp.array([1.0, np.inf])).rms)
    assert shown(jnp.array([1.0, np.inf], HALF)).saturated == 0.5


def test_an_unknown_format_is_an_error():
    with pytest.raises(ValueError, match="FloatFormat"):
        figures(jnp.ones(2, jnp.float8_e4m3b11fnuz))
