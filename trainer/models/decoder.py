"""The parts that all decoder-only models share: head, loss, and cache.

Legend: B batch, T time, N = B*T, S cache length, D model, G heads of keys and values, K
head dim, V padded vocabulary, L layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from scalify_core.ops.functional import linear_cross_entropy
from trainer.models.cache import KVCache, empty_cache

# `narrow_logits` of the loss, by `loss_logits` of a spec; else FP32
NARROW_LOGITS: dict[str | None, Any] = {"auto": "cuda", "compute": True}


class Decoder(nnx.Module):
    """A decoder-only model: a subclass has `hidden` and `head_VxD`."""

    spec: Any
    compute_dtype: DTypeLike

    def hidden(self, *args: Any, **settings: Any) -> jax.Array:
        """Return the hidden states `[B, T, D]` of tokens; see the families."""
        raise NotImplementedError

    @property
    def head_VxD(self) -> jax.Array:
        """The head's weights."""
        raise NotImplementedError

    def logits(self, h_NxD: jax.Array) -> jax.Array:
        """Return logits, FP32 `[N, vocab_size]`, without padding."""
        # Padding rows are zero: their logits would be 0 rather than -inf.
        head_VxD = self.head_VxD[: self.spec.vocab_size].astype(self.compute_dtype)
        return jnp.einsum(
            "nd,vd->nv", h_NxD, head_VxD, preferred_element_type=jnp.float32
        )

    def __call__(
        self,
        tokens_BxT: jax.Array,
        segments_BxT: jax.Array | None = None,
        **settings: Any,
    ) -> jax.Array:
        """Return next-token logits, FP32 `[B, T, vocab_size]`; see `hidden`."""
        h_BxTxD = self.hidden(tokens_BxT, segments_BxT, **settings)
        # Matmuls act on N = B T rows: see `trainer.models.layers`.
        return self.logits(h_BxTxD.reshape(-1, self.spec.d_model)).reshape(
            *tokens_BxT.shape, self.spec.vocab_size
        )

    def loss(
        self,
        tokens_BxT: jax.Array,
        targets_BxT: jax.Array,
        segments_BxT: jax.Array | None = None,
        *,
        masked: bool = False,
        **settings: Any,
    ) -> jax.Array:
        """Return the mean cross-entropy of the targets in nats, an FP32 scalar.

        With `masked`, negative targets count as zero nats. FP32 logits of a full batch
        are never in memory. `settings` are those of `hidden`.
        """
        h_BxTxD = self.hidden(tokens_BxT, segments_BxT, **settings)
        return linear_cross_entropy(
            h_BxTxD.reshape(-1, self.spec.d_model),
            # With its padding rows, whose logits the loss leaves out by `vocab_size`: a
            # matmul of 50257 columns would be padded again in each step.
            self.head_VxD,
            targets_BxT.reshape(-1),
            vocab_size=self.spec.vocab_size,
            masked=masked,
            narrow_logits=NARROW_LOGITS.get(self.spec.loss_logits, False),
        )

    def init_cache(self, batch: int, length: int | None = None) -> KVCache:
        """Return an empty cache `[L, B, S, G, K]`; S = `length` or `context`."""
        return empty_cache(
            self.spec.n_layer,
            batch,
            # A generated text needs less than the context, which may be very long.
            length or self.spec.context,
            self.spec.n_kv_head,
            self.spec.head_width,
            self.compute_dtype,
        )
