"""A model of a program's own, as a family beside GPT-2 and Llama.

It is a Flax NNX module that gives logits, built by a `Build`, whose layers have their
roles; from these follow linear sizes, FLOPs, sharding, precision and optimizer. What
else a family gives (caches, Hugging Face, tensor parallelism) it does without: samples
take a whole forward pass a token.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from scalify_core import cross_entropy
from trainer.errors import UserError
from trainer.models.family import Family, HuggingFace
from trainer.models.functional import Functional, as_functions
from trainer.models.layers import DotGeneralFor, Embedding, Factory


class Build(Factory):
    """What an own model is built with: sizes, dtypes, keys, and layers with their
    roles.

    `at("h.3")` makes the layers of a part: `linear(name, d_in, d_out, stddev, kind)`,
    of kind "column" or "row", is called `h.3.NAME`, which the presets' pattern `h.*`
    chooses for narrow products. All layers take activations `[N, d]`. Parameters made
    otherwise need a role: `nnx.Param(value, role=Role(kind, ...))`.

    Attributes:
      vocab_size: ids are below it.
      context: the longest sequence, in tokens.
      compute_dtype: of activations.
      rngs: key stream `params`.
    """

    def __init__(
        self, vocab_size: int, context: int, path: str, *settings: Any
    ) -> None:
        super().__init__(path, *settings)
        self.vocab_size, self.context, self._settings = vocab_size, context, settings

    def at(self, path: str) -> "Build":
        """The same for layers under a path."""
        return Build(self.vocab_size, self.context, path, *self._settings)

    def table(self, rows: int, d: int, stddev: float = 0.02) -> Embedding:
        """Normal vectors `embedding` [rows, d] to look up; also a tied head."""
        return Embedding(rows, rows, d, stddev, self.param_dtype, self.rngs)


class CausalModel(nnx.Module):
    """The base of an own model: override `__call__`. No position may see a later
    one.
    """

    context: int

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """Logits `[B, T, vocab_size]` of int32 ids; T is at most the context."""
        raise NotImplementedError

    def loss(
        self,
        tokens_BxT: jax.Array,
        targets_BxT: jax.Array,
        segments_BxT: jax.Array | None = None,
        **_: Any,
    ) -> jax.Array:
        """Mean cross-entropy of the targets in nats, an FP32 scalar."""
        if segments_BxT is not None:
            raise UserError(
                "data.document_mask=true needs a model that takes segments; leave it"
                " out for your own"
            )
        logits_BxTxV = self(tokens_BxT)
        return cross_entropy(
            logits_BxTxV.reshape(-1, logits_BxTxV.shape[-1]), targets_BxT.reshape(-1)
        )

    def last_logits(
        self, tokens_BxT: jax.Array, segments_BxT: jax.Array | None = None
    ) -> jax.Array:
        """Logits after the last token, FP32 `[B, vocab_size]`; segments are refused, as
        by `loss`.
        """
        del segments_BxT
        return self(tokens_BxT)[:, -1].astype(jnp.float32)

    def hidden(
        self, tokens_BxT: jax.Array, segments_BxT: jax.Array | None = None
    ) -> jax.Array:
        """Logits `[B, T, V]`, which are what `logits` takes; segments are refused, as
        by `loss`.
        """
        del segments_BxT
        return self(tokens_BxT)

    def init_cache(self, batch: int, length: int | None = None) -> jax.Array:
        """The tokens so far: int32 `[B, S]`, S the context, or `length` of it."""
        return jnp.zeros((batch, length or self.context), jnp.int32)

    def decode(
        self, tokens_BxT: jax.Array, cache: jax.Array, position: jax.Array | int
    ) -> tuple[jax.Array, jax.Array]:
        """Logits `[B, T, V]` of tokens at `position` and after it, and the tokens with
        them among them.
        """
        cache = jax.lax.dynamic_update_slice_in_dim(cache, tokens_BxT, position, axis=1)
        return (
            jax.lax.dynamic_slice_in_dim(
                self(cache), position, tokens_BxT.shape[1], axis=1
            ),
            cache,
        )

    def logits(self, h_NxV: jax.Array) -> jax.Array:
        """What `decode` gave, in FP32."""
        return h_NxV.astype(jnp.float32)


MakeModel = Callable[[Build], CausalModel]


@dataclass(frozen=True)
class CustomSpec:
    """What is known of an own model without building it."""

    make: MakeModel
    vocab_size: int
    context: int
    keep_fp8_weights: bool
    dropout: float = 0.0
    scan_layers: bool = False
    n_layer: int = 0  # nobody knows what its layers are

    @property
    def padded_vocab(self) -> int:
        """Its tables are as it makes them."""
        return self.vocab_size

    @property
    def d_model(self) -> int:
        """The width of the first table or head; 1 without any."""
        return next(
            (
                shape[-1]
                for role, shape in parameters(self)
                if role.kind in ("table", "head")
            ),
            1,
        )

    @classmethod
    def family(cls) -> Family:
        """See `family.Spec`."""
        return CUSTOM

    @classmethod
    def deciding(cls) -> tuple[str, ...]:
        """See `family.Spec`."""
        return ("vocab_size", "context", "parameters")

    @classmethod
    def keys_of_huggingface(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `family.Spec`: there is none."""
        raise UserError("Hugging Face has no model of your own")

    def architecture(self) -> dict[str, Any]:
        """See `family.Spec`; the parameters' roles and shapes stand for the function,
        which its author knows.
        """
        digest = hashlib.blake2b(
            repr(parameters(self)).encode(), digest_size=8
        ).hexdigest()
        return {
            "vocab_size": self.vocab_size,
            "context": self.context,
            "parameters": digest,
        }

    def agrees(self, name: str, value: Any) -> bool:
        """See `family.Spec`."""
        return bool(self.architecture()[name] == value)

    def folded(self) -> Self:
        """See `family.Spec`."""
        return self


@functools.cache
def parameters(spec: CustomSpec) -> tuple[tuple[Any, tuple[int, ...]], ...]:
    """Role and shape of each parameter. Nothing is allocated."""
    model = functional(spec)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    leaves = zip(jax.tree.leaves(model.roles), jax.tree.leaves(shapes), strict=True)
    return tuple((role, leaf.shape) for role, leaf in leaves)


def functional(
    spec: CustomSpec,
    *,
    compute_dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    dot_general: DotGeneralFor | None = None,
    rescale_grads: tuple[str, ...] = (),
    split: str | None = None,
) -> Functional[CausalModel]:
    """The model as pure functions. UserError for what is no `CausalModel`, or has a
    parameter without a role.
    """
    settings = compute_dtype, param_dtype, dot_general, rescale_grads, split

    def make(rngs: nnx.Rngs) -> CausalModel:
        model = spec.make(Build(spec.vocab_size, spec.context, "", rngs, *settings))
        if not isinstance(model, CausalModel):
            raise UserError(
                f"model gave a {type(model).__name__}; expected a trainer.CausalModel"
            )
        model.context = spec.context
        return model

    try:
        return as_functions(make)
    except ValueError as error:
        raise UserError(f"model: {error}") from error


def custom_spec(
    make: MakeModel, *, vocab_size: int, context: int, keep_fp8_weights: bool
) -> CustomSpec:
    """The spec of an own model. UserError where its logits are not
    `[B, T, vocab_size]`.
    """
    spec = CustomSpec(make, vocab_size, context, keep_fp8_weights)
    model = functional(spec)
    logits = jax.eval_shape(
        lambda tokens: model.bind(model.init(jax.random.key(0)))(tokens),
        jax.ShapeDtypeStruct((2, context), jnp.int32),
    )
    if logits.shape != (2, context, vocab_size):
        raise UserError(
            f"model gives {list(logits.shape)} for tokens {[2, context]}; expected"
            f" logits {[2, context, vocab_size]}"
        )
    return spec


def linear_sizes(spec: CustomSpec) -> dict[str, tuple[int, int]]:
    """Input and output width of each kernel that has a path."""
    found = [
        (role, shape)
        for role, shape in parameters(spec)
        if role.is_kernel and role.layer is not None
    ]
    return {role.layer: (shape[-2], shape[-1]) for role, shape in found}


def forward_flops_per_token(spec: CustomSpec) -> int:
    """Of the products with kernels and with the head, or the table where there is no
    head; FLOPs exclude attention.
    """
    kernels = sum(
        math.prod(shape) for role, shape in parameters(spec) if role.is_kernel
    )
    return 2 * (kernels + spec.vocab_size * spec.d_model)


def check_tensor(spec: CustomSpec, devices: int, multiple: int) -> NoReturn:
    """Refuse every number of devices: what can be split is not known."""
    raise UserError(
        f"parallel.tensor={devices}: a model of your own is not split; use"
        " parallel.data or parallel.fsdp"
    )


def no_files(*_: Any) -> NoReturn:
    """Refuse: Hugging Face has no such model."""
    raise UserError("a model of your own has no Hugging Face form")


def no_load(source: Path, spec: Any) -> NoReturn:
    """Refuse: Hugging Face has no such model."""
    raise UserError(
        f"init_from={source}: Hugging Face weights are not those of a model of your"
        " own; give a run of it"
    )


CUSTOM = Family(
    name="own",
    blocks="h",
    parts=("embedding", "scale", "kernel", "bias"),
    build=functional,
    linear_sizes=linear_sizes,
    forward_flops_per_token=forward_flops_per_token,
    check_tensor=check_tensor,
    huggingface=HuggingFace(no_load, no_files),
)
