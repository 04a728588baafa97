"""Products whose operands have a scale for each block, the rivals of one scale per
tensor; simulated in FP32, and MXFP8 also native.

An operand is cut into blocks along the axis that the product sums over, so that
hardware can scale partial sums. Each block has a scale from its largest magnitude, and
its numbers are rounded to a narrow format on that scale. The three products of a layer
sum over three different axes (input, output, tokens), so a tensor is rounded twice,
each time from the wide one.

The last block of an axis may be shorter. A block of zeros stays zeros; a block with a
number that is not finite becomes NaN. Where `jax.nn.scaled_dot_general` has the format,
its quantizer gives the same bits, except for blocks that it turns into NaN.

The native MXFP8 product is `jax.nn.scaled_matmul`. XLA computes it in one call of cuDNN
for a Blackwell GPU, and multiplies the widened operands for an older one. Other
platforms multiply them in FP32: the simulation, with operands of the same bits.

Legend: N tokens, D input width, F output width.

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
from typing import Any, NamedTuple, Self

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
from trainer.precision.dots import MATRICES, hadamard

FP4_MAX = 6.0  # of E2M1, which has no infinities and no NaN
HADAMARD = 16
MX_BLOCK = 32

Block = tuple[int, int]  # rows and columns


def amax_of_blocks(x: jax.Array, block: Block) -> jax.Array:
    """Return for each number of a matrix the largest magnitude in its block; NaN if one
    is not finite.
    """
    size = [min(b, n) for b, n in zip(block, x.shape, strict=True)]
    padded = jnp.pad(
        jnp.abs(x), [(0, -n % b) for n, b in zip(x.shape, size, strict=True)]
    )
    blocks = padded.reshape(
        padded.shape[0] // size[0], size[0], padded.shape[1] // size[1], size[1]
    )
    largest = jnp.broadcast_to(
        jnp.max(blocks, axis=(1, 3), keepdims=True), blocks.shape
    )
    largest = largest.reshape(padded.shape)[: x.shape[0], : x.shape[1]]
    return jnp.where(jnp.isfinite(largest), largest, jnp.nan)


def along(axis: int, length: int) -> Block:
    """Return a block of `length` numbers along an axis of a matrix."""
    return (length, 1) if axis == 0 else (1, length)


def mx_scale(largest: jax.Array, fmt: FloatFormat) -> jax.Array:
    """Return the least power of two on which the largest number of a block fits in
    `fmt`, FP32 from 2^-126 to 2^127.
    """
    wanted = largest / np.float32(fmt.max)
    below = pow2_floor(wanted)
    return jnp.where(below < wanted, 2 * below, below)


def mx(x: jax.Array, fmt: FloatFormat, axis: int) -> jax.Array:
    """Round FP32 `x` to `fmt` in blocks of 32 along `axis`, on the scales of
    `mx_scale`.
    """
    scale = mx_scale(amax_of_blocks(x, along(axis, MX_BLOCK)), fmt)
    return fmt.quantise(x * pow2_inverse(scale)) * scale


class MxMatrix(NamedTuple):
    """A matrix in MXFP8, with the axis K that a product sums over last.

    Attributes:
      data: FP8 [rows, K].
      scales: E8M0 [rows, K / 32], of the blocks.
    """

    data: jax.Array
    scales: jax.Array

    @classmethod
    def cast(cls, x: jax.Array, fmt: FloatFormat, axis: int) -> Self:
        """Round a matrix as `mx` does; `axis` has a multiple of 32 numbers."""
        x = x.astype(jnp.float32)
        rows = x if axis == 1 else x.T
        blocks = rows.reshape(len(rows), -1, MX_BLOCK)
        scales = mx_scale(amax_of_blocks(rows, (1, MX_BLOCK))[:, ::MX_BLOCK], fmt)
        data = fmt.cast(blocks * pow2_inverse(scales)[..., None])
        return cls(data.reshape(rows.shape), scales.astype(jnp.float8_e8m0fnu))

    def widened(self) -> jax.Array:
        """Return the numbers in FP32."""
        blocks = self.data.astype(jnp.float32).reshape(*self.scales.shape, MX_BLOCK)
        wide = blocks * self.scales.astype(jnp.float32)[..., None]
        return wide.reshape(self.data.shape)

    def times(self, other: "MxMatrix", dtype: Any) -> jax.Array:
        """Return the products of the rows of both, [rows, rows of `other`].

        They are accumulated in FP32 and rounded to `dtype`.
        """

        def cuda(lhs: MxMatrix, rhs: MxMatrix) -> jax.Array:
            a, b = (jax.tree.map(lambda x: x[None], x) for x in (lhs, rhs))
            return jax.nn.scaled_matmul(
                a.data, b.data, a.scales, b.scales, preferred_element_type=dtype
            )[0]

        def default(lhs: MxMatrix, rhs: MxMatrix) -> jax.Array:
            exact = jnp.matmul(lhs.widened(), rhs.widened().T, precision="highest")
            return exact.astype(dtype)

        return jax.lax.platform_dependent(self, other, cuda=cuda, default=default)


def quantize_on_amax(x: jax.Array, fmt: FloatFormat, block: Block) -> jax.Array:
    """Round FP32 `x` to `fmt` in blocks, on FP32 scales that map each block's largest
    number to the format's.
    """
    largest = amax_of_blocks(x, block)
    scale = jnp.where(largest == 0, 1, largest / np.float32(fmt.max))
    return fmt.quantise(x / scale) * scale


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


def nvfp4(x: jax.Array, block: Block, *, stochastic: bool = False) -> jax.Array:
    """Round FP32 `x` to E2M1 in blocks, on E4M3 scales times one FP32 scale for the
    tensor.

    `stochastic`: the bits are a hash of the position and of all of `x`, so they differ
    between steps, and a repeated step is the same.
    """
    largest = jnp.max(jnp.abs(x))
    tensor_scale = jnp.where(largest == 0, 1, largest / np.float32(FP4_MAX * E4M3.max))
    scale = E4M3.quantise(amax_of_blocks(x / tensor_scale, block) / np.float32(FP4_MAX))
    bits = hash_bits(x) if stochastic else None
    return (
        fp4(x / tensor_scale / jnp.where(scale == 0, 1, scale), bits)
        * scale
        * tensor_scale
    )


Rounding = Callable[[jax.Array, int], jax.Array]


class Recipe(NamedTuple):
    """The rounding of the operands of a layer's three products, FP32 matrices to FP32.

    Each rounding is given the axis that the product sums over.

    Attributes:
      activation: rounds an input [N, D].
      weight: rounds a kernel [D, F].
      gradient: rounds the gradient of an output [N, F].
      mixed: multiplies the operands of the weights' gradient by one orthogonal matrix
        along N, before they are rounded.
    """

    activation: Rounding
    weight: Rounding
    gradient: Rounding
    mixed: Callable[[jax.Array], jax.Array] = lambda x: x


def mx_recipe(forward: FloatFormat, backward: FloatFormat) -> Recipe:
    """Return blocks of 32 along the sum [1]."""
    return Recipe(
        lambda x, axis: mx(x, forward, axis),
        lambda x, axis: mx(x, forward, axis),
        lambda x, axis: mx(x, backward, axis),
    )


def deepseek_recipe(forward: FloatFormat, backward: FloatFormat) -> Recipe:
    """Return blocks of 128 along the sum, and of 128 x 128 for weights [2]."""
    return Recipe(
        lambda x, axis: quantize_on_amax(x, forward, along(axis, 128)),
        lambda x, axis: quantize_on_amax(x, forward, (128, 128)),
        lambda x, axis: quantize_on_amax(x, backward, along(axis, 128)),
    )


def nvfp4_recipe() -> Recipe:
    """Return blocks of 16 along the sum, and of 16 x 16 for weights; gradients are
    rounded stochastically [3].
    """
    return Recipe(
        lambda x, axis: nvfp4(x, along(axis, 16)),
        lambda x, axis: nvfp4(x, (16, 16)),
        lambda x, axis: nvfp4(x, along(axis, 16), stochastic=True),
        lambda x: hadamard(x, HADAMARD),
    )


class BlockScaledDot:
    """The product of a linear layer, and the two of its backward pass, with operands
    rounded by a recipe.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._product = _product_of(recipe)

    def __call__(
        self, lhs_NxD: jax.Array, rhs_DxF: jax.Array, dims: Any, **_: Any
    ) -> jax.Array:
        """Return the product, FP32 [N, F]. ValueError: not a product of two
        matrices.
        """
        if dims != MATRICES:
            raise ValueError(
                "BlockScaledDot multiplies [N, D] and [D, F]; got dimension numbers"
                f" {dims}"
            )
        return self._product(lhs_NxD, rhs_DxF.astype(jnp.float32))


def _product_of(recipe: Recipe) -> Callable[[jax.Array, jax.Array], jax.Array]:
    @jax.custom_vjp
    def product(x_NxD: jax.Array, w_DxF: jax.Array) -> jax.Array:
        return recipe.activation(x_NxD, 1) @ recipe.weight(w_DxF, 0)

    def backward(
        operands: tuple[jax.Array, jax.Array], g_NxF: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        x_NxD, w_DxF = operands
        d_x_NxD = recipe.gradient(g_NxF, 1) @ recipe.weight(w_DxF, 1).T
        left_NxD, right_NxF = recipe.mixed(x_NxD), recipe.mixed(g_NxF)
        return d_x_NxD, recipe.activation(left_NxD, 0).T @ recipe.gradient(right_NxF, 0)

    product.defvjp(
        lambda x_NxD, w_DxF: (product(x_NxD, w_DxF), (x_NxD, w_DxF)), backward
    )
    return product


class MxDot:
    """The MXFP8 product of a linear layer, and the two of its backward pass.

    Input and kernel are cast once for both passes: between them are their bytes, cast
    along the axes that the backward pass sums over.
    """

    def __init__(self, forward: FloatFormat, backward: FloatFormat) -> None:
        self._product = _mx_product_of(forward, backward)

    def __call__(
        self, lhs_NxD: jax.Array, rhs_DxF: jax.Array, dims: Any, **_: Any
    ) -> jax.Array:
        """Return the product in the dtype of `lhs`, [N, F]; the gradient of `rhs` has
        the dtype of `rhs`. N, D and F are multiples of 32. ValueError: not a product of
        two matrices.
        """
        if dims != MATRICES:
            raise ValueError(
                f"MxDot multiplies [N, D] and [D, F]; got dimension numbers {dims}"
            )
        return self._product(lhs_NxD, rhs_DxF)


def _mx_product_of(
    fmt: FloatFormat, backward_fmt: FloatFormat
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    @jax.custom_vjp
    def product(x_NxD: jax.Array, w_DxF: jax.Array) -> jax.Array:
        x = MxMatrix.cast(x_NxD, fmt, 1)
        return x.times(MxMatrix.cast(w_DxF, fmt, 0), x_NxD.dtype)

    def forward(x_NxD: jax.Array, w_DxF: jax.Array) -> tuple[jax.Array, tuple]:
        for_backward = MxMatrix.cast(x_NxD, fmt, 0), MxMatrix.cast(w_DxF, fmt, 1)
        # An empty slice has the dtype of the kernel's gradient.
        return product(x_NxD, w_DxF), (*for_backward, w_DxF[:0])

    def backward(residuals: tuple, g_NxF: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, w, like_w = residuals
        d_x_NxD = MxMatrix.cast(g_NxF, backward_fmt, 1).times(w, g_NxF.dtype)
        return d_x_NxD, x.times(MxMatrix.cast(g_NxF, backward_fmt, 0), like_w.dtype)

    product.defvjp(forward, backward)
    return product
