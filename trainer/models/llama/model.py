"""Llama in Flax NNX: rotary positions, RMS norms, grouped-query attention, SwiGLU.

Families that are nearly Llama are this model, too: `LlamaSpec` says how they differ.

Legend: B batch, T time, N = B*T, S cache length, D model, F MLP, H heads of queries, G
heads of keys and values, K head dim, P = K / 2 channel pairs, V padded vocabulary, L
layers.

References: Touvron et al. 2023, "Llama 2" (arXiv 2307.09288); Grattafiori et al. 2024,
"The Llama 3 herd of models" (arXiv 2407.21783), and Meta's published code.
"""

import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from scalify_core.ops.functional import embedding, materialized, rope
from scalify_core.static import dynamic_rescale_rms_grad, rebalance, rebalance_grad
from trainer.models.blocks import (
    LayerComm,
    apply_blocks,
    decode_blocks,
    make_blocks,
)
from trainer.models.cache import KVCache, cached_attention, extend_cache
from trainer.models.decoder import Decoder
from trainer.models.gated import GatedMLP
from trainer.models.layers import (
    Embedding,
    Factory,
    Norm,
    RMSNorm,
    project_normed,
)
from trainer.models.llama.rope import frequencies
from trainer.models.llama.spec import LlamaSpec
from trainer.models.model_functions import ModelFunctions, functions_of_module

# Under `scalify`, static scales assume independent numbers, as at initialization, where
# data has an RMS of 1 to 5. Training correlates them: after 200 steps of llama_nano the
# RMS was 14 (queries, keys), 12 (attention's output), 40 (hidden channels) and 55
# (gradients of the branches). `rebalance` moves a power of two from the data into the
# scale, exactly. Each power keeps the RMS of initial data above 1/4. docs/lab.md has
# the growth that remains.
QK_REBALANCE, ATTENTION_REBALANCE = 2.0, 4.0
HIDDEN_REBALANCE, GRADIENT_REBALANCE = 4.0, 2.0


class Rotation(NamedTuple):
    """Cosines and sines of the angles of some positions, FP32 `[T, P]` each."""

    cos_TxP: jax.Array
    sin_TxP: jax.Array

    def masked(self, uses_rope: Any) -> "Rotation":
        """Return this rotation where `uses_rope` is true, and angle 0 elsewhere.

        None: true everywhere.
        """
        if uses_rope is None:
            return self
        # Angle 0 turns nothing. Selected by value, since a scan has one program for all
        # layers.
        return Rotation(
            jnp.where(uses_rope, self.cos_TxP, 1), jnp.where(uses_rope, self.sin_TxP, 0)
        )


class Attention(nnx.Module):
    """Causal self-attention with grouped queries.

    `rescale_grad`: under `scalify`, the gradients of queries, keys and values are
    rescaled by their RMS, measured at run time. They are sums over positions. These are
    correlated, so the sums grow faster than static scales, computed from shapes,
    predict.
    """

    def __init__(self, spec: LlamaSpec, layers: Factory) -> None:
        self.head_dim = spec.head_width
        self.tensor_axis = layers.tensor_axis
        self.attention = layers.attention
        self.rescale_grad = "qkv" in layers.rescale_grads
        self.recompute = spec.remat == "elementwise"
        self.window = spec.attention_window
        q_width = spec.n_head * spec.head_width
        kv_width = spec.n_kv_head * spec.head_width
        linear = functools.partial(
            layers.linear,
            d_in=spec.d_model,
            stddev=spec.init_std,
            kind="column",
            bias=spec.qkv_bias,
        )
        # Three kernels, as in the files: XLA may join their matmuls.
        self.q_proj = linear("attn.q_proj", d_out=q_width)
        self.k_proj = linear("attn.k_proj", d_out=kv_width)
        self.v_proj = linear("attn.v_proj", d_out=kv_width)
        # Qwen2 has biases of queries, keys and values alone.
        self.o_proj = layers.linear(
            "attn.o_proj",
            q_width,
            spec.d_model,
            spec.residual_stddev,
            "row",
            bias=False,
        )
        self.qk_norm = spec.qk_norm
        if spec.qk_norm is not None:
            # OLMo 2 has a gain for each channel of all heads, Qwen3 one vector of gains
            # that all heads share.
            sizes = (
                (q_width, kv_width) if spec.qk_norm == "layer" else (self.head_dim,) * 2
            )
            self.q_norm, self.k_norm = (
                RMSNorm(size, spec.norm_eps, layers, tensor_axis=layers.tensor_axis)
                for size in sizes
            )

    def heads(
        self, x_NxD: jax.Array, norm: Norm, rotation: Rotation, batch: int
    ) -> list[jax.Array]:
        """Return this device's heads of queries, keys and values, rotated.

        Queries are `[B, T, H, K]`, keys and values `[B, T, G, K]`.
        """
        projections = project_normed(
            x_NxD, norm, self.qkv, self.tensor_axis, self.recompute
        )
        # Over all heads together, so before they are apart.
        if self.qk_norm == "layer":
            q, k, v = projections
            projections = [self.q_norm(q), self.k_norm(k), v]
        q, k, v = (
            y.reshape(batch, -1, y.shape[1] // self.head_dim, self.head_dim)
            for y in projections
        )
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q = rope(rebalance(q, QK_REBALANCE), *rotation)
        k = rope(rebalance(k, QK_REBALANCE), *rotation)
        return [q, k, v]

    def qkv(self, x_NxD: jax.Array) -> list[jax.Array]:
        """Return queries `[N, H*K]`, and keys and values, `[N, G*K]` each."""
        projections = [self.q_proj(x_NxD), self.k_proj(x_NxD), self.v_proj(x_NxD)]
        if self.rescale_grad:
            # Three scales, since the gradients of queries, keys and values may differ
            # in size.
            projections = [dynamic_rescale_rms_grad(y) for y in projections]
        return projections

    def __call__(
        self,
        x_NxD: jax.Array,
        norm: Norm,
        rotation: Rotation,
        segments_BxT: jax.Array | None,
        batch: int,
    ) -> jax.Array:
        """Return the attention of `norm(x)`."""
        q_BxTxHxK, k_BxTxGxK, v_BxTxGxK = self.heads(x_NxD, norm, rotation, batch)
        out_BxTxHxK = self.attention(
            q_BxTxHxK,
            k_BxTxGxK,
            v_BxTxGxK,
            causal=True,
            window=self.window,
            segments=segments_BxT,
        )
        # In front of `o_proj`, whose FP8 copy of its input is rounded from the
        # rebalanced data. The gradient comes from `o_proj`: attention's backward pass
        # gets it rebalanced.
        out_BxTxHxK = rebalance_grad(
            rebalance(out_BxTxHxK, ATTENTION_REBALANCE), GRADIENT_REBALANCE
        )
        return self.o_proj(out_BxTxHxK.reshape(len(x_NxD), -1))

    def decode(
        self,
        x_NxD: jax.Array,
        norm: Norm,
        rotation: Rotation,
        cache: KVCache,
        position: jax.Array | int,
    ) -> tuple[jax.Array, KVCache]:
        """Return attention for tokens from `position` on, and the layer's new cache."""
        q_BxTxHxK, k_BxTxGxK, v_BxTxGxK = self.heads(
            x_NxD, norm, rotation, cache.k.shape[0]
        )
        cache = extend_cache(cache, k_BxTxGxK, v_BxTxGxK, position)
        out_BxTxHxK = cached_attention(q_BxTxHxK, cache, position, self.window)
        return self.o_proj(out_BxTxHxK.reshape(len(x_NxD), -1)), cache


class MLP(GatedMLP):
    """Llama's `GatedMLP`."""

    names: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")
    bias: ClassVar[bool] = False
    # `rebalance_hidden` divides by it afterwards: the linear branch's amax is then near
    # 1.
    hidden_amax: ClassVar[float] = HIDDEN_REBALANCE

    def branches(self, x_NxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `GatedMLP`."""
        gate_NxF, up_NxF = super().branches(x_NxD)
        return (
            rebalance_grad(gate_NxF, GRADIENT_REBALANCE),
            rebalance_grad(up_NxF, GRADIENT_REBALANCE),
        )

    def rebalance_hidden(self, hidden_NxF: jax.Array) -> jax.Array:
        """See `GatedMLP`."""
        return rebalance(hidden_NxF, HIDDEN_REBALANCE)


def identity(x: jax.Array) -> jax.Array:
    """Return `x`."""
    return x


class Block(nnx.Module):
    """Two residual branches, attention and MLP, each with a norm before or after it."""

    # The output of a block is the input of the next, and the last is that of the norm.
    probes: ClassVar[tuple[str, ...]] = ("in",)

    def __init__(self, spec: LlamaSpec, layers: Factory) -> None:
        self.attn_norm = RMSNorm(spec.d_model, spec.norm_eps, layers)
        self.attn = Attention(spec, layers)
        self.mlp_norm = RMSNorm(spec.d_model, spec.norm_eps, layers)
        self.mlp = MLP(spec, layers)
        self.norms_after = spec.norms == "after"

    def pre_and_post(self, norm: Norm) -> tuple[Norm, Norm]:
        """Return what a branch applies to its input, and the block to its output.

        A branch gets the norm of its input as an argument, so that with
        remat=elementwise norm and projection are recomputed together.
        """
        if self.norms_after:
            return identity, norm
        return norm, identity

    def __call__(
        self,
        x_NxD: jax.Array,
        rotation: Rotation,
        segments_BxT: jax.Array | None,
        batch: int,
    ) -> jax.Array:
        pre_norm, post_norm = self.pre_and_post(self.attn_norm)
        x_NxD += post_norm(self.attn(x_NxD, pre_norm, rotation, segments_BxT, batch))
        # Otherwise XLA may fuse the cast to 16 bits into each consumer, and store `x`
        # in FP32.
        x_NxD = materialized(x_NxD)
        pre_norm, post_norm = self.pre_and_post(self.mlp_norm)
        return materialized(x_NxD + post_norm(self.mlp(x_NxD, pre_norm)))

    def decode(
        self,
        x_NxD: jax.Array,
        rotation: Rotation,
        cache: KVCache,
        position: jax.Array | int,
    ) -> tuple[jax.Array, KVCache]:
        """Return the output for tokens from `position` on, and the new cache."""
        pre_norm, post_norm = self.pre_and_post(self.attn_norm)
        out_NxD, cache = self.attn.decode(x_NxD, pre_norm, rotation, cache, position)
        x_NxD += post_norm(out_NxD)
        pre_norm, post_norm = self.pre_and_post(self.mlp_norm)
        return x_NxD + post_norm(self.mlp(x_NxD, pre_norm)), cache


class Llama(Decoder):
    """The language model.

    Args:
      spec: sizes and choices.
      rngs: the key stream `params`. Scanned and unrolled layers get the same initial
        values from the same key.
      settings: keyword arguments of `Factory`; `linear_sizes` has the paths that
        `dot_general_for` takes.
    """

    def __init__(self, spec: LlamaSpec, *, rngs: nnx.Rngs, **settings: Any) -> None:
        layers = Factory("", rngs, **settings)
        self.spec = spec
        self.compute_dtype = layers.compute_dtype
        self.wte = Embedding(
            spec.vocab_size,
            spec.d_model,
            spec.init_std,
            layers,
            padded_rows=spec.padded_vocab,
        )

        def make_block(name: str, key: jax.Array) -> Block:
            return Block(spec, Factory(f"h.{name}", nnx.Rngs(params=key), **settings))

        self.h = make_blocks(
            make_block, rngs.params(), spec.n_layer, scan=spec.scan_layers
        )
        self.norm = RMSNorm(spec.d_model, spec.norm_eps, layers, probes=("in", "out"))
        # No table, since nothing is looked up in it: only matmuls give it a gradient.
        if not spec.tied:
            self.lm_head = Embedding(
                spec.vocab_size,
                spec.d_model,
                spec.init_std,
                layers,
                padded_rows=spec.padded_vocab,
                kind="head",
            )

    @property
    def head_VxD(self) -> jax.Array:
        """The head's weights: the token table if tied."""
        return (self.wte if self.spec.tied else self.lm_head).embedding[...]

    @property
    def uses_rope_L(self) -> jax.Array | None:
        """A flag for each layer: it has rotary positions; None: all have them."""
        layers = self.spec.rope_layers
        if layers is None:
            return None
        return jnp.asarray(layers)

    def rotation(self, position: jax.Array | int, length: int) -> Rotation:
        """Return the rotation of `length` positions from `position` on."""
        spec = self.spec
        # A constant of the program: it follows from the spec alone.
        frequency_P = frequencies(spec.head_width, spec.rope_theta, spec.rope_scaling)
        # Positions are FP32: above 256, BF16 has no odd numbers.
        position_T = (position + jnp.arange(length)).astype(jnp.float32)
        angle_TxP = position_T[:, None] * frequency_P[None]
        rotation = Rotation(jnp.cos(angle_TxP), jnp.sin(angle_TxP))
        amplitude = 1.0 if spec.rope_scaling is None else spec.rope_scaling.amplitude
        # No multiplication by 1 in the programs of models without YaRN.
        if amplitude == 1.0:
            return rotation
        return Rotation(*(amplitude * x for x in rotation))

    def embed(self, tokens_BxT: jax.Array) -> jax.Array:
        """Return token vectors, `[B*T, D]` in the compute dtype."""
        x_BxTxD = embedding(self.wte.embedding[...], tokens_BxT)
        return x_BxTxD.reshape(-1, self.spec.d_model).astype(self.compute_dtype)

    def hidden(
        self,
        tokens_BxT: jax.Array,
        segments_BxT: jax.Array | None = None,
        layer_comm: LayerComm | None = None,
    ) -> jax.Array:
        """Return the final norm's output, `[B, T, D]` in the compute dtype.

        Args:
          tokens_BxT: int32 ids below `vocab_size`; T at most `context`.
          segments_BxT: int32 document ids; a token only attends to its own document.
              None: to all earlier tokens.
          layer_comm: see `apply_blocks`.
        """
        spec, (B, T) = self.spec, tokens_BxT.shape

        def call(
            block: Block, x_NxD: jax.Array, shared: Any, uses_rope: Any
        ) -> jax.Array:
            rotation, segments_BxT = shared
            return block(x_NxD, rotation.masked(uses_rope), segments_BxT, B)

        # Computed once, and passed to each block: in a scan it might be computed anew
        # in each layer.
        shared = self.rotation(0, T), segments_BxT
        x_NxD = apply_blocks(
            self.h,
            call,
            self.embed(tokens_BxT),
            shared,
            self.uses_rope_L,
            scan=spec.scan_layers,
            remat=spec.remat,
            layer_comm=layer_comm,
        )
        return self.norm(x_NxD).reshape(B, T, spec.d_model)

    def decode(
        self, tokens_BxT: jax.Array, cache: KVCache, position: jax.Array | int
    ) -> tuple[jax.Array, KVCache]:
        """Return hidden states `[B, T, D]` from `position` on, and the new cache.

        `position + T` must not exceed `context`.
        """
        rotation = self.rotation(position, tokens_BxT.shape[1])

        def call(
            block: Block, x_NxD: jax.Array, per_layer: tuple[KVCache, Any]
        ) -> tuple[jax.Array, KVCache]:
            cache, uses_rope = per_layer
            return block.decode(x_NxD, rotation.masked(uses_rope), cache, position)

        x_NxD, cache = decode_blocks(
            self.h,
            call,
            self.embed(tokens_BxT),
            (cache, self.uses_rope_L),
            scan=self.spec.scan_layers,
        )
        return self.norm(x_NxD).reshape(*tokens_BxT.shape, self.spec.d_model), cache


def build_functions(spec: LlamaSpec, **settings: Any) -> ModelFunctions[Llama]:
    """Return the model as pure functions; `settings` are those of `Factory`."""
    return functions_of_module(lambda rngs: Llama(spec, rngs=rngs, **settings))
