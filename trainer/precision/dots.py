"""The `dot_general` of a linear layer in each precision.

Each takes activations in the compute dtype and the kernel as the master weight. A
kernel that is cast first, as layers do by default, has its gradient rounded to the
compute dtype on the way back.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.linen.fp8_ops import fp8_scaled_dot_general, in_q

from scalify_core.numerics.formats import E4M3, FloatFormat
from scalify_core.static import cast_on_backward, cast_on_forward

Dot = Callable[..., jax.Array]
Dims = Any  # dimension numbers of jax.lax.dot_general
MATRICES: Dims = (((1,), (0,)), ((), ()))  # [N, D] @ [D, F]


def check_matrices(name: str, dims: Dims) -> None:
    """Raise ValueError for dimension numbers other than those of two matrices."""
    if dims != MATRICES:
        raise ValueError(
            f"{name} multiplies [N, D] and [D, F]; got dimension numbers {dims}"
        )


class OverwriteWithGradient(nnx.Variable):
    """A variable whose "gradient" is its next value: Flax's convention for amax
    histories.
    """


class DelayedFp8Dot(nnx.Module):
    """Flax's FP8 product with delayed scaling: scales from the amax of the last
    steps.

    `dtype`: of the operands; a kernel is cast to it.
    """

    def __init__(self, history: int, dtype: np.dtype) -> None:
        self.dtype = dtype
        # The names and shapes are those of the arguments of `fp8_scaled_dot_general`,
        # which gets the histories by name.
        for tensor in ("lhs", "rhs", "grad"):
            setattr(
                self, f"{tensor}_scale", OverwriteWithGradient(jnp.ones(1, jnp.float32))
            )
            setattr(
                self,
                f"{tensor}_amax_history",
                OverwriteWithGradient(jnp.zeros(history, jnp.float32)),
            )

    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, dims: Dims, **_: Any
    ) -> jax.Array:
        """Return the product in the dtype of `lhs`; Flax rounds the gradient of `rhs`
        to it too.
        """
        histories = {
            name: value[...]
            for name, value in vars(self).items()
            if isinstance(value, OverwriteWithGradient)
        }
        return fp8_scaled_dot_general(
            lhs,
            rhs.astype(lhs.dtype),
            dims,
            preferred_element_type=lhs.dtype,
            quantize_compute_type=lhs.dtype,
            **histories,
        )

    def quantize(self, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the kernel in FP8, and its scale [1], as the next product has them."""
        return self._cast("rhs", rhs.astype(self.dtype))

    @property
    def input_scale(self) -> jax.Array:
        """The scale [1] of the next product's input, from the amax history alone."""
        # Flax takes the scale from the history before an operand's amax enters it, so
        # that any operand gives this scale.
        return self._cast("lhs", jnp.zeros(1, self.dtype))[1]

    def _cast(self, tensor: str, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = getattr(self, f"{tensor}_scale")[...]
        history = getattr(self, f"{tensor}_amax_history")[...]
        x8, new_scale = in_q(self.dtype, E4M3.dtype, x, scale, history)
        return x8, new_scale


class SimulatedDot:
    """The FP32 product of operands rounded to `forward`, with gradients rounded to
    `backward`: for formats without kernels.
    """

    def __init__(self, forward: FloatFormat, backward: FloatFormat) -> None:
        self.forward, self.backward = forward, backward

    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, dims: Dims, **_: Any
    ) -> jax.Array:
        """Return the product in FP32."""
        # AD keeps the rounded operands for the backward pass, as FP8 products do.
        lhs = cast_on_forward(lhs, self.forward)
        rhs = cast_on_forward(rhs, self.forward)
        return cast_on_backward(jax.lax.dot_general(lhs, rhs, dims), self.backward)


@jax.custom_vjp
def _clip(x: jax.Array, multiple: jax.Array) -> jax.Array:
    # In FP32: the square of 256 is beyond FP16.
    bound = multiple * jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)))).astype(
        x.dtype
    )
    return jnp.clip(x, -bound, bound)


# A straight-through gradient, as that of the saturating cast that follows.
_clip.defvjp(
    lambda x, multiple: (_clip(x, multiple), None), lambda _, gradient: (gradient, None)
)


class ClippedDot(nnx.Module):
    """`dot` of operands that are clipped to `multiple` times their RMS.

    A module, for the amax histories that `dot` may have.
    """

    def __init__(self, dot: Dot, multiple: float) -> None:
        self.dot, self.multiple = dot, multiple

    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, dims: Dims, **settings: Any
    ) -> jax.Array:
        """Return the product in the dtype of `dot`'s."""
        bound = jnp.float32(self.multiple)
        return self.dot(
            _clip(lhs, bound.astype(lhs.dtype)),
            _clip(rhs, bound.astype(rhs.dtype)),
            dims,
            **settings,
        )


class HadamardDot(nnx.Module):
    """`dot` of operands after a random Hadamard transform: both are multiplied by one
    orthogonal matrix along the contracted axis, in groups of `size` channels.

    The product stays the same, and an outlier is spread over the channels of its group.
    A module, for the amax histories that `dot` may have.
    """

    def __init__(self, dot: Dot, size: int) -> None:
        self.dot, self.size = dot, size

    def __call__(
        self, lhs_NxD: jax.Array, rhs_DxF: jax.Array, dims: Dims, **settings: Any
    ) -> jax.Array:
        """Return the product in the dtype of `dot`'s. ValueError: not a product of two
        matrices.
        """
        # `hadamard` mixes along the last axis of a matrix, which is the contracted one
        # here.
        check_matrices("HadamardDot", dims)
        mixed_DxF = hadamard(rhs_DxF.T, self.size).T
        return self.dot(hadamard(lhs_NxD, self.size), mixed_DxF, dims, **settings)


def hadamard(x_NxK: jax.Array, size: int, dtype: Any = None) -> jax.Array:
    """Multiply `x` by a random orthogonal matrix in groups of `size` along K.

    The signs are always the same. Columns beyond the last full group are mixed with
    zeros, so the result may have more columns. `size` is a power of two. `dtype`: of
    the result; None: that of `x`.
    """
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    # A constant seed: both operands of a product need the same matrix, and so does a
    # resumed run.
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size)
    padded = jnp.pad(x_NxK, ((0, 0), (0, -x_NxK.shape[1] % size)))
    groups = padded.reshape(len(x_NxK), -1, size)
    # Entries of 1 and -1 are exact in every dtype, and fit the scale 1 that scale
    # propagation gives to constants. The FP32 sums are divided by sqrt(size) instead.
    ones = (signs[:, None] * matrix).astype(x_NxK.dtype)
    # `highest`, because GPUs multiply FP32 operands in TF32 by default.
    mixed = jnp.einsum(
        "ngi,ij->ngj",
        groups,
        ones,
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    mixed = mixed.reshape(padded.shape) * (1 / math.sqrt(size))
    return mixed.astype(dtype or x_NxK.dtype)


@jax.custom_vjp
def _matmul(lhs_NxD: jax.Array, rhs_DxF: jax.Array) -> jax.Array:
    return lhs_NxD @ rhs_DxF.astype(lhs_NxD.dtype)


def _matmul_bwd(
    operands: tuple[jax.Array, jax.Array], gradient_NxF: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # JAX's derivative of the cast kernel is a product in the dtype of `lhs` that is
    # widened afterwards: the digits of the FP32 accumulation would be lost.
    lhs_NxD, rhs_DxF = operands
    d_lhs_NxD = gradient_NxF @ rhs_DxF.astype(lhs_NxD.dtype).T
    return d_lhs_NxD, jnp.matmul(
        lhs_NxD.T, gradient_NxF, preferred_element_type=rhs_DxF.dtype
    )


_matmul.defvjp(lambda lhs, rhs: (_matmul(lhs, rhs), (lhs, rhs)), _matmul_bwd)


def wide_gradient_dot(
    lhs: jax.Array, rhs: jax.Array, dims: Dims, **_: Any
) -> jax.Array:
    """Return `lhs @ rhs` in the dtype of `lhs`; the gradient of `rhs` is the FP32
    accumulation, not rounded first.
    """
    # Of operands of one dtype JAX's derivative already has that dtype.
    if lhs.dtype == rhs.dtype:
        return jax.lax.dot_general(lhs, rhs, dims)
    check_matrices("wide_gradient_dot", dims)
    return _matmul(lhs, rhs)


def narrow_gradient_dot(
    lhs: jax.Array, rhs: jax.Array, dims: Dims, **_: Any
) -> jax.Array:
    """Return `lhs @ rhs` and both gradients in the dtype of `lhs`."""
    check_matrices("narrow_gradient_dot", dims)
    # JAX's own gradient of `rhs` transposes a product. XLA turns that transpose into
    # another layout, and an update of several matrices would have to read two layouts.
    return _matmul(lhs, rhs.astype(lhs.dtype))
