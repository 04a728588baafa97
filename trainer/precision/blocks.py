"""Products whose operands have a scale for each block, the rivals of one scale a
tensor; simulated in FP32.

An operand is cut into blocks. Each has a scale of its own, from its largest magnitude,
and its numbers are rounded to a narrow format on that scale. Blocks lie along the axis
that the product adds up, so that hardware can scale partial sums. The three products of
a layer add up three different axes (input, output, tokens), so a tensor is rounded
twice, each time from the wide one: there is no one narrow form of it.

The last block of an axis may be shorter. A block of zeros is zeros, one with a number
that is not finite is NaN. Where `jax.nn.scaled_dot_general` has the format, its
quantiser gives the same bits, but for blocks of which that makes NaN.

Legend: N tokens, D input width, F output width.

References:
    [1] OCP Microscaling Formats (MX) Specification 1.0: blocks of 32, scales E8M0. The
        scale is rounded up, as in Mishra et al. 2025, "Recipes for Pre-training LLMs
        with MXFP8", https://arxiv.org/abs/2506.08027.
    [2] DeepSeek-AI 2024, "DeepSeek-V3 Technical Report",
        https://arxiv.org/abs/2412.19437, section 3.3: E4M3 in all three products, FP32
        scales for 1 x 128 of activations and gradients and 128 x 128 of weights.
    [3] NVIDIA 2025, "Pretraining Large Language Models with NVFP4",
        https://arxiv.org/abs/2509.25149: blocks of 16 with a scale in E4M3 and one in
        FP32 a tensor, 16 x 16 of weights, stochastic rounding of gradients, and a
        random Hadamard transform of the operands of the weights' gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalify_core import FloatFormat
from scalify_core.formats import E4M3, hash_bits, pow2_floor, pow2_inverse
from trainer.precision.dots import MATRICES, hadamard

FP4_MAX = 6.0  # of E2M1, which has neither infinities nor NaN
HADAMARD = 16

Block = tuple[int, int]  # rows and columns


def largest_in_blocks(x: jax.Array, block: Block) -> jax.Array:
    """Of each number of a matrix the largest magnitude in its block; NaN where one is
    not finite.
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
    """A block of so many numbers along an axis of a matrix."""
    return (length, 1) if axis == 0 else (1, length)


def mx(x: jax.Array, fmt: FloatFormat, axis: int) -> jax.Array:
    """FP32 `x` in blocks of 32 along `axis`, each in `fmt` on the least power of two
    that holds its largest number.
    """
    wanted = largest_in_blocks(x, along(axis, 32)) / np.float32(fmt.max)
    below = pow2_floor(wanted)
    scale = jnp.where(below < wanted, 2 * below, below)
    return fmt.quantise(x * pow2_inverse(scale)) * scale


def on_largest(x: jax.Array, fmt: FloatFormat, block: Block) -> jax.Array:
    """FP32 `x` in blocks, each in `fmt` on an FP32 scale that makes its largest number
    that of the format.
    """
    largest = largest_in_blocks(x, block)
    scale = jnp.where(largest == 0, 1, largest / np.float32(fmt.max))
    return fmt.quantise(x / scale) * scale


def fp4(x: jax.Array, bits: jax.Array | None = None) -> jax.Array:
    """FP32 numbers in E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6), saturating: to nearest, ties
    to even, or by 16 random bits.
    """
    size = jnp.abs(x)
    step = jnp.where(
        size < 2, np.float32(0.5), jnp.where(size < 4, np.float32(1), np.float32(2))
    )
    steps = size / step
    if bits is None:
        whole = jnp.round(steps)
    else:
        whole = jnp.floor(
            steps + (bits.astype(jnp.float32) + 0.5) * np.float32(2.0**-16)
        )
    return jnp.copysign(jnp.minimum(whole * step, FP4_MAX), x)


def nvfp4(x: jax.Array, block: Block, *, stochastic: bool = False) -> jax.Array:
    """FP32 `x` in blocks in E2M1, on scales in E4M3 times one in FP32 for the whole.

    `stochastic`: rounded with bits that are a hash of the place and of all of `x`: a
    number is not rounded the same way in every step, and a step that is repeated is the
    same.
    """
    largest = jnp.max(jnp.abs(x))
    whole = jnp.where(largest == 0, 1, largest / np.float32(FP4_MAX * E4M3.max))
    scale = E4M3.quantise(largest_in_blocks(x / whole, block) / np.float32(FP4_MAX))
    bits = hash_bits(x) if stochastic else None
    return fp4(x / whole / jnp.where(scale == 0, 1, scale), bits) * scale * whole


Rounding = Callable[[jax.Array, int], jax.Array]


class Recipe(NamedTuple):
    """How the operands of a layer's three products are rounded: FP32 matrices, for a
    sum over an axis, to FP32.

    Attributes:
      activation: an input [N, D].
      weight: a kernel [D, F].
      gradient: the gradient of an output [N, F].
      mixed: the operands of the weights' gradient before they are rounded, both times
          one orthogonal matrix along N.
    """

    activation: Rounding
    weight: Rounding
    gradient: Rounding
    mixed: Callable[[jax.Array], jax.Array] = lambda x: x


def mx_recipe(forward: FloatFormat, backward: FloatFormat) -> Recipe:
    """Blocks of 32 along the sum, everywhere [1]."""
    return Recipe(
        lambda x, axis: mx(x, forward, axis),
        lambda x, axis: mx(x, forward, axis),
        lambda x, axis: mx(x, backward, axis),
    )


def deepseek_recipe(forward: FloatFormat, backward: FloatFormat) -> Recipe:
    """Blocks of 128 along the sum, of weights of 128 x 128 [2]."""
    return Recipe(
        lambda x, axis: on_largest(x, forward, along(axis, 128)),
        lambda x, axis: on_largest(x, forward, (128, 128)),
        lambda x, axis: on_largest(x, backward, along(axis, 128)),
    )


def nvfp4_recipe() -> Recipe:
    """Blocks of 16 along the sum, of weights of 16 x 16, gradients rounded
    stochastically [3].
    """
    return Recipe(
        lambda x, axis: nvfp4(x, along(axis, 16)),
        lambda x, axis: nvfp4(x, (16, 16)),
        lambda x, axis: nvfp4(x, along(axis, 16), stochastic=True),
        lambda x: hadamard(x, HADAMARD),
    )


class BlockScaledDot:
    """The product of a linear layer, and the two of its backward pass, of operands that
    a recipe has rounded.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._product = _product_of(recipe)

    def __call__(
        self, lhs_NxD: jax.Array, rhs_DxF: jax.Array, dims: Any, **_: Any
    ) -> jax.Array:
        """The product, FP32 [N, F]. ValueError for any other than that of two
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
