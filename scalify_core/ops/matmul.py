"""Matrix products of rounded operands: FP8, and what the caller rounds.

FP8 operands are E4M3 forward, and E5M2 or E4M3 for the gradient of the output.

    y  = X8 W8             X8, W8: saturating casts to E4M3; fast accumulation
    dX = G8 W8^T           G8: a saturating cast of dy to E5M2, or E4M3
    dW = X8^T G8           residuals are X8 and W8, never the wide operands

The operands of every product are real FP8 arrays, and the program names the algorithm.
XLA needs both to choose cuBLASLt's FP8 kernels, and cannot undo either. Wide operands
that were rounded to FP8 and back, scales that are vectors, or a derivative left to AD
would silently run in BF16. Programs compiled for other platforms than CUDA
multiply the same FP8 numbers in FP32.

References:
    Micikevicius et al., FP8 formats for deep learning, 2022
    (https://arxiv.org/abs/2209.05433).
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalify_core.numerics import compiler_hints
from scalify_core.numerics.amax import measured
from scalify_core.numerics.formats import (
    E4M3,
    E5M2,
    FP16,
    MIN_SCALE,
    FloatFormat,
    is_float,
)
from scalify_core.ops.composite import composite

# cuBLASLt's FP8 kernels need rows, columns and contracted sizes that it divides. XLA
# pads others itself, in kernels of their own, but its compiler refuses a product of one
# row.
MULTIPLE = 16

Axes = tuple[int, ...]
Sizes = tuple[int, int, int]
DimensionNumbers = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]


@dataclasses.dataclass(eq=False)
class Fp8DotGeneral:
    """`jax.lax.dot_general` in FP8, for the `dot_general` argument of Flax layers.

    A product whose rows, columns or contracted elements are not multiples of 16 is done
    by `jax.lax.dot_general` in the operands' dtype, with a warning once per shape.
    Under `vmap` the sizes are those of one entry, whose gradients would be made one by
    one and then added: give the layer all rows at once.
    `skipped` has the shapes, once the layer was traced.

    It is differentiable once. A gradient of a gradient through the product has no
    meaning, since the FP8 operands that the first one keeps have none: in plain
    programs it is NaN, under `scalify` JAX raises ValueError about the FP8 precision.

    Attributes:
        name: the name of the layer, for the warning.
        current_scaling: whether plain programs divide each tensor before its cast, by
            the power of two that brings its largest magnitude into [128, 256) for E4M3,
            [16384, 32768) for E5M2, and multiply the product by these. Under `scalify`
            the scales of the data, propagated or measured, are in their place.
        keep_rhs: with static scales, whether a 16-bit right operand, a parameter, is
            kept for the backward pass in FP8: a byte an element. For (rows, k) (k,
            columns) one kernel writes both orders that the GEMMs read. Otherwise it is
            cast again. Operands of other widths, measured scales and plain programs
            always keep the FP8 copy.
        rhs_gradient: with static scales, the dtype that the right operand's gradient is
            cast to where it is computed, so that a loop over layers stacks it in that
            dtype; None: the dtype of the result.
        gradient: the format that the gradient of the result is cast to, E5M2 or E4M3,
            which has a digit more and 14 octaves less.
        skipped: the (rows, columns, contracted) of the products not done in FP8.
    """

    name: str = "fp8_dot_general"
    _: dataclasses.KW_ONLY
    current_scaling: bool = False
    # At 124M 1005 kernels a step with it, 1053 without, for 0.08 GiB; at 1558M the
    # copies are 1.37 GiB.
    keep_rhs: bool = False
    # A scan would stack the gradients in 16 bits, and cast the stack behind the loop:
    # 45 GiB at 7B, in place of 33.
    rhs_gradient: Any = None
    # E4M3 halves the rounding error at the same speed, where 18 octaves hold the
    # gradients.
    gradient: FloatFormat = E5M2
    skipped: set[Sizes] = dataclasses.field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        """Raise ValueError for another format of the gradient."""
        if self.gradient not in (E4M3, E5M2):
            raise ValueError(
                f"{self.name}: the gradient of an FP8 product is cast to e5m2 or e4m3,"
                f" not {self.gradient}"
            )
        if self.rhs_gradient is not None:
            self.rhs_gradient = str(jnp.dtype(self.rhs_gradient))

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: None = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: None = None,
    ) -> jax.Array:
        """Return the product of `lhs` and `rhs`, with the dimensions of
        `jax.lax.dot_general`.

        Args:
            lhs: float array.
            rhs: float array.
            dimension_numbers: ((lhs contracted, rhs contracted), (lhs batch, rhs
                batch)) axes.
            precision: must be None: the precision of an FP8 product is given.
            preferred_element_type: FP32, BF16 or FP16; by default the dtype that the
                operands promote to.
            out_sharding: must be None: explicitly sharded axes are not supported, let
                the compiler place the result.

        Raises:
            ValueError: `precision` or `out_sharding` is given.
            TypeError: an operand is not of a floating-point dtype, or the result's
                dtype is none of the three.
        """
        if precision is not None or out_sharding is not None:
            raise ValueError(
                f"{self.name}: FP8 takes no precision ({precision}) and no out_sharding"
                f" ({out_sharding})"
            )
        dtype = jnp.dtype(
            preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
        )
        results = (jnp.float32, jnp.bfloat16, jnp.float16)
        if not (dtype in results and is_float(lhs) and is_float(rhs)):
            raise TypeError(
                f"{self.name}: {dtype} of {lhs.dtype} and {rhs.dtype}: operands of an"
                " FP8 product are floats, and its result is float32, bfloat16 or"
                " float16"
            )
        dims = normalized(dimension_numbers)
        sizes = matrix_sizes(lhs.shape, rhs.shape, dims)
        if any(size % MULTIPLE for size in sizes):
            # Once a shape: layers, passes and recomputed blocks trace the same product
            # again.
            if sizes not in self.skipped:
                self.skipped.add(sizes)
                warnings.warn(
                    f"{self.name}: not FP8 but {dtype}, because (rows, columns,"
                    f" contracted) = {sizes} are not all multiples of {MULTIPLE}"
                    " (under vmap these are of one entry: give the layer all rows at"
                    " once instead)",
                    stacklevel=2,
                )
            return lax.dot_general(lhs, rhs, dims, preferred_element_type=dtype)
        dtypes = str(lhs.dtype), str(rhs.dtype), str(dtype)
        product = Product(
            dims,
            sizes,
            dtypes,
            self.current_scaling,
            self.keep_rhs,
            self.rhs_gradient,
            self.gradient,
        )
        return _fp8_dot(lhs, rhs, product=product)

    def quantize(self, rhs: jax.Array) -> tuple[jax.Array, float | jax.Array]:
        """Return the right operand in FP8, and its scale, as plain programs have it.

        Under `scalify` it is the data of a ScaledArray, whose scale comes on top.
        """
        if self.current_scaling:
            data, scale = measured(rhs, E4M3.dtype)
            # Zeros have no size. In a checkpoint their measured scale, times that of a
            # ScaledArray, would be zero.
            return data, jnp.where(scale == MIN_SCALE, jnp.float32(1), scale)
        return _cast(rhs, E4M3), 1.0

    @property
    def input_scale(self) -> float | None:
        """The scale of the left operand in plain programs; None: it is measured."""
        if self.current_scaling:
            return None
        return 1.0


fp8_dot_general = Fp8DotGeneral()
"""`jax.lax.dot_general` in FP8: E4M3 operands, E5M2 gradients.

For the `dot_general` argument of Flax layers. A product whose rows, columns or
contracted elements are not multiples of 16 is done in the operands' dtype, with a
warning once per shape. It is differentiable once.
"""


def normalized(dimension_numbers: Any) -> DimensionNumbers:
    """Return hashable dimension numbers: tuples at every level."""
    (lhs, rhs), (lhs_batch, rhs_batch) = dimension_numbers
    return (tuple(lhs), tuple(rhs)), (tuple(lhs_batch), tuple(rhs_batch))


def matrix_sizes(
    lhs: Sequence[int], rhs: Sequence[int], dims: DimensionNumbers
) -> Sizes:
    """Return (rows, columns, contracted elements) of each matrix of a product.

    Batch axes do not count.
    """
    (lhs_contract, _), (lhs_batch, rhs_batch) = dims
    contracted = math.prod(lhs[axis] for axis in lhs_contract)
    rows = math.prod(lhs[axis] for axis in _rest(len(lhs), lhs_contract, lhs_batch))
    columns = math.prod(rhs[axis] for axis in _rest(len(rhs), dims[0][1], rhs_batch))
    return rows, columns, contracted


def _rest(rank: int, *taken: Axes) -> Axes:
    """Return the axes that are in none of `taken`, in order."""
    return tuple(axis for axis in range(rank) if axis not in sum(taken, ()))


class Product(NamedTuple):
    """The static description of one product, which its rule sees.

    Attributes:
        dims: dimension numbers.
        sizes: rows, columns and contracted elements.
        dtypes: of lhs, rhs and the result.
        current_scaling, keep_rhs, rhs_gradient, gradient: see `Fp8DotGeneral`.
    """

    dims: DimensionNumbers
    sizes: Sizes
    dtypes: tuple[str, str, str]
    current_scaling: bool
    keep_rhs: bool
    rhs_gradient: str | None
    gradient: FloatFormat


# JAX's derivative of a cast would multiply operands that are not quantized, in BF16: so
# both passes are written here.
@composite(name="fp8_dot_general")
def _fp8_dot(lhs: jax.Array, rhs: jax.Array, *, product: Product) -> jax.Array:
    return _forward(lhs, rhs, product=product)[0]


def _forward(
    lhs: jax.Array, rhs: jax.Array, *, product: Product
) -> tuple[jax.Array, tuple]:
    """Return the product, and as residuals the FP8 operands and measured scales."""
    if not product.current_scaling:
        lhs8, rhs8 = _cast(lhs, E4M3), _cast(rhs, E4M3)
        out = dot_fp8(lhs8, rhs8, product.dims, product.dtypes[2], fast=True)
        return out, (lhs8, rhs8)
    (lhs8, lhs_scale), (rhs8, rhs_scale) = (measured(x, E4M3.dtype) for x in (lhs, rhs))
    dtype = product.dtypes[2]
    out = dot_fp8(lhs8, rhs8, product.dims, _unscaled_dtype(dtype), fast=True)
    out = _scaled(out, dtype, lhs_scale, rhs_scale)
    return out, (lhs8, rhs8, lhs_scale, rhs_scale)


def _backward(
    residuals: tuple, gradient: jax.Array, *, product: Product
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of lhs and rhs, in their dtypes."""
    # The residuals are the FP8 copies, which also halves what the forward pass keeps.
    lhs8, rhs8, *scales = residuals
    lhs_dtype, rhs_dtype, _ = product.dtypes
    dtypes = lhs_dtype, rhs_dtype
    if not product.current_scaling:
        gradient8 = _cast(gradient, product.gradient)
        return gradients(lhs8, rhs8, gradient8, product.dims, dtypes)
    gradient8, scale = measured(gradient, product.gradient.dtype)
    wide = [_unscaled_dtype(dtype) for dtype in dtypes]
    d_lhs, d_rhs = gradients(lhs8, rhs8, gradient8, product.dims, wide)
    lhs_scale, rhs_scale = scales
    return _scaled(d_lhs, lhs_dtype, scale, rhs_scale), _scaled(
        d_rhs, rhs_dtype, lhs_scale, scale
    )


_fp8_dot.defvjp(_forward, _backward)


def gradients(
    lhs8: jax.Array,
    rhs8: jax.Array,
    gradient8: jax.Array,
    dims: DimensionNumbers,
    dtypes: Sequence[Any],
    alphas: tuple[float, float] = (1.0, 1.0),
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of lhs and rhs, in their axes.

    They are the FP8 products of the result's gradient and the other operand, in these
    dtypes, times `alphas`.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dims
    lhs_kept = _rest(lhs8.ndim, lhs_contract, lhs_batch)
    rhs_kept = _rest(rhs8.ndim, rhs_contract, rhs_batch)
    # The axes of the result's gradient are (batch, kept of lhs, kept of rhs).
    end = len(lhs_batch) + len(lhs_kept)
    batch, rows = _range(0, len(lhs_batch)), _range(len(lhs_batch), end)
    columns = _range(end, gradient8.ndim)
    dot = functools.partial(dot_fp8, fast=False)
    of_lhs = (columns, rhs_kept), (batch, rhs_batch)
    d_lhs = dot(gradient8, rhs8, of_lhs, dtypes[0], alphas[0])
    # Its axes: (batch, kept, contracted in the order of rhs's axes).
    pairs = sorted(zip(rhs_contract, lhs_contract, strict=True))
    d_lhs = _moved(d_lhs, (*lhs_batch, *lhs_kept, *(axis for _, axis in pairs)))
    of_rhs = (lhs_kept, rows), (lhs_batch, batch)
    d_rhs = dot(lhs8, gradient8, of_rhs, dtypes[1], alphas[1])
    # Its axes: (batch, contracted in the order of lhs's axes, kept).
    pairs = sorted(zip(lhs_contract, rhs_contract, strict=True))
    return d_lhs, _moved(d_rhs, (*rhs_batch, *(axis for _, axis in pairs), *rhs_kept))


def _range(start: int, stop: int) -> Axes:
    return tuple(range(start, stop))


def _moved(x: jax.Array, axes: Axes) -> jax.Array:
    """Return `x` with its axis i moved to `axes[i]`."""
    return lax.transpose(x, [axes.index(i) for i in range(len(axes))])


def _contracted_last(x: jax.Array, contracted: Axes, batch: Axes) -> jax.Array:
    """Return `x` with its axes in the order batch, kept, contracted."""
    return lax.transpose(x, (*batch, *_rest(x.ndim, contracted, batch), *contracted))


def _cast(x: jax.Array, fmt: FloatFormat) -> jax.Array:
    return fmt.cast(x.astype(jnp.float32))


def _unscaled_dtype(dtype: str) -> str:
    """Return the dtype of a product that scales are yet to multiply."""
    # It can leave the range of FP16, where the scaled one does not. BF16 has the range
    # of FP32.
    return "bfloat16" if dtype == "bfloat16" else "float32"


def _scaled(
    x: jax.Array, dtype: str, lhs_scale: jax.Array, rhs_scale: jax.Array
) -> jax.Array:
    return (x * (lhs_scale * rhs_scale)).astype(dtype)


def dot_fp8(
    lhs8: jax.Array,
    rhs8: jax.Array,
    dims: DimensionNumbers,
    dtype: Any,
    alpha: float = 1.0,
    *,
    fast: bool,
) -> jax.Array:
    """Return the product of two FP8 arrays times a constant, accumulated in FP32.

    It is rounded to `dtype`. On CUDA it is cuBLASLt's, where `fast` keeps some 14 bits
    in the accumulator: enough for the forward pass. The constant is the GEMM's own
    (`compiler_hints.scales_in_products`), or multiplies its result before the rounding
    to FP16. An FP16 result is never stored without the constant, where it would
    overflow.

    The platform of lowering decides, so a CPU-only machine compiles for a GPU. The
    function is not differentiable: the derivative would not be FP8.
    """
    dtype = jnp.dtype(dtype)
    preset = lax.DotAlgorithmPreset
    if fast:
        algorithm = preset.ANY_F8_ANY_F8_F32_FAST_ACCUM
    else:
        algorithm = preset.ANY_F8_ANY_F8_F32
    # Constants that FP16 holds as normal numbers. Others are multiplied in FP32, so
    # that none loses digits or vanishes.
    fits = float(np.asarray(alpha, dtype)) == alpha and (
        dtype != jnp.float16 or alpha >= FP16.min_normal
    )
    given = alpha != 1 and compiler_hints.scales_in_products.value

    def cuda(lhs8: jax.Array, rhs8: jax.Array) -> jax.Array:
        # Contracted axes last in both operands, which is the layout that cuBLASLt
        # wants. And in programs for several devices XLA's partitioner forgets the
        # algorithm of every product written as (rows, k) (k, columns), after which the
        # product would no longer be FP8.
        order = dims
        if not compiler_hints.products_in_any_layout.value:
            (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dims
            lhs8 = _contracted_last(lhs8, lhs_contract, lhs_batch)
            rhs8 = _contracted_last(rhs8, rhs_contract, rhs_batch)
            batch, n = _range(0, len(lhs_batch)), len(lhs_contract)
            last = _range(lhs8.ndim - n, lhs8.ndim), _range(rhs8.ndim - n, rhs8.ndim)
            order = last, (batch, batch)
        product = functools.partial(lax.dot_general, dimension_numbers=order)
        if given:
            # FP8 arrays that are widened, the left one times a constant: XLA's rewriter
            # makes of the constant the scale of the operand. It is the GEMM's argument,
            # so equal products are one kernel, whatever their scales.
            wide = dtype if fits else np.dtype(np.float32)
            # Held: the products are FP8 without it, too, but XLA may then write both
            # orders of an array in one kernel, at a quarter of an H100's bandwidth.
            lhs, rhs = (
                compiler_hints.kept_narrow(x).astype(wide) for x in (lhs8, rhs8)
            )
            # XLA accumulates fast unless the precision is the highest.
            exact = None if fast else lax.Precision.HIGHEST
            out = product(
                lhs * np.asarray(alpha, wide),
                rhs,
                precision=exact,
                preferred_element_type=wide,
            )
            return out.astype(dtype)
        # XLA merges equal constants, and folds a constant into the GEMM only if one
        # product uses it. Otherwise the result would be stored without the constant,
        # and may overflow FP16: so it is FP32 first.
        if alpha == 1 or (fits and dtype != jnp.float16):
            result = dtype
        else:
            result = np.dtype(np.float32)
        out = product(lhs8, rhs8, precision=algorithm, preferred_element_type=result)
        if alpha == 1:
            return out
        return (out * np.asarray(alpha, result)).astype(dtype)

    def default(lhs8: jax.Array, rhs8: jax.Array) -> jax.Array:
        lhs, rhs = lhs8.astype(jnp.float32), rhs8.astype(jnp.float32)
        out = lax.dot_general(lhs, rhs, dims, precision=lax.Precision.HIGHEST)
        return (out if alpha == 1 else out * np.float32(alpha)).astype(dtype)

    # By the platform of lowering: jax.default_backend() is "cpu" where a machine
    # without a GPU compiles for one.
    return lax.platform_dependent(lhs8, rhs8, cuda=cuda, default=default)


# A product of matrices whose operands are rounded by a recipe of the caller's.
# The caller's functions are homogeneous in powers of two: twice an operand gives twice
# the product, bit for bit. So under `scalify` they act on the data, and the scales of
# the operands are multiplied. That holds for block scales that are powers of two.


class Rounded(NamedTuple):
    """The functions of a product of [N, D] and [D, F].

    Attributes:
        forward: (lhs, rhs) -> (product, rounded lhs, rounded rhs), which are pytrees
            whose first array grows with the operand; the others do not.
        backward: (rounded lhs, rounded rhs, gradient) -> the gradients of lhs and rhs.
    """

    forward: Callable[..., tuple[jax.Array, Any, Any]]
    backward: Callable[..., tuple[jax.Array, jax.Array]]


def rounded_product(lhs: jax.Array, rhs: jax.Array, rounded: Rounded) -> jax.Array:
    """Return the product, whose gradients are those of `rounded.backward`."""
    sizes = len(lhs), rhs.shape[1], len(rhs)
    return _rounded_product(lhs, rhs, rounded=rounded, sizes=sizes)


# `sizes` is for the rule, which may see batches.


@composite(name="rounded_product")
def _rounded_product(
    lhs: jax.Array, rhs: jax.Array, *, rounded: Rounded, sizes: Sizes
) -> jax.Array:
    return rounded.forward(lhs, rhs)[0]


def _rounded_forward(
    lhs: jax.Array, rhs: jax.Array, *, rounded: Rounded, **_: Any
) -> tuple[jax.Array, tuple[Any, Any]]:
    out, *residuals = rounded.forward(lhs, rhs)
    return out, tuple(residuals)


def _rounded_backward(
    residuals: tuple[Any, Any], gradient: jax.Array, *, rounded: Rounded, **_: Any
) -> tuple[jax.Array, jax.Array]:
    return rounded.backward(*residuals, gradient)


_rounded_product.defvjp(_rounded_forward, _rounded_backward)
