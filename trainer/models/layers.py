"""The layers of GPT-2 in Flax NNX, of which Llama has the simple ones too.

Dense layers act on activations flattened to (B*T, D): on CPU, XLA runs them up to four times faster than on (B, T, D),
whose weight gradients need transposed copies. Master parameters stay in `param_dtype`; a layer casts its own to
`compute_dtype` where it uses them, except LayerNorm's gain and bias, which are applied in FP32, and kernels, which go
to their `dot_general` as they are.

Legend: B batch, T time, N = B*T, S cache length, D model, F MLP, H heads, K head dim.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from scalify_core import attention, dynamic_rescale_rms_grad, gelu, layer_norm, materialised, rms_norm, swiglu
from trainer.models.cache import KVCache, cached_attention
from trainer.models.gated import align, smooth_swiglu
from trainer.models.roles import Role
from trainer.models.spec import GPT2Spec
from trainer.precision.dots import wide_gradient_dot

DotGeneral = Callable[..., jax.Array]
DotGeneralFor = Callable[[str], DotGeneral]
Norm = Callable[[jax.Array], jax.Array]


def enter(x_NxD: jax.Array, axis: str | None) -> jax.Array:
    """What every device of a mesh axis has, where each goes on with its part of a layer: the gradient adds up.

    None: nothing is split. Reference: Shoeybi et al. 2019, "Megatron-LM", section 3, f; `leave` is g.
    """
    return x_NxD if axis is None else _enter(x_NxD, axis)


def leave(x_NxD: jax.Array, axis: str | None) -> jax.Array:
    """The sum of what the devices of a mesh axis have; each has the gradient of it. None: nothing is split."""
    return x_NxD if axis is None else _leave(x_NxD, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _enter(x: jax.Array, axis: str) -> jax.Array:
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _leave(x: jax.Array, axis: str) -> jax.Array:
    return jax.lax.psum(x, axis)


_enter.defvjp(lambda x, axis: (x, None), lambda axis, _, gradient: (jax.lax.psum(gradient, axis),))
_leave.defvjp(lambda x, axis: (jax.lax.psum(x, axis), None), lambda axis, _, gradient: (gradient,))


class Linear(nnx.Linear):
    """`nnx.Linear` whose kernel reaches `dot_general` as it is, in the parameters' dtype.

    `partial`: over this mesh axis every device has some of the rows, and the outputs are added up; None: all rows.
    """

    partial: str | None = None
    probes: ClassVar[tuple[str, ...]] = ("in", "out")

    def __call__(
        self,
        x_NxD: jax.Array,
        factor: jax.Array | float | None = None,
        columns: int | None = None,
        add_bias: bool = True,
    ) -> jax.Array:
        """`factor`: of the kernel, of each row (`[D, 1]`) or of all; `columns`: only so many, the first ones.

        `add_bias`: false where who takes the product adds the bias himself; not of a `partial` one.
        """
        kernel_DxF, bias_F = self.kernel[...], None if self.bias is None else self.bias[...]
        if factor is not None:
            kernel_DxF = (kernel_DxF * factor).astype(kernel_DxF.dtype)
        if columns is not None:
            kernel_DxF, bias_F = kernel_DxF[:, :columns], None if bias_F is None else bias_F[:columns]
        if not add_bias:
            assert self.partial is None
            return product(x_NxD, kernel_DxF, self.dot_general, self.dtype)
        return dense(x_NxD, kernel_DxF, bias_F, self.dot_general, self.dtype, self.partial)


class LastColumns(nnx.Module):
    """The last columns of a `Linear` as a layer of their own on the same parameters, kernel and bias times `gain`."""

    probes: ClassVar[tuple[str, ...]] = ("in", "out")

    def __init__(self, whole: Linear, columns: int, gain: float, dot_general: DotGeneral) -> None:
        self.kernel, self.bias = whole.kernel, whole.bias
        self.dtype = whole.dtype
        self.columns = columns
        self.gain = gain
        self.dot_general = dot_general

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        """`[N, columns]`."""
        assert self.bias is not None
        kernel_DxF, bias_F = self.kernel[:, -self.columns :] * self.gain, self.bias[-self.columns :] * self.gain
        return dense(x_NxD, kernel_DxF, bias_F, self.dot_general, self.dtype)


def dense(
    x_NxD: jax.Array,
    kernel_DxF: jax.Array,
    bias_F: jax.Array | None,
    dot_general: DotGeneral,
    dtype: DTypeLike | None,
    partial: str | None = None,
) -> jax.Array:
    """`x @ kernel + bias`, `[N, F]` in `dtype`; `partial` as of `Linear`."""
    y_NxF = leave(product(x_NxD, kernel_DxF, dot_general, dtype), partial)
    if bias_F is None:
        return y_NxF.astype(dtype)
    # The sum in FP32: rounded once, and the bias has its gradient in FP32, as the kernel has.
    return (y_NxF.astype(jnp.float32) + bias_F.astype(jnp.float32)[None]).astype(dtype)


def product(x_NxD: jax.Array, kernel_DxF: jax.Array, dot_general: DotGeneral, dtype: DTypeLike | None) -> jax.Array:
    """`x @ kernel`, `[N, F]` in `dtype`."""
    return dot_general(x_NxD, kernel_DxF, (((1,), (0,)), ((), ())), preferred_element_type=dtype)


class Factory:
    """Makes the layers of one block: dtypes, keys, the dot_general chosen for each path, and the parameters' roles.

    `path`: of the block, `h.3`, or `h.*` of all blocks, whose parameters are then stacked.
    `split`: the mesh axis over which heads and hidden channels are split; None: none is.
    """

    def __init__(
        self,
        path: str,
        rngs: nnx.Rngs,
        compute_dtype: DTypeLike,
        param_dtype: DTypeLike,
        dot_general: DotGeneralFor | None,
        rescale_grads: tuple[str, ...],
        split: str | None,
    ) -> None:
        self.path = path
        self.stacked = path.endswith("*")
        self.rngs = rngs
        self.compute_dtype = compute_dtype
        self.param_dtype = param_dtype
        self.dot_general = dot_general
        self.rescale_grads = rescale_grads
        self.split = split

    def layer_norm(self, d: int, probes: tuple[str, ...] = ("out",)) -> "LayerNorm":
        """A LayerNorm over `d` elements; for `probes` see `LayerNorm`."""
        rescale_grad = "layer_norm" in self.rescale_grads
        return LayerNorm(d, self.param_dtype, rescale_grad=rescale_grad, stacked=self.stacked, probes=probes)

    def rms_norm(self, d: int, eps: float, probes: tuple[str, ...] = ("out",)) -> "RMSNorm":
        """An RMSNorm over `d` elements; for `probes` see `LayerNorm`."""
        rescale_grad = "layer_norm" in self.rescale_grads
        return RMSNorm(d, eps, self.param_dtype, rescale_grad=rescale_grad, stacked=self.stacked, probes=probes)

    def product(self, name: str) -> DotGeneral:
        """The dot_general chosen for `{path}.{name}`."""
        return wide_gradient_dot if self.dot_general is None else self.dot_general(f"{self.path}.{name}")

    def linear(
        self,
        name: str,
        d_in: int,
        d_out: int,
        stddev: float,
        kind: Literal["column", "row"],
        *,
        groups: int = 1,
        scaled_rows: bool = False,
        bias: bool = True,
    ) -> Linear:
        """Normal weights; zero bias, or none. `kind`, `groups` and `scaled_rows` as of `Role`."""
        by_rows = kind == "row" or groups > 1
        kernel = Role(
            kind,
            f"{self.path}.{name}",
            stacked=self.stacked,
            split=-2 if by_rows else -1,
            groups=groups,
            scaled_rows=scaled_rows,
        )
        role_of_bias = Role("bias", stacked=self.stacked, split=None if by_rows else -1, groups=groups)
        linear = Linear(
            d_in,
            d_out,
            dtype=self.compute_dtype,
            param_dtype=self.param_dtype,
            kernel_init=nnx.initializers.normal(stddev),
            use_bias=bias,
            dot_general=self.product(name),
            rngs=self.rngs,
            kernel_metadata={"role": kernel},
            bias_metadata={"role": role_of_bias},
        )
        linear.partial = self.split if kind == "row" else None
        return linear


def again(fun: Callable[[Any], Any], recompute: bool) -> Callable[[Any], Any]:
    """`fun`; with `recompute`, of what it computes only its argument is kept for the backward pass."""
    return jax.checkpoint(fun) if recompute else fun


class LayerNorm(nnx.Module):
    """Normalisation over the last axis, in FP32; the result has the input's dtype.

    `rescale_grad`: under `scalify`, the gradient of the input is rescaled by its RMS, measured at run time.
    `stacked`: as of `Role`.
    `probes`: which of its sides, "in" and "out", `observe.numerics` looks at.
    """

    def __init__(
        self, d: int, param_dtype: DTypeLike, *, rescale_grad: bool, stacked: bool, probes: tuple[str, ...]
    ) -> None:
        self.scale = nnx.Param(jnp.ones(d, param_dtype), role=Role("gain", stacked=stacked))
        self.bias = nnx.Param(jnp.zeros(d, param_dtype), role=Role("bias", stacked=stacked))
        self.rescale_grad = rescale_grad
        self.probes = probes

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        if self.rescale_grad:
            x_NxD = dynamic_rescale_rms_grad(x_NxD)
        return layer_norm(x_NxD, self.scale[...], self.bias[...])


class RMSNorm(nnx.Module):
    """Division by the root of the mean square over the last axis, in FP32; the result has the input's dtype.

    `rescale_grad`, `stacked` and `probes` as of LayerNorm.
    """

    def __init__(
        self, d: int, eps: float, param_dtype: DTypeLike, *, rescale_grad: bool, stacked: bool, probes: tuple[str, ...]
    ) -> None:
        self.scale = nnx.Param(jnp.ones(d, param_dtype), role=Role("gain", stacked=stacked))
        self.eps = eps
        self.rescale_grad = rescale_grad
        self.probes = probes

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        if self.rescale_grad:
            x_NxD = dynamic_rescale_rms_grad(x_NxD)
        return rms_norm(x_NxD, self.scale[...], self.eps)


class Embedding(nnx.Module):
    """A table of normal vectors. Rows from `rows` to `padded_rows` are zero and stay so: nothing reads them.

    `kind`: as of `Role`; what is both, as a tied head is, is a table.
    """

    def __init__(
        self,
        rows: int,
        padded_rows: int,
        d: int,
        stddev: float,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
        kind: Literal["table", "head"] = "table",
    ) -> None:
        table = nnx.initializers.normal(stddev)(rngs.params(), (rows, d), param_dtype)
        padding = padded_rows - rows
        self.embedding = nnx.Param(jnp.pad(table, ((0, padding), (0, 0))), role=Role(kind, padding=padding))


class Attention(nnx.Module):
    """Causal multi-head self-attention.

    `rescale_grad`: under `scalify`, the gradient of queries, keys and values is rescaled by its RMS, measured at run
    time: it is a sum over positions that are anything but independent, and grows by more than shapes tell.

    With a `value_gain` the values are a product of their own, `c_value`, on the last third of the parameters of
    `c_attn`. Of one product with queries and keys, they would share the scale of its gradient and of its FP8 kernel.
    """

    def __init__(self, spec: GPT2Spec, make: Factory, residual_stddev: float) -> None:
        self.head_dim = spec.head_dim
        self.split = make.split
        self.rescale_grad = "qkv" in make.rescale_grads
        self.recompute = spec.remat == "elementwise"
        self.c_attn = make.linear("attn.c_attn", spec.d_model, 3 * spec.d_model, spec.init_std, "column", groups=3)
        gain = spec.value_gain
        if gain is not None:
            self.c_value = LastColumns(self.c_attn, spec.d_model, gain, make.product("attn.c_value"))
        self.value_gain = gain
        self.c_proj = make.linear("attn.c_proj", spec.d_model, spec.d_model, residual_stddev, "row")

    def heads(self, x_NxD: jax.Array, norm: Norm, batch: int) -> list[jax.Array]:
        """Queries, keys, values, each `[B, T, H, K]`, of the heads that this device has."""
        split = again(lambda x_NxD: self.products(enter(norm(x_NxD), self.split)), self.recompute)(x_NxD)
        heads = split[0].shape[1] // self.head_dim
        return [part.reshape(batch, -1, heads, self.head_dim) for part in split]

    def products(self, x_NxD: jax.Array) -> list[jax.Array]:
        """Queries, keys, values, each `[N, E]`."""
        if self.value_gain is None:
            return jnp.split(self.rescaled(self.c_attn(x_NxD)), 3, axis=1)
        q_and_k_NxE = self.rescaled(self.c_attn(x_NxD, columns=2 * x_NxD.shape[1]))
        return [*jnp.split(q_and_k_NxE, 2, axis=1), self.rescaled(self.c_value(x_NxD))]

    def rescaled(self, x: jax.Array) -> jax.Array:
        """`x`, its gradient rescaled where that is asked for."""
        return dynamic_rescale_rms_grad(x, columns=True) if self.rescale_grad else x

    def project(self, out_NxD: jax.Array) -> jax.Array:
        """The output projection."""
        return self.c_proj(out_NxD, factor=None if self.value_gain is None else 1 / self.value_gain)

    def __call__(self, x_NxD: jax.Array, norm: Norm, batch: int, segments_BxT: jax.Array | None) -> jax.Array:
        """Of `norm(x)`."""
        q_BxTxHxK, k_BxTxHxK, v_BxTxHxK = self.heads(x_NxD, norm, batch)
        out_BxTxHxK = attention(q_BxTxHxK, k_BxTxHxK, v_BxTxHxK, causal=True, segments=segments_BxT)
        return self.project(out_BxTxHxK.reshape(len(x_NxD), -1))

    def decode(
        self, x_NxD: jax.Array, norm: Norm, cache: KVCache, position: jax.Array | int
    ) -> tuple[jax.Array, KVCache]:
        """The same for tokens at `position` and after it, which attend to this layer's cache too."""
        q_BxTxHxK, k_BxTxHxK, v_BxTxHxK = self.heads(x_NxD, norm, cache.k.shape[0])
        k_BxSxHxK = jax.lax.dynamic_update_slice_in_dim(cache.k, k_BxTxHxK, position, axis=1)
        v_BxSxHxK = jax.lax.dynamic_update_slice_in_dim(cache.v, v_BxTxHxK, position, axis=1)
        out_BxTxHxK = cached_attention(q_BxTxHxK, k_BxSxHxK, v_BxSxHxK, position)
        return self.project(out_BxTxHxK.reshape(x_NxD.shape)), KVCache(k_BxSxHxK, v_BxSxHxK)


class GeluMLP(nnx.Module):
    """D -> F, GELU (tanh form), F -> D, of what `norm` makes of the input."""

    def __init__(self, spec: GPT2Spec, make: Factory, residual_stddev: float) -> None:
        self.split = make.split
        self.recompute = spec.remat == "elementwise"
        self.c_fc = make.linear("mlp.c_fc", spec.d_model, spec.mlp_width, spec.init_std, "column")
        self.c_proj = make.linear("mlp.c_proj", spec.mlp_width, spec.d_model, residual_stddev, "row")

    def __call__(self, x_NxD: jax.Array, norm: Norm) -> jax.Array:
        first = lambda x_NxD: self.c_fc(enter(norm(x_NxD), self.split), add_bias=False)
        hidden_NxF = again(first, self.recompute)(x_NxD)
        return again(self.activated, self.recompute)(hidden_NxF)

    def activated(self, hidden_NxF: jax.Array) -> jax.Array:
        """What follows the first product."""
        assert self.c_fc.bias is not None
        return self.c_proj(gelu(hidden_NxF, self.c_fc.bias[...]))


class SwigluMLP(nnx.Module):
    """D -> F twice, silu(gate) * linear, F -> D. Reference: Shazeer 2020, "GLU variants improve transformer"."""

    scaled_rows: ClassVar[bool] = False  # of the last kernel, see `Role`

    def __init__(self, spec: GPT2Spec, make: Factory, residual_stddev: float) -> None:
        self.split = make.split
        self.recompute = spec.remat == "elementwise"
        self.c_gate = make.linear("mlp.c_gate", spec.d_model, spec.mlp_width, spec.init_std, "column")
        self.c_fc = make.linear("mlp.c_fc", spec.d_model, spec.mlp_width, spec.init_std, "column")
        self.c_proj = make.linear(
            "mlp.c_proj", spec.mlp_width, spec.d_model, residual_stddev, "row", scaled_rows=self.scaled_rows
        )
        align(self.c_gate, self.c_fc, spec.align_channels, spec.align_gain)

    def __call__(self, x_NxD: jax.Array, norm: Norm) -> jax.Array:
        branches = again(lambda x_NxD: self.branches(enter(norm(x_NxD), self.split)), self.recompute)(x_NxD)
        return again(self.activated, self.recompute)(branches)

    def branches(self, x_NxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Gate and linear branch, each `[N, F]`."""
        return self.c_gate(x_NxD), self.c_fc(x_NxD)

    def activated(self, branches: tuple[jax.Array, jax.Array]) -> jax.Array:
        """What follows the two products."""
        return self.c_proj(swiglu(*branches))


class SmoothSwigluMLP(SwigluMLP):
    """The function and the parameters of `SwigluMLP`, by `gated.smooth_swiglu`."""

    scaled_rows: ClassVar[bool] = True

    def activated(self, branches: tuple[jax.Array, jax.Array]) -> jax.Array:
        """What follows the two products."""
        hidden_NxF, size_F = smooth_swiglu(*branches)
        return self.c_proj(hidden_NxF, factor=size_F[:, None])


def dropout(x_NxD: jax.Array, rate: float, keys_B: jax.Array | None) -> jax.Array:
    """Zero a share of the elements, scale up the rest; a key for each sequence. Without: evaluation, the identity."""
    if keys_B is None or rate == 0.0:
        return x_NxD
    shape = (x_NxD.shape[0] // len(keys_B), x_NxD.shape[1])
    keep_BxTxD = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, shape))(keys_B)
    return jnp.where(keep_BxTxD.reshape(x_NxD.shape), x_NxD / (1.0 - rate), 0.0).astype(x_NxD.dtype)


def split_keys(keys_B: jax.Array | None, count: int) -> Any:
    """`count` keys for each sequence, [count, B]; Nones where there are none."""
    if keys_B is None:
        return [None] * count
    return jnp.swapaxes(jax.vmap(lambda key: jax.random.split(key, count))(keys_B), 0, 1)


class Block(nnx.Module):
    """Two residual branches: attention and MLP, each behind its LayerNorm."""

    probes: ClassVar[tuple[str, ...]] = ("in",)

    def __init__(self, spec: GPT2Spec, make: Factory) -> None:
        # 2 L branches add up in the residual stream: each starts with 1 / (2 L) of the variance.
        residual_stddev = spec.init_std / math.sqrt(2 * spec.n_layer)
        self.dropout = spec.dropout
        self.ln_1 = make.layer_norm(spec.d_model)
        self.attn = Attention(spec, make, residual_stddev)
        self.ln_2 = make.layer_norm(spec.d_model)
        mlps = {"gelu": GeluMLP, "swiglu": SwigluMLP, "smooth_swiglu": SmoothSwigluMLP}
        self.mlp = mlps[spec.mlp](spec, make, residual_stddev)

    def __call__(
        self, x_NxD: jax.Array, batch: int, segments_BxT: jax.Array | None, keys_B: jax.Array | None
    ) -> jax.Array:
        attn_keys_B, mlp_keys_B = split_keys(keys_B, 2)
        x_NxD += dropout(self.attn(x_NxD, self.ln_1, batch, segments_BxT), self.dropout, attn_keys_B)
        x_NxD = materialised(x_NxD)  # both norms and both sums read it
        return materialised(x_NxD + dropout(self.mlp(x_NxD, self.ln_2), self.dropout, mlp_keys_B))

    def decode(self, x_NxD: jax.Array, cache: KVCache, position: jax.Array | int) -> tuple[jax.Array, KVCache]:
        """The same for tokens at `position` and after it, which attend to this layer's cache too."""
        out_NxD, cache = self.attn.decode(x_NxD, self.ln_1, cache, position)
        x_NxD += out_NxD
        return x_NxD + self.mlp(x_NxD, self.ln_2), cache
