"""Formats beside ml_dtypes, and roundings beside a search among all numbers of a
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
    hash_bits,
    pow2_floor,
    pow2_inverse,
    pow2_round,
    saturating_cast,
)

NATIVE = [E4M3, E5M2, FP16, BF16]
SIMULATED = ("e2m1", "e3m4", "e8m3", "e4m3t", "e5m2t", "e8m7t")
# signalling NaNs warn
quiet_nan = functools.partial(np.nan_to_num, nan=np.nan, posinf=np.inf, neginf=-np.inf)
EVERY_BF16 = quiet_nan((np.arange(2**16, dtype=np.uint32) << 16).view(np.float32))
ALL_DRAWS = jnp.arange(2**16, dtype=jnp.uint16)


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


def neighbors(fmt: FloatFormat, x: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the numbers of a format around |x|, by search, and whether the upper one
    is even (its lowest mantissa bit is 0)."""
    table = values(fmt)
    below = np.searchsorted(table, np.abs(x), side="right") - 1
    above = np.minimum(below + 1, len(table) - 1)
    return table[below], table[above], above % 2 == 0


def signed(fmt: FloatFormat, magnitude: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the magnitudes with the signs, infinities and NaNs of `x`."""
    special = np.abs(x) if fmt.infinities else np.nan
    return np.copysign(np.where(np.isfinite(x), magnitude, special), x)


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


def rounded(fmt: FloatFormat, x: np.ndarray) -> np.ndarray:
    """Return `x` rounded to nearest even, or truncated, by search."""
    low, high, is_even = neighbors(fmt, x)
    up, down = high - np.abs(x), np.abs(x) - low
    is_up = (up < down) | ((up == down) & is_even)
    if fmt.rounding == "truncate":
        is_up = False
    return signed(fmt, np.where(is_up, high, low), x)


@pytest.mark.parametrize("fmt", [*NATIVE, *map(FloatFormat.parse, SIMULATED)], ids=str)
def test_every_bf16_number_and_numbers_around_ties_are_rounded(fmt):
    x = np.concatenate([EVERY_BF16, near_ties(fmt)])
    assert_same(jax.jit(fmt.quantize)(x), rounded(fmt, x))
    if fmt.dtype is None:
        with pytest.raises(ValueError, match="quantize"):
            fmt.cast(1.0)
        return
    actual = jax.jit(fmt.cast)(x)
    assert actual.dtype == fmt.dtype
    assert_same(actual, rounded(fmt, x))
    assert_same(saturating_cast(jnp.asarray(x), fmt.dtype), actual)


def test_a_stochastic_format_rounds_by_a_hash_of_the_array():
    x = np.random.default_rng(0).normal(size=2**16).astype(F32)
    x[:4] = [0.0, -0.0, np.inf, np.nan]
    bits_of, other = jax.jit(hash_bits), np.copy(x)
    other[5] += 1
    bits = bits_of(x)
    assert np.mean(bits == bits_of(other)) < 0.01
    for fmt in (E4M3, E5M2):
        actual = jax.jit(FloatFormat.parse(f"{fmt}s").quantize)(x)
        assert_same(actual, jax.jit(fmt.stochastic_round)(x, bits))


def test_a_bf16_operand_saturates_at_the_maximum_of_fp16():
    # In BF16 the limit 65504 would round to 65536, which FP16 cannot hold.
    x = jnp.asarray([9e4, -9e4], jnp.bfloat16)
    assert_array_equal(np.asarray(FP16.cast(x), np.float32), [65504, -65504])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("e4m3", ml_dtypes.float8_e4m3fn),
        ("e3m4", ml_dtypes.float8_e3m4),
        ("bf16", ml_dtypes.bfloat16),
    ],
)
def test_limits_are_those_of_ml_dtypes(name, dtype):
    fmt, info = FloatFormat.parse(name), ml_dtypes.finfo(dtype)
    limits = (fmt.max, fmt.min_normal, fmt.min_subnormal, fmt.epsilon)
    assert limits == (
        info.max,
        info.smallest_normal,
        info.smallest_subnormal,
        info.eps,
    )


def test_names_give_the_native_formats_and_unknown_names_are_refused():
    assert FloatFormat.parse("E5M10") is FP16
    assert FloatFormat.parse("e8m7") is BF16
    assert FloatFormat.parse("fp32") is FP32
    assert FloatFormat.parse("e4m3").dtype == jnp.float8_e4m3fn
    for name in ("e3m4", "e4m3t", "e5m2s"):
        fmt = FloatFormat.parse(name)
        assert (str(fmt), fmt.dtype) == (name, None)
        assert fmt.max == FloatFormat.parse(name[:4]).max
    assert FloatFormat.of(jnp.float8_e5m2) is E5M2
    for wrong in ("int8", "e9m2", "e4m24", "m3e4", ""):
        with pytest.raises(ValueError, match="format"):
            FloatFormat.parse(wrong)
    with pytest.raises(ValueError, match="FloatFormat"):
        FloatFormat.of(jnp.int32)


@pytest.mark.parametrize("fmt", [*NATIVE, FloatFormat.parse("e3m2")], ids=str)
def test_stochastic_rounding_preserves_numbers_of_the_format_and_saturates(fmt):
    x = np.concatenate([values(fmt), -values(fmt)]).astype(np.float32)
    round_by = jax.jit(fmt.stochastic_round)
    for draw in (0, 2**16 - 1):
        assert_same(round_by(x, jnp.full(x.shape, draw, jnp.uint16)), x)
    largest = float(np.finfo(np.float32).max)
    just_above = fmt.max * (1 + fmt.epsilon / 4)
    x = np.array([just_above, -largest, np.inf, -np.inf, np.nan], np.float32)
    actual = round_by(x, jnp.full(5, 2**16 - 1, jnp.uint16))
    assert_same(actual, signed(fmt, fmt.max, x))


@pytest.mark.parametrize(
    "fmt", [*NATIVE, FloatFormat.parse("e5m6"), FloatFormat.parse("e5m15")], ids=str
)
def test_stochastic_rounding_is_unbiased_over_all_draws(fmt):
    """The mean over the 2^16 possible draws is x, up to 2^-17 of the distance between
    its neighbors.

    Of a subnormal number no more bits are seen than of the smallest normal one: 13
    below FP16's last place, so 2^-14.
    """
    rng = np.random.default_rng(0)
    subnormal = np.log2(fmt.min_subnormal) + np.array([1.5, 1.5, 1.5, -1, -4, -9])
    exponent = np.concatenate([subnormal, rng.uniform(-8, 8, 10)])
    sign_and_fraction = rng.uniform(1, 2, 16) * rng.choice([-1, 1], 16)
    x = (2.0**exponent * sign_and_fraction).astype(np.float32)
    round_all = jax.jit(jax.vmap(fmt.stochastic_round, in_axes=(None, 0)))
    rounded = round_all(x, jnp.tile(ALL_DRAWS[:, None], (1, 16)))
    rounded = np.asarray(rounded).astype(np.float64)
    low, high, _ = neighbors(fmt, x)
    assert np.all((np.abs(rounded) == low) | (np.abs(rounded) == high))
    unseen = 2.0 ** (fmt.mantissa_bits - 24)
    bound = 2.0**-17 + np.where(np.abs(x) < fmt.min_normal, unseen, 0)
    assert_array_less(np.abs(rounded.mean(0) - x), (high - low) * bound * (1 + 1e-9))


def test_counter_bits_are_the_same_on_any_sharding_and_differ_by_every_counter():
    shape = (64, 48)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("data", None))
    base = np.asarray(counter_bits(shape, 1, 2, 3))
    sharded = jax.jit(counter_bits, static_argnums=0, out_shardings=sharding)
    assert_array_equal(base, sharded(shape, 1, jnp.int32(2), 3))
    assert_array_equal(base.reshape(-1), counter_bits((64 * 48,), 1, 2, 3))
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (3, 2, 1)):
        assert np.mean(base == np.asarray(counter_bits(shape, *other))) < 0.01


def test_counter_bits_look_uniform_and_independent():
    n = 2**18
    counters = ((0, 0, 0), (0, 1, 0), (0, 0, 1))
    draws = [np.asarray(counter_bits((n,), *x)).astype(np.int64) for x in counters]
    for sample in draws:
        counts = np.bincount(sample, minlength=2**16)
        chi2 = np.sum((counts - n / 2**16) ** 2 / (n / 2**16))
        # six standard deviations of chi squared, 2^16 degrees
        assert abs(chi2 - 2**16) < 6 * np.sqrt(2 * 2**16)
    a, b, c = [(d - d.mean()) / d.std() for d in draws]
    for x, y in ((a, b), (a, c), (a[1:], a[:-1]), (a[7:], b[:-7])):
        assert abs(np.mean(x * y)) < 6 / np.sqrt(n)


def test_random_bits_of_another_shape_or_type_are_refused():
    for bits in (jnp.zeros(3, jnp.uint16), jnp.zeros(4, jnp.uint32)):
        with pytest.raises(ValueError, match="uint16"):
            FP16.stochastic_round(jnp.ones(4), bits)


def test_elements_beyond_32_bits_of_index_have_the_bits_of_those_2_32_before():
    @jax.jit  # the compiler computes only what is read
    def columns():
        bits = counter_bits((2, 2**16, 2**16), 0, 0, 0)
        return bits[0, :64, :64], bits[1, :64, :64]

    first, later = map(np.asarray, columns())
    assert len({row.tobytes() for row in first}) == 64
    assert_array_equal(first, later)


def test_powers_of_two_are_rounded_at_the_square_root_of_two():
    powers = (2.0 ** np.arange(-126.0, 126)).astype(np.float32)
    # FP32's nearest number to sqrt(2) lies below it
    border = powers * np.float32(np.sqrt(2.0))
    above = np.nextafter(border, np.float32(np.inf))
    top = np.nextafter(2 * powers, np.float32(0))
    outside = np.array([0, 2.0**-149, np.inf, np.nan, -8], np.float32)
    of_outside = [2.0**-126, 2.0**-126, 2.0**126, np.nan, 8]
    x = np.concatenate([powers, border, above, top, outside])
    for function, raised in ((pow2_floor, powers), (pow2_round, 2 * powers)):
        expected = np.concatenate([powers, powers, raised, raised, of_outside])
        assert_array_equal(jax.jit(function)(x), expected)
        assert_array_equal([function(number) for number in x], expected)
        assert isinstance(function(3), float)


def test_rounding_is_not_removed_by_the_compiler():
    program = jax.jit(FloatFormat.parse("e3m4").quantize).lower(jnp.ones(4)).compile()
    assert "reduce-precision" not in program.as_text()
    assert "shift" in program.as_text()


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [F32, jnp.float16, jnp.bfloat16])
def test_cast_or_nan_is_the_cast_of_all_but_infinities(fmt, dtype):
    x = jnp.asarray(EVERY_BF16).astype(dtype)
    expected = np.asarray(fmt.cast(x.astype(F32)), np.float32)
    expected[~np.isfinite(np.asarray(x, np.float32))] = np.nan
    assert_same(jax.jit(fmt.cast_or_nan)(x), expected)
    with pytest.raises(ValueError, match="8-bit formats"):
        FP16.cast_or_nan(x)


def test_the_inverse_of_a_power_of_two_is_exact():
    powers = 2.0 ** np.arange(-126, 127)
    assert_array_equal(pow2_inverse(jnp.asarray(powers, F32)), 1 / powers)
