"""formats.py against ml_dtypes and against an oracle that searches all numbers of a
format in float64."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from beside_plain import F32
from numpy.testing import assert_array_equal, assert_array_less

from scalify_core.numerics.formats import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    FloatFormat,
    counter_bits,
    pow2_floor,
    pow2_inverse,
    pow2_round,
    saturating_cast,
)

NATIVE = [E4M3, E5M2, FP16, BF16]
SIMULATED = [
    FloatFormat.parse(name) for name in ("e2m1", "e3m4", "e5m7", "e6m9", "e8m3")
]
# signalling NaNs warn
quiet_nan = functools.partial(np.nan_to_num, nan=np.nan, posinf=np.inf, neginf=-np.inf)
EVERY_16_BITS = np.concatenate(
    [
        quiet_nan(np.arange(2**16, dtype=np.uint16).view(np.float16)).astype(F32),
        quiet_nan((np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)),
    ]
)


@functools.cache
def values(fmt: FloatFormat) -> np.ndarray:
    """All non-negative finite numbers of a format, from their definition, as float64,
    sorted."""
    fields = 2**fmt.exponent_bits - (1 if fmt.infinities else 0)
    fraction = np.arange(2**fmt.mantissa_bits) / 2**fmt.mantissa_bits
    bias = 2 ** (fmt.exponent_bits - 1) - 1
    rows = [fraction * 2.0 ** (1 - bias)] + [
        (1 + fraction) * 2.0 ** (e - bias) for e in range(1, fields)
    ]
    table = np.concatenate(rows)
    return table if fmt.infinities else table[:-1]


def oracle(fmt: FloatFormat, x: np.ndarray) -> np.ndarray:
    """Nearest number by search; a tie goes to the even position in the table (its
    lowest mantissa bit is 0)."""
    table, magnitude = (
        values(fmt),
        np.minimum(np.abs(x).astype(np.float64), values(fmt)[-1]),
    )
    above = np.minimum(np.searchsorted(table, magnitude), len(table) - 1)
    below = np.maximum(above - 1, 0)
    up, down = table[above] - magnitude, magnitude - table[below]
    pick = np.where(
        (up < down) | ((up == down) & (above % 2 == 0)) | (up == 0), above, below
    )
    special = np.abs(x) if fmt.infinities else np.full_like(x, np.nan)
    return np.copysign(np.where(np.isfinite(x), table[pick], special), x)


def near_ties(fmt: FloatFormat) -> np.ndarray:
    """FP32 numbers at, just above and just below the middle of neighbours, of both
    signs."""
    table = values(fmt)
    middle = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    near = np.concatenate(
        [np.nextafter(middle, np.float32(s)) for s in (0, np.inf)] + [middle]
    )
    return np.concatenate([near, -near])


def assert_same(actual, expected) -> None:
    """Equal numbers, zeros of equal sign, NaN where NaN. Bitwise comparison, for CPUs
    flush subnormals in ==."""
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    assert np.array_equal(np.isnan(actual), np.isnan(expected))
    number = ~np.isnan(expected)
    assert_array_equal(actual[number].view(np.uint32), expected[number].view(np.uint32))


@pytest.mark.parametrize("fmt", NATIVE + SIMULATED, ids=str)
def test_every_16_bit_pattern_and_numbers_around_ties_round_to_nearest_even(fmt):
    x = np.concatenate([EVERY_16_BITS, near_ties(fmt)])
    expected = oracle(fmt, x)
    assert_same(jax.jit(fmt.quantize)(x), expected)
    if fmt.dtype is not None:
        actual = jax.jit(fmt.cast)(x)
        assert actual.dtype == fmt.dtype
        assert_same(actual, expected)
        assert_same(saturating_cast(jnp.asarray(x), fmt.dtype), expected)
        inside = np.abs(x) <= fmt.max
        assert_same(np.asarray(actual)[inside], x[inside].astype(fmt.dtype))


def truncated(fmt: FloatFormat, x: np.ndarray) -> np.ndarray:
    """The largest number of the format that is not above |x|, by search."""
    table, magnitude = values(fmt), np.abs(x).astype(np.float64)
    below = (
        np.searchsorted(table, np.where(np.isfinite(x), magnitude, 0), side="right") - 1
    )
    special = np.abs(x) if fmt.infinities else np.full_like(x, np.nan)
    return np.copysign(np.where(np.isfinite(x), table[below], special), x)


@pytest.mark.parametrize("name", ["e4m3t", "e5m2t", "e8m7t"])
def test_a_truncating_format_leaves_out_digits_and_never_rounds_up(name):
    fmt = FloatFormat.parse(name)
    like = FloatFormat.parse(name[:-1])
    assert (str(fmt), fmt.dtype, fmt.max) == (name, None, like.max)
    x = np.concatenate([EVERY_16_BITS, near_ties(fmt)])
    assert_same(jax.jit(fmt.quantize)(x), truncated(fmt, x))
    with pytest.raises(ValueError, match="quantize"):
        fmt.cast(1.0)


@pytest.mark.parametrize("name", ["e4m3s", "e5m2s"])
def test_a_stochastic_format_gives_either_neighbour_the_nearer_the_likelier(name):
    fmt = FloatFormat.parse(name)
    like = FloatFormat.parse(name[:-1])
    assert (str(fmt), fmt.dtype, fmt.max) == (name, None, like.max)
    quantize = jax.jit(fmt.quantize)
    special = np.array([0.0, -0.0, np.inf, np.nan], F32)
    x = np.random.default_rng(0).normal(size=2**16).astype(F32)
    all_of_it = np.asarray(quantize(np.append(x, special)))
    ends = np.where(np.isfinite(special) | fmt.infinities, special, np.nan)
    assert_same(all_of_it[-4:], ends)
    actual, below, table = all_of_it[:-4], truncated(fmt, x), values(fmt)
    next_one = np.minimum(np.searchsorted(table, np.abs(below)) + 1, len(table) - 1)
    above = np.copysign(table[next_one], x)
    assert np.all((actual == below) | (actual == above))
    assert np.mean(actual == below) > 0.3
    assert np.mean(actual == above) > 0.3
    assert_same(actual, np.asarray(quantize(np.append(x, special)))[:-4])
    # A rounding is off by at most the space between its neighbours, so that many are
    # off by its root together.
    error, space = (actual - x).astype(np.float64), np.abs(above - below)
    assert abs(error.sum()) < 4 * np.sqrt(np.square(space).sum() / 4)
    assert np.any(actual != np.asarray(quantize(np.append(x, F32(1))))[:-1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_operands_saturate_at_the_formats_own_maximum(dtype):
    # In BF16 the limit 65504 would round to 65536, which FP16 cannot hold.
    x = (
        jnp.asarray([6e4, -6.5e4], dtype) * 1.5
        if dtype == jnp.bfloat16
        else jnp.asarray([65504, -65504], dtype)
    )
    assert_array_equal(np.asarray(FP16.cast(x), np.float32), [65504, -65504])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("e4m3", ml_dtypes.float8_e4m3fn),
        ("e5m2", ml_dtypes.float8_e5m2),
        ("e3m4", ml_dtypes.float8_e3m4),
        ("e5m10", np.float16),
        ("bf16", ml_dtypes.bfloat16),
    ],
)
def test_limits_are_those_of_ml_dtypes(name, dtype):
    fmt, info = FloatFormat.parse(name), ml_dtypes.finfo(dtype)
    assert (fmt.max, fmt.min_normal, fmt.min_subnormal, fmt.epsilon) == (
        float(info.max),
        float(info.smallest_normal),
        float(info.smallest_subnormal),
        float(info.eps),
    )


def test_names_give_the_native_formats_and_unknown_names_are_refused():
    assert FloatFormat.parse("E5M10") is FP16
    assert FloatFormat.parse("e8m7") is BF16
    assert FloatFormat.parse("fp32") is FP32
    assert FloatFormat.parse("e4m3").dtype == jnp.float8_e4m3fn
    assert FloatFormat.parse("e3m4").dtype is None
    assert FloatFormat.of(jnp.float8_e5m2) is E5M2
    for wrong in ("int8", "e9m2", "e4m24", "m3e4", ""):
        with pytest.raises(ValueError, match="format"):
            FloatFormat.parse(wrong)
    with pytest.raises(ValueError, match="FloatFormat"):
        FloatFormat.of(jnp.int32)
    with pytest.raises(ValueError, match="quantize"):
        FloatFormat.parse("e3m4").cast(1.0)


@pytest.mark.parametrize("fmt", [*NATIVE, FloatFormat.parse("e3m2")], ids=str)
def test_stochastic_rounding_keeps_what_is_of_the_format_and_saturates(fmt):
    x = np.concatenate([values(fmt), -values(fmt)]).astype(np.float32)
    for draw in (0, 2**16 - 1):
        assert_same(fmt.stochastic_round(x, jnp.full(x.shape, draw, jnp.uint16)), x)
    largest = float(np.finfo(np.float32).max)
    x = np.array(
        [fmt.max * (1 + fmt.epsilon / 4), -largest, np.inf, -np.inf, np.nan], np.float32
    )
    special = x[2:] if fmt.infinities else [np.nan] * 3
    assert_same(
        fmt.stochastic_round(x, jnp.full(5, 2**16 - 1, jnp.uint16)),
        [fmt.max, -fmt.max, *special],
    )


@pytest.mark.parametrize(
    "fmt", [*NATIVE, FloatFormat.parse("e5m6"), FloatFormat.parse("e5m15")], ids=str
)
def test_stochastic_rounding_is_unbiased_over_all_draws(fmt):
    """The mean over the 2^16 possible draws is x, up to 2^-17 of the distance between
    its neighbours.

    Of a subnormal number no more bits are seen than of the smallest normal one: 13
    below FP16's last place, so 2^-14.
    """
    rng = np.random.default_rng(0)
    exponent = np.concatenate(
        [np.full(6, np.log2(fmt.min_subnormal) + 1.5), rng.uniform(-8, 8, 10)]
    )
    x = (2.0**exponent * rng.uniform(1, 2, 16) * rng.choice([-1, 1], 16)).astype(
        np.float32
    )
    draws = jnp.arange(2**16, dtype=jnp.uint16)
    rounded = jax.jit(jax.vmap(fmt.stochastic_round, in_axes=(None, 0)))(
        x, jnp.tile(draws[:, None], (1, 16))
    )
    rounded = np.asarray(rounded).astype(np.float64)
    above = np.minimum(
        np.searchsorted(values(fmt), np.abs(x.astype(np.float64))), len(values(fmt)) - 1
    )
    low, high = values(fmt)[above - 1], values(fmt)[above]
    assert np.all((np.abs(rounded) == low) | (np.abs(rounded) == high))
    bound = 2.0**-17 + np.where(
        np.abs(x) < fmt.min_normal, 2.0 ** (fmt.mantissa_bits - 24), 0
    )
    assert_array_less(np.abs(rounded.mean(0) - x), (high - low) * bound * (1 + 1e-9))


@pytest.mark.parametrize("fmt", [*NATIVE[:3], FloatFormat.parse("e3m2")], ids=str)
def test_stochastic_rounding_of_a_part_of_the_smallest_number_gives_it_as_often(fmt):
    draws = jnp.arange(2**16, dtype=jnp.uint16)
    for part in (1.0, 0.75, 2.0**-10, 0.0):
        x = jnp.full(2**16, part * fmt.min_subnormal, F32)
        rounded = np.asarray(jax.jit(fmt.stochastic_round)(-x, draws), np.float64)
        assert set(rounded) <= {0.0, -fmt.min_subnormal}
        assert np.all(np.signbit(rounded))
        assert np.sum(rounded != 0) == part * 2**16


def test_stochastic_rounding_refuses_bits_of_another_shape_or_type():
    for bits in (jnp.zeros(3, jnp.uint16), jnp.zeros(4, jnp.uint32)):
        with pytest.raises(ValueError, match="uint16"):
            FP16.stochastic_round(jnp.ones(4), bits)


def test_counter_bits_are_the_same_on_any_sharding_and_differ_by_every_counter():
    shape = (64, 48)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("data", None))
    base = np.asarray(counter_bits(shape, 1, 2, 3))
    sharded = jax.jit(counter_bits, static_argnums=0, out_shardings=sharding)(
        shape, 1, jnp.int32(2), 3
    )
    assert_array_equal(base, sharded)
    assert_array_equal(base.reshape(-1), counter_bits((64 * 48,), 1, 2, 3))
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (3, 2, 1)):
        assert np.mean(base == np.asarray(counter_bits(shape, *other))) < 0.01


def test_counter_bits_look_uniform_and_independent():
    n = 2**18
    draws = [
        np.asarray(counter_bits((n,), 0, step, leaf)).astype(np.int64)
        for step, leaf in ((0, 0), (1, 0), (0, 1))
    ]
    for sample in draws:
        counts = np.bincount(sample >> 8, minlength=256)
        chi2 = np.sum((counts - n / 256) ** 2 / (n / 256))
        # six standard deviations of chi squared, 255 degrees
        assert abs(chi2 - 255) < 6 * np.sqrt(2 * 255)
        bit_means = ((sample[:, None] >> np.arange(16)) & 1).mean(0)
        assert np.all(np.abs(bit_means - 0.5) < 6 * 0.5 / np.sqrt(n))
    unit = [(d - d.mean()) / d.std() for d in draws]
    pairs = [
        (unit[0], unit[1]),
        (unit[0], unit[2]),
        (unit[0][1:], unit[0][:-1]),
        (unit[0][7:], unit[1][:-7]),
    ]
    for a, b in pairs:
        assert abs(np.mean(a * b)) < 6 / np.sqrt(n)


def test_elements_beyond_32_bits_of_index_have_bits_of_their_own():
    @jax.jit  # the compiler computes only what is read
    def columns():
        bits = counter_bits((2**17, 2**16), 0, 0, 0)
        return bits[:64, :64], bits[2**16 : 2**16 + 64, :64]

    first, later = map(np.asarray, columns())
    assert len({row.tobytes() for row in (*first, *later)}) == 128
    assert np.mean(first == later) < 0.01


@pytest.mark.parametrize("exponent", [-126, -1, 0, 13, 125])
def test_powers_of_two_round_at_the_binary_border_and_at_the_square_root_of_two(
    exponent,
):
    one = np.float32(2.0**exponent)
    border = one * np.float32(np.sqrt(2.0))
    top = np.nextafter(one * 2, np.float32(0))
    above = np.nextafter(border, np.float32(np.inf))
    for convert in (float, F32):
        assert float(pow2_floor(convert(one))) == one
        assert float(pow2_floor(convert(top))) == one
        # FP32's nearest number to sqrt(2) lies below it
        assert float(pow2_round(convert(border))) == one
        assert float(pow2_round(convert(above))) == one * 2


def test_powers_of_two_agree_between_numbers_and_arrays_over_all_exponents():
    rng = np.random.default_rng(0)
    x = (2.0 ** rng.uniform(-149, 127.9, 5000)).astype(np.float32)
    for function in (pow2_floor, pow2_round):
        actual = np.asarray(jax.jit(function)(x))
        assert_array_equal(actual, [function(v) for v in x])
        assert np.all(np.frexp(actual)[0] == 0.5)
        assert (actual.min(), actual.max()) == (2.0**-126, 2.0**126)


@pytest.mark.parametrize("function", [pow2_floor, pow2_round])
@pytest.mark.parametrize("convert", [float, F32])
def test_powers_of_two_of_zero_infinity_and_nan_are_defined(function, convert):
    assert float(function(convert(0))) == 2.0**-126
    assert float(function(convert(np.inf))) == 2.0**126
    assert np.isnan(float(function(convert(np.nan))))
    assert float(function(convert(-8.0))) == 8
    assert isinstance(function(3), float)


def test_rounding_is_not_removed_by_the_compiler():
    text = (
        jax.jit(FloatFormat.parse("e3m4").quantize)
        .lower(jnp.ones(4))
        .compile()
        .as_text()
    )
    assert "reduce-precision" not in text
    assert "shift" in text


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [F32, jnp.float16, jnp.bfloat16])
def test_cast_or_nan_is_the_cast_of_all_but_infinities(fmt, dtype):
    x = jnp.asarray(np.arange(2**16, dtype=np.uint16).view(np.float16)).astype(dtype)
    x = jnp.concatenate(
        [
            x,
            jnp.asarray(
                [jnp.finfo(dtype).max, -0.0, jnp.inf, -jnp.inf, jnp.nan], dtype
            ),
        ]
    )
    expected = np.asarray(fmt.cast(x.astype(F32)), np.float32)
    expected[~np.isfinite(np.asarray(x, np.float32))] = np.nan
    actual = np.asarray(jax.jit(fmt.cast_or_nan)(x), np.float32)
    assert_array_equal(actual, expected)
    finite = np.isfinite(expected)
    assert_array_equal(np.signbit(actual[finite]), np.signbit(expected[finite]))
    with pytest.raises(ValueError, match="8-bit formats"):
        FP16.cast_or_nan(x)


def test_the_inverse_of_a_power_of_two_is_exact():
    powers = 2.0 ** np.arange(-126, 127)
    assert_array_equal(pow2_inverse(jnp.asarray(powers, F32)), 1 / powers)
