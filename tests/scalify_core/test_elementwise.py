"""Elementwise rules where a narrow format, a constant or an extreme scale would change the result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalify_core import ScaledArray, as_scaled_array, asarray, scalify

HALF, BRAIN = jnp.float16, jnp.bfloat16
# One rounding to the format of the result.
RTOL = {jnp.float32: 2.0**-22, HALF: 2.0**-10, BRAIN: 2.0**-7}


# Constants that only keep a divisor or an argument of a logarithm from zero.


GUARDS = {
    "maximum": lambda x: x / jnp.maximum(jnp.abs(x), 1e-12),
    "where": lambda x: 1e-6 / jnp.where(x == 0, 1e-12, x),
    "clip": lambda x: jnp.log(1 - jnp.clip(x, 1e-7, 1 - 1e-7)),
    "norm": lambda x: x / jnp.maximum(jnp.linalg.norm(x * 0), 1e-12),
}


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("name", GUARDS)
def test_guards_below_the_format_act_as_in_fp32(name, dtype):
    x = jnp.asarray([0.0, 1.0, -2.0])
    found = scalify(GUARDS[name])(as_scaled_array(x, 1.0, dtype=dtype))
    limit = float(jnp.finfo(dtype).max) * float(found.scale)
    expected = np.clip(GUARDS[name](x), -limit, limit)
    # The clip's complement, 1 - (1 - 1e-7), has few bits in FP32 already: an ulp of its logarithm's argument.
    np.testing.assert_allclose(asarray(found), expected, rtol=RTOL[dtype], atol=1e-6)


def test_a_guard_that_a_matrix_product_also_reads_is_not_rounded_to_zero():
    def normalised(x):
        norm = jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
        return x / norm, norm @ jnp.ones((1, 1))

    x = jnp.zeros((3, 4)).at[1].set(1.0)
    rows, _ = scalify(normalised)(as_scaled_array(x, 1.0, dtype=HALF))
    np.testing.assert_allclose(asarray(rows), normalised(x)[0], rtol=2.0**-10)


def test_a_constant_that_the_format_holds_costs_no_conversion():
    x = as_scaled_array(jnp.ones(8), 1.0, dtype=HALF)
    for fun in (lambda x: jnp.maximum(x, 0.25), lambda x: jnp.where(x > 0, x, -1e9)):
        jaxpr = jax.make_jaxpr(scalify(fun))(x)
        assert "convert_element_type" not in str(jaxpr)
