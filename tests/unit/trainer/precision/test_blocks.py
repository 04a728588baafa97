"""Block-scaled products: their quantizers are JAX's own, and a layer's three products
are rounded as a recipe says."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from for_h200 import program_for

# public only behind a product for GPUs
from jax._src.cudnn.scaled_matmul_stablehlo import quantize
from numpy.testing import assert_allclose, assert_array_equal

from scalify_core.numerics.formats import E4M3, E5M2, FloatFormat, counter_bits
from trainer.config.composition import compose_config
from trainer.errors import UserError
from trainer.precision import blocks
from trainer.precision.dots import hadamard

ROWS, COLUMNS = 48, 128
PRODUCT = (((1,), (0,)), ((), ()))
TIES = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # of E2M1
RECIPES = {
    "mx": blocks.mx_recipe(E4M3, E4M3),
    "deepseek": blocks.deepseek_recipe(E4M3, E4M3),
    "nvfp4": blocks.nvfp4_recipe(),
    "four over six": blocks.nvfp4_recipe(four_over_six=True),
    "rowwise": blocks.rowwise_recipe(E4M3, E4M3),
}
FP4_RECIPES = ("nvfp4", "four over six")


# One program for each cast and shape: an operation alone takes as long to compile.
@functools.partial(jax.jit, static_argnames=("cast", "axis"))
def round_by(cast, x, axis):
    """Return a rounded matrix, with its axes in their order."""
    wide = cast(x, axis).widened()
    return wide[:, : x.shape[1]] if axis == 1 else wide[:, : x.shape[0]].T


def spread(shape, key=0, octaves=12):
    """Return numbers of many sizes, some of them at the borders of blocks' scales and
    at ties."""
    random = np.random.default_rng(key)
    x = random.normal(size=shape) * 2.0 ** random.integers(-octaves, octaves, shape)
    round_numbers = 1.75 * 2.0 ** random.integers(-6, 6, shape)
    chosen = np.where(random.uniform(size=shape) < 0.2, round_numbers, x)
    return jnp.asarray(chosen, jnp.float32)


def quantized_by_jax(x, length, config):
    """Return JAX's numbers and the scales of its blocks."""
    data, scales = jax.jit(lambda x: quantize(x[None], config))(x)
    data, scales = np.float32(data[0]), np.float32(scales[0])[..., None]
    return data.reshape(ROWS, -1, length) * scales, scales


@pytest.mark.parametrize("octaves", [1, 40])
def test_mxfp8_is_jaxs_own_quantizer(octaves):
    x = spread((ROWS, COLUMNS), octaves=octaves)
    config = jax.nn.get_scaled_dot_general_config("mxfp8")
    expected, _ = quantized_by_jax(x, 32, config)
    for native in (False, True):
        cast = blocks.mx_recipe(E4M3, E4M3, native=native).activation
        assert_array_equal(round_by(cast, x, 1), expected.reshape(x.shape))
        assert_array_equal(round_by(cast, x.T, 0).T, expected.reshape(x.shape))


@pytest.mark.parametrize("octaves", [1, 4])
def test_nvfp4_is_jaxs_own_quantizer(octaves):
    x = spread((ROWS, COLUMNS), octaves=octaves)
    x = np.asarray(x)
    scale = np.max(np.abs(x)) / np.float32(6 * 448)
    of_all = jnp.full((1, 1, 1, 1), scale)
    config = jax.nn.get_scaled_dot_general_config("nvfp4", of_all)
    expected, scales = quantized_by_jax(x, 16, config)
    # XLA's older code for CPUs, with which tests run, rounds to BF16 on the way to
    # E2M1: twice, next to a tie.
    on_scale = np.abs(x / scale).reshape(ROWS, -1, 16) / scales
    from_tie = np.min(np.abs(on_scale[..., None] - TIES), axis=-1)
    clear = (from_tie > 2.0**-8 * on_scale) | (from_tie == 0)
    assert np.mean(clear) > 0.95
    actual = np.asarray(round_by(RECIPES["nvfp4"].activation, x, 1))
    actual = actual.reshape(expected.shape)
    assert_array_equal(actual[clear], (expected * scale)[clear])


def test_fp4_is_the_native_cast_and_its_ties():
    x = np.concatenate([np.arange(-8, 8, 1 / 64), TIES, [1e9, np.nan]])
    x = x.astype(np.float32)
    native = jax.jit(lambda x: jnp.clip(x, -6, 6).astype(jnp.float4_e2m1fn))
    actual = np.asarray(jax.jit(blocks.fp4)(x))
    assert_array_equal(actual[:-1], np.float32(native(x[:-1])))
    assert math.isnan(actual[-1])


def test_random_bits_are_right_in_expectation():
    x = np.linspace(-6, 6, 61, dtype=np.float32)
    bits = jax.jit(counter_bits, static_argnums=0)((2**14, 61), 0, 0, 0)
    rounded = np.asarray(jax.jit(blocks.fp4)(np.broadcast_to(x, bits.shape), bits))
    step = np.where(np.abs(x) < 2, 0.5, np.where(np.abs(x) < 4, 1, 2))
    # Five standard deviations of the mean of numbers that are at most a step apart.
    bound = 5 * step / 2 / math.sqrt(len(bits))
    assert np.all(np.abs(np.mean(rounded, axis=0) - x) <= bound)
    assert not np.array_equal(rounded[0], rounded[1])


def test_gradients_are_rounded_anew_when_they_are_others():
    x = spread((64, 64), octaves=1)

    rounded = functools.partial(round_by, RECIPES["nvfp4"].gradient, axis=1)
    first = rounded(x)
    assert_array_equal(first, rounded(x))
    other = rounded(x.at[0, 0].multiply(1 + 2**-20))
    assert np.mean(np.asarray(first != other)) > 0.1


@pytest.mark.parametrize("name", RECIPES)
def test_any_sizes_zeros_and_numbers_that_are_not_finite(name):
    recipe, shape = RECIPES[name], (33, 130)
    for rounding in (recipe.activation, recipe.weight, recipe.gradient):
        for axis in (0, 1):
            rounded = functools.partial(round_by, rounding, axis=axis)
            zeros = np.zeros(shape, np.float32)
            assert_array_equal(rounded(zeros), zeros)
            x = np.array(spread(shape, octaves=1))
            assert np.all(np.isfinite(rounded(x)))
            assert np.all(np.isfinite(rounded(x * np.float32(1e-36))))  # tiny scales
            for bad in (np.inf, np.nan):
                x[2, 3] = bad
                assert np.isnan(rounded(x)[2, 3])


@pytest.mark.parametrize(
    ("name", "operand", "octaves", "lost"),
    [
        ("nvfp4", "activation", 14, 15),
        ("mx", "activation", 24, 31),
        ("rowwise", "activation", 14, 0),
        ("rowwise", "weight", 24, 63),
        ("deepseek", "activation", 24, 63),
        ("deepseek", "weight", 24, 64 * 64 - 1),
        ("nvfp4", "weight", 24, 64 * 64 - 1),  # its scales have a range, too
    ],
)
def test_a_large_number_takes_the_digits_of_its_block_along_the_sum(
    name, operand, octaves, lost
):
    x = jnp.ones((64, 64)).at[0, 0].set(2.0**octaves)
    for axis in (0, 1):
        zeros = np.asarray(round_by(getattr(RECIPES[name], operand), x, axis)) == 0
        along_the_sum = zeros[:, 0] if axis == 0 else zeros[0]
        assert np.sum(zeros) == lost
        assert np.sum(along_the_sum) == min(lost, 63)


def test_a_block_at_four_keeps_numbers_that_six_cannot():
    # 8 and 6 are 4 and 3 on a scale of 2; with 8 at 6, 6 would be 4.5, between 4 and 6.
    x = jnp.zeros((16, 32)).at[:, 0].set(8.0).at[:, 1].set(6.0)
    # and here 6 and 0.5 lie on a scale of 1, where 4 of 6 would make 1/3 of the 0.5
    x = x.at[:, 16].set(6.0).at[:, 17].set(0.5)
    for cast in RECIPES["four over six"][:3]:
        assert_array_equal(round_by(cast, x, 1), x)
    assert round_by(RECIPES["nvfp4"].activation, x, 1)[0, 1] != 6.0


@pytest.mark.parametrize("name", FP4_RECIPES)
def test_weights_are_the_same_numbers_in_both_passes(name):
    w = spread((ROWS, COLUMNS), octaves=12)
    weight = RECIPES[name].weight
    assert_array_equal(round_by(weight, w, 0), round_by(weight, w, 1))


def test_hadamard_cancels_in_the_product():
    x, g = spread((24, 50), 1, octaves=1), spread((8, 50), 2, octaves=1)
    exact = np.asarray(x, np.float64) @ np.asarray(g, np.float64).T
    mixed_x, mixed_g = (np.asarray(hadamard(m, 16), np.float64) for m in (x, g))
    # Each mixed number is a sum of 16 products, rounded once each.
    sizes = np.abs(np.asarray(x)).sum() * np.abs(np.asarray(g)).max()
    assert_allclose(
        mixed_x @ mixed_g.T, exact, rtol=0, atol=2 * 16 * 2.0**-24 * 4 * sizes
    )


def with_gradients(dot, x, w, g):
    y, vjp = jax.vjp(lambda x, w: dot(x, w, PRODUCT), x, w)
    return y, *vjp(g)


@pytest.mark.parametrize("name", RECIPES)
def test_the_three_products_of_a_layer_are_of_rounded_operands(name):
    recipe, dot = RECIPES[name], blocks.BlockScaledDot(RECIPES[name])
    x, w, g = spread((32, 64), 1, 1), spread((64, 48), 2, 1), spread((32, 48), 3, 1)

    @jax.jit
    def expected(x, w, g):
        y = round_by(recipe.activation, x, 1) @ round_by(recipe.weight, w, 0)
        d_x = round_by(recipe.gradient, g, 1) @ round_by(recipe.weight, w, 1).T
        rounded_x = round_by(recipe.activation, recipe.mix(x.T), 1)
        return y, d_x, rounded_x @ round_by(recipe.gradient, recipe.mix(g.T), 1).T

    actual = jax.jit(lambda *args: with_gradients(dot, *args))(x, w, g)
    for a, b in zip(actual, expected(x, w, g), strict=True):
        assert_allclose(a, b, rtol=1e-6, atol=1e-5)  # the order of the sums alone
    with pytest.raises(ValueError, match="multiplies"):
        dot(x, w.T, (((1,), (1,)), ((), ())))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["precision.scaling=mx"], "scales blocks of FP8 matmuls: choose its preset"),
        (
            ["precision=scalify_fp16", "precision.scaling=propagate_mx"],
            "propagate_mx scales blocks of FP8 matmuls: choose its preset",
        ),
        (
            ["precision=mxfp8", "precision.forward=e5m2"],
            "takes e4m3 forward and e4m3 backward, or e4m3 forward and e5m2 backward",
        ),
        (
            ["precision=nvfp4", "precision.forward=e4m3"],
            "NVFP4 matmul takes e2m1 forward and e2m1 backward",
        ),
        (
            [
                *("precision=nvfp4", "precision.forward=e4m3"),
                *("precision.simulate=true", "precision.compute=fp32"),
            ],
            "rounds to e2m1, not e4m3 and e2m1; set .*forward=e2m1",
        ),
    ],
)
def test_formats_that_a_recipe_does_not_have_are_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        compose_config(overrides)


NATIVE = {
    "mx": (blocks.mx_recipe(E4M3, E5M2), blocks.mx_recipe(E4M3, E5M2, native=True)),
    "nvfp4": (RECIPES["nvfp4"], blocks.nvfp4_recipe(native=True)),
    "four over six": (
        RECIPES["four over six"],
        blocks.nvfp4_recipe(four_over_six=True, native=True),
    ),
}


@pytest.mark.parametrize("name", NATIVE)
def test_native_casts_have_the_bits_of_the_simulation(name):
    x = spread((64, 96), octaves=40).at[3, 5:40].set(0).at[40:, 7].set(0)
    simulated, native = NATIVE[name]
    for given in (x, x.at[2, 3].set(jnp.inf)):
        for cast, native_cast in zip(simulated[:3], native[:3], strict=True):
            for axis in (0, 1):
                narrow = jax.eval_shape(
                    functools.partial(native_cast, axis=axis), given
                )
                assert narrow.scales.dtype.itemsize == narrow.data.dtype.itemsize == 1
                rounded = round_by(native_cast, given, axis)
                assert_array_equal(rounded, round_by(cast, given, axis))
    dtype = jnp.float8_e5m2 if name == "mx" else jnp.float4_e2m1fn
    gradient = jax.eval_shape(functools.partial(native.gradient, axis=1), x)
    assert gradient.data.dtype == dtype


@pytest.mark.parametrize(
    ("name", "gpu", "dtypes"),
    [
        ("mx", "b200", {"fp8"}),
        ("nvfp4", "rtx5090", {"fp4"}),
        ("mx", "h100", {"bf16", "fp32"}),  # FP32: the gradient of w
        ("rowwise", "h100", {"fp8"}),
    ],
)
def test_blackwell_alone_multiplies_blocks_and_hopper_rows(name, gpu, dtypes):
    operands = (
        ((256, 128), jnp.bfloat16),
        ((128, 384), jnp.float32),
        ((256, 384), jnp.bfloat16),
    )
    recipe = RECIPES["rowwise"] if name == "rowwise" else NATIVE[name][1]
    dot = blocks.BlockScaledDot(recipe)
    step = lambda *args: with_gradients(dot, *args)
    program = program_for(gpu, step, *operands, xla_gpu_enable_triton_gemm=False)
    gemms = [gemm for gemm in program.gemms if gemm.sizes[3] != blocks.HADAMARD]
    assert len(gemms) == 3
    assert {gemm.dtype for gemm in gemms} == dtypes
    kernels = {gemm.kernel for gemm in gemms}
    assert (kernels == {"__cudnn$blockScaledDot"}) == (gpu != "h100")


def figures_of(x, name):
    fmt = FloatFormat.parse("e2m1" if name in FP4_RECIPES else "e4m3")
    figures_of_blocks = jax.jit(blocks.block_figures, static_argnums=(1, 2, 3))
    figures = figures_of_blocks(x, RECIPES[name].activation, 1, fmt)
    return dict(zip(blocks.BLOCK_FIGURES, figures.tolist(), strict=True))


def test_figures_of_blocks_are_counted_by_hand():
    row = jnp.arange(1, 129.0)[None]
    x = jnp.concatenate([row, 4 * row, 0 * row])
    for name in ("rowwise", "deepseek"):  # two octaves apart; zeros do not count
        assert figures_of(x, name)["block_spread"] == pytest.approx(1)
        assert not any(figures_of(0 * x, name).values())
    x = jnp.ones((4, 32)).at[0, 0].set(2.0**20)
    assert figures_of(x, "nvfp4")["block_underflow"] == 7 / 8
    assert figures_of(x, "mx")["block_underflow"] == 0


def test_blocks_whose_scale_is_rounded_down_saturate():
    """The largest of all, 2688, has the scale 448. Of 2000 it is 333.3, rounded to
    320, at which 6 stands for 1920; 1760 has 293.3, rounded to 288, 1728."""
    x = jnp.ones((4, 16)).at[:, 0].set(jnp.array([2688.0, 2000.0, 1760.0, 1920.0]))
    assert figures_of(x, "nvfp4")["block_saturated"] == 0.5
    for name in ("mx", "rowwise"):  # their scales are rounded up
        assert figures_of(spread((64, 64)), name)["block_saturated"] == 0
