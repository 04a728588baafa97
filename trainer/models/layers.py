"""The layers of all families in Flax NNX, and the roles of their parameters.

Dense layers act on activations flattened to (B*T, D): on CPU, XLA runs them up to four
times faster than on (B, T, D), whose weight gradients need transposed copies. Master
parameters stay in `param_dtype`, and a layer casts its own to `compute_dtype`. The
exceptions are LayerNorm's gain and bias, which are applied in FP32, and kernels, which
are passed to their `dot_general` uncast.

Legend: B batch, T time, N = B*T, D model, F width of a linear layer's output.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from scalify_core.ops.functional import attention as wide_attention
from scalify_core.ops.functional import layer_norm, rms_norm
from scalify_core.static import dynamic_rescale_rms_grad
from trainer.models.roles import Role
from trainer.precision.dots import wide_gradient_dot

DotGeneral = Callable[..., jax.Array]
Attend = Callable[..., jax.Array]  # with the arguments of `wide_attention`
DotGeneralFor = Callable[[str], DotGeneral]
Norm = Callable[[jax.Array], jax.Array]


def copy_to_axis(x_NxD: jax.Array, axis: str | None) -> jax.Array:
    """Return `x` unchanged; the backward pass sums its gradient over a mesh axis.

    The input of a layer that is split by columns needs it. None: no tensor parallelism.
    This function is f of Shoeybi et al. 2019, "Megatron-LM", section 3;
    `sum_over_axis` is g.
    """
    if axis is None:
        return x_NxD
    return _copy_to_axis(x_NxD, axis)


def sum_over_axis(x_NxD: jax.Array, axis: str | None) -> jax.Array:
    """Return the sum over the devices of a mesh axis; each gets the sum's gradient.

    None: no tensor parallelism, so `x` is returned.
    """
    if axis is None:
        return x_NxD
    return _sum_over_axis(x_NxD, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copy_to_axis(x: jax.Array, axis: str) -> jax.Array:
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum_over_axis(x: jax.Array, axis: str) -> jax.Array:
    return jax.lax.psum(x, axis)


_copy_to_axis.defvjp(
    lambda x, axis: (x, None), lambda axis, _, gradient: (jax.lax.psum(gradient, axis),)
)
_sum_over_axis.defvjp(
    lambda x, axis: (jax.lax.psum(x, axis), None), lambda axis, _, gradient: (gradient,)
)


class Linear(nnx.Linear):
    """`nnx.Linear` whose kernel is passed to `dot_general` in the parameters' dtype.

    `psum_axis`: the mesh axis over which the kernel's rows are split, so that outputs
    are summed over it; None: this device has all rows.
    """

    # Set after construction: `nnx.Linear` has no such argument.
    psum_axis: str | None = None
    probes: ClassVar[tuple[str, ...]] = ("in", "out")

    def __call__(
        self,
        x_NxD: jax.Array,
        factor: jax.Array | float | None = None,
        columns: int | None = None,
        add_bias: bool = True,
    ) -> jax.Array:
        """Apply the layer.

        Args:
          x_NxD: the input.
          factor: a factor of the kernel, for each row (`[D, 1]`) or for all.
          columns: the number of first columns to use; None: all.
          add_bias: False leaves the bias to the caller; not with a `psum_axis`.
        """
        kernel_DxF = self.kernel[...]
        bias_F = None if self.bias is None else self.bias[...]
        if factor is not None:
            # A factor in FP32 would widen the kernel, and with it the product.
            kernel_DxF = (kernel_DxF * factor).astype(kernel_DxF.dtype)
        if columns is not None:
            kernel_DxF = kernel_DxF[:, :columns]
            bias_F = None if bias_F is None else bias_F[:columns]
        if not add_bias:
            # The product is not summed over devices here.
            assert self.psum_axis is None
            return matmul(x_NxD, kernel_DxF, self.dot_general, self.dtype)
        return dense(
            x_NxD, kernel_DxF, bias_F, self.dot_general, self.dtype, self.psum_axis
        )


def dense(
    x_NxD: jax.Array,
    kernel_DxF: jax.Array,
    bias_F: jax.Array | None,
    dot_general: DotGeneral,
    dtype: DTypeLike | None,
    psum_axis: str | None = None,
) -> jax.Array:
    """Return `x @ kernel + bias`, `[N, F]` in `dtype`; `psum_axis` as in `Linear`."""
    # Summed before the bias, which each device would add to its part.
    y_NxF = sum_over_axis(matmul(x_NxD, kernel_DxF, dot_general, dtype), psum_axis)
    if bias_F is None:
        return y_NxF.astype(dtype)
    # A sum in FP32 is rounded once, and the bias has an FP32 gradient, like the kernel.
    return (y_NxF.astype(jnp.float32) + bias_F.astype(jnp.float32)[None]).astype(dtype)


def matmul(
    x_NxD: jax.Array,
    kernel_DxF: jax.Array,
    dot_general: DotGeneral,
    dtype: DTypeLike | None,
) -> jax.Array:
    """Return `x @ kernel`, `[N, F]` in `dtype`."""
    return dot_general(
        x_NxD, kernel_DxF, (((1,), (0,)), ((), ())), preferred_element_type=dtype
    )


class Factory:
    """A factory of the layers of one block, with dtypes, keys, dot_generals and roles.

    Args:
      path: the block's path, `h.3`, or `h.*` for all blocks, with stacked parameters.
      rngs: the key stream `params`.
      compute_dtype: the dtype of activations and matmuls.
      param_dtype: the dtype of parameters.
      dot_general_for: a function from a linear layer's path to its dot_general, which
        takes activations in `compute_dtype` and a kernel in `param_dtype`; None: a
        matmul in `compute_dtype`.
      attention: softmax attention, a function like `scalify_core.functional.attention`.
      rescale_grads: the places where gradients are rescaled under `scalify`; see
        `precision.fields.PrecisionFields`.
      tensor_axis: inside `shard_map`, the mesh axis over which the heads and hidden
        channels of the parameters are split.
    """

    def __init__(
        self,
        path: str,
        rngs: nnx.Rngs,
        *,
        compute_dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        dot_general_for: DotGeneralFor | None = None,
        attention: Attend = wide_attention,
        rescale_grads: tuple[str, ...] = (),
        tensor_axis: str | None = None,
    ) -> None:
        self.path = path
        self.stacked = path.endswith("*")
        self.rngs = rngs
        self.compute_dtype = compute_dtype
        self.param_dtype = param_dtype
        self.dot_general_for = dot_general_for
        self.attention = attention
        self.rescale_grads = rescale_grads
        self.tensor_axis = tensor_axis

    def dot_general_of(self, name: str) -> DotGeneral:
        """Return the dot_general of the layer `{path}.{name}`."""
        if self.dot_general_for is None:
            return wide_gradient_dot
        return self.dot_general_for(f"{self.path}.{name}")

    def linear(
        self,
        name: str,
        d_in: int,
        d_out: int,
        stddev: float,
        kind: Literal["column", "row"],
        *,
        groups: int = 1,
        gated: bool = False,
        scaled_rows: bool = False,
        bias: bool = True,
    ) -> Linear:
        """Return a layer with normal weights, and with `bias` a bias of zeros.

        `kind`, `groups`, `gated` and `scaled_rows` are those of `Role`.
        """
        # A device's columns of several groups would not be contiguous; see `Role`.
        split_by_rows = kind == "row" or groups > 1
        kernel_role = Role(
            kind,
            f"{self.path}.{name}",
            stacked=self.stacked,
            split=-2 if split_by_rows else -1,
            groups=groups,
            gated=gated,
            scaled_rows=scaled_rows,
        )
        bias_role = Role(
            "bias",
            stacked=self.stacked,
            # A row layer's bias is added after the sum over devices, and columns of
            # several groups are not contiguous: both biases are whole on each device.
            split=None if split_by_rows else -1,
            groups=groups,
        )
        linear = Linear(
            d_in,
            d_out,
            dtype=self.compute_dtype,
            param_dtype=self.param_dtype,
            kernel_init=nnx.initializers.normal(stddev),
            use_bias=bias,
            dot_general=self.dot_general_of(name),
            rngs=self.rngs,
            # Flax gives it to the parameter, where `roles_of` finds it.
            kernel_metadata={"role": kernel_role},
            bias_metadata={"role": bias_role},
        )
        # A device with some of the rows has a partial sum of every output.
        linear.psum_axis = self.tensor_axis if kind == "row" else None
        return linear


def maybe_remat(fun: Callable[[Any], Any], recompute: bool) -> Callable[[Any], Any]:
    """Return `fun`, under `jax.checkpoint` if `recompute`: only its input is saved."""
    if recompute:
        return jax.checkpoint(fun)
    return fun


def project_normed(
    x_NxD: jax.Array,
    norm: Norm,
    project: Callable[[jax.Array], Any],
    tensor_axis: str | None,
    recompute: bool,
) -> Any:
    """Return `project(norm(x))`, the inputs of a branch of a block.

    With `recompute` both are computed again in the backward pass: only `x` is saved.
    `tensor_axis` is the mesh axis over which the columns of `project` are split.
    """

    def apply(x_NxD: jax.Array) -> Any:
        return project(copy_to_axis(norm(x_NxD), tensor_axis))

    return maybe_remat(apply, recompute)(x_NxD)


class LayerNorm(nnx.Module):
    """Normalization over the last axis, in FP32; the result has the input's dtype.

    `rescale_grad`: under `scalify`, the gradient of the input is rescaled by its RMS,
    measured at run time. `probes`: the sides, "in" and "out", that `observe.numerics`
    measures.
    """

    def __init__(
        self, d: int, factory: Factory, probes: tuple[str, ...] = ("out",)
    ) -> None:
        self.scale = nnx.Param(
            jnp.ones(d, factory.param_dtype), role=Role("gain", stacked=factory.stacked)
        )
        self.bias = nnx.Param(
            jnp.zeros(d, factory.param_dtype),
            role=Role("bias", stacked=factory.stacked),
        )
        self.rescale_grad = "layer_norm" in factory.rescale_grads
        self.probes = probes

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        if self.rescale_grad:
            # The place that the Scalify paper rescales: two a layer, against 18 of
            # delayed scaling.
            x_NxD = dynamic_rescale_rms_grad(x_NxD)
        return layer_norm(x_NxD, self.scale[...], self.bias[...])


class RMSNorm(nnx.Module):
    """Division by the root mean square over the last axis, in FP32.

    The result has the input's dtype. `rescale_grad` and `probes` are those of
    LayerNorm. `tensor_axis`: the mesh axis whose devices normalize different vectors,
    such as heads, so that their gradients of the gain are added; None: all devices
    normalize the same vectors.
    """

    def __init__(
        self,
        d: int,
        eps: float,
        factory: Factory,
        probes: tuple[str, ...] = ("out",),
        tensor_axis: str | None = None,
    ) -> None:
        self.scale = nnx.Param(
            jnp.ones(d, factory.param_dtype), role=Role("gain", stacked=factory.stacked)
        )
        self.eps, self.probes, self.tensor_axis = eps, probes, tensor_axis
        # In `rescale_grads`, `layer_norm` means both kinds of norm.
        self.rescale_grad = "layer_norm" in factory.rescale_grads

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        if self.rescale_grad:
            x_NxD = dynamic_rescale_rms_grad(x_NxD)
        # Each device's gradient of the gain is that of its heads alone.
        gain_D = copy_to_axis(self.scale[...], self.tensor_axis)
        return rms_norm(x_NxD, gain_D, self.eps)


class Embedding(nnx.Module):
    """A table of normal vectors, padded to `padded_rows` with zeros that nothing reads.

    `kind`: as in `Role`; a tied head is a table.
    """

    def __init__(
        self,
        rows: int,
        d: int,
        stddev: float,
        factory: Factory,
        *,
        padded_rows: int | None = None,
        kind: Literal["table", "head"] = "table",
    ) -> None:
        # Rows are drawn without the padding, so that its size changes no initial value.
        table = nnx.initializers.normal(stddev)(
            factory.rngs.params(), (rows, d), factory.param_dtype
        )
        padding = (padded_rows or rows) - rows
        self.embedding = nnx.Param(
            jnp.pad(table, ((0, padding), (0, 0))), role=Role(kind, padding=padding)
        )


def dropout(x_NxD: jax.Array, rate: float, keys_B: jax.Array | None) -> jax.Array:
    """Zero a share of the elements, and scale up the rest.

    Each sequence has a key. Without keys, in evaluation, `x` is returned.
    """
    if keys_B is None or rate == 0.0:
        return x_NxD
    # A key for each sequence: its mask is the same on any number of devices and
    # micro-batches.
    shape = (x_NxD.shape[0] // len(keys_B), x_NxD.shape[1])
    keep_BxTxD = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, shape))(
        keys_B
    )
    keep_NxD = keep_BxTxD.reshape(x_NxD.shape)
    # Scaled in training, so that evaluation needs no factor.
    return jnp.where(keep_NxD, x_NxD / (1.0 - rate), 0.0).astype(x_NxD.dtype)


def split_keys(keys_B: jax.Array | None, count: int) -> Any:
    """Return `count` keys for each sequence, [count, B]; Nones where there are none."""
    if keys_B is None:
        return [None] * count
    return jnp.swapaxes(
        jax.vmap(lambda key: jax.random.split(key, count))(keys_B), 0, 1
    )
