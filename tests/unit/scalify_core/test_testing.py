"""The checker itself: it passes what is right and fails what is wrong, each promise for
itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import F32, HALF

from scalify_core.array.scaled_array import ScaledArray
from scalify_core.debug.testing import assert_close, check_scalify
from scalify_core.numerics.formats import FP32
from scalify_core.ops.rescale import set_scaling

X = ScaledArray(jnp.array([[1.0, -2.0, 0.5], [3.0, 0.25, -1.5]]), 2.0**20)


@pytest.mark.parametrize("dtype", [F32, HALF])
def test_it_passes_a_composition_with_its_gradient(dtype):
    fun = lambda x, b: {"y": jnp.sin(x * 2.0**-20) * b, "n": jnp.argmax(x)}
    out = check_scalify(fun, X, jnp.ones((1, 3), dtype), dtype=dtype, grad=True)
    assert (out["y"].dtype, out["n"].dtype) == (dtype, jnp.int32)


def close(actual, expected, **kwargs):
    assert_close(actual, jnp.asarray(expected, F32), FP32, **kwargs)


def test_a_wrong_value_is_found_and_named():
    x = ScaledArray(jnp.array([1.0, 2.0]), 4.0)
    close(x, [4.0, 8.0])
    with pytest.raises(
        AssertionError, match=r"result: 8.0 at \(1,\), expected 8.00000"
    ):
        close(x, [4.0, 8.00001])


def test_small_elements_are_held_to_their_own_size_unless_there_is_a_sum():
    x = ScaledArray(jnp.array([1.0, 1.00001e-4]), 1.0)
    with pytest.raises(AssertionError, match="expected"):
        close(x, [1.0, 1e-4])
    close(x, [1.0, 1e-4], reduction=5)


def test_infinities_and_nans_must_stand_where_they_belong():
    special = [np.inf, -np.inf, np.nan]
    close(ScaledArray(jnp.array(special), 2.0), special)
    for data, expected in ((np.inf, 1), (1, np.inf), (np.inf, -np.inf), (np.nan, 1)):
        with pytest.raises(AssertionError, match="infinities or NaNs differ"):
            close(ScaledArray(jnp.array([data], F32), 1.0), [expected])


@pytest.mark.parametrize("scale", [3.0, 2.0**127])
def test_a_scale_that_is_no_power_of_two_in_range_is_found(scale):
    x = ScaledArray(jnp.ones(2), F32(scale))
    with pytest.raises(AssertionError, match="power of two"):
        close(x, [1.0, 1.0])


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (
            ScaledArray(jnp.zeros(2, jnp.bfloat16), 1.0),
            jnp.zeros(2),
            "data is bfloat16",
        ),
        (jnp.zeros(2), jnp.zeros(3), "shape"),
        ({"a": jnp.zeros(2)}, {"b": jnp.zeros(2)}, "tree"),
        (jnp.int32(3), jnp.int32(4), "expected 4"),
        (ScaledArray(F32(1), 1.0), jnp.int32(1), "expected int32"),
        (jax.random.key(0), jax.random.key(1), "expected"),
    ],
)
def test_another_format_shape_tree_or_integer_is_found(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_close(actual, expected, FP32)


def test_zeros_at_a_scale_that_is_too_large_are_found():
    """They are no excuse where plain data keeps the numbers."""
    astray = lambda x: set_scaling(x, 2.0**24) * 1.5
    x = ScaledArray(jnp.asarray([1.0, -2.0, 0.5]), 1.0)
    with pytest.raises(AssertionError, match="expected"):
        check_scalify(astray, x, dtype=HALF, scales="static")


def test_plain_data_that_overflows_is_no_measure_of_its_small_elements():
    x = ScaledArray(jnp.asarray([1.0, 1.5 * 2.0**-14]), 2.0**20)
    check_scalify(lambda x: jnp.stack([x[0], x[1] * 2.0**-24]), x, dtype=HALF)
