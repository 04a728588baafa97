"""The user's own model, as a family beside GPT-2 and Llama.

It is a Flax NNX module that returns logits, built with a `Build`, whose layers have
roles. Linear sizes, FLOPs, sharding, precision and optimizer follow from the roles.
There is no key-value cache, Hugging Face format or tensor parallelism: sampling takes a
full forward pass per token.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
from flax import nnx

from scalify_core.ops.functional import cross_entropy
from trainer.errors import UserError
from trainer.models.family import Family, HuggingFace
from trainer.models.flops import parameters
from trainer.models.layers import Embedding, Factory, LayerNorm
from trainer.models.model_functions import ModelFunctions, functions_of_module


class Build(Factory):
    """The sizes, dtypes, keys and layers from which a custom model is built.

    `scope("h.3")` is the `Build` of a block. Its `linear(name, d_in, d_out, stddev,
    kind)`, of kind "column" or "row", makes the layer `h.3.NAME`, which the presets'
    pattern `h.*` chooses for FP8. All layers take activations `[N, d]`. Other
    parameters need a role: `nnx.Param(value, role=Role(kind, ...))`.

    Attributes:
      vocab_size: the size of the vocabulary.
      context: the longest sequence, in tokens.
      compute_dtype: the dtype of activations.
      rngs: the key stream `params`.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int,
        path: str,
        rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:
        super().__init__(path, rngs, **settings)
        self.vocab_size, self.context, self._settings = vocab_size, context, settings

    def scope(self, path: str) -> "Build":
        """Return a `Build` for layers under a path."""
        # The same key stream: each layer takes the next key, whatever its path.
        return Build(self.vocab_size, self.context, path, self.rngs, **self._settings)

    def layer_norm(self, d: int, probes: tuple[str, ...] = ("out",)) -> LayerNorm:
        """Return a LayerNorm over `d` elements; for `probes` see `LayerNorm`."""
        return LayerNorm(d, self, probes)

    def table(self, rows: int, d: int, stddev: float = 0.02) -> Embedding:
        """Return a table `embedding` [rows, d] of normal vectors."""
        return Embedding(rows, d, stddev, self)


class CausalModel(nnx.Module):
    """The base class of a custom model, which overrides `__call__`.

    The logits of a position may not depend on later tokens.
    """

    context: int

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """Return logits `[B, T, vocab_size]` of int32 ids; T is at most the context."""
        raise NotImplementedError

    def loss(
        self,
        tokens_BxT: jax.Array,
        targets_BxT: jax.Array,
        segments_BxT: jax.Array | None = None,
        **_: Any,
    ) -> jax.Array:
        """Return the mean cross-entropy of the targets in nats, an FP32 scalar."""
        # Ignored, they would let documents see each other without a word.
        if segments_BxT is not None:
            raise UserError(
                "data.document_mask=true: a custom model takes no segments; set"
                " data.document_mask=false"
            )
        logits_BxTxV = self(tokens_BxT)
        return cross_entropy(
            logits_BxTxV.reshape(-1, logits_BxTxV.shape[-1]), targets_BxT.reshape(-1)
        )

    def hidden(
        self, tokens_BxT: jax.Array, segments_BxT: jax.Array | None = None
    ) -> jax.Array:
        """Return logits `[B, T, V]` in place of hidden states.

        `logits` only casts them to FP32.
        """
        del segments_BxT
        return self(tokens_BxT)

    def init_cache(self, batch: int, length: int | None = None) -> jax.Array:
        """Return an empty cache of tokens: int32 `[B, S]`; S = `length` or context."""
        return jnp.zeros((batch, length or self.context), jnp.int32)

    def decode(
        self, tokens_BxT: jax.Array, cache: jax.Array, position: jax.Array | int
    ) -> tuple[jax.Array, jax.Array]:
        """Return logits `[B, T, V]` of tokens from `position` on, and the new cache."""
        # Places behind the new tokens hold zeros, token 0. No logits that are returned
        # may depend on these: they are later tokens.
        cache = jax.lax.dynamic_update_slice_in_dim(cache, tokens_BxT, position, axis=1)
        logits_BxSxV, T = self(cache), tokens_BxT.shape[1]
        return (
            jax.lax.dynamic_slice_in_dim(logits_BxSxV, position, T, axis=1),
            cache,
        )

    def logits(self, h_NxV: jax.Array) -> jax.Array:
        """Return the logits of `decode` in FP32."""
        return h_NxV.astype(jnp.float32)


MakeModel = Callable[[Build], CausalModel]


@dataclass(frozen=True)
class CustomSpec:
    """The spec of a custom model."""

    make: MakeModel
    vocab_size: int
    context: int
    keep_fp8_weights: bool
    # Such choices are in the user's code, where the trainer does not see them.
    dropout: float = 0.0
    scan_layers: bool = False
    remat: str = "none"
    n_layer: int = 0  # unknown
    n_head: int = 0
    # Its attention is unknown: FLOPs leave it out, and FP8 attention is refused.
    head_width: None = None
    attention_window: None = None

    @property
    def padded_vocab(self) -> int:
        """The vocabulary's size: a custom model makes its own tables."""
        return self.vocab_size

    @property
    def d_model(self) -> int:
        """Width of the first table or head; 1 if there is neither."""
        # The head's FLOPs, d_model x vocab_size, are counted by it.
        for role, shape in parameters(self):
            if role.kind in ("table", "head"):
                return shape[-1]
        return 1

    @classmethod
    def checkpoint_fields(cls) -> tuple[str, ...]:
        """See `family.Spec`."""
        return ("vocab_size", "context", "parameters")

    @classmethod
    def fields_from_huggingface(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Raise UserError: a custom model has no config.json."""
        raise UserError(
            "a custom model has no Hugging Face config.json; give init_from a run of"
            " the same model"
        )

    def architecture(self) -> dict[str, Any]:
        """See `family.Spec`.

        What the model computes is unknown here: roles and shapes of the parameters
        stand for it.
        """
        # Not `hash`, whose values of strings differ between processes.
        digest = hashlib.blake2b(
            repr(parameters(self)).encode(), digest_size=8
        ).hexdigest()
        return {
            "vocab_size": self.vocab_size,
            "context": self.context,
            "parameters": digest,
        }

    def is_compatible(self, name: str, value: Any) -> bool:
        """See `family.Spec`."""
        return bool(self.architecture()[name] == value)

    def for_sampling(self) -> Self:
        """See `family.Spec`."""
        return self


def build_functions(spec: CustomSpec, **settings: Any) -> ModelFunctions[CausalModel]:
    """Return the model as pure functions; `settings` are those of `Factory`.

    Raises:
      UserError: the model is not a `CausalModel`, or a parameter has no role.
    """

    def make(rngs: nnx.Rngs) -> CausalModel:
        model = spec.make(Build(spec.vocab_size, spec.context, "", rngs, **settings))
        # Training, evaluation and sampling call its `loss`, `hidden` and `decode`.
        if not isinstance(model, CausalModel):
            raise UserError(
                f"model gave a {type(model).__name__}; expected a trainer.CausalModel"
            )
        # Set here, so that a user's constructor need not pass it on.
        model.context = spec.context
        return model

    try:
        return functions_of_module(make)
    # `roles_of` raises it for a parameter without a role.
    except ValueError as error:
        raise UserError(f"model: {error}") from error


def custom_spec(
    make: MakeModel, *, vocab_size: int, context: int, keep_fp8_weights: bool
) -> CustomSpec:
    """Return the spec of a custom model.

    Raises:
      UserError: its logits are not `[B, T, vocab_size]`.
    """
    spec = CustomSpec(make, vocab_size, context, keep_fp8_weights)
    model = build_functions(spec)
    logits = jax.eval_shape(
        lambda tokens: model.bind(model.init(jax.random.key(0)))(tokens),
        # Two sequences: with one, a model that mixes up or drops the axis of the batch
        # may still give logits of the right shape.
        jax.ShapeDtypeStruct((2, context), jnp.int32),
    )
    if logits.shape != (2, context, vocab_size):
        raise UserError(
            f"model gives {list(logits.shape)} for tokens {[2, context]}; expected"
            f" logits {[2, context, vocab_size]}"
        )
    return spec


def check_tensor(spec: CustomSpec, devices: int, multiple: int) -> NoReturn:
    """Raise UserError: it is unknown how tensor parallelism could split the model."""
    raise UserError(
        f"parallel.tensor={devices}: a custom model cannot be split; use parallel.data"
        " or parallel.fsdp"
    )


def raise_not_exportable(*_: Any) -> NoReturn:
    """Raise UserError: Hugging Face has no such model."""
    raise UserError("a custom model cannot be exported: Hugging Face has no such model")


def raise_not_importable(source: Path, spec: Any) -> NoReturn:
    """Raise UserError: Hugging Face has no such model."""
    raise UserError(
        f"init_from={source}: Hugging Face weights do not fit a custom model; give a"
        " run of the same model"
    )


CUSTOM = Family(
    name="own",  # checkpoints store it
    # Only the user knows the names of layers: these are Flax's names of parameters.
    forward_order=("embedding", "scale", "kernel", "bias"),
    build=build_functions,
    check_tensor=check_tensor,
    huggingface=HuggingFace(raise_not_importable, raise_not_exportable),
)
