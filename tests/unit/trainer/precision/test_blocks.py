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

from scalify_core import as_scaled_array, asarray, scalify
from scalify_core.numerics.formats import E4M3, E5M2, FloatFormat, counter_bits
from trainer.config.composition import compose_config
from trainer.errors import UserError
from trainer.precision import blocks
from trainer.precision.arrays import for_allgather
from trainer.precision.dots import hadamard

ROWS, COLUMNS = 48, 128
PRODUCT = (((1,), (0,)), ((), ()))
TIES = jnp.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])[None, None, None]  # of E2M1
RECIPES = {
    "mx": blocks.mx_recipe(E4M3, E4M3),
    "deepseek": blocks.deepseek_recipe(E4M3, E4M3),
    "nvfp4": blocks.nvfp4_recipe(),
    "four over six": blocks.nvfp4_recipe(four_over_six=True),
    "rowwise": blocks.rowwise_recipe(E4M3, E4M3),
}
FP4_RECIPES = ("nvfp4", "four over six")


def round_by(cast, x, axis):
    """What a cast makes of a matrix, in its own order."""
    wide = cast(x, axis).widened()
    return wide[:, : x.shape[1]] if axis == 1 else wide[:, : x.shape[0]].T


@functools.partial(jax.jit, static_argnames=("shape", "octaves"))
def spread(shape, key=0, octaves=12):
    """Numbers of many sizes, some of them at the borders of blocks' scales and at
    ties."""
    a, b, c = jax.random.split(jax.random.key(key), 3)
    x = jax.random.normal(a, shape) * jnp.exp2(
        jax.random.randint(b, shape, -octaves, octaves)
    )
    round_numbers = jnp.exp2(
        jax.random.randint(c, shape, -6, 6).astype(jnp.float32)
    ) * jnp.float32(1.75)
    return jnp.where(jax.random.uniform(c, shape) < 0.2, round_numbers, x)


@pytest.mark.parametrize("octaves", [1, 12, 40])
def test_mxfp8_is_jaxs_own_quantizer(octaves):
    x = spread((ROWS, COLUMNS), octaves=octaves)
    data, scales = quantize(x[None], jax.nn.get_scaled_dot_general_config("mxfp8"))
    theirs = (
        data[0].astype(jnp.float32).reshape(ROWS, -1, 32)
        * scales[0].astype(jnp.float32)[..., None]
    )
    for native in (False, True):
        for ours in (
            blocks.mx(x, E4M3, 1, native=native),
            blocks.mx(x.T, E4M3, 0, native=native),
        ):
            np.testing.assert_array_equal(ours.widened(), theirs.reshape(x.shape))


@pytest.mark.parametrize("octaves", [1, 4])
def test_nvfp4_is_jaxs_own_quantizer(octaves):
    x = spread((ROWS, COLUMNS), octaves=octaves)
    whole = jnp.max(jnp.abs(x)) / (6 * 448)
    config = jax.nn.get_scaled_dot_general_config("nvfp4", whole.reshape(1, 1, 1, 1))
    data, scales = quantize(x[None], config)
    theirs = (
        data[0].astype(jnp.float32).reshape(ROWS, -1, 16)
        * scales[0].astype(jnp.float32)[..., None]
        * whole
    )
    # XLA's older code for CPUs, with which tests run, rounds to BF16 on the way to
    # E2M1: twice, next to a tie.
    on_scale = (
        jnp.abs(x / whole).reshape(ROWS, -1, 16)
        / scales[0].astype(jnp.float32)[..., None]
    )
    from_tie = jnp.min(jnp.abs(on_scale[..., None] - TIES), axis=-1)
    clear = (from_tie > 2.0**-8 * on_scale) | (from_tie == 0)
    assert jnp.mean(clear) > 0.95
    ours = blocks.nvfp4(x, 1, native=False).widened().reshape(theirs.shape)
    np.testing.assert_array_equal(ours[clear], theirs[clear])


def test_fp4_is_the_native_cast_and_its_ties():
    x = jnp.concatenate(
        [
            jnp.arange(-8, 8, 1 / 64),
            jnp.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 1e9]),
        ]
    )
    np.testing.assert_array_equal(
        blocks.fp4(x), jnp.clip(x, -6, 6).astype(jnp.float4_e2m1fn).astype(jnp.float32)
    )
    assert math.isnan(blocks.fp4(jnp.float32(jnp.nan)))


def test_random_bits_are_right_in_expectation():
    x = jnp.linspace(-6, 6, 61)
    draws = 2**14
    bits = counter_bits((draws, 61), 0, 0, 0)
    rounded = blocks.fp4(jnp.broadcast_to(x, bits.shape), bits)
    step = jnp.where(jnp.abs(x) < 2, 0.5, jnp.where(jnp.abs(x) < 4, 1, 2))
    # Five standard deviations of the mean of numbers that are at most a step apart.
    assert jnp.all(
        jnp.abs(jnp.mean(rounded, axis=0) - x) <= 5 * step / 2 / math.sqrt(draws)
    )
    assert not np.array_equal(rounded[0], rounded[1])


def test_gradients_are_rounded_anew_when_they_are_others():
    x = spread((64, 64), octaves=1)

    def rounded(x):
        return blocks.nvfp4(x, 1, stochastic=True, native=False).widened()

    first = rounded(x)
    np.testing.assert_array_equal(first, rounded(x))
    other = rounded(x.at[0, 0].multiply(1 + 2**-20))
    assert np.mean(np.asarray(first != other)) > 0.1


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(5, 7), (33, 130)])
def test_any_sizes_zeros_and_what_is_not_finite(name, shape):
    recipe = RECIPES[name]
    for rounding in (recipe.activation, recipe.weight, recipe.gradient):
        for axis in (0, 1):
            rounded = jax.jit(functools.partial(round_by, rounding, axis=axis))
            zeros = np.zeros(shape, np.float32)
            np.testing.assert_array_equal(rounded(zeros), zeros)
            x = np.array(spread(shape, octaves=1))
            assert np.all(np.isfinite(rounded(x)))
            assert np.all(np.isfinite(rounded(x * np.float32(1e-36))))  # tiny scales
            for bad in (np.inf, np.nan):
                x[2, 3] = bad
                assert np.isnan(rounded(x)[2, 3])


def test_blocks_lie_along_the_sum():
    # which takes all digits from its block
    x = jnp.ones((64, 64)).at[0, 0].set(2.0**14)
    small = {
        name: [round_by(r.activation, x, axis) == 0 for axis in (0, 1)]
        for name, r in RECIPES.items()
    }
    assert [int(jnp.sum(lost)) for lost in small["nvfp4"]] == [15, 15]
    assert jnp.all(small["nvfp4"][1][0, 1:16])
    assert jnp.all(small["nvfp4"][0][1:16, 0])
    x = x.at[0, 0].set(2.0**24)
    assert [
        int(jnp.sum(round_by(RECIPES["mx"].activation, x, axis) == 0))
        for axis in (0, 1)
    ] == [31, 31]
    assert [int(jnp.sum(lost)) for lost in small["rowwise"]] == [0, 0]  # 14 octaves
    rowwise = [round_by(RECIPES["rowwise"].weight, x, axis) == 0 for axis in (0, 1)]
    assert [int(jnp.sum(lost)) for lost in rowwise] == [63, 63]
    assert jnp.all(rowwise[1][0, 1:])
    assert jnp.all(rowwise[0][1:, 0])
    assert [
        int(jnp.sum(round_by(RECIPES["deepseek"].activation, x, axis) == 0))
        for axis in (0, 1)
    ] == [63, 63]
    assert int(jnp.sum(round_by(RECIPES["deepseek"].weight, x, 0) == 0)) == 64 * 64 - 1
    # its scales have a range, too
    assert int(jnp.sum(round_by(RECIPES["nvfp4"].weight, x, 0) == 0)) == 64 * 64 - 1


def test_a_block_at_four_keeps_what_six_cannot():
    # 8 and 6 are 4 and 3 on a scale of 2; with 8 at 6, 6 would be 4.5, between 4 and 6.
    x = jnp.zeros((16, 32)).at[:, 0].set(8.0).at[:, 1].set(6.0)
    # and here 6 and 0.5 lie on a scale of 1, where 4 of 6 would make 1/3 of the 0.5
    x = x.at[:, 16].set(6.0).at[:, 17].set(0.5)
    recipe = RECIPES["four over six"]
    for cast in recipe[:3]:
        np.testing.assert_array_equal(round_by(cast, x, 1), x)
    assert float(round_by(RECIPES["nvfp4"].activation, x, 1)[0, 1]) != 6.0


def test_four_over_six_is_closer():
    x = jax.random.normal(jax.random.key(5), (256, 256))
    for kind in ("activation", "gradient"):
        at_six, better = (
            jnp.mean(jnp.square(round_by(getattr(RECIPES[name], kind), x, 1) - x))
            for name in FP4_RECIPES
        )
        assert better < at_six, kind


@pytest.mark.parametrize("name", FP4_RECIPES)
def test_weights_are_the_same_numbers_in_both_passes(name):
    w = spread((ROWS, COLUMNS), octaves=12)
    weight = RECIPES[name].weight
    np.testing.assert_array_equal(round_by(weight, w, 0), round_by(weight, w, 1))


def test_a_row_is_rounded_to_the_digits_of_its_own_scale():
    x = spread((32, 64), octaves=1)
    octaves = np.exp2(np.arange(-16, 16, dtype=np.float32))[:, None]
    once, apart = (blocks.rowwise(rows, E4M3, 1) for rows in (x, x * octaves))
    np.testing.assert_array_equal(
        apart.data.astype(jnp.float32), once.data.astype(jnp.float32)
    )
    np.testing.assert_array_equal(apart.scales, once.scales * octaves)
    largest = jnp.max(jnp.abs(once.data.astype(jnp.float32)), axis=1)
    assert jnp.all((largest > 224) & (largest <= 448))
    np.testing.assert_array_equal(
        blocks.rowwise(x.T, E4M3, 0).widened(), once.widened()
    )


def test_hadamard_cancels_in_the_product():
    x, g = spread((24, 50), 1, octaves=1), spread((8, 50), 2, octaves=1)
    exact = np.asarray(x, np.float64) @ np.asarray(g, np.float64).T
    mixed_x, mixed_g = (np.asarray(hadamard(m, 16), np.float64) for m in (x, g))
    actual = mixed_x @ mixed_g.T
    # Each mixed number is a sum of 16 products, rounded once each.
    bound = (
        2
        * 16
        * 2.0**-24
        * (np.abs(np.asarray(x)).sum() * np.abs(np.asarray(g)).max() * 4)
    )
    np.testing.assert_allclose(actual, exact, rtol=0, atol=bound)
    # of which FP16 does not hold the sum, but what is left of it
    large = jnp.full((1, 16), 8000.0)
    np.testing.assert_allclose(
        hadamard(large.astype(jnp.float16), 16), hadamard(large, 16), rtol=2**-10
    )
    spike = jnp.zeros((1, 16)).at[0, 3].set(16.0)
    # an outlier is shared out
    np.testing.assert_allclose(np.abs(hadamard(spike, 16)), 4.0)


@pytest.mark.parametrize("name", RECIPES)
def test_the_three_products_of_a_layer(name):
    recipe, dot = RECIPES[name], blocks.BlockScaledDot(RECIPES[name])
    x, w, g = spread((32, 64), 1, 1), spread((64, 48), 2, 1), spread((32, 48), 3, 1)

    @jax.jit
    def found(x, w, g):
        y, pull = jax.vjp(lambda x, w: dot(x, w, PRODUCT), x, w)
        return y, *pull(g)

    @jax.jit
    def expected(x, w, g):
        y = round_by(recipe.activation, x, 1) @ round_by(recipe.weight, w, 0)
        d_x = round_by(recipe.gradient, g, 1) @ round_by(recipe.weight, w, 1).T
        mixed_x, mixed_g = recipe.mixed(x.T), recipe.mixed(g.T)
        rounded_x = round_by(recipe.activation, mixed_x, 1)
        return y, d_x, rounded_x @ round_by(recipe.gradient, mixed_g, 1).T

    y, d_x, d_w = found(x, w, g)
    same = {"rtol": 1e-6, "atol": 1e-5}  # the order of the sums alone
    for a, b in zip((y, d_x, d_w), expected(x, w, g), strict=True):
        np.testing.assert_allclose(a, b, **same)
    exact = x @ w
    error = jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact)
    # Roundings of both operands, each off by at most half a place: of E4M3 2^-4, of
    # E2M1 2^-2, relatively.
    assert 0 < error < 2 * (0.25 if name in FP4_RECIPES else 0.0625)
    with pytest.raises(ValueError, match="multiplies"):
        dot(x, w.T, (((1,), (1,)), ((), ())))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["precision.scaling=mx"], "scales blocks of FP8 matmuls: choose its preset"),
        (
            ["precision=mxfp8", "precision.forward=e5m2"],
            "takes e4m3 forward and e4m3 backward, or e4m3 forward and e5m2 backward",
        ),
        (
            ["precision=fp8_current", "precision.scaling=deepseek"],
            "set .*simulate=true",
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
        (
            ["precision=mxfp8", "precision.weights=fp16"],
            "needs precision.scaling=propagate, not mx",
        ),
    ],
)
def test_what_does_not_go_together(arguments, words):
    with pytest.raises(UserError, match=words):
        compose_config(arguments)


NATIVE = {
    "mx": (blocks.mx_recipe(E4M3, E5M2), blocks.mx_recipe(E4M3, E5M2, native=True)),
    "nvfp4": (blocks.nvfp4_recipe(), blocks.nvfp4_recipe(native=True)),
    "four over six": tuple(
        blocks.nvfp4_recipe(four_over_six=True, native=native)
        for native in (False, True)
    ),
}


@pytest.mark.parametrize("name", NATIVE)
def test_native_casts_have_the_bits_of_the_simulation(name):
    x = spread((64, 96), octaves=40).at[3, 5:40].set(0).at[40:, 7].set(0)
    simulated, native = NATIVE[name]
    for fields in (x, x.at[2, 3].set(jnp.inf)):
        for cast, native_cast in zip(simulated[:3], native[:3], strict=True):
            for axis in (0, 1):
                narrow = native_cast(fields, axis)
                assert narrow.scales.dtype.itemsize == narrow.data.dtype.itemsize == 1
                np.testing.assert_array_equal(
                    narrow.widened(), cast(fields, axis).widened()
                )
    of_gradients = jnp.float8_e5m2 if name == "mx" else jnp.float4_e2m1fn
    assert native.gradient(x, 1).data.dtype == of_gradients


@pytest.mark.parametrize("preset", ["mxfp8", "nvfp4", "deepseek_fp8", "fp8_rowwise"])
def test_presets_are_native_unless_they_are_simulated_and_keep_the_dtypes(preset):
    policy = compose_config([f"precision={preset}"]).precision.policy
    if preset == "deepseek_fp8":
        assert (policy.scaling, policy.simulate) == ("deepseek", True)
        dot = policy.method.simulated(policy, E4M3, E5M2)
    else:
        assert not policy.simulate
        dot = policy.method.dot("", policy, gradient=E5M2)
        simulated = ["precision.simulate=true", "precision.compute=fp32"]
        assert compose_config([f"precision={preset}", *simulated]).precision.simulate
    compute = jnp.float32 if policy.simulate else jnp.bfloat16
    x, w = jnp.ones((32, 32), compute), jnp.ones((32, 32))
    y, pull = jax.vjp(lambda x, w: dot(x, w, PRODUCT), x, w)
    d_x, d_w = pull(y)
    assert (y.dtype, d_x.dtype, d_w.dtype) == (compute, compute, jnp.float32)
    text = jax.jit(dot, static_argnums=2).lower(x, w, PRODUCT).as_text()
    narrow = {"nvfp4": "f4E2M1FN", "fp8_rowwise": "f8E4M3FN"}.get(preset, "f8E8M0FNU")
    assert (narrow in text) != policy.simulate


@pytest.mark.parametrize(
    ("recipe", "name", "dtypes"),
    [
        ("mx", "b200", {"fp8"}),
        ("nvfp4", "rtx5090", {"fp4"}),
        ("mx", "h100", {"bf16", "fp32"}),  # FP32: the gradient of w
        ("rowwise", "h100", {"fp8"}),
    ],
)
def test_blackwell_alone_multiplies_blocks_and_hopper_rows(recipe, name, dtypes):
    operands = (
        ((256, 128), jnp.bfloat16),
        ((128, 384), jnp.float32),
        ((256, 384), jnp.bfloat16),
    )

    def step(x, w, g):
        native = RECIPES[recipe] if recipe == "rowwise" else NATIVE[recipe][1]
        dot = blocks.BlockScaledDot(native)
        y, pull = jax.vjp(lambda x, w: dot(x, w, PRODUCT), x, w)
        return y, *pull(g)

    gemms = program_for(name, step, *operands, xla_gpu_enable_triton_gemm=False).gemms
    gemms = [gemm for gemm in gemms if gemm.sizes[3] != blocks.HADAMARD]
    assert len(gemms) == 3
    assert {gemm.dtype for gemm in gemms} == dtypes
    kernels = {gemm.kernel for gemm in gemms}
    assert (kernels == {"__cudnn$blockScaledDot"}) == (name != "h100")


def test_a_wide_forward_pass_keeps_the_gradients_of_four_bits():
    """The end of NVIDIA's recipe: only the output is another one."""
    (narrow, wide), (x, w) = (
        [
            policy.method.dot("", policy, gradient=None)
            for policy in (
                compose_config([f"precision={name}"]).precision.policy
                for name in ("nvfp4", "nvfp4_wide_forward")
            )
        ],
        (spread((32, 64), octaves=2), spread((64, 48), octaves=2) / 64),
    )
    x = x.astype(jnp.bfloat16)

    def both(dot):
        y, pull = jax.vjp(lambda x, w: dot(x, w, PRODUCT), x, w)
        return y, *pull(jnp.ones_like(y))

    y4, *gradients = both(narrow)
    y, *gradients_of_wide = both(wide)
    np.testing.assert_array_equal(y, x @ w.astype(jnp.bfloat16))
    assert jnp.any(y != y4)
    for a, b in zip(gradients, gradients_of_wide, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("simulate", [False, True])
def test_propagated_scales_leave_mxfp8_its_numbers(simulate):
    """Blocks on powers of two are the same for the data as for the values: the
    products of scaled arrays are those of plain ones, rounded to 16 bits."""
    policy = compose_config(["precision=scalify_mxfp8"]).precision.policy
    if simulate:
        dot = policy.method.simulated(policy, E4M3, E4M3)
    else:
        dot = policy.method.dot("", policy, gradient=E4M3)
    x, w, g = (
        as_scaled_array(
            scale * jax.random.normal(jax.random.key(i), shape), scale, np.float16
        )
        for i, (shape, scale) in enumerate(
            [((32, 64), 2.0**-8), ((64, 96), 2.0**4), ((32, 96), 2.0**-20)]
        )
    )

    def step(x, w, g):
        y, pull = jax.vjp(lambda x, w: dot(x, w, PRODUCT), x, w)
        return y, *pull(g)

    plain = jax.jit(step)(asarray(x), asarray(w), asarray(g))
    scaled = jax.jit(scalify(step, scales="static"))(x, w, g)
    for a, b in zip(scaled, plain, strict=True):
        rounded = as_scaled_array(b, a.scale, np.float16)
        np.testing.assert_array_equal(asarray(a), asarray(rounded))
        rms = jnp.sqrt(jnp.mean(jnp.square(a.data.astype(jnp.float32))))
        assert 0.5 < rms < 2
    # An all-gather in E4M3 would round at another scale first.
    sent = for_allgather(w, policy, kernel=True, narrow=True, factor=False)
    assert sent.dtype == np.float16


def figures_of(x, name):
    recipe = RECIPES[name]
    fmt = FloatFormat.parse("e2m1" if name in FP4_RECIPES else "e4m3")
    figures = blocks.block_figures(x, recipe.activation, 1, fmt)
    return dict(zip(blocks.BLOCK_FIGURES, figures.tolist(), strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_the_spread_of_scales_is_in_octaves_and_blocks_of_zeros_do_not_count(name):
    row = jnp.arange(1, 129.0)[None]
    x = jnp.concatenate([row, 4 * row, 0 * row])
    figures = figures_of(x, name)
    if name in ("rowwise", "deepseek"):
        assert figures["block_spread"] == pytest.approx(1)
    assert figures["block_spread"] >= 1 - 1e-6
    assert figures["block_underflow"] == 0
    assert not any(figures_of(0 * x, name).values())


def test_blocks_that_are_lost_beside_a_large_one_are_counted():
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
