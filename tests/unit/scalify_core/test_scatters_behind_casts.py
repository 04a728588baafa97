"""Behind a cast to 16 bits a scatter adds up logical numbers in FP32, too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from measured_and_plain import HALF

from scalify_core import as_scaled_array, scalify

X = jnp.linspace(1.0, 2.0, 16)
GROUPS = jnp.arange(16) % 4
SCATTERS = {
    "add": lambda x: jnp.zeros(4, x.dtype).at[GROUPS].add(x),
    "max": lambda x: jax.ops.segment_max(x, GROUPS, 4),
    "min": lambda x: jax.ops.segment_min(x, GROUPS, 4),
    "rows of a table": lambda x: jax.grad(lambda t: (t[GROUPS] * x).sum())(
        jnp.zeros(4, x.dtype)
    ),
}


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e6])
@pytest.mark.parametrize("name", SCATTERS)
def test_small_and_large_numbers_are_added_up(name, size):
    out = scalify(lambda x: SCATTERS[name]((x * size).astype(HALF)))(
        as_scaled_array(X, dtype=HALF)
    )
    actual = np.asarray(out.data, np.float64) * np.asarray(out.scale, np.float64)
    expected = np.asarray(SCATTERS[name](X), np.float64) * size
    np.testing.assert_allclose(actual, expected, rtol=2.0**-9)
