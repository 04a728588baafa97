"""A block of GPT-2: attention and MLP.

Legend: B batch, T time, N = B*T, S cache length, D model, F MLP, H heads, K head dim.
"""

import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from scalify_core import attention, dynamic_rescale_rms_grad, gelu, materialised, swiglu
from trainer.models.cache import KVCache, cached_attention
from trainer.models.gated import smooth_swiglu
from trainer.models.layers import Factory, Norm, again, dropout, enter, split_keys
from trainer.models.spec import GPT2Spec


class Attention(nnx.Module):
    """Causal multi-head self-attention.

    `rescale_grad`: under `scalify`, the gradient of queries, keys and values is
    rescaled by its RMS, measured at run time: it is a sum over positions that are
    anything but independent, and grows by more than shapes tell.
    """

    def __init__(self, spec: GPT2Spec, make: Factory, residual_stddev: float) -> None:
        self.head_dim = spec.head_dim
        self.split = make.split
        self.rescale_grad = "qkv" in make.rescale_grads
        self.recompute = spec.remat == "elementwise"
        self.c_attn = make.linear(
            "attn.c_attn",
            spec.d_model,
            3 * spec.d_model,
            spec.init_std,
            "column",
            groups=3,
        )
        self.c_proj = make.linear(
            "attn.c_proj", spec.d_model, spec.d_model, residual_stddev, "row"
        )

    def heads(self, x_NxD: jax.Array, norm: Norm, batch: int) -> list[jax.Array]:
        """Queries, keys, values, each `[B, T, H, K]`, of the heads that this device
        has.
        """
        split = again(
            lambda x_NxD: self.products(enter(norm(x_NxD), self.split)), self.recompute
        )(x_NxD)
        heads = split[0].shape[1] // self.head_dim
        return [part.reshape(batch, -1, heads, self.head_dim) for part in split]

    def products(self, x_NxD: jax.Array) -> list[jax.Array]:
        """Queries, keys, values, each `[N, E]`."""
        return jnp.split(self.rescaled(self.c_attn(x_NxD)), 3, axis=1)

    def rescaled(self, x: jax.Array) -> jax.Array:
        """`x`, its gradient rescaled where that is asked for."""
        return dynamic_rescale_rms_grad(x, columns=True) if self.rescale_grad else x

    def project(self, out_NxD: jax.Array) -> jax.Array:
        """The output projection."""
        return self.c_proj(out_NxD)

    def __call__(
        self, x_NxD: jax.Array, norm: Norm, batch: int, segments_BxT: jax.Array | None
    ) -> jax.Array:
        """Of `norm(x)`."""
        q_BxTxHxK, k_BxTxHxK, v_BxTxHxK = self.heads(x_NxD, norm, batch)
        out_BxTxHxK = attention(
            q_BxTxHxK, k_BxTxHxK, v_BxTxHxK, causal=True, segments=segments_BxT
        )
        return self.project(out_BxTxHxK.reshape(len(x_NxD), -1))

    def decode(
        self, x_NxD: jax.Array, norm: Norm, cache: KVCache, position: jax.Array | int
    ) -> tuple[jax.Array, KVCache]:
        """The same for tokens at `position` and after it, which attend to this layer's
        cache too.
        """
        q_BxTxHxK, k_BxTxHxK, v_BxTxHxK = self.heads(x_NxD, norm, cache.k.shape[0])
        k_BxSxHxK = jax.lax.dynamic_update_slice_in_dim(
            cache.k, k_BxTxHxK, position, axis=1
        )
        v_BxSxHxK = jax.lax.dynamic_update_slice_in_dim(
            cache.v, v_BxTxHxK, position, axis=1
        )
        out_BxTxHxK = cached_attention(q_BxTxHxK, k_BxSxHxK, v_BxSxHxK, position)
        return self.project(out_BxTxHxK.reshape(x_NxD.shape)), KVCache(
            k_BxSxHxK, v_BxSxHxK
        )


class GeluMLP(nnx.Module):
    """D -> F, GELU (tanh form), F -> D, of what `norm` makes of the input."""

    def __init__(self, spec: GPT2Spec, make: Factory, residual_stddev: float) -> None:
        self.split = make.split
        self.recompute = spec.remat == "elementwise"
        self.c_fc = make.linear(
            "mlp.c_fc", spec.d_model, spec.mlp_width, spec.init_std, "column"
        )
        self.c_proj = make.linear(
            "mlp.c_proj", spec.mlp_width, spec.d_model, residual_stddev, "row"
        )

    def __call__(self, x_NxD: jax.Array, norm: Norm) -> jax.Array:
        first = lambda x_NxD: self.c_fc(enter(norm(x_NxD), self.split), add_bias=False)
        hidden_NxF = again(first, self.recompute)(x_NxD)
        return again(self.activated, self.recompute)(hidden_NxF)

    def activated(self, hidden_NxF: jax.Array) -> jax.Array:
        """What follows the first product."""
        assert self.c_fc.bias is not None
        return self.c_proj(gelu(hidden_NxF, self.c_fc.bias[...]))


class SwigluMLP(nnx.Module):
    """D -> F twice, silu(gate) * linear, F -> D. Reference: Shazeer 2020, "GLU variants
    improve transformer".
    """

    scaled_rows: ClassVar[bool] = False  # of the last kernel, see `Role`

    def __init__(self, spec: GPT2Spec, make: Factory, residual_stddev: float) -> None:
        self.split = make.split
        self.recompute = spec.remat == "elementwise"
        linear = functools.partial(make.linear, gated=True)
        self.c_gate = linear(
            "mlp.c_gate", spec.d_model, spec.mlp_width, spec.init_std, "column"
        )
        self.c_fc = linear(
            "mlp.c_fc", spec.d_model, spec.mlp_width, spec.init_std, "column"
        )
        self.c_proj = linear(
            "mlp.c_proj",
            spec.mlp_width,
            spec.d_model,
            residual_stddev,
            "row",
            scaled_rows=self.scaled_rows,
        )

    def __call__(self, x_NxD: jax.Array, norm: Norm) -> jax.Array:
        branches = again(
            lambda x_NxD: self.branches(enter(norm(x_NxD), self.split)), self.recompute
        )(x_NxD)
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


class Block(nnx.Module):
    """Two residual branches: attention, of the given class, and MLP, each behind its
    LayerNorm.
    """

    probes: ClassVar[tuple[str, ...]] = ("in",)

    def __init__(
        self, spec: GPT2Spec, make: Factory, attention: type[Attention] = Attention
    ) -> None:
        # 2 L branches add up in the residual stream: each starts with 1 / (2 L) of the
        # variance.
        residual_stddev = spec.init_std / math.sqrt(2 * spec.n_layer)
        self.dropout = spec.dropout
        self.ln_1 = make.layer_norm(spec.d_model)
        self.attn = attention(spec, make, residual_stddev)
        self.ln_2 = make.layer_norm(spec.d_model)
        mlps = {"gelu": GeluMLP, "swiglu": SwigluMLP, "smooth_swiglu": SmoothSwigluMLP}
        self.mlp = mlps[spec.mlp](spec, make, residual_stddev)

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
        x_NxD = materialised(x_NxD)  # both norms and both sums read it
        return materialised(
            x_NxD + dropout(self.mlp(x_NxD, self.ln_2), self.dropout, mlp_keys_B)
        )

    def decode(
        self, x_NxD: jax.Array, cache: KVCache, position: jax.Array | int
    ) -> tuple[jax.Array, KVCache]:
        """The same for tokens at `position` and after it, which attend to this layer's
        cache too.
        """
        out_NxD, cache = self.attn.decode(x_NxD, self.ln_1, cache, position)
        x_NxD += out_NxD
        return x_NxD + self.mlp(x_NxD, self.ln_2), cache
