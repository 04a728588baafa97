"""Products whose operands have a scale for each block, the rivals of one scale per
tensor.

An operand is cut into blocks along the axis that the product sums over, so that
hardware can scale partial sums. Each block has a scale from its largest magnitude, and
its numbers are rounded to a narrow format on that scale. The three products of a layer
sum over three different axes (input, output, tokens), so a tensor is rounded twice,
each time from the wide one.

The last block of an axis may be shorter. A block of zeros stays zeros; a block with a
number that is not finite becomes NaN. Where `jax.nn.scaled_dot_general` has the format,
its quantizer gives the same bits, except for blocks that it turns into NaN.

MXFP8 and NVFP4 products are `jax.nn.scaled_matmul`, which XLA computes in one call of
cuDNN for a Blackwell GPU; for an older one it multiplies the widened operands. Other
platforms, and simulated products, multiply the same numbers in FP32.

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
"""

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
from trainer.precision.dots import check_matrices, hadamard

FP4_MAX = 6.0  # of E2M1, which has no infinities and no NaN
HADAMARD = 16
MX_BLOCK = 32
NVFP4_BLOCK = 16
DEEPSEEK_BLOCK = 128
LEAST_SCALE = np.float32(2.0**-126)  # a smaller one is flushed to zero
NATIVE_SCALES = jnp.float8_e8m0fnu, jnp.float8_e4m3fn


class BlockMatrix(NamedTuple):
    """A rounded matrix, with a scale for each block of its rows.

    Attributes:
      data: [rows, K], K last and padded with zeros to whole blocks; FP32 for a format
        without a dtype.
      scales: [rows, blocks]; FP32 where products are simulated.
      whole: the scale of the tensor, FP32; None: 1.
    """

    data: jax.Array
    scales: jax.Array
    whole: jax.Array | None = None

    def widened(self) -> jax.Array:
        """Return the numbers in FP32."""
        scales = self.scales.astype(jnp.float32)
        wide = in_blocks(lambda x, s: x * s, self.data.astype(jnp.float32), scales)
        return wide if self.whole is None else wide * self.whole

    def times(self, other: "BlockMatrix", dtype: Any) -> jax.Array:
        """Return the products of the rows of both, [rows, rows of `other`].

        They are accumulated in FP32 and rounded to `dtype`.
        """

        def native(lhs: BlockMatrix, rhs: BlockMatrix) -> jax.Array:
            wholes = [x.whole for x in (lhs, rhs) if x.whole is not None]
            (out,) = jax.nn.scaled_matmul(
                lhs.data[None],
                rhs.data[None],
                lhs.scales[None],
                rhs.scales[None],
                preferred_element_type=jnp.float32 if wholes else dtype,
            )
            for whole in wholes:
                out = out * whole
            return out.astype(dtype)

        def in_fp32(lhs: BlockMatrix, rhs: BlockMatrix) -> jax.Array:
            exact = jnp.matmul(lhs.widened(), rhs.widened().T, precision="highest")
            return exact.astype(dtype)

        if self.scales.dtype not in NATIVE_SCALES:
            return in_fp32(self, other)
        return jax.lax.platform_dependent(self, other, cuda=native, default=in_fp32)


def in_blocks(
    fun: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, scales: jax.Array
) -> jax.Array:
    """Return `fun(x, scales)`, where each number of `x` [rows, K] has the scale of its
    block, of `scales` [rows, blocks].
    """
    blocks = x.reshape(*scales.shape, x.shape[1] // scales.shape[1])
    return fun(blocks, scales[..., None]).reshape(x.shape)


def summed_last(x: jax.Array, axis: int, length: int) -> jax.Array:
    """Return a matrix in FP32 with `axis` last, padded to whole blocks."""
    x = x.astype(jnp.float32)
    x = x if axis == 1 else x.T
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % length)))


def amax_of_blocks(x: jax.Array, length: int, rows: int = 1) -> jax.Array:
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
    if rows > 1:
        padded = jnp.pad(largest, ((0, -len(x) % rows), (0, 0)))
        of_block = jnp.max(padded.reshape(-1, rows, padded.shape[1]), axis=1)
        largest = jnp.repeat(of_block, rows, axis=0)[: len(x)]
    return jnp.where(jnp.isfinite(largest), largest, jnp.nan)


def stored(x: jax.Array, fmt: FloatFormat) -> jax.Array:
    """Return FP32 numbers rounded to a format; in FP32 where it has no dtype."""
    return fmt.quantise(x) if fmt.dtype is None else fmt.cast(x)


def mx(x: jax.Array, fmt: FloatFormat, axis: int, *, native: bool) -> BlockMatrix:
    """Round `x` to `fmt` in blocks of 32 along `axis`.

    The scale of a block is the least power of two on which its largest number fits,
    from 2^-126 to 2^127. `native`: scales are E8M0.
    """
    x = summed_last(x, axis, MX_BLOCK)
    wanted = amax_of_blocks(x, MX_BLOCK) / np.float32(fmt.max)
    below = pow2_floor(wanted)
    scales = jnp.where(below < wanted, 2 * below, below)
    data = in_blocks(lambda x, s: x * pow2_inverse(s), x, scales)
    if native:
        scales = scales.astype(jnp.float8_e8m0fnu)
    return BlockMatrix(stored(data, fmt), scales)


def deepseek(
    x: jax.Array, fmt: FloatFormat, axis: int, *, rows: int = 1
) -> BlockMatrix:
    """Round `x` to `fmt` in blocks of `rows` x 128, 128 along `axis`, on FP32 scales
    that map each block's largest number to the format's.
    """
    x = summed_last(x, axis, DEEPSEEK_BLOCK)
    largest = amax_of_blocks(x, DEEPSEEK_BLOCK, rows)
    scales = jnp.maximum(largest / np.float32(fmt.max), LEAST_SCALE)
    return BlockMatrix(stored(in_blocks(jnp.divide, x, scales), fmt), scales)


def fp4(x: jax.Array, bits: jax.Array | None = None) -> jax.Array:
    """Round FP32 numbers to E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6), saturating.

    `bits`: 16 random bits for each number; None: to nearest, ties to even.
    """
    size = jnp.abs(x)
    coarse = jnp.where(size < 4, np.float32(1), np.float32(2))
    step = jnp.where(size < 2, np.float32(0.5), coarse)
    steps = size / step
    if bits is None:
        rounded = jnp.round(steps)
    else:
        rounded = jnp.floor(
            steps + (bits.astype(jnp.float32) + 0.5) * np.float32(2.0**-16)
        )
    return jnp.copysign(jnp.minimum(rounded * step, FP4_MAX), x)


def nvfp4(
    x: jax.Array,
    axis: int,
    *,
    rows: int = 1,
    stochastic: bool = False,
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
      native: numbers and scales are in their narrow dtypes.
    """
    bits = hash_bits(x.astype(jnp.float32)) if stochastic else None
    x = summed_last(x, axis, NVFP4_BLOCK)
    if bits is not None:
        bits = summed_last(bits, axis, NVFP4_BLOCK)
    largest = jnp.max(jnp.abs(x))
    whole = jnp.maximum(largest / np.float32(FP4_MAX * E4M3.max), LEAST_SCALE)
    x = x / whole
    largest = amax_of_blocks(x, NVFP4_BLOCK, rows)
    scales = E4M3.quantise(largest / np.float32(FP4_MAX))
    on_scale = in_blocks(
        lambda x, s: x / jnp.where(s == 0, np.float32(1), s), x, scales
    )
    data = fp4(on_scale, bits)
    if native:
        data, scales = data.astype(jnp.float4_e2m1fn), scales.astype(E4M3.dtype)
    return BlockMatrix(data, scales, whole)


Cast = Callable[[jax.Array, int], BlockMatrix]


class Recipe(NamedTuple):
    """The casts of the operands of a layer's three products.

    Each cast is given the axis that the product sums over.

    Attributes:
      activation: casts an input [N, D].
      weight: casts a kernel [D, F].
      gradient: casts the gradient of an output [N, F].
      mixed: multiplies the operands of the weights' gradient, [D, N] and [F, N], by
        one orthogonal matrix along N, before they are cast.
    """

    activation: Cast
    weight: Cast
    gradient: Cast
    mixed: Callable[[jax.Array], jax.Array] = lambda x: x


def mx_recipe(
    forward: FloatFormat, backward: FloatFormat, *, native: bool = False
) -> Recipe:
    """Return blocks of 32 along the sum [1]."""

    def cast(x: jax.Array, axis: int) -> BlockMatrix:
        return mx(x, forward, axis, native=native)

    return Recipe(cast, cast, lambda x, axis: mx(x, backward, axis, native=native))


def deepseek_recipe(forward: FloatFormat, backward: FloatFormat) -> Recipe:
    """Return blocks of 128 along the sum, and of 128 x 128 for weights [2]."""
    return Recipe(
        lambda x, axis: deepseek(x, forward, axis),
        lambda x, axis: deepseek(x, forward, axis, rows=DEEPSEEK_BLOCK),
        lambda x, axis: deepseek(x, backward, axis),
    )


def nvfp4_recipe(*, native: bool = False) -> Recipe:
    """Return blocks of 16 along the sum, and of 16 x 16 for weights; gradients are
    rounded stochastically [3].
    """
    return Recipe(
        lambda x, axis: nvfp4(x, axis, native=native),
        lambda x, axis: nvfp4(x, axis, rows=NVFP4_BLOCK, native=native),
        lambda x, axis: nvfp4(x, axis, stochastic=True, native=native),
        lambda x: hadamard(x, HADAMARD, jnp.float32),
    )


class BlockScaledDot:
    """The product of a linear layer, and the two of its backward pass, with operands
    cast by a recipe.

    Input and kernel are cast once for both passes: between them are their bytes, cast
    along the axes that the backward pass sums over.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._product = _product_of(recipe)

    def __call__(
        self, lhs_NxD: jax.Array, rhs_DxF: jax.Array, dims: Any, **_: Any
    ) -> jax.Array:
        """Return the product [N, F] in the dtype of `lhs`; the gradient of `rhs` has
        the dtype of `rhs`. ValueError: not a product of two matrices.
        """
        check_matrices("BlockScaledDot", dims)
        return self._product(lhs_NxD, rhs_DxF)


def _product_of(recipe: Recipe) -> Callable[[jax.Array, jax.Array], jax.Array]:
    @jax.custom_vjp
    def product(x_NxD: jax.Array, w_DxF: jax.Array) -> jax.Array:
        x = recipe.activation(x_NxD, 1)
        return x.times(recipe.weight(w_DxF, 0), x_NxD.dtype)

    def forward(x_NxD: jax.Array, w_DxF: jax.Array) -> tuple[jax.Array, tuple]:
        x = recipe.activation(recipe.mixed(x_NxD.T), 1)
        # An empty slice has the dtype of the kernel's gradient.
        return product(x_NxD, w_DxF), (x, recipe.weight(w_DxF, 1), w_DxF[:0])

    def backward(residuals: tuple, g_NxF: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, w, like_w = residuals
        d_x_NxD = recipe.gradient(g_NxF, 1).times(w, g_NxF.dtype)
        g = recipe.gradient(recipe.mixed(g_NxF.T), 1)
        return d_x_NxD, x.times(g, like_w.dtype)

    product.defvjp(forward, backward)
    return product
