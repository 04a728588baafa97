"""Statistics of many arrays at once are those of each of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from scalify_core.numerics.amax import (
    SMALL_ROWS,
    largest_magnitudes,
    sums_of_squares,
)

# Small arrays of one shape, more than go into one table, between large ones, of odd
# lengths and of more blocks.
SHAPES = [
    (),
    (1,),
    (7,),
    (3, 5),
    (256,),
    (768, 24),
    (2, 1000),
    (0,),
    (0, 4),
    *SMALL_ROWS * [(256,)],
    (7, 2351),
    (256,),
    (4201, 1001),
]


def arrays(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.normal(size=shape)).astype(dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float8_e5m2])
def test_each_array_has_its_own(dtype):
    a, b = arrays(0, dtype), arrays(1, dtype)
    pairs = list(zip(a, b, strict=True))
    peaks = [
        np.max(np.abs(np.asarray(x, np.float32)), initial=0.0)
        for pair in pairs
        for x in pair
    ]
    assert jax.jit(largest_magnitudes)(pairs).tolist() == peaks
    expected = [np.sum(np.square(np.asarray(x, np.float64))) for x in a]
    # Sums of up to 18432 squares, in FP32 and in blocks of at most 2^14.
    assert_allclose(jax.jit(sums_of_squares)(a), expected, rtol=18432 / 2**24)
    assert largest_magnitudes([]).shape == sums_of_squares([]).shape == (0,)


def test_infinities_and_nan_are_those_of_their_own_array():
    a = arrays(0)
    a[3][1, 2] = np.nan
    a[5][700, 3] = -np.inf
    peaks = jax.jit(largest_magnitudes)([[x] for x in a])
    for figures in map(np.asarray, (jax.jit(sums_of_squares)(a), peaks)):
        assert np.flatnonzero(~np.isfinite(figures)).tolist() == [3, 5]
        assert np.isnan(figures[3])
