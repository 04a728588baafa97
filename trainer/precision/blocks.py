"""Products whose operands have a scale for each block or row, the rivals of one scale
per tensor.

An operand is cut into blocks along the axis that the product sums over, so that
hardware can scale partial sums. Each block has a scale from its largest magnitude, and
its numbers are rounded to a narrow format on that scale. The three products of a layer
sum over three different axes (input, output, tokens), so a tensor is rounded twice,
each time from the wide one.

The last block of an axis may be shorter. A block of zeros stays zeros; a block with a
number that is not finite becomes NaN. Where `jax.nn.scaled_dot_general` has the format,
its quantizer gives the same bits, except for blocks that it turns into NaN.

MXFP8 and NVFP4 products are `jax.nn.scaled_matmul`, which XLA computes in one call of
cuDNN for a Blackwell GPU; for an older one it multiplies the widened operands. Where a
block is a whole row, its scale is constant over the sum: the product is that of FP8
numbers, which every GPU with FP8 has, and is multiplied by the scales. Other platforms,
and simulated products, multiply the same numbers in FP32.

Legend: N tokens, D input width, F output width, K the axis that a product sums over.

References:
    [1] OCP Microscaling Formats (MX) Specification 1.0: blocks of 32, scales E8M0. The
      scale is rounded up, as in Mishra et al. 2025, "Recipes for Pre-training LLMs with
      MXFP8", https://arxiv.org/abs/2506.08027.
    [2] DeepSeek-AI 2024, "DeepSeek-V3 Technical Report",
      https://arxiv.org/abs/2412.19437, section 3.3: E4M3 in all three products, FP32
      scales for 1 x 128 of activations and gradients and 128 x 128 of weights.
    [3] NVIDIA 2025, "Pretraining Large Language Models with NVFP4",
      https://arxiv.org/abs/2509.25149: blocks of 16 with a scale in E4M3 and one in
      FP32 per tensor, 16 x 16 of weights, stochastic rounding of gradients, and a
      random Hadamard transform of the operands of the weights' gradient.
    [4] Cook et al. 2025, "Four Over Six", https://arxiv.org/abs/2512.02010: of two
      scales of a block, the one with the smaller error.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core.numerics.formats import (
    E4M3,
    FloatFormat,
    hash_bits,
    pow2_floor,
    pow2_inverse,
)
from scalify_core.ops.matmul import Rounded, dot_fp8, rounded_product
from trainer.precision.dots import check_matrices, hadamard

FP4_MAX = 6.0  # of E2M1, which has no infinities and no NaN
# The largest scale of a block whose amax is put at 6. The scale that puts it at 4 is
# 1.5 times as large: 384 is an E4M3 number, 1.5 * 448 overflows [4].
FOUR_OVER_SIX_MAX = 256.0
# As in [3].
HADAMARD = 16
MX_BLOCK = 32
NVFP4_BLOCK = 16
DEEPSEEK_BLOCK = 128
LEAST_SCALE = np.float32(2.0**-126)  # smaller ones are flushed to zero
FP8_DTYPES = jnp.float8_e4m3fn, jnp.float8_e5m2
LAST_AXES = ((1,), (1,)), ((), ())  # dimension numbers: [N, K] @ [F, K].T
NATIVE_SCALE_DTYPES = jnp.float8_e8m0fnu, jnp.float8_e4m3fn


class BlockMatrix(NamedTuple):
    """A rounded matrix, with a scale for each block of its rows.

    Attributes:
      data: [rows, K], K last and padded with zeros to whole blocks; FP32 for a format
        without a dtype.
      scales: [rows, blocks]; FP32 where products are simulated.
      tensor_scale: one more scale, of the whole tensor, FP32; None: 1.
    """

    data: jax.Array
    scales: jax.Array
    tensor_scale: jax.Array | None = None

    def widened(self) -> jax.Array:
        """Return the numbers in FP32."""
        scales = self.scales.astype(jnp.float32)
        wide = in_blocks(lambda x, s: x * s, self.data.astype(jnp.float32), scales)
        if self.tensor_scale is None:
            return wide
        return wide * self.tensor_scale

    @property
    def is_fp8_by_rows(self) -> bool:
        """Return whether it is FP8 numbers with one FP32 scale for each row."""
        return (
            self.data.dtype in FP8_DTYPES
            and self.scales.dtype == jnp.float32
            and self.scales.shape[1] == 1
        )

    def times(self, other: "BlockMatrix", dtype: Any) -> jax.Array:
        """Return the products of the rows of both, [rows, rows of `other`].

        They are accumulated in FP32 and rounded to `dtype`.
        """

        def native(lhs: BlockMatrix, rhs: BlockMatrix) -> jax.Array:
            tensor_scales = [
                x.tensor_scale for x in (lhs, rhs) if x.tensor_scale is not None
            ]
            # The sizes of the blocks follow from the shapes. It takes a batch axis
            # first.
            (out,) = jax.nn.scaled_matmul(
                lhs.data[None],
                rhs.data[None],
                lhs.scales[None],
                rhs.scales[None],
                # Without the tensors' scales a sum may exceed FP16: one product of E2M1
                # numbers and their E4M3 scales reaches 6^2 448^2.
                preferred_element_type=jnp.float32 if tensor_scales else dtype,
            )
            for scale in tensor_scales:
                out = out * scale
            return out.astype(dtype)

        def in_fp32(lhs: BlockMatrix, rhs: BlockMatrix) -> jax.Array:
            # `highest`: by default GPUs multiply FP32 operands in TF32.
            exact = jnp.matmul(lhs.widened(), rhs.widened().T, precision="highest")
            return exact.astype(dtype)

        if self.is_fp8_by_rows and other.is_fp8_by_rows:
            # The scales are powers of two, so a BF16 product keeps its digits. An FP16
            # product could overflow before the scales are applied.
            wide = jnp.promote_types(dtype, jnp.bfloat16)
            out = dot_fp8(self.data, other.data, LAST_AXES, wide, fast=False)
            return (out * self.scales * other.scales.T).astype(dtype)
        if self.scales.dtype not in NATIVE_SCALE_DTYPES:
            return in_fp32(self, other)
        # By the platform that the program is compiled for: a plan compiles for GPUs on
        # a machine without one.
        return jax.lax.platform_dependent(self, other, cuda=native, default=in_fp32)


def in_blocks(
    fun: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, scales: jax.Array
) -> jax.Array:
    """Return `fun(x, scales)`, where each number of `x` [rows, K] has the scale of its
    block, of `scales` [rows, blocks].
    """
    blocks = x.reshape(*scales.shape, x.shape[1] // scales.shape[1])
    return fun(blocks, scales[..., None]).reshape(x.shape)


def rows_along(x: jax.Array, axis: int, length: int) -> jax.Array:
    """Return a matrix in FP32 whose rows run along `axis`, padded to whole blocks."""
    x = x.astype(jnp.float32)
    x = x if axis == 1 else x.T
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % length)))


def reduce_row_groups(
    reduce: Callable[..., jax.Array], x: jax.Array, rows: int
) -> jax.Array:
    """Return `x` [rows of x, blocks], at least 0, reduced over groups of `rows`.

    Each row of a group gets the group's result.
    """
    if rows == 1:
        return x
    # Zeros change neither a sum nor a maximum of numbers that are at least 0.
    padded = jnp.pad(x, ((0, -len(x) % rows), (0, 0)))
    reduced = reduce(padded.reshape(-1, rows, x.shape[1]), axis=1)
    return jnp.repeat(reduced, rows, axis=0)[: len(x)]


def block_amax(x: jax.Array, length: int, rows: int = 1) -> jax.Array:
    """Return the largest magnitude in each block of `rows` x `length` numbers; NaN if
    one is not finite.

    Args:
      x: [rows of x, K], K a multiple of `length`.
      length: of a block.
      rows: of a block. All rows of it get its magnitude.

    Returns:
      [rows of x, blocks].
    """
    largest = jnp.max(jnp.abs(x).reshape(len(x), -1, length), axis=2)
    largest = reduce_row_groups(jnp.max, largest, rows)
    # On an infinite scale the finite numbers of the block would become zeros, and only
    # the others NaN.
    return jnp.where(jnp.isfinite(largest), largest, jnp.nan)


def round_to(x: jax.Array, fmt: FloatFormat) -> jax.Array:
    """Return FP32 numbers rounded to a format; in FP32 where it has no dtype."""
    if fmt.dtype is None:
        return fmt.quantize(x)
    return fmt.cast(x)


def round_on_pow2_scales(
    x: jax.Array, axis: int, fmt: FloatFormat, length: int
) -> BlockMatrix:
    """Round `x` to `fmt` in blocks of `length` along `axis`.

    The scale of a block, FP32, is the least power of two on which its largest number
    fits, from 2^-126 to 2^127.
    """
    x = rows_along(x, axis, length)
    exact_scales = block_amax(x, length) / np.float32(fmt.max)
    below = pow2_floor(exact_scales)
    # Rounded down, the scale would saturate the block's largest numbers.
    scales = jnp.where(below < exact_scales, 2 * below, below)
    data = in_blocks(lambda x, s: x * pow2_inverse(s), x, scales)
    return BlockMatrix(round_to(data, fmt), scales)


def mx(x: jax.Array, axis: int, fmt: FloatFormat, *, native: bool) -> BlockMatrix:
    """Round `x` to `fmt` in blocks of 32 along `axis`, each on a power of two.

    `native`: scales are E8M0.
    """
    out = round_on_pow2_scales(x, axis, fmt, MX_BLOCK)
    if native:
        # An exact cast: E8M0 holds the powers of two from 2^-127 to 2^127.
        out = out._replace(scales=out.scales.astype(jnp.float8_e8m0fnu))
    return out


def rowwise(x: jax.Array, axis: int, fmt: FloatFormat) -> BlockMatrix:
    """Round `x` to `fmt`, each row along `axis` on a power of two."""
    return round_on_pow2_scales(x, axis, fmt, x.shape[axis])


def deepseek(
    x: jax.Array, axis: int, fmt: FloatFormat, *, rows: int = 1
) -> BlockMatrix:
    """Round `x` to `fmt` in blocks of `rows` x 128, 128 along `axis`, on FP32 scales
    that map each block's largest number to the format's.
    """
    x = rows_along(x, axis, DEEPSEEK_BLOCK)
    largest = block_amax(x, DEEPSEEK_BLOCK, rows)
    # A block of zeros would be 0 / 0. `maximum` keeps NaN.
    scales = jnp.maximum(largest / np.float32(fmt.max), LEAST_SCALE)
    return BlockMatrix(round_to(in_blocks(jnp.divide, x, scales), fmt), scales)


def fp4(x: jax.Array, bits: jax.Array | None = None) -> jax.Array:
    """Round FP32 numbers to E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6), saturating.

    `bits`: 16 random bits for each number; None: to nearest, ties to even.
    """
    size = jnp.abs(x)
    # The distances of E2M1's numbers: 0.5 below 2, 1 below 4, then 2.
    coarse = jnp.where(size < 4, np.float32(1), np.float32(2))
    step = jnp.where(size < 2, np.float32(0.5), coarse)
    steps = size / step
    if bits is None:
        rounded = jnp.round(steps)
    else:
        rounded = jnp.floor(
            # The half centers the 2^16 possible values: without it the mean would be
            # rounded down.
            steps + (bits.astype(jnp.float32) + 0.5) * np.float32(2.0**-16)
        )
    return jnp.copysign(jnp.minimum(rounded * step, FP4_MAX), x)


def divide_by_scales(x: jax.Array, scales: jax.Array) -> jax.Array:
    """Return `x` divided by the scales of its blocks, unchanged where they are zero."""
    # The scale is zero where E4M3 underflows. The block's numbers are then at most 6 *
    # 2^-10, which E2M1 rounds to nearest as zero, and their products with the scale are
    # zero in any case.
    return in_blocks(lambda x, s: x / jnp.where(s == 0, np.float32(1), s), x, scales)


def fp4_error(x: jax.Array, scales: jax.Array, rows: int) -> jax.Array:
    """Return the squared error of E2M1 on given scales, [rows of x, blocks].

    `rows`: of a block. All rows of it get the sum of its errors.
    """
    rounded = in_blocks(jnp.multiply, fp4(divide_by_scales(x, scales)), scales)
    error = jnp.sum(jnp.square(rounded - x).reshape(*scales.shape, -1), axis=2)
    return reduce_row_groups(jnp.sum, error, rows)


def nvfp4(
    x: jax.Array,
    axis: int,
    *,
    rows: int = 1,
    stochastic: bool = False,
    four_over_six: bool = False,
    native: bool,
) -> BlockMatrix:
    """Round `x` to E2M1 in blocks of `rows` x 16, 16 along `axis`, on E4M3 scales times
    one FP32 scale for the tensor.

    Args:
      x: a matrix.
      axis: that the product sums over.
      rows: of a block.
      stochastic: the bits are a hash of the position and of all of `x`, so they differ
        between steps, and a repeated step is the same.
      four_over_six: a block's scale puts its largest number at 4 instead of 6 where
        that has the smaller squared error, rounded to nearest [4].
      native: numbers and scales are in their narrow dtypes.
    """
    # Before `rows_along`: a number has the same bits along both axes.
    bits = hash_bits(x.astype(jnp.float32)) if stochastic else None
    x = rows_along(x, axis, NVFP4_BLOCK)
    if bits is not None:
        bits = rows_along(bits, axis, NVFP4_BLOCK)
    largest = jnp.max(jnp.abs(x))
    max_scale = FOUR_OVER_SIX_MAX if four_over_six else E4M3.max
    # It gives the block of the tensor's largest number the largest scale, so that the
    # range of E4M3 below is left to all other blocks.
    tensor_scale = jnp.maximum(largest / np.float32(FP4_MAX * max_scale), LEAST_SCALE)
    x = x / tensor_scale
    largest = block_amax(x, NVFP4_BLOCK, rows)
    # To nearest, as JAX's quantizer: a scale that is rounded down saturates the block's
    # largest number.
    scales = E4M3.quantize(largest / np.float32(FP4_MAX))
    if four_over_six:
        scales_at_4 = E4M3.quantize(largest / np.float32(4))
        is_closer = fp4_error(x, scales_at_4, rows) < fp4_error(x, scales, rows)
        scales = jnp.where(is_closer, scales_at_4, scales)
    data = fp4(divide_by_scales(x, scales), bits)
    if native:
        data, scales = data.astype(jnp.float4_e2m1fn), scales.astype(E4M3.dtype)
    return BlockMatrix(data, scales, tensor_scale)


Cast = Callable[[jax.Array, int], BlockMatrix]


class Recipe(NamedTuple):
    """The casts of the operands of a layer's three products.

    Each cast is given the axis that the product sums over.

    Attributes:
      activation: casts an input [N, D].
      weight: casts a kernel [D, F].
      gradient: casts the gradient of an output [N, F].
      forward_dtype: of the operands of the forward product; None: they are cast, too.
      mix: multiplies the operands of the weights' gradient, [D, N] and [F, N], by
        one orthogonal matrix along N, before they are cast.
    """

    activation: Cast
    weight: Cast
    gradient: Cast
    forward_dtype: np.dtype | None = None
    mix: Callable[[jax.Array], jax.Array] = lambda x: x


def mx_recipe(
    forward: FloatFormat, backward: FloatFormat, *, native: bool = False
) -> Recipe:
    """Return blocks of 32 along the sum [1]."""
    cast = functools.partial(mx, fmt=forward, native=native)
    return Recipe(cast, cast, functools.partial(cast, fmt=backward))


def rowwise_recipe(forward: FloatFormat, backward: FloatFormat) -> Recipe:
    """Return a scale for each row along the sum."""
    cast = functools.partial(rowwise, fmt=forward)
    return Recipe(cast, cast, functools.partial(cast, fmt=backward))


def deepseek_recipe(forward: FloatFormat, backward: FloatFormat) -> Recipe:
    """Return blocks of 128 along the sum, and of 128 x 128 for weights [2]."""
    cast = functools.partial(deepseek, fmt=forward)
    return Recipe(
        cast,
        functools.partial(cast, rows=DEEPSEEK_BLOCK),
        functools.partial(cast, fmt=backward),
    )


def nvfp4_recipe(
    *,
    four_over_six: bool = False,
    native: bool = False,
    forward_dtype: np.dtype | None = None,
) -> Recipe:
    """Return blocks of 16 along the sum, and of 16 x 16 for weights; gradients are
    rounded stochastically [3]. See `Recipe` for `forward_dtype`.
    """
    cast = functools.partial(nvfp4, four_over_six=four_over_six, native=native)
    return Recipe(
        cast,
        functools.partial(cast, rows=NVFP4_BLOCK),
        functools.partial(cast, stochastic=True),
        forward_dtype,
        # In FP32: mixed numbers are rounded once, to four bits.
        lambda x: hadamard(x, HADAMARD, jnp.float32),
    )


BLOCK_FIGURES = ("block_spread", "block_underflow", "block_saturated")


def block_figures(x: jax.Array, cast: Cast, axis: int, fmt: FloatFormat) -> jax.Array:
    """Return BLOCK_FIGURES of an operand, FP32 [3].

    - block_spread: the standard deviation of log2 of the blocks' scales, in octaves.
    - block_underflow: the share of blocks whose numbers all become zeros.
    - block_saturated: the share of blocks with a number beyond the format's largest.

    Blocks of zeros do not count. If all blocks are zeros, the figures are 0.

    Args:
      x: a matrix.
      cast: of the recipe.
      axis: that the product sums over.
      fmt: of the numbers of a block.
    """
    rounded = cast(x, axis)
    rows, blocks = rounded.scales.shape
    length = rounded.data.shape[1] // blocks
    x = rows_along(x, axis, length)
    if rounded.tensor_scale is not None:
        x = x / rounded.tensor_scale
    amax, rounded_amax = (
        jnp.max(jnp.abs(y.astype(jnp.float32)).reshape(rows, -1, length), axis=2)
        for y in (x, rounded.data)
    )
    is_nonzero, scales = amax > 0, rounded.scales.astype(jnp.float32)
    has_scale = is_nonzero & (scales > 0)
    exponents = jnp.log2(jnp.where(has_scale, scales, 1))

    def mean(y: jax.Array, chosen: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(chosen, y, 0)) / jnp.maximum(jnp.sum(chosen), 1)

    center = mean(exponents, has_scale)
    # `FloatFormat` keeps the largest exponent for infinities, which E2M1 lacks: its
    # `max` would be 3.
    fmt_max = FP4_MAX if str(fmt) == "e2m1" else fmt.max
    return jnp.stack(
        [
            jnp.sqrt(mean(jnp.square(exponents - center), has_scale)),
            mean(rounded_amax == 0, is_nonzero),
            mean(has_scale & (amax > fmt_max * scales), is_nonzero),
        ]
    )


class BlockScaledDot:
    """The product of a linear layer, and the two of its backward pass, with operands
    cast by a recipe.

    The forward pass casts input and kernel twice: along D for its own product, and
    along N and F for the backward pass, which keeps these bytes only.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._rounded = _rounded_by(recipe)

    def __call__(
        self, lhs_NxD: jax.Array, rhs_DxF: jax.Array, dims: Any, **_: Any
    ) -> jax.Array:
        """Return the product [N, F] in the dtype of `lhs`; the gradient of `rhs` has
        the dtype of `rhs`. ValueError: not a product of two matrices.
        """
        check_matrices("BlockScaledDot", dims)
        return rounded_product(lhs_NxD, rhs_DxF, self._rounded)


def _rounded_by(recipe: Recipe) -> Rounded:
    """Return the three products of a recipe; see `Rounded`."""

    def forward(x_NxD: jax.Array, w_DxF: jax.Array) -> tuple[jax.Array, Any, Any]:
        if recipe.forward_dtype is None:
            x = recipe.activation(x_NxD, 1)
            y_NxF = x.times(recipe.weight(w_DxF, 0), x_NxD.dtype)
        else:
            # The wide forward pass of a recipe is in 16 bits also where the master
            # weights are FP32.
            operands = (z.astype(recipe.forward_dtype) for z in (x_NxD, w_DxF))
            y_NxF = jnp.matmul(*operands, preferred_element_type=x_NxD.dtype)
        x_DxN = recipe.activation(recipe.mix(x_NxD.T), 1)
        # Only arrays are kept for the backward pass: an empty one carries the dtype.
        return y_NxF, x_DxN, (recipe.weight(w_DxF, 1), w_DxF[:0])

    def backward(
        x_DxN: BlockMatrix, weight: tuple[BlockMatrix, jax.Array], g_NxF: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        w_DxF, like_w = weight
        d_x_NxD = recipe.gradient(g_NxF, 1).times(w_DxF, g_NxF.dtype)
        g_FxN = recipe.gradient(recipe.mix(g_NxF.T), 1)
        return d_x_NxD, x_DxN.times(g_FxN, like_w.dtype)

    return Rounded(forward, backward)
