"""What a family of models gives, so that every other room can train, sample, measure,
import and export it.

A family is a `Family` and a spec, a frozen dataclass with the attributes of `Spec`;
`trainer.models.specs` lists those that a configuration can name. Everything else here
follows from these, whatever the architecture.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

from trainer.models.functional import Functional, Params


class Spec(Protocol):
    """Sizes and choices of a model: what other rooms read of them. A frozen
    dataclass.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer."""

    @property
    def padded_vocab(self) -> int:
        """Rows of the token table."""

    @property
    def context(self) -> int:
        """The longest sequence, in tokens."""

    @property
    def n_layer(self) -> int:
        """Blocks."""

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""

    @property
    def dropout(self) -> float:
        """The rate; 0 where the model has none."""

    @property
    def scan_layers(self) -> bool:
        """Return whether the blocks' parameters are stacked, and a loop goes over
        them.
        """

    @property
    def keep_fp8_weights(self) -> bool:
        """Return whether the backward pass reuses FP8 weights: a byte a parameter more,
        four kernels a layer less.
        """

    @classmethod
    def family(cls) -> "Family":
        """The family that the specs of this class are of."""

    @classmethod
    def deciding(cls) -> tuple[str, ...]:
        """The fields that decide which function parameters stand for."""

    @classmethod
    def keys_of_huggingface(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """What a Hugging Face config.json says of the `deciding` fields.

        KeyError or UserError where it does not, or says another function than the
        family's.
        """

    def architecture(self) -> dict[str, Any]:
        """The `deciding` fields as JSON values; what follows from others is filled
        in.
        """

    def agrees(self, name: str, value: Any) -> bool:
        """Whether a field of another `architecture` stands for the same function of the
        same parameters as ours.
        """

    def folded(self) -> Self:
        """The same function of the same parameters, without what only serves to round
        it well: for sampling.
        """


class LanguageModel(Protocol):
    """A model that has its parameters."""

    def loss(
        self,
        tokens_BxT: jax.Array,
        targets_BxT: jax.Array,
        segments_BxT: jax.Array | None = None,
        **settings: Any,
    ) -> jax.Array:
        """Mean cross-entropy of the targets in nats, an FP32 scalar.

        `dropout_keys_B` where the spec has dropout. `masked=True`: negative targets
        count as no nats, see `linear_cross_entropy`.
        """

    def last_logits(
        self, tokens_BxT: jax.Array, segments_BxT: jax.Array | None = None
    ) -> jax.Array:
        """FP32 `[B, vocab_size]`: what the loss's forward pass predicts after the last
        token.
        """

    def hidden(
        self, tokens_BxT: jax.Array, segments_BxT: jax.Array | None = None
    ) -> jax.Array:
        """What `logits` takes, `[B, T, D]`, of the loss's forward pass, for T of at
        most `context`.
        """

    def init_cache(self, batch: int, length: int | None = None) -> Any:
        """An empty cache of `length` positions, by default of `context`."""

    def decode(
        self, tokens_BxT: jax.Array, cache: Any, position: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        """Hidden states `[B, T, D]` of tokens at `position` and after it, and the cache
        with them in it.
        """

    def logits(self, h_NxD: jax.Array) -> jax.Array:
        """FP32 `[N, vocab_size]` of hidden states."""


class HuggingFace(NamedTuple):
    """A family's weights as Hugging Face keeps them.

    Attributes:
      load: from a directory or a safetensors file, and the spec that was asked for,
        where the files leave something open (None: nothing was), to the spec and the
        parameters: NumPy, of unrolled layers, tables padded.
      save: writes a directory from (directory, spec, parameters of unrolled layers, the
        tokenizer's end-of-text id or None); gives the paths of the weights.
    """

    load: Callable[[Path, Any], tuple[Any, Params]]
    save: Callable[[Path, Any, Params, int | None], list[Path]]


@dataclass(frozen=True)
class Family:
    """A family of models. Its functions take a spec of the family.

    Attributes:
      name: by which a configuration and Hugging Face's `model_type` name it.
      blocks: the name of the list of blocks among the parameters.
      parts: names of layers and parameters in the order of a forward pass: that of
          numerics' rows.
      build: (spec, **settings) -> the model as pure functions; the settings are
        `compute_dtype`, `param_dtype`, `dot_general`, `rescale_grads` and `split`, as
        of `gpt2.GPT2`. What is bound is a `LanguageModel`.
      linear_sizes: the linear layers inside the blocks: input and output width of each
        by path, such as `h.3.mlp.c_fc`, or `h.*.mlp.c_fc` of stacked layers.
      forward_flops_per_token: FLOPs of one token's forward pass at the full context;
          see `flops`.
      check_tensor: (spec, devices, multiple) raises UserError where heads do not split
        over so many devices, or channels not into multiples.
      huggingface: weights in and out.
    """

    name: str
    blocks: str
    parts: tuple[str, ...]
    build: Callable[..., Functional]
    linear_sizes: Callable[[Any], dict[str, tuple[int, int]]]
    forward_flops_per_token: Callable[[Any], int]
    check_tensor: Callable[[Any, int, int], None]
    huggingface: HuggingFace

    def stack_layers(self, params: Mapping[str, Any]) -> Params:
        """Parameters of unrolled layers (an entry of `blocks` each) as those of scanned
        ones (leading axis L).
        """
        layers = [params[self.blocks][i] for i in range(len(params[self.blocks]))]
        return {
            **params,
            self.blocks: jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers),
        }

    def unstack_layers(self, params: Mapping[str, Any]) -> Params:
        """The inverse of `stack_layers`."""
        stacked = params[self.blocks]
        n_layer = jax.tree.leaves(stacked)[0].shape[0]
        return {
            **params,
            self.blocks: {
                i: jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
                for i in range(n_layer)
            },
        }


def param_count(spec: Spec, part: Callable[[Any], Any] = lambda params: params) -> int:
    """The number of parameters, or of a part of them, rows that nothing reads not
    counted. Nothing is allocated.
    """
    model = spec.family().build(spec)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    read = jax.tree.map(
        lambda s, role: math.prod(s.shape) - role.padding * s.shape[-1],
        shapes,
        model.roles,
    )
    return sum(jax.tree.leaves(part(read)))
