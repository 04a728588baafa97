"""GPT-2 in Flax NNX: learned positions, pre-LN blocks, tied head.

Legend: B batch, T time, N = B*T, S cache length, D model, H heads, K head dim, V padded
vocabulary, L layers.

Reference: Radford et al. 2019, "Language models are unsupervised multitask learners",
and its published code.
"""

from typing import Any

import jax
from flax import nnx

from scalify_core.ops.functional import embedding
from trainer.models.blocks import (
    LayerComm,
    apply_blocks,
    decode_blocks,
    make_blocks,
)
from trainer.models.cache import KVCache
from trainer.models.decoder import Decoder
from trainer.models.gpt2.block import Attention, Block
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.gpt2.value_gain import ValueGainAttention
from trainer.models.layers import Embedding, Factory, LayerNorm, dropout, split_keys
from trainer.models.model_functions import ModelFunctions, functions_of_module


class GPT2(Decoder):
    """The language model.

    Args:
      spec: sizes and choices.
      rngs: the key stream `params`. Scanned and unrolled layers get the same initial
        values from the same key.
      settings: keyword arguments of `Factory`; `linear_sizes` has the paths that
        `dot_general_for` takes.
    """

    def __init__(self, spec: GPT2Spec, *, rngs: nnx.Rngs, **settings: Any) -> None:
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
        self.wpe = Embedding(spec.context, spec.d_model, spec.init_std, layers)

        attention = Attention if spec.value_gain is None else ValueGainAttention

        def make_block(name: str, key: jax.Array) -> Block:
            factory = Factory(f"h.{name}", nnx.Rngs(params=key), **settings)
            return Block(spec, factory, attention)

        self.h = make_blocks(
            make_block, rngs.params(), spec.n_layer, scan=spec.scan_layers
        )
        # Its input is the last residual stream, which no block after it measures.
        self.ln_f = LayerNorm(spec.d_model, layers, probes=("in", "out"))

    @property
    def head_VxD(self) -> jax.Array:
        """The head's weights: the token table."""
        return self.wte.embedding[...]

    def embed(self, tokens_BxT: jax.Array, position: jax.Array | int = 0) -> jax.Array:
        """Return token plus position vectors, `[B*T, D]` in the compute dtype.

        The first token is at `position`.
        """
        # JAX shifts a slice that exceeds the table, in silence: see `decode`.
        wpe_TxD = jax.lax.dynamic_slice_in_dim(
            self.wpe.embedding[...], position, tokens_BxT.shape[1]
        )
        x_BxTxD = embedding(self.wte.embedding[...], tokens_BxT) + wpe_TxD[None]
        # The sum of both tables is rounded once.
        return x_BxTxD.reshape(-1, self.spec.d_model).astype(self.compute_dtype)

    def hidden(
        self,
        tokens_BxT: jax.Array,
        segments_BxT: jax.Array | None = None,
        dropout_keys_B: jax.Array | None = None,
        layer_comm: LayerComm | None = None,
    ) -> jax.Array:
        """Return the final LayerNorm's output, `[B, T, D]` in the compute dtype.

        Args:
          tokens_BxT: int32 ids below `vocab_size`; T at most `context`.
          segments_BxT: int32 document ids; a token only attends to its own document.
              None: to all earlier tokens.
          dropout_keys_B: a key for each sequence; None turns dropout off.
          layer_comm: see `apply_blocks`.
        """
        spec, (B, T) = self.spec, tokens_BxT.shape
        embed_keys_B = keys_LxB = None
        if spec.dropout > 0 and dropout_keys_B is not None:
            # One more than layers, so that the embedding's mask is no layer's.
            keys = split_keys(dropout_keys_B, 1 + spec.n_layer)
            embed_keys_B, keys_LxB = keys[0], keys[1:]

        def call(
            block: Block, x_NxD: jax.Array, segments_BxT: Any, keys_B: Any
        ) -> jax.Array:
            return block(x_NxD, B, segments_BxT, keys_B)

        x_NxD = dropout(self.embed(tokens_BxT), spec.dropout, embed_keys_B)
        x_NxD = apply_blocks(
            self.h,
            call,
            x_NxD,
            segments_BxT,
            keys_LxB,
            scan=spec.scan_layers,
            remat=spec.remat,
            layer_comm=layer_comm,
        )
        return self.ln_f(x_NxD).reshape(B, T, spec.d_model)

    def decode(
        self, tokens_BxT: jax.Array, cache: KVCache, position: jax.Array | int
    ) -> tuple[jax.Array, KVCache]:
        """Return hidden states `[B, T, D]` from `position` on, and the new cache.

        `position + T` must not exceed `context`.
        """

        def call(
            block: Block, x_NxD: jax.Array, cache: KVCache
        ) -> tuple[jax.Array, KVCache]:
            return block.decode(x_NxD, cache, position)

        x_NxD = self.embed(tokens_BxT, position)
        x_NxD, cache = decode_blocks(
            self.h, call, x_NxD, cache, scan=self.spec.scan_layers
        )
        return self.ln_f(x_NxD).reshape(*tokens_BxT.shape, self.spec.d_model), cache


def build_functions(spec: GPT2Spec, **settings: Any) -> ModelFunctions[GPT2]:
    """Return the model as pure functions; `settings` are those of `Factory`.

    >>> import jax.numpy as jnp
    >>> spec = GPT2Spec(vocab_size=256, context=8, n_layer=1, n_head=1, d_model=8)
    >>> model = build_functions(spec)
    >>> model.bind(model.init(jax.random.key(0)))(jnp.zeros((2, 8), jnp.int32)).shape
    (2, 8, 256)
    """
    return functions_of_module(lambda rngs: GPT2(spec, rngs=rngs, **settings))
