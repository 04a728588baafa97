"""ScaledArray: its invariants, its two kinds of scale, its behavior as a pytree."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import F32, HALF
from draws import draw_normal
from numpy.testing import assert_allclose, assert_array_equal

from scalify_core import PrecisionWarning, ScaledArray, as_scaled_array, asarray, tree
from scalify_core.static import rebalance, rebalance_grad, set_scaling

X = draw_normal(0, (4, 8))


def test_logical_value_is_data_times_scale():
    x = ScaledArray(X, 4.0)
    assert_array_equal(np.asarray(x), 4 * np.asarray(X))
    assert (x.shape, x.dtype, x.ndim, x.size, len(x)) == (X.shape, X.dtype, 2, 32, 4)


@pytest.mark.parametrize("read", [jnp.asarray, np.asarray])
def test_numpy_functions_read_the_logical_value(read):
    values = jnp.linspace(1.0, 2.0, 8) * 1e9
    x = as_scaled_array(values, dtype=HALF)
    assert_allclose(read(x), values, rtol=2.0**-10)
    assert read(x).dtype == np.float32


@pytest.mark.parametrize("read", [jnp.asarray, np.asarray])
def test_scales_that_were_added_up_read_as_nan_through_numpy_too(read):
    x, y = (as_scaled_array(jnp.full(4, n), dtype=HALF) for n in (1.0, 4.0))
    total = jax.tree.map(jnp.add, x, y)
    with pytest.warns(PrecisionWarning, match="reads as NaN"):
        assert np.isnan(read(total)).all()


@pytest.mark.parametrize("scale", [3.0, 0.0, -2.0, 2.0**127, float("nan")])
def test_a_scale_that_is_no_power_of_two_in_range_is_an_error(scale):
    for make in (ScaledArray, set_scaling, rebalance, rebalance_grad):
        with pytest.raises(ValueError, match="power of two"):
            make(X, scale)
    with pytest.raises(ValueError, match="power of two"):
        ScaledArray(X, np.full(4, scale, np.float32))
    for make in (as_scaled_array, lambda x, scale: ScaledArray(x, 1.0).rescale(scale)):
        with pytest.raises(ValueError, match=r"scale is .*, expected a power of two"):
            make(X, F32(scale))


def test_data_and_scales_of_other_dtypes_and_shapes_are_errors():
    with pytest.raises(TypeError, match="int32"):
        ScaledArray(jnp.arange(3), 1.0)
    for scale in (jnp.int32(2), *map(jnp.ones, ((5,), (8,), (4, 3), (1, 4, 8)))):
        with pytest.raises(
            ValueError, match=r"scale \w+32\[.* for data float32\[4,8\]"
        ):
            ScaledArray(X, scale)
    with pytest.raises(TypeError, match=r"float16.*a dtype is given by.*dtype="):
        as_scaled_array(X, HALF)


@pytest.mark.parametrize("dtype", ["int8", "bool"])
def test_a_dtype_without_a_format_is_an_error_that_says_how_to_cast(dtype):
    x = as_scaled_array(X)
    for cast in (
        x.astype,
        x.unscale,
        lambda dtype: asarray(x, dtype),
        lambda dtype: as_scaled_array(X, dtype=dtype),
    ):
        with pytest.raises(TypeError, match=rf"{dtype}.*asarray\(x\)\.astype"):
            cast(dtype)


def test_the_data_of_a_scaled_array_is_no_scaled_array():
    with pytest.raises(TypeError, match=r"rescale"):
        ScaledArray(as_scaled_array(X), 2.0)


def test_static_scale_is_structure_and_dynamic_scale_is_a_leaf():
    static, dynamic = ScaledArray(X, 2), ScaledArray(X, F32(2))
    assert len(jax.tree.leaves(static)) == 1
    assert jax.tree.structure(static) != jax.tree.structure(ScaledArray(X, 4))
    leaves = jax.tree_util.tree_leaves_with_path({"w": dynamic})
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    assert paths == ["['w'].data", "['w'].scale"]
    for number in (2, np.float32(2), np.array(2.0)):
        assert ScaledArray(X, number).is_static
    x = jax.device_get(dynamic)
    assert not any(y.is_static for y in (x, x.astype(HALF), x[0]))


def test_default_scale_is_the_power_of_two_nearest_to_the_rms():
    for exponent in (-100, 0, 100):
        x = as_scaled_array(X * 2.0**exponent)
        assert float(x.scale) == 2.0**exponent
        assert_array_equal(asarray(x), X * 2.0**exponent)
    for content, scale in ((0.0, 2.0**-126), (np.inf, 1), (np.nan, 1)):
        assert float(as_scaled_array(jnp.full(3, content)).scale) == scale


@pytest.mark.parametrize(
    ("dtype", "scale"), [(HALF, 2.0**-20), (jnp.float8_e5m2, F32(2.0**-20))]
)
def test_saturation_on_entry_is_named(dtype, scale):
    message = r"as_scaled_array\['w'\]: more than 1% of its norm is beyond"
    with pytest.warns(PrecisionWarning, match=message):
        x = as_scaled_array({"w": 3 * jnp.eye(8) + 1e30}, scale, dtype=dtype)
    assert float(x["w"].data[0, 0]) == float(jnp.finfo(dtype).max)
    as_scaled_array(2.0**-20 * jnp.eye(8), scale, dtype=dtype)
    # representable
    as_scaled_array(jnp.array([65504 * 2.0**-20, jnp.inf, jnp.nan]), scale, dtype=HALF)


def test_underflow_on_entry_is_named():
    """Later nobody can tell: a program sees the zeros."""
    far = jnp.asarray([1.0] * 8 + [1e-8] * 8)
    message = (
        r"as_scaled_array\['far'\]: more than a tenth of its elements become zeros in"
        r" float16"
    )
    with pytest.warns(PrecisionWarning, match=message):
        as_scaled_array({"near": jnp.ones(4), "far": far}, dtype=HALF)
    # The remedies that the warning names.
    for kwargs in ({"dtype": HALF, "scale": F32(2.0**-14)}, {"dtype": jnp.bfloat16}):
        assert_allclose(asarray(as_scaled_array(far, **kwargs)), far, rtol=2**-8)
    # one of them cos(pi / 2), which is no more than a rounding
    angles = jnp.cos(jnp.linspace(0, np.pi, 13))
    as_scaled_array((angles, jnp.zeros(3), jnp.zeros(0)), dtype=HALF)
    jax.jit(lambda x: as_scaled_array(x, dtype=HALF))(far)


def test_integers_keys_and_scaled_arrays_are_unchanged():
    inputs = [jnp.arange(3), jax.random.key(0), ScaledArray(X, 2.0), True]
    assert all(map(operator.is_, as_scaled_array(inputs, 1.0), inputs))


def test_rescale_preserves_the_value_over_the_range_of_scales():
    for x in (ScaledArray(X, 2.0**100), ScaledArray(X, F32(2.0**100))):
        for scale in (2.0**126, 2.0**98, F32(2.0**101)):
            assert_array_equal(asarray(x.rescale(scale)), asarray(x))


def test_scales_of_layers_broadcast_along_leading_axes_and_are_indexed():
    scales = jnp.asarray([1.0, 2.0, 4.0, 8.0])
    expected = np.asarray(X) * np.asarray(scales)[:, None]
    for shape in ((4,), (4, 1)):
        x = ScaledArray(X, scales.reshape(shape))
        assert_array_equal(asarray(x), expected)
        assert_array_equal(asarray(x[2]), expected[2])
        assert_array_equal([np.asarray(row) for row in x], expected)
    by_column = ScaledArray(X, jnp.asarray([[0.5, 1, 2, 4, 8, 16, 32, 64]]))
    assert_array_equal(asarray(by_column[1:3]), asarray(by_column)[1:3])


def test_repr_shows_scale_and_data_and_of_many_values_is_short():
    assert "[1.]" in repr(ScaledArray(jnp.ones(1), 0.25))
    shown = "ScaledArray(float32[4,8], scale=2^-2)"
    assert repr(ScaledArray(X, 0.25)) == shown


def test_tree_functions_take_a_scaled_array_as_one_leaf():
    params = [ScaledArray(X, F32(4)), jnp.arange(2)]
    assert len(tree.leaves(params)) == 2
    static = tree.with_static_scales(params)
    assert (static[0].scale, static[0].is_static) == (4.0, True)
    assert not tree.with_dynamic_scales(static)[0].is_static


@pytest.mark.parametrize("use", [float, "{:.3f}".format])
@pytest.mark.parametrize("scale", [4.0, F32(4.0)])
def test_a_scaled_array_is_no_number(use, scale):
    x = ScaledArray(HALF(0.5), scale)
    with pytest.raises(TypeError, match="ScaledArray"):
        use(x)
    assert float(asarray(x)) == 2.0


def test_fp64_has_no_scaled_form():
    with jax.enable_x64(True), pytest.raises(TypeError, match="float64 has no scaled"):
        as_scaled_array({"w": jnp.full(2, 1e200)})


def test_truth_and_comparison_are_errors():
    """Python's defaults are the length, and the identity: neither reads a number."""
    zeros = as_scaled_array(jnp.zeros(3), dtype=HALF)
    with pytest.raises(TypeError, match=r"bool\(asarray\(x\)\)"):
        bool(zeros)
    for compare in (operator.eq, operator.ne):
        for other in (
            zeros,
            as_scaled_array(jnp.zeros(3), dtype=HALF),
            0,
            jnp.zeros(3),
        ):
            with pytest.raises(TypeError, match=r"asarray\(x\) == y"):
                compare(zeros, other)
    assert len({zeros, zeros}) == 1
