"""The interface of a family of models for all other rooms.

A family is a `Family` and a spec, a frozen dataclass with the attributes of `Spec`.
`trainer.models.registry` finds the family of a spec.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax

from trainer.models.model_functions import ModelFunctions, Params


class Spec(Protocol):
    """Sizes and choices of a model, a frozen dataclass."""

    # For type checkers: `dataclasses.replace` and `fields` take a Spec by it.
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def vocab_size(self) -> int:
        """Size of the tokenizer's vocabulary."""

    @property
    def padded_vocab(self) -> int:
        """Rows of the token table, padding included."""

    @property
    def context(self) -> int:
        """The longest sequence, in tokens."""

    @property
    def n_layer(self) -> int:
        """Number of blocks."""

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""

    @property
    def n_head(self) -> int:
        """Number of attention's heads of queries."""

    @property
    def head_width(self) -> int | None:
        """Width of attention's heads; None: the model has attention of its own."""

    @property
    def attention_window(self) -> int | None:
        """The number of keys that a query sees, its own included; None: all."""

    @property
    def dropout(self) -> float:
        """The dropout rate; 0 where the model has none."""

    @property
    def scan_layers(self) -> bool:
        """Return whether the blocks' parameters are stacked and scanned."""

    @property
    def remat(self) -> str:
        """The values that the backward pass recomputes; see `GPT2Spec`."""

    @property
    def keep_fp8_weights(self) -> bool:
        """Return whether the backward pass reuses the FP8 weights of the forward pass.

        This takes a byte more per parameter and saves four kernels per layer.
        """

    # Specs are keys of caches, such as that of `flops.abstract_parameters`.
    def __hash__(self) -> int:
        """Return the hash of a frozen dataclass."""

    @classmethod
    def checkpoint_fields(cls) -> tuple[str, ...]:
        """Return the names of the fields that decide what the model computes from its
        parameters.
        """

    @classmethod
    def fields_from_huggingface(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `checkpoint_fields` of a Hugging Face config.json.

        Raises:
          UserError: a field is missing, or the config asks for what the family does not
            implement.
        """

    def architecture(self) -> dict[str, Any]:
        """Return the `checkpoint_fields` as JSON values, with defaults filled in."""

    def is_compatible(self, name: str, value: Any) -> bool:
        """Return whether a spec with this value of a field computes the same."""

    def for_sampling(self) -> Self:
        """Return the spec with SwiGLU in place of smooth SwiGLU.

        Both compute the same function.
        """


class LanguageModel(Protocol):
    """A model bound to its parameters."""

    def loss(
        self,
        tokens_BxT: jax.Array,
        targets_BxT: jax.Array,
        segments_BxT: jax.Array | None = None,
        **settings: Any,
    ) -> jax.Array:
        """Return the mean cross-entropy of the targets in nats, an FP32 scalar.

        `dropout_keys_B` is a setting where the spec has dropout. With `masked=True`
        negative targets count as zero nats, see `linear_cross_entropy`.
        """

    def hidden(
        self, tokens_BxT: jax.Array, segments_BxT: jax.Array | None = None
    ) -> jax.Array:
        """Return hidden states `[B, T, D]` of `loss`'s forward pass, for `logits`.

        A custom model, whose head is unknown, returns logits `[B, T, V]`.
        """

    def init_cache(self, batch: int, length: int | None = None) -> Any:
        """Return an empty cache of `length` positions, by default of `context`."""

    def decode(
        self, tokens_BxT: jax.Array, cache: Any, position: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        """Return hidden states `[B, T, D]` from `position` on, and the new cache."""

    def logits(self, h_NxD: jax.Array) -> jax.Array:
        """Return the logits of hidden states, FP32 `[N, vocab_size]`."""


Sizes = dict[str, tuple[int, int]]  # input and output width by path


class HuggingFace(NamedTuple):
    """Import and export of a family's weights in Hugging Face's format.

    Attributes:
      load: `(source, spec) -> (spec, parameters)` of a directory or safetensors file.
        Without a config.json the given spec tells the sizes. Parameters are NumPy
        arrays, with unrolled layers and padded tables.
      save: `(directory, spec, parameters, eot) -> paths of the weights`. Layers are
        unrolled; `eot` is the tokenizer's end-of-text id, or None.
    """

    load: Callable[[Path, Any], tuple[Any, Params]]
    save: Callable[[Path, Any, Params, int | None], list[Path]]


@dataclass(frozen=True)
class Family:
    """A family of models. Its functions take a spec of the family.

    Attributes:
      name: the name in configurations, and Hugging Face's `model_type`.
      forward_order: names of layers and parameters in the order of a forward pass;
        per-layer numerics are listed in it.
      build: (spec, **settings) -> the model as pure functions. The settings are
        `compute_dtype`, `param_dtype`, `dot_general_for`, `attention`,
        `rescale_grads` and `tensor_axis`; see `layers.Factory`. The bound model is a
        `LanguageModel`.
      check_tensor: (spec, devices, multiple) raises UserError if the number of heads is
        not divisible by `devices`, or a device's number of channels is not a multiple
        of `multiple`.
      huggingface: import and export of weights.
      matmul_sizes: (spec, sizes of kernels by path) -> sizes of matmuls, where a kernel
        is multiplied in parts.
    """

    name: str
    forward_order: tuple[str, ...]
    build: Callable[..., ModelFunctions]
    check_tensor: Callable[[Any, int, int], None]
    huggingface: HuggingFace
    matmul_sizes: Callable[[Any, Sizes], Sizes] = lambda spec, sizes: sizes
