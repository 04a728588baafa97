"""Floating-point formats: limits, saturating casts, simulated and stochastic rounding,
powers of two.

Rules that hold for every rounding in this module, of numbers that FP32 holds:

- A *finite* value beyond the largest finite number of the format saturates (JAX's own
  casts give NaN or infinity).
- Infinities and NaN stay not finite, so that a watchdog still sees them: NaN stays NaN;
  an infinity becomes NaN where the format has none (E4M3) and in `cast_or_nan`.
- Subnormals of the format are kept, and rounded on their own coarser grid.

Simulated and stochastic rounding are integer arithmetic on the FP32 bit pattern: no
compiler may remove it (floating point conversions there and back are removed on GPU),
and a flush-to-zero mode of the device does not change it. Stochastic rounding also adds
the smallest normal number to those below it and subtracts it again, in FP32 to nearest;
the bit operations in between keep compilers from removing both.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalify_core.numerics import precision_warnings

_SIGN, _MAGNITUDE, _INFINITY = (
    np.uint32(0x80000000),
    np.uint32(0x7FFFFFFF),
    np.uint32(0x7F800000),
)
_FRACTION, _HIDDEN = np.uint32(0x007FFFFF), np.uint32(0x00800000)
_NAN = np.uint32(0x7FC00000)
# FP32(sqrt(2)) lies below sqrt(2)
_ABOVE_SQRT2 = float(np.nextafter(np.float32(math.sqrt(2.0)), np.float32(2)))
# The inverse of each scale is a normal FP32 number, too: that of 2^127 is subnormal,
# which devices may flush to zero.
MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**126


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """A binary format with a sign bit, exponent and mantissa bits, and IEEE-like
    subnormals.

    With `infinities` the all-ones exponent is reserved for infinities and NaNs, as in
    IEEE 754. Without, every bit pattern is a number except S.1111.111, which is NaN:
    the 8-bit E4M3 of hardware and of the OCP standard (float8_e4m3fn, max 448). `dtype`
    is the native NumPy/JAX dtype, None where the format can only be simulated.

    `rounding` is the rounding of `quantize`. "truncate" drops the digits behind the
    last place, as arXiv 2405.18710 simulates by masking bits; the name ends in t, as in
    e4m3t. "stochastic" is that of `stochastic_round`, with bits that are a hash of the
    position and of the whole array, so that a repeated step is the same; the name ends
    in s.
    """

    exponent_bits: int
    mantissa_bits: int
    infinities: bool = True
    dtype: np.dtype | None = None
    rounding: Literal["nearest", "truncate", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        """Raise ValueError unless FP32 holds every value of the format."""
        if not (2 <= self.exponent_bits <= 8 and 1 <= self.mantissa_bits <= 23):
            raise ValueError(
                f"{self}: a format has 2 to 8 exponent bits and 1 to 23 mantissa bits"
            )

    def __str__(self) -> str:
        return f"e{self.exponent_bits}m{self.mantissa_bits}{_SUFFIXES[self.rounding]}"

    @classmethod
    def parse(cls, name: str) -> FloatFormat:
        """Return the format called "e4m3", "E5M2", "e3m4", "fp16", "bf16" or "fp32".

        "e4m3" has no infinities. "e4m3t" and the like have the same numbers, and
        truncate; "e4m3s" and the like round stochastically.

        Raises:
            ValueError: any other name, or a format that FP32 cannot hold.
        """
        if name.lower() in _ALIASES:
            return _ALIASES[name.lower()]
        match = re.fullmatch(r"(e(\d+)m(\d+))([ts]?)", name.lower())
        if match is None:
            raise ValueError(
                f"unknown float format {name!r}: give eXmY, as in e4m3, or one of"
                f" {sorted(_ALIASES)}"
            )
        fmt = cls(int(match[2]), int(match[3]))
        # The sizes do not say that E4M3 has no infinities, nor which formats have a
        # dtype.
        fmt = next((known for known in _NATIVE if str(known) == match[1]), fmt)
        if not match[4]:
            return fmt
        # A native cast rounds to nearest, so these formats are simulated in FP32.
        return dataclasses.replace(
            fmt, dtype=None, rounding="truncate" if match[4] == "t" else "stochastic"
        )

    @classmethod
    @functools.cache
    def of(cls, dtype: Any) -> FloatFormat:
        """Return the format of a native dtype.

        Raises:
            ValueError: no constant of this module has the dtype.
        """
        given = jnp.dtype(dtype)
        for known in _NATIVE:
            if known.dtype == given:
                return known
        raise ValueError(
            f"{given} has no FloatFormat: known are {[str(f.dtype) for f in _NATIVE]}"
        )

    @property
    def bias(self) -> int:
        """Return the exponent bias."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def max(self) -> float:
        """Return the largest finite number."""
        if self.infinities:
            return 2.0**self.bias * (2 - self.epsilon)
        return 2.0 ** (self.bias + 1) * (2 - 2 * self.epsilon)

    @property
    def top(self) -> int:
        """Return the exponent of an operand's largest magnitude at a measured scale.

        It is one octave below the format's largest. An operand is multiplied and added
        up in FP32, never in its own format, so the full range serves its smaller
        elements.
        """
        return int(math.log2(self.max)) - 1

    @property
    def min_normal(self) -> float:
        """Return the smallest positive normal number."""
        return 2.0 ** (1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        """Return the smallest positive number."""
        return self.min_normal * self.epsilon

    @property
    def epsilon(self) -> float:
        """Return the distance from 1 to the next number.

        A rounding to nearest has a relative error of at most half of it.
        """
        return 2.0**-self.mantissa_bits

    def cast(self, x: jax.typing.ArrayLike) -> jax.Array:
        """Return `x` in the native dtype: to nearest, ties to even, saturating.

        See the module's rules.

        Raises:
            ValueError: the format has no native dtype; `quantize` simulates it.
        """
        if not self.infinities:
            return self.cast_or_nan(x)
        # FP32 first: 65504 is not a BF16 number, so a limit in the operand's own dtype
        # may round past the maximum.
        x = jnp.asarray(x).astype(jnp.float32)
        magnitude, limit = jnp.abs(x), np.float32(self.max)
        # Selects, not clip: min and max flush FP32 subnormals on CPU, and BF16 has such
        # numbers.
        y = jnp.where(magnitude > limit, jnp.where(x < 0, -limit, limit), x)
        return jnp.where(magnitude == np.inf, x, y).astype(self._native())

    def cast_or_nan(self, x: jax.typing.ArrayLike) -> jax.Array:
        """Return `x` in the native dtype; infinities become NaN. For FP8.

        There is no conversion to FP32 and no comparison. Compilers move the
        transposition of an operand to before its cast; masks would be transposed one by
        one.

        Raises:
            ValueError: FP16 and BF16 do not hold all numbers of the format.
        """
        if self._native().itemsize > 1:
            raise ValueError(
                f"{self}: cast_or_nan is for 8-bit formats; cast keeps infinities"
            )
        x = jnp.asarray(x)
        # 448 and 57344 are numbers of FP16 and BF16, so the operand need not be
        # widened.
        limit = np.asarray(self.max, x.dtype)
        # Infinity minus infinity is NaN, any other number minus itself is zero, which
        # leaves the sign of a zero.
        return (lax.clamp(-limit, x, limit) - (x - x)).astype(self._native())

    def quantize(self, x: jax.typing.ArrayLike) -> jax.Array:
        """Return `x` rounded to the nearest number of the format, as FP32.

        It simulates any format, with ties to even, and saturates. Where the format
        truncates, it is the nearest number that is not larger in magnitude; where it
        rounds stochastically, one of the two neighbors.
        """
        x = jnp.asarray(x).astype(jnp.float32)
        if self.rounding == "stochastic":
            return self._round_stochastically(x, hash_bits(x))
        return self._round(x)

    def stochastic_round(self, x: jax.typing.ArrayLike, bits: jax.Array) -> jax.Array:
        """Return `x` rounded to one of its two neighbors in the format, saturating.

        The probability of a neighbor grows with its nearness.

        `bits` holds 16 random bits per element (uint16, shape of `x`): from
        `counter_bits`, or `jax.random.bits(key, x.shape, jnp.uint16)`. The expectation
        is `x` up to 2^-17 of the distance of the two neighbors. It is exact where FP32
        has at most 16 bits below that distance, as for the normal numbers of FP16 and
        BF16.

        Below the smallest normal number, `x` is first rounded to nearest at FP32's last
        place of that number. With m bits of mantissa and a narrower exponent than
        FP32's, this adds an error of 2^-(24-m) of the distance, 2^-14 for FP16. A
        number of the format is always returned unchanged. The result has the native
        dtype, else FP32.

        Raises:
            ValueError: `bits` is not uint16 of the shape of `x`.
        """
        x = jnp.asarray(x).astype(jnp.float32)
        if bits.dtype != jnp.uint16 or bits.shape != x.shape:
            raise ValueError(
                f"bits: found {bits.dtype}{list(bits.shape)}, expected"
                f" uint16{list(x.shape)}"
            )
        y = self._round_stochastically(x, bits)
        if self.dtype is None:
            return y
        return y.astype(self.dtype)

    def _native(self) -> np.dtype:
        if self.dtype is None:
            raise ValueError(
                f"{self} has no native dtype: use quantize, which simulates it in"
                " float32"
            )
        return self.dtype

    def _round_stochastically(self, x: jax.Array, random: jax.Array) -> jax.Array:
        """Round FP32 `x`: its bits + offset, cut at the format's last place.

        `random` holds integers below 2^16. Numbers below the smallest normal number are
        cut at its last place, after it is added to them. On a GPU the optimizer is
        bound by these operations, not by memory.
        """
        u32, cut = jnp.uint32, 23 - self.mantissa_bits
        random = random.astype(u32)
        as_bits = functools.partial(lax.bitcast_convert_type, new_dtype=u32)
        as_float = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.float32)
        bits = as_bits(x)
        magnitude = shifted = bits & _MAGNITUDE
        # Random bits are centered when fewer than the bits to be cut, else the fraction
        # would be biased down.
        if cut <= 16:
            offset = random >> (16 - cut)
        else:
            offset = (random << (cut - 16)) + u32(1 << (cut - 17))
        # A format with FP32's exponents has its subnormal numbers: their bits are cut.
        if self.bias < FP32.bias:
            least = np.float32(self.min_normal)
            added = jnp.where(magnitude < least.view(np.uint32), least, np.float32(0))
            shifted = as_bits(as_float(magnitude) + added)
        # A carry into the exponent is right: it gives the first number of the next
        # octave.
        rounded = (shifted + offset) & u32(2**32 - 2**cut)
        if self.bias < FP32.bias:
            rounded = as_bits(as_float(rounded) - added)
        return self._saturated(rounded, bits)

    def _round(self, x: jax.Array) -> jax.Array:
        """Round FP32 `x` to nearest, ties to even.

        It is significand + offset, cut below the format's last place. Without the
        offset, the cut truncates.
        """
        u32 = jnp.uint32
        bits = lax.bitcast_convert_type(x, u32)
        magnitude = bits & _MAGNITUDE
        # An FP32 subnormal has the exponent of field 1, and no hidden bit.
        exponent = jnp.maximum(magnitude >> 23, u32(1))
        significand = (magnitude & _FRACTION) | jnp.where(
            magnitude >= _HIDDEN, _HIDDEN, u32(0)
        )
        min_exponent = u32(128 - self.bias)
        shift = u32(23 - self.mantissa_bits) + jnp.where(
            exponent < min_exponent, min_exponent - exponent, u32(0)
        )
        # A larger shift rounds to zero in any case.
        shift = jnp.minimum(shift, u32(25))
        if self.rounding != "truncate":
            odd = (significand >> shift) & 1
            # Half a place, less one bit where the place is even: ties go to even.
            # Without a cut there is no half.
            significand += jnp.where(
                shift > 0, (u32(1) << shift >> 1) - 1 + odd, u32(0)
            )
        cut = significand >> shift << shift
        # The hidden bit adds one to the exponent, as does a carry. An FP32 subnormal
        # has no hidden bit, and its field stays 0.
        rounded = jnp.where(cut == 0, u32(0), ((exponent - 1) << 23) + cut)
        return self._saturated(rounded, bits)

    def _saturated(self, rounded: jax.Array, bits: jax.Array) -> jax.Array:
        """Return rounded magnitudes as FP32, within the format's range.

        The signs, infinities and NaN are those of `bits`, the unrounded numbers.
        """
        magnitude = bits & _MAGNITUDE
        special: Any = magnitude
        if not self.infinities:
            special = _NAN
        # Positive floats are in the order of their bits. A minimum of floats would
        # flush FP32's subnormal numbers on CPU.
        rounded = jnp.minimum(rounded, np.float32(self.max).view(np.uint32))
        rounded = jnp.where(magnitude >= _INFINITY, special, rounded)
        return lax.bitcast_convert_type(rounded | (bits & _SIGN), jnp.float32)


_SUFFIXES = {"nearest": "", "truncate": "t", "stochastic": "s"}
# The FP8 types that XLA hands to cuBLASLt's FP8 kernels: with IEEE's E4M3 and the fnuz
# types it multiplies in BF16.
E4M3 = FloatFormat(4, 3, infinities=False, dtype=np.dtype(jnp.float8_e4m3fn))
E5M2 = FloatFormat(5, 2, dtype=np.dtype(jnp.float8_e5m2))
FP16 = FloatFormat(5, 10, dtype=np.dtype(jnp.float16))
BF16 = FloatFormat(8, 7, dtype=np.dtype(jnp.bfloat16))
FP32 = FloatFormat(8, 23, dtype=np.dtype(jnp.float32))
_NATIVE = (E4M3, E5M2, FP16, BF16, FP32)
_ALIASES = {
    "fp16": FP16,
    "float16": FP16,
    "bf16": BF16,
    "bfloat16": BF16,
    "fp32": FP32,
    "float32": FP32,
}


def counter_bits(shape: tuple[int, ...], seed: Any, step: Any, leaf: Any) -> jax.Array:
    """Return 16 random bits per element (uint16): a hash of (seed, step, leaf, index).

    They are the same for any sharding and order of evaluation; there is no key to carry
    or store. The counters are integers or integer arrays of one element; `leaf` tells
    the arrays of a tree apart. Inside shard_map the index of an element is the local
    one, so include the shard's number in `leaf`.
    """
    return bits_of_words(shape, counter_words(seed, step, leaf))


def hash_bits(x: jax.Array) -> jax.Array:
    """Return 16 bits per element of FP32 `x` (uint16).

    They are a hash of its index and of the bits of the whole array.
    """
    # A sum of integers is the same in any order, so on any number of devices.
    words = lax.bitcast_convert_type(x, jnp.uint32)
    return counter_bits(x.shape, jnp.sum(words, dtype=jnp.uint32), 0, 0)


def counter_words(seed: Any, step: Any, leaf: Any) -> jax.Array:
    """Return the two uint32 words that `counter_bits` hashes the indices with.

    Their shape is `[..., 2]`, that of `leaf` being `[...]`.
    """
    u32 = jnp.uint32
    words = []
    for word in (0x9E3779B9, 0x85EBCA6B):
        key = u32(word)
        for counter in (seed, step, leaf):
            key = _mix(key ^ jnp.asarray(counter).astype(u32)) + u32(word)
        words.append(key)
    return jnp.stack(words, axis=-1)


def bits_of_words(shape: tuple[int, ...], words: jax.Array) -> jax.Array:
    """Return `counter_bits` of words made for all arrays of a tree at once.

    On a GPU these words are one kernel. Words `[n, 2]` belong to the n parts of an
    array along its first axis, whose elements are numbered separately. Elements 2^32
    apart have the same bits.
    """
    if words.ndim == 2:
        return jax.vmap(lambda pair: bits_of_words(shape[1:], pair))(words)
    u32 = jnp.uint32
    index = jnp.zeros(shape, u32)
    for axis in range(len(shape)):
        index = index + lax.broadcasted_iota(u32, shape, axis) * u32(
            math.prod(shape[axis + 1 :]) % 2**32
        )
    # Two rounds, with a key word before each: with one, two steps would draw shifted
    # copies of one sequence.
    return (_mix_upper_bits(_mix(index ^ words[..., 0]) + words[..., 1]) >> 16).astype(
        jnp.uint16
    )


def _mix(h: jax.Array) -> jax.Array:
    """Return a bijection of 32-bit words with full avalanche.

    It is the finalizer of MurmurHash3.
    """
    h = _mix_upper_bits(h)
    return h ^ (h >> 16)


def _mix_upper_bits(h: jax.Array) -> jax.Array:
    """Return `_mix` without its last line, which leaves the upper 16 bits unchanged."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    return (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)


def pow2_inverse(x: jax.Array) -> jax.Array:
    """Return the exact inverse of FP32 powers of two in [2^-126, 2^126].

    The exponent field is subtracted: compilers do not repeat a division in every kernel
    that needs its result, but make it a separate kernel.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(lax.sub(np.uint32(254 << 23), bits), jnp.float32)


def pow2_floor(x: Any) -> Any:
    """Return the largest power of two at most `x` > 0, within [2^-126, 2^126].

    A Python or NumPy number gives a Python float (a static scale), an array gives FP32.
    Zero gives 2^-126, infinity 2^126, NaN NaN; the sign is ignored. It is exact: read
    off the exponent bits.
    """
    return _pow2(x, up_from=2.0)


def pow2_round(x: Any) -> Any:
    """Return the power of two nearest to `x` > 0 on a logarithmic scale.

    It lies within [2^-126, 2^126]; other arguments are treated as in `pow2_floor`. x /
    pow2_round(x) lies in [sqrt(1/2), sqrt(2)]: errors of either sign cost the same
    number of octaves. The border sqrt(2) is no binary number, so there are no ties.
    (Nearest in value would put the border at 1.5.)
    """
    return _pow2(x, up_from=_ABOVE_SQRT2)


def _pow2(x: Any, up_from: float) -> Any:
    """Return 2^floor(log2 x), one octave more for significands of at least `up_from`.

    The significand is in [1, 2); `up_from` is an FP32 number.
    """
    if isinstance(x, (int, float, np.number)):
        return _pow2_number(float(x), up_from)
    x = jnp.asarray(x, jnp.float32)
    border = np.float32(up_from).view(np.uint32) - np.float32(1).view(np.uint32)
    bits = lax.bitcast_convert_type(x, jnp.uint32) & _MAGNITUDE
    # What is missing from the border to the next octave: added to the bits, it carries
    # into the exponent from the border on.
    raised = (bits + (_HIDDEN - border)) & _INFINITY
    low, high = (np.float32(s).view(np.uint32) for s in (MIN_SCALE, MAX_SCALE))
    power = jnp.clip(raised, low, high)
    return lax.bitcast_convert_type(
        jnp.where(bits > _INFINITY, bits, power), jnp.float32
    )


def _pow2_number(x: float, up_from: float) -> float:
    """Return `_pow2` of a Python number."""
    if math.isnan(x):
        return x
    # Not log2, which gives 3 for the largest number below 8.
    significand, exponent = math.frexp(min(max(abs(x), MIN_SCALE), MAX_SCALE))
    return 2.0 ** (exponent - (2 * significand < up_from))


_F32 = np.dtype(np.float32)


def is_float(x: Any) -> bool:
    """Return whether an array, a value, a number or an aval is real floating point."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return isinstance(x, float)
    # A reference has a dtype, and no conversion: a program must read it first.
    return _is_float_dtype(dtype) and not isinstance(x, jax.Ref)


@functools.cache
def _is_float_dtype(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def is_narrow(x: Any) -> bool:
    """Return whether an array, a value or an aval is floating point below 32 bits."""
    return is_narrow_dtype(getattr(x, "dtype", None)) and is_float(x)


@functools.cache
def is_narrow_dtype(dtype: Any) -> bool:
    """Return whether a dtype is floating point below 32 bits; None is no dtype."""
    is_floating = dtype is not None and _is_float_dtype(dtype)
    return is_floating and np.dtype(dtype).itemsize < 4


def has_range_of_float32(dtype: Any) -> bool:
    """Return whether a format has the range of FP32, and so needs no scale."""
    dtype = np.dtype(dtype)
    # Below the largest numbers of FP32 and BF16, which differ, and above FP16's 2^16.
    return dtype.itemsize >= 4 or FloatFormat.of(dtype).max > 2.0**120


def holds(dtype: Any, number: float) -> bool:
    """Return whether a format has this number."""
    with np.errstate(over="ignore"):
        return np.isnan(number) or float(np.asarray(number, dtype)) == number


def materialize(x: Any) -> Any:
    """Return a plain operand for `bind`.

    A uniform constant becomes a broadcast, not an array of constants.
    """
    # Strides of zero are those of `np.broadcast_to`. A compiled program would hold
    # every element of a plain constant.
    if isinstance(x, np.ndarray) and x.ndim and not any(x.strides):
        return lax.full(x.shape, x[(0,) * x.ndim] if x.size else 0, x.dtype)
    return x


def as_float32(x: Any) -> Any:
    """Return `x` in FP32 (no operation if it already is)."""
    x = materialize(x)
    if getattr(x, "dtype", None) == _F32:
        return x
    return lax.convert_element_type(x, _F32)


def at_least_float32(x: Any) -> Any:
    """Return `x` in FP32 if it is a narrower float, else as it is."""
    if is_narrow(x):
        return as_float32(x)
    return x


def saturating_cast(x: Any, dtype: Any, *, meant: bool = False) -> Any:
    """Return `x` in `dtype`, saturating; infinities and NaN stay not finite.

    `meant`: saturation is intended, as of a mask's -1e9, and not reported.
    """
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{dtype} is no float dtype; write asarray(x).astype({dtype})")
    # Nothing to saturate: a clamp would be one more operation in front of each
    # widening.
    if float(jnp.finfo(dtype).max) >= float(jnp.finfo(x.dtype).max):
        return lax.convert_element_type(x, dtype)
    if has_range_of_float32(dtype):  # it has FP32's subnormal numbers, too
        out = FloatFormat.of(dtype).cast(x)
    else:
        out = _saturating_cast(x, dtype)
    if meant:
        return out
    return precision_warnings.observe_rounding(x, out)


def fp8_cast(x: Any, fmt: FloatFormat) -> Any:
    """Return `x` in an 8-bit format, see `FloatFormat.cast_or_nan`."""
    return precision_warnings.observe_rounding(x, fmt.cast_or_nan(x))


# One call in a jaxpr in place of five equations: a program has hundreds of casts, and
# tracing costs by the equation.
@functools.partial(jax.jit, static_argnums=1)
def _saturating_cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    x = as_float32(x)
    limit = np.float32(FloatFormat.of(dtype).max)
    # A clamp flushes FP32's subnormal numbers on CPU, and is less for compilers to fuse
    # than `FloatFormat.cast`. Not `is_finite`, which XLA's kernels for norms on GPUs
    # (Triton) do not have: a cast would be a kernel of its own.
    finite = lax.lt(lax.abs(x), np.float32(np.inf))
    return lax.convert_element_type(
        lax.select(finite, lax.clamp(-limit, x, limit), x), dtype
    )
