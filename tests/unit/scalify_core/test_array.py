"""ScaledArray: its invariants, its two kinds of scale, what it means as a pytree and as
a gradient."""

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


@pytest.mark.parametrize(
    "read",
    [
        jnp.asarray,
        jax.jit(jnp.asarray),
        jnp.abs,
        lambda x: jnp.where(True, x, 0.0),
        np.asarray,
    ],
)
@pytest.mark.parametrize("size", [1e9, 1e-12])
def test_numpy_functions_read_the_value_and_not_the_data(read, size):
    values = jnp.linspace(1.0, 2.0, 8) * size
    x = as_scaled_array(values, dtype=HALF)
    assert_allclose(read(x), values, rtol=2.0**-10)
    assert read(x).dtype == np.float32


@pytest.mark.parametrize("read", [jnp.asarray, np.asarray])
def test_scales_that_were_added_up_read_as_nan_through_numpy_too(read):
    x, y = (as_scaled_array(jnp.full(4, n), dtype=HALF) for n in (1.0, 4.0))
    total = jax.tree.map(jnp.add, x, y)
    with pytest.warns(PrecisionWarning, match="reads as NaN"):
        assert np.all(np.isnan(read(total)))


@pytest.mark.parametrize("scale", [3.0, 0.0, -2.0, 2.0**127, float("nan")])
def test_static_scale_that_is_no_power_of_two_in_range_is_an_error(scale):
    with pytest.raises(ValueError, match="power of two"):
        ScaledArray(X, scale)
    with pytest.raises(ValueError, match="power of two"):
        ScaledArray(X, np.full(4, scale, np.float32))
    for change in (set_scaling, rebalance, rebalance_grad):
        with pytest.raises(ValueError, match="power of two"):
            change(X, scale)


def test_data_and_scales_of_other_dtypes_and_shapes_are_errors():
    for data, scale in ((jnp.arange(3), 1.0), (X, jnp.int32(2))):
        with pytest.raises(TypeError, match="int32"):
            ScaledArray(data, scale)
    for shape in ((5,), (8,), (4, 3), (1, 4, 8)):
        with pytest.raises(ValueError, match="shape"):
            ScaledArray(X, jnp.ones(shape))


def test_static_scale_is_structure_and_dynamic_scale_is_a_leaf():
    static, dynamic = ScaledArray(X, 2), ScaledArray(X, F32(2))
    assert len(jax.tree.leaves(static)) == 1
    assert len(jax.tree.leaves(dynamic)) == 2
    assert jax.tree.structure(static) != jax.tree.structure(ScaledArray(X, 4))
    paths = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path({"w": dynamic})
    ]
    assert paths == ["['w'].data", "['w'].scale"]
    for number in (2, 2.0, np.float32(2), np.array(2.0)):
        assert ScaledArray(X, number).is_static


def test_scale_that_is_not_given_is_the_power_of_two_nearest_to_the_rms():
    for exponent in (-100, 0, 100):
        x = as_scaled_array(X * 2.0**exponent)
        assert float(x.scale) == 2.0**exponent
        assert_array_equal(asarray(x), X * 2.0**exponent)


@pytest.mark.parametrize(
    ("content", "scale"), [(0.0, 2.0**-126), (np.inf, 1), (np.nan, 1)]
)
def test_zeros_get_the_smallest_scale_and_what_is_not_finite_scale_one(content, scale):
    assert float(as_scaled_array(jnp.full(3, content)).scale) == scale


def test_narrow_data_is_cast_after_scaling_and_saturates():
    with pytest.warns(
        PrecisionWarning, match="more than 1% of its norm is beyond what float16 holds"
    ):
        x = as_scaled_array(jnp.asarray([1e-9, 3e-9, 1e20]), 2.0**-30, dtype=HALF)
    assert float(x.data[2]) == 65504
    assert_allclose(asarray(x)[:2], [1e-9, 3e-9], rtol=2**-11)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(HALF, 2.0**-20), (jnp.float8_e5m2, F32(2.0**-20))]
)
def test_what_saturates_on_entry_is_named(dtype, scale):
    with pytest.warns(
        PrecisionWarning,
        match=r"as_scaled_array\['w'\]: more than 1% of its norm is beyond",
    ):
        as_scaled_array(
            {"w": 3 * jnp.eye(8) + 1e30, "n": jnp.zeros(3)}, scale, dtype=dtype
        )
    as_scaled_array(2.0**-20 * jnp.eye(8), scale, dtype=dtype)
    # held as they are
    as_scaled_array(jnp.array([65504 * 2.0**-20, jnp.inf, jnp.nan]), scale, dtype=HALF)


@pytest.mark.parametrize("number", [3.0, -1.0, jnp.nan, jnp.inf])
def test_a_run_time_scale_that_is_none_is_refused_where_it_is_known(number):
    for make in (as_scaled_array, lambda x, scale: as_scaled_array(x).rescale(scale)):
        with pytest.raises(
            ValueError, match=r"scale is .*, expected a power of two in"
        ):
            make(jnp.ones(3), F32(number))


def test_a_dtype_in_the_place_of_a_scale_is_refused():
    with pytest.raises(
        TypeError, match=r"float16.*expected a power of two or an FP32 array; .*dtype="
    ):
        as_scaled_array(jnp.ones(3), HALF)


def test_what_becomes_zero_on_entry_is_named():
    """Nobody can tell later: a program sees the zeros."""
    far = jnp.asarray([1.0] * 8 + [1e-8] * 8)
    with pytest.warns(
        PrecisionWarning,
        match=(
            r"as_scaled_array\['far'\]: more than a tenth of its elements become zeros"
            r" in float16"
        ),
    ):
        as_scaled_array({"near": jnp.ones(4), "far": far}, dtype=HALF)
    # With what it says to do instead, nothing is.
    for kwargs in (
        {"dtype": HALF, "scale": F32(2.0**-14)},
        {"dtype": jnp.bfloat16},
    ):
        assert_allclose(asarray(as_scaled_array(far, **kwargs)), far, rtol=2**-8)
    # one of them cos(pi / 2), which is no more than a rounding
    angles = jnp.cos(jnp.linspace(0, np.pi, 13))
    as_scaled_array((angles, jnp.zeros(3), jnp.zeros(0)), dtype=HALF)
    jax.jit(lambda x: as_scaled_array(x, dtype=HALF))(far)


def test_integers_keys_and_scaled_arrays_pass_as_they_are():
    inputs = {
        "i": jnp.arange(3),
        "k": jax.random.key(0),
        "s": ScaledArray(X, 2.0),
        "b": True,
    }
    out = as_scaled_array(inputs, 1.0)
    assert out["s"] is inputs["s"]
    assert out["b"] is True
    assert out["i"].dtype == jnp.int32


def test_rescale_keeps_the_value_over_the_whole_range_of_scales():
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


def test_iteration_ends_with_the_leading_axis():
    rows = [
        np.asarray(row) for row in ScaledArray(X, jnp.asarray([1.0, 2.0, 4.0, 8.0]))
    ]
    assert_array_equal(rows, X * 2.0 ** np.arange(4)[:, None])


def test_dynamic_scale_of_a_host_copy_stays_dynamic():
    x = jax.device_get(ScaledArray(X, F32(2)))
    assert not any(y.is_static for y in (x, x.astype(HALF), x[0]))


def test_repr_shows_scale_and_data_and_of_many_values_is_short():
    shown = "ScaledArray(scale=2^-2, data=Array([1.], dtype=float32))"
    assert repr(ScaledArray(jnp.ones(1), 0.25)) == shown
    shown = "ScaledArray(float16[4,8], scale=2^-2)"
    assert repr(ScaledArray(jnp.ones((4, 8), HALF), 0.25)) == shown


def test_tree_functions_take_a_scaled_array_as_one_leaf():
    params = {"w": ScaledArray(X, F32(4)), "n": jnp.arange(2)}
    assert len(tree.leaves(params)) == 2
    static = tree.with_static_scales(params)
    assert static["w"].scale == 4.0
    assert static["w"].is_static
    assert not tree.with_dynamic_scales(static)["w"].is_static
    moved = tree.rescaled_like({"w": ScaledArray(X, 1.0), "n": jnp.arange(2)}, static)
    assert moved["w"].scale == 4.0
    assert_array_equal(asarray(moved["w"]), X)


@pytest.mark.parametrize("use", [float, int, "{:.3f}".format])
@pytest.mark.parametrize("scale", [4.0, F32(4.0)])
def test_a_scaled_array_is_no_number(use, scale):
    x = ScaledArray(HALF(0.5), scale)
    with pytest.raises(TypeError, match="ScaledArray"):
        use(x)
    assert f"{x}" == repr(x)
    assert float(asarray(x)) == 2.0
