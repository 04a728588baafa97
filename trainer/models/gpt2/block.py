"""A block of GPT-2: attention and MLP.

Legend: B batch, T time, N = B*T, S cache length, D model, F MLP, H heads, K head dim.
"""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from scalify_core.ops.functional import gelu, materialized
from scalify_core.static import dynamic_rescale_rms_grad
from trainer.models.cache import KVCache, cached_attention, extend_cache
from trainer.models.gated import GatedMLP
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.layers import (
    Factory,
    LayerNorm,
    Norm,
    dropout,
    maybe_remat,
    project_normed,
    split_keys,
)


class Attention(nnx.Module):
    """Causal multi-head self-attention.

    `rescale_grad`: under `scalify`, the gradient of queries, keys and values is
    rescaled by its RMS, measured at run time. It is a sum over positions. They are
    correlated, so it grows faster than static scales, computed from shapes, predict.
    """

    def __init__(self, spec: GPT2Spec, layers: Factory) -> None:
        self.head_dim = spec.head_width
        self.tensor_axis = layers.tensor_axis
        self.attention = layers.attention
        self.rescale_grad = "qkv" in layers.rescale_grads
        self.recompute = spec.remat == "elementwise"
        self.c_attn = layers.linear(
            "attn.c_attn",
            spec.d_model,
            # One kernel, as in GPT-2's files: one matmul of three times the columns.
            3 * spec.d_model,
            spec.init_std,
            "column",
            # Contiguous shares of the columns would not have the same heads of all
            # three: see `Role`.
            groups=3,
        )
        self.c_proj = layers.linear(
            "attn.c_proj", spec.d_model, spec.d_model, spec.residual_stddev, "row"
        )

    def heads(self, x_NxD: jax.Array, norm: Norm, batch: int) -> list[jax.Array]:
        """Return this device's heads of queries, keys, values, `[B, T, H, K]` each."""
        projections = project_normed(
            x_NxD, norm, self.qkv, self.tensor_axis, self.recompute
        )
        # From the array: with tensor parallelism a device has a part of the heads.
        heads = projections[0].shape[1] // self.head_dim
        return [y.reshape(batch, -1, heads, self.head_dim) for y in projections]

    def qkv(self, x_NxD: jax.Array) -> list[jax.Array]:
        """Return queries, keys and values, `[N, H*K]` each."""
        # Before the split: going back, the three gradients are one array here, with one
        # scale.
        return jnp.split(self.rescale_gradient(self.c_attn(x_NxD)), 3, axis=1)

    def rescale_gradient(self, x: jax.Array) -> jax.Array:
        """Return `x`, with its gradient rescaled if `rescale_grad`."""
        if self.rescale_grad:
            return dynamic_rescale_rms_grad(x)
        return x

    def project(self, out_NxD: jax.Array) -> jax.Array:
        """Apply the output projection."""
        return self.c_proj(out_NxD)

    def __call__(
        self, x_NxD: jax.Array, norm: Norm, batch: int, segments_BxT: jax.Array | None
    ) -> jax.Array:
        """Return the attention of `norm(x)`.

        The norm is an argument, so that with remat=elementwise norm and projection are
        recomputed together, and only `x` is saved for the backward pass.
        """
        q_BxTxHxK, k_BxTxHxK, v_BxTxHxK = self.heads(x_NxD, norm, batch)
        out_BxTxHxK = self.attention(
            q_BxTxHxK, k_BxTxHxK, v_BxTxHxK, causal=True, segments=segments_BxT
        )
        # -1, not D: a device may have a part of the heads.
        return self.project(out_BxTxHxK.reshape(len(x_NxD), -1))

    def decode(
        self, x_NxD: jax.Array, norm: Norm, cache: KVCache, position: jax.Array | int
    ) -> tuple[jax.Array, KVCache]:
        """Return attention for tokens from `position` on, and the layer's new cache."""
        q_BxTxHxK, k_BxTxHxK, v_BxTxHxK = self.heads(x_NxD, norm, cache.k.shape[0])
        cache = extend_cache(cache, k_BxTxHxK, v_BxTxHxK, position)
        out_BxTxHxK = cached_attention(q_BxTxHxK, cache, position)
        return self.project(out_BxTxHxK.reshape(x_NxD.shape)), cache


class GeluMLP(nnx.Module):
    """D -> F, GELU (tanh form), F -> D, of the normalized input."""

    def __init__(self, spec: GPT2Spec, layers: Factory) -> None:
        self.tensor_axis = layers.tensor_axis
        self.recompute = spec.remat == "elementwise"
        self.c_fc = layers.linear(
            "mlp.c_fc", spec.d_model, spec.mlp_width, spec.init_std, "column"
        )
        self.c_proj = layers.linear(
            "mlp.c_proj", spec.mlp_width, spec.d_model, spec.residual_stddev, "row"
        )

    def __call__(self, x_NxD: jax.Array, norm: Norm) -> jax.Array:
        # GELU adds the bias itself, in FP32: the sum is neither rounded nor stored.
        c_fc = functools.partial(self.c_fc, add_bias=False)
        hidden_NxF = project_normed(x_NxD, norm, c_fc, self.tensor_axis, self.recompute)
        return maybe_remat(self.project_down, self.recompute)(hidden_NxF)

    def project_down(self, hidden_NxF: jax.Array) -> jax.Array:
        """Apply bias, GELU and the second matmul."""
        assert self.c_fc.bias is not None
        return self.c_proj(gelu(hidden_NxF, self.c_fc.bias[...]))


class SwigluMLP(GatedMLP):
    """GPT-2's `GatedMLP`."""

    names: ClassVar[tuple[str, str, str]] = ("c_gate", "c_fc", "c_proj")
    bias: ClassVar[bool] = True


class Block(nnx.Module):
    """Two residual branches: attention of the given class, and MLP, each normalized."""

    # The output of a block is the input of the next, and the last is that of `ln_f`.
    probes: ClassVar[tuple[str, ...]] = ("in",)

    def __init__(
        self, spec: GPT2Spec, layers: Factory, attention: type[Attention] = Attention
    ) -> None:
        self.dropout = spec.dropout
        self.ln_1 = LayerNorm(spec.d_model, layers)
        self.attn = attention(spec, layers)
        self.ln_2 = LayerNorm(spec.d_model, layers)
        mlp = GeluMLP if spec.mlp == "gelu" else SwigluMLP
        self.mlp = mlp(spec, layers)

    def __call__(
        self,
        x_NxD: jax.Array,
        batch: int,
        segments_BxT: jax.Array | None,
        keys_B: jax.Array | None,
    ) -> jax.Array:
        attn_keys_B, mlp_keys_B = split_keys(keys_B, 2)
        x_NxD += dropout(
            self.attn(x_NxD, self.ln_1, batch, segments_BxT), self.dropout, attn_keys_B
        )
        # Otherwise XLA may fuse the cast to 16 bits into each consumer, and store `x`
        # in FP32.
        x_NxD = materialized(x_NxD)
        return materialized(
            x_NxD + dropout(self.mlp(x_NxD, self.ln_2), self.dropout, mlp_keys_B)
        )

    def decode(
        self, x_NxD: jax.Array, cache: KVCache, position: jax.Array | int
    ) -> tuple[jax.Array, KVCache]:
        """Return the output for tokens from `position` on, and the new cache."""
        out_NxD, cache = self.attn.decode(x_NxD, self.ln_1, cache, position)
        x_NxD += out_NxD
        return x_NxD + self.mlp(x_NxD, self.ln_2), cache
