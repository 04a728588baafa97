"""probe.array_figures, counted by hand, in every format, for plain arrays and
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
from trainer.observe.probe import array_figures
from trainer.observe.records import FIGURE_NAMES


def shown(x, **options):
    """Its figures, by name."""
    numbers = jax.jit(functools.partial(array_figures, **options))(x)
    return types.SimpleNamespace(**dict(zip(FIGURE_NAMES, numbers, strict=True)))


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16, BF16], ids=str)
def test_figures_of_eight_known_numbers(fmt):
    sub, normal = fmt.min_subnormal, fmt.min_normal
    numbers = np.array([0, 0, sub, -sub, normal, 1, -fmt.max, 2], np.float32)
    data = jnp.asarray(numbers.astype(fmt.dtype))
    s = shown(ScaledArray(data, 2.0**-20))
    assert s.exponent == -20
    assert s.underflow == 4 / 8  # at most: two zeros and two subnormals
    assert shown(data, count_zeros=False).underflow == 2 / 8
    assert s.saturated == 1 / 8
    expected = np.sqrt(np.mean(np.square(np.asarray(data, np.float64))))
    assert_allclose(s.rms, expected, rtol=8 * FP32.epsilon)


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
    narrow = exact.astype(HALF)
    assert shown(narrow, uncast=exact).underflow == 2 / 4
    scaled = shown(ScaledArray(narrow, 1.0), uncast=ScaledArray(exact, 1.0))
    assert scaled.underflow == 2 / 4


@pytest.mark.parametrize("exponent", [-125, -70, 126])
def test_rms_is_right_where_squares_leave_fp32(exponent):
    x = jnp.float32(2.0**exponent) * jnp.array([1.0, 1.0, 0.0, 0.0])
    s = shown(x)
    assert_allclose(s.rms, 2.0**exponent * np.sqrt(0.5), rtol=4 * FP32.epsilon)
    assert s.exponent == 0


def test_numbers_that_are_not_finite_show():
    assert np.isnan(shown(jnp.array([1.0, np.nan])).rms)
    infinite = shown(jnp.array([1.0, np.inf], HALF))
    assert not np.isfinite(infinite.rms)
    assert infinite.saturated == 0.5
