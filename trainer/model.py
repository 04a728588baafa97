"""GPT-2 in Flax NNX: learned positions, pre-LN blocks, tied head.

Dense layers act on activations flattened to (B*T, D): on CPU, XLA runs them up to four times faster than on (B, T, D),
whose weight gradients need transposed copies. Master parameters stay in `param_dtype`; a layer casts its own to
`compute_dtype` where it uses them, except LayerNorm's gain and bias, which are applied in FP32.

Legend: B batch, T time, N = B*T, S cache length, D model, F MLP, H heads, K head dim, V padded vocabulary, L layers.

Reference: Radford et al. 2019, "Language models are unsupervised multitask learners", and its published code.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from scalify_core import attention, embedding, gelu, layer_norm, linear_cross_entropy, swiglu
from trainer.errors import UserError

Params = dict[str, Any]
DotGeneral = Callable[..., jax.Array]
DotGeneralFor = Callable[[str], DotGeneral]

# The members of jax.checkpoint_policies that are policies themselves; the others are functions that make one.
REMAT_POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
)
MLPS = ("gelu", "swiglu")


@dataclass(frozen=True)
class GPT2Spec:
    """A GPT-2's sizes and choices.

    Attributes:
      vocab_size: of the tokenizer; tables and logits hold `padded_vocab` rows.
      context: the longest sequence, in tokens.
      mlp: gelu (D -> F -> D) or swiglu (two projections D -> F, their gated product -> D).
      d_mlp: F; None: 4 D (gelu) or 8/3 D rounded up to a multiple of 64 (swiglu, the same number of parameters).
      dropout: rate on the embeddings and on each branch's output; fused attention has none inside.
      scan_layers: loop over stacked parameters instead of unrolling: compiles faster, moves more memory.
      remat: recompute in the backward pass: none, block (whole blocks), or one of REMAT_POLICIES inside blocks.
    """

    vocab_size: int
    context: int = 1024
    n_layer: int = 12
    n_head: int = 12
    d_model: int = 768
    mlp: Literal["gelu", "swiglu"] = "gelu"
    d_mlp: int | None = None
    dropout: float = 0.0
    scan_layers: bool = False
    remat: str = "none"

    def __post_init__(self) -> None:
        """Raise UserError for what cannot be built."""
        if self.d_model % self.n_head:
            raise UserError(f"d_model={self.d_model} is not a multiple of n_head={self.n_head}; change one of them")
        if self.mlp not in MLPS:
            raise UserError(f"mlp={self.mlp!r} is not a choice; valid: {', '.join(MLPS)}")
        valid = ("none", "block", *REMAT_POLICIES)
        if self.remat not in valid:
            raise UserError(f"remat={self.remat!r} is not a choice; valid: {', '.join(valid)}")

    @property
    def padded_vocab(self) -> int:
        """Rows of the token table: `vocab_size` rounded up to a multiple of 64, so 50304 for 50257."""
        return -(-self.vocab_size // 64) * 64

    @property
    def mlp_width(self) -> int:
        """F."""
        if self.d_mlp is not None:
            return self.d_mlp
        return 4 * self.d_model if self.mlp == "gelu" else math.ceil(8 * self.d_model / 3 / 64) * 64

    @property
    def head_dim(self) -> int:
        """K."""
        return self.d_model // self.n_head


class KVCache(NamedTuple):
    """Keys and values of the positions seen so far, `[L, B, S, H, K]` in the compute dtype; one layer's have no L."""

    k: jax.Array
    v: jax.Array


def init_cache(spec: GPT2Spec, batch: int, dtype: DTypeLike) -> KVCache:
    """An empty cache of `spec.context` positions."""
    shape = (spec.n_layer, batch, spec.context, spec.n_head, spec.head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


class Factory:
    """Makes the linear layers of one block: dtypes, keys, and the dot_general chosen for each path."""

    def __init__(
        self,
        path: str,
        rngs: nnx.Rngs,
        compute_dtype: DTypeLike,
        param_dtype: DTypeLike,
        dot_general: DotGeneralFor | None,
    ) -> None:
        self.path = path
        self.rngs = rngs
        self.compute_dtype = compute_dtype
        self.param_dtype = param_dtype
        self.dot_general = dot_general

    def linear(self, name: str, d_in: int, d_out: int, stddev: float = 0.02) -> nnx.Linear:
        """Normal weights, zero bias. Its dot_general is the one chosen for `{path}.{name}`."""
        chosen = jax.lax.dot_general if self.dot_general is None else self.dot_general(f"{self.path}.{name}")
        return nnx.Linear(
            d_in,
            d_out,
            dtype=self.compute_dtype,
            param_dtype=self.param_dtype,
            kernel_init=nnx.initializers.normal(stddev),
            dot_general=chosen,
            rngs=self.rngs,
        )


class LayerNorm(nnx.Module):
    """Normalisation over the last axis, in FP32; the result has the input's dtype."""

    def __init__(self, d: int, param_dtype: DTypeLike) -> None:
        self.scale = nnx.Param(jnp.ones(d, param_dtype))
        self.bias = nnx.Param(jnp.zeros(d, param_dtype))

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        return layer_norm(x_NxD, self.scale[...], self.bias[...])


class Embedding(nnx.Module):
    """A table of vectors, normal(0.02). Rows from `rows` to `padded_rows` are zero and stay so: nothing reads them."""

    def __init__(self, rows: int, padded_rows: int, d: int, param_dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        table = nnx.initializers.normal(0.02)(rngs.params(), (rows, d), param_dtype)
        self.embedding = nnx.Param(jnp.pad(table, ((0, padded_rows - rows), (0, 0))))


class Attention(nnx.Module):
    """Causal multi-head self-attention."""

    def __init__(self, spec: GPT2Spec, make: Factory, residual_stddev: float) -> None:
        self.n_head = spec.n_head
        self.c_attn = make.linear("attn.c_attn", spec.d_model, 3 * spec.d_model)
        self.c_proj = make.linear("attn.c_proj", spec.d_model, spec.d_model, residual_stddev)

    def heads(self, x_NxD: jax.Array, batch: int) -> list[jax.Array]:
        """Queries, keys, values, each `[B, T, H, K]`."""
        d = x_NxD.shape[1]
        split = jnp.split(self.c_attn(x_NxD), 3, axis=1)
        return [part.reshape(batch, -1, self.n_head, d // self.n_head) for part in split]

    def __call__(self, x_NxD: jax.Array, batch: int, segments_BxT: jax.Array | None) -> jax.Array:
        q_BxTxHxK, k_BxTxHxK, v_BxTxHxK = self.heads(x_NxD, batch)
        out_BxTxHxK = attention(q_BxTxHxK, k_BxTxHxK, v_BxTxHxK, causal=True, segments=segments_BxT)
        return self.c_proj(out_BxTxHxK.reshape(x_NxD.shape))

    def decode(self, x_NxD: jax.Array, cache: KVCache, position: jax.Array | int) -> tuple[jax.Array, KVCache]:
        """The same for tokens at `position` and after it, which attend to this layer's cache too."""
        q_BxTxHxK, k_BxTxHxK, v_BxTxHxK = self.heads(x_NxD, cache.k.shape[0])
        k_BxSxHxK = jax.lax.dynamic_update_slice_in_dim(cache.k, k_BxTxHxK, position, axis=1)
        v_BxSxHxK = jax.lax.dynamic_update_slice_in_dim(cache.v, v_BxTxHxK, position, axis=1)
        out_BxTxHxK = cached_attention(q_BxTxHxK, k_BxSxHxK, v_BxSxHxK, position)
        return self.c_proj(out_BxTxHxK.reshape(x_NxD.shape)), KVCache(k_BxSxHxK, v_BxSxHxK)


def cached_attention(
    q_BxTxHxK: jax.Array, k_BxSxHxK: jax.Array, v_BxSxHxK: jax.Array, position: jax.Array | int
) -> jax.Array:
    """Attention of queries at `position + t` over the cached positions up to their own; softmax in FP32."""
    T, S = q_BxTxHxK.shape[1], k_BxSxHxK.shape[1]
    logits_BxHxTxS = jnp.einsum("bthk,bshk->bhts", q_BxTxHxK, k_BxSxHxK, preferred_element_type=jnp.float32)
    visible_TxS = jnp.arange(S)[None, :] <= position + jnp.arange(T)[:, None]
    logits_BxHxTxS = jnp.where(visible_TxS[None, None], logits_BxHxTxS / math.sqrt(q_BxTxHxK.shape[3]), -jnp.inf)
    weights_BxHxTxS = jax.nn.softmax(logits_BxHxTxS, axis=-1).astype(v_BxSxHxK.dtype)
    return jnp.einsum("bhts,bshk->bthk", weights_BxHxTxS, v_BxSxHxK)


class GeluMLP(nnx.Module):
    """D -> F, GELU (tanh form), F -> D."""

    def __init__(self, spec: GPT2Spec, make: Factory, residual_stddev: float) -> None:
        self.c_fc = make.linear("mlp.c_fc", spec.d_model, spec.mlp_width)
        self.c_proj = make.linear("mlp.c_proj", spec.mlp_width, spec.d_model, residual_stddev)

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        return self.c_proj(gelu(self.c_fc(x_NxD)))


class SwigluMLP(nnx.Module):
    """D -> F twice, silu(gate) * linear, F -> D. Reference: Shazeer 2020, "GLU variants improve transformer"."""

    def __init__(self, spec: GPT2Spec, make: Factory, residual_stddev: float) -> None:
        self.c_gate = make.linear("mlp.c_gate", spec.d_model, spec.mlp_width)
        self.c_fc = make.linear("mlp.c_fc", spec.d_model, spec.mlp_width)
        self.c_proj = make.linear("mlp.c_proj", spec.mlp_width, spec.d_model, residual_stddev)

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        return self.c_proj(swiglu(self.c_gate(x_NxD), self.c_fc(x_NxD)))


def dropout(x_NxD: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero a share of the elements, scale up the rest. Without a key: evaluation, the identity."""
    if key is None or rate == 0.0:
        return x_NxD
    keep_NxD = jax.random.bernoulli(key, 1.0 - rate, x_NxD.shape)
    return jnp.where(keep_NxD, x_NxD / (1.0 - rate), 0.0).astype(x_NxD.dtype)


class Block(nnx.Module):
    """Two residual branches: attention and MLP, each behind its LayerNorm."""

    def __init__(self, spec: GPT2Spec, make: Factory) -> None:
        # 2 L branches add up in the residual stream: each starts with 1 / (2 L) of the variance.
        residual_stddev = 0.02 / math.sqrt(2 * spec.n_layer)
        self.dropout = spec.dropout
        self.ln_1 = LayerNorm(spec.d_model, make.param_dtype)
        self.attn = Attention(spec, make, residual_stddev)
        self.ln_2 = LayerNorm(spec.d_model, make.param_dtype)
        self.mlp = {"gelu": GeluMLP, "swiglu": SwigluMLP}[spec.mlp](spec, make, residual_stddev)

    def __call__(
        self, x_NxD: jax.Array, batch: int, segments_BxT: jax.Array | None, dropout_key: jax.Array | None
    ) -> jax.Array:
        attn_key, mlp_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        x_NxD += dropout(self.attn(self.ln_1(x_NxD), batch, segments_BxT), self.dropout, attn_key)
        return x_NxD + dropout(self.mlp(self.ln_2(x_NxD)), self.dropout, mlp_key)

    def decode(self, x_NxD: jax.Array, cache: KVCache, position: jax.Array | int) -> tuple[jax.Array, KVCache]:
        """The same for tokens at `position` and after it, which attend to this layer's cache too."""
        out_NxD, cache = self.attn.decode(self.ln_1(x_NxD), cache, position)
        x_NxD += out_NxD
        return x_NxD + self.mlp(self.ln_2(x_NxD)), cache


class GPT2(nnx.Module):
    """The language model.

    Args:
      spec: sizes and choices.
      compute_dtype: of activations and matmuls.
      param_dtype: of the master parameters.
      dot_general: from a linear layer's path to the dot_general it uses; None: jax.lax.dot_general everywhere. Paths
        read `h.3.mlp.c_fc`, or `h.*.mlp.c_fc` when the layers are scanned, because they share one program.
      rngs: key stream `params`. Scanned and unrolled layers get the same initial values from the same key.
    """

    def __init__(
        self,
        spec: GPT2Spec,
        *,
        compute_dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        dot_general: DotGeneralFor | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.spec = spec
        self.compute_dtype = compute_dtype
        self.wte = Embedding(spec.vocab_size, spec.padded_vocab, spec.d_model, param_dtype, rngs)
        self.wpe = Embedding(spec.context, spec.context, spec.d_model, param_dtype, rngs)

        def block(name: str, key: jax.Array) -> Block:
            return Block(spec, Factory(f"h.{name}", nnx.Rngs(params=key), compute_dtype, param_dtype, dot_general))

        keys_L = jax.random.split(rngs.params(), spec.n_layer)
        if spec.scan_layers:
            self.h: Any = nnx.vmap(lambda key: block("*", key))(keys_L)
        else:
            self.h = nnx.List([block(str(i), keys_L[i]) for i in range(spec.n_layer)])
        self.ln_f = LayerNorm(spec.d_model, param_dtype)

    def embed(self, tokens_BxT: jax.Array, position: jax.Array | int = 0) -> jax.Array:
        """Token plus position vectors, `[B*T, D]` in the compute dtype; the first token stands at `position`."""
        wpe_TxD = jax.lax.dynamic_slice_in_dim(self.wpe.embedding[...], position, tokens_BxT.shape[1])
        x_BxTxD = embedding(self.wte.embedding[...], tokens_BxT) + wpe_TxD[None]
        return x_BxTxD.reshape(-1, self.spec.d_model).astype(self.compute_dtype)

    def hidden(
        self, tokens_BxT: jax.Array, segments_BxT: jax.Array | None = None, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """The final LayerNorm's output, `[B, T, D]` in the compute dtype.

        Args:
          tokens_BxT: int32 ids below `vocab_size`; T at most `context`.
          segments_BxT: int32 document ids; a token attends to its own document only. None: to all before it.
          dropout_key: None turns dropout off.
        """
        spec, (B, T) = self.spec, tokens_BxT.shape
        if spec.dropout == 0.0:
            dropout_key = None
        embed_key, layers_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        keys_L = None if layers_key is None else jax.random.split(layers_key, spec.n_layer)

        def run(graphdef: Any, x_NxD: jax.Array, layer: Any, segments_BxT: Any, key: Any) -> jax.Array:
            return nnx.merge(graphdef, layer)(x_NxD, B, segments_BxT, key)

        if spec.remat != "none":
            policy = None if spec.remat == "block" else getattr(jax.checkpoint_policies, spec.remat)
            # A scan's body is not deduplicated with its recomputation anyway; the barriers would only cost.
            run = jax.checkpoint(run, policy=policy, prevent_cse=not spec.scan_layers, static_argnums=0)

        x_NxD = dropout(self.embed(tokens_BxT), spec.dropout, embed_key)
        if spec.scan_layers:
            graphdef, layers = nnx.split(self.h)
            x_NxD, _ = jax.lax.scan(
                lambda x, layer: (run(graphdef, x, layer[0], segments_BxT, layer[1]), None), x_NxD, (layers, keys_L)
            )
        else:
            for i, block in enumerate(self.h):
                graphdef, layer = nnx.split(block)
                x_NxD = run(graphdef, x_NxD, layer, segments_BxT, None if keys_L is None else keys_L[i])
        return self.ln_f(x_NxD).reshape(B, T, spec.d_model)

    def logits(self, h_NxD: jax.Array) -> jax.Array:
        """The tied head: FP32 `[N, vocab_size]`, the padding cut off."""
        wte_VxD = self.wte.embedding[: self.spec.vocab_size].astype(self.compute_dtype)
        return jnp.einsum("nd,vd->nv", h_NxD, wte_VxD, preferred_element_type=jnp.float32)

    def __call__(
        self, tokens_BxT: jax.Array, segments_BxT: jax.Array | None = None, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """Next-token logits, FP32 `[B, T, vocab_size]`. Arguments as for `hidden`."""
        h_BxTxD = self.hidden(tokens_BxT, segments_BxT, dropout_key)
        return self.logits(h_BxTxD.reshape(-1, self.spec.d_model)).reshape(*tokens_BxT.shape, self.spec.vocab_size)

    def loss(
        self,
        tokens_BxT: jax.Array,
        targets_BxT: jax.Array,
        segments_BxT: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Mean cross-entropy of the targets in nats, an FP32 scalar. FP32 logits of a whole batch are never held."""
        h_BxTxD = self.hidden(tokens_BxT, segments_BxT, dropout_key)
        wte_VxD = self.wte.embedding[...].astype(self.compute_dtype)
        h_NxD = h_BxTxD.reshape(-1, self.spec.d_model)
        return linear_cross_entropy(h_NxD, wte_VxD, targets_BxT.reshape(-1), vocab_size=self.spec.vocab_size)

    def decode(self, tokens_BxT: jax.Array, cache: KVCache, position: jax.Array | int) -> tuple[jax.Array, KVCache]:
        """Hidden states `[B, T, D]` of tokens at `position` and after it, and the cache with them in it.

        `position + T` must not exceed `context`.
        """
        x_NxD = self.embed(tokens_BxT, position)
        if self.spec.scan_layers:
            graphdef, layers = nnx.split(self.h)
            x_NxD, cache = jax.lax.scan(
                lambda x, layer: nnx.merge(graphdef, layer[0]).decode(x, layer[1], position), x_NxD, (layers, cache)
            )
        else:
            new = []
            for i, block in enumerate(self.h):
                x_NxD, layer_cache = block.decode(x_NxD, jax.tree.map(lambda c, i=i: c[i], cache), position)
                new.append(layer_cache)
            cache = jax.tree.map(lambda *c: jnp.stack(c), *new)
        return self.ln_f(x_NxD).reshape(*tokens_BxT.shape, self.spec.d_model), cache


def functional(
    spec: GPT2Spec,
    *,
    compute_dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    dot_general: DotGeneralFor | None = None,
) -> tuple[Callable[[jax.Array], Params], Callable[[Params], GPT2]]:
    """The model as two pure functions: `init(key)` to the parameters, `bind(params)` to the model that has them.

    Parameters are nested dictionaries of arrays, as `nnx.to_pure_dict` gives them.

    >>> init, bind = functional(GPT2Spec(vocab_size=256, context=8, n_layer=1, n_head=1, d_model=8))
    >>> bind(init(jax.random.key(0)))(jnp.zeros((2, 8), jnp.int32)).shape
    (2, 8, 256)
    """

    def make(key: jax.Array) -> GPT2:
        rngs = nnx.Rngs(params=key)
        return GPT2(spec, compute_dtype=compute_dtype, param_dtype=param_dtype, dot_general=dot_general, rngs=rngs)

    graphdef = nnx.graphdef(nnx.eval_shape(make, jax.random.key(0)))

    def init(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(make(key)))

    def bind(params: Params) -> GPT2:
        return nnx.merge(graphdef, params)

    return init, bind


def stack_layers(params: Params) -> Params:
    """Parameters of unrolled layers (`h` has one entry per layer) as those of scanned layers (leading axis L)."""
    layers = [params["h"][i] for i in range(len(params["h"]))]
    return params | {"h": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


def unstack_layers(params: Params) -> Params:
    """The inverse of `stack_layers`."""
    n_layer = jax.tree.leaves(params["h"])[0].shape[0]
    return params | {"h": {i: jax.tree.map(lambda leaf, i=i: leaf[i], params["h"]) for i in range(n_layer)}}


def param_count(spec: GPT2Spec) -> int:
    """Trainable parameters, the vocabulary's padding rows not counted. Nothing is allocated."""
    init, _ = functional(spec)
    shapes = jax.eval_shape(init, jax.random.key(0))
    return (
        sum(math.prod(s.shape) for s in jax.tree.leaves(shapes)) - (spec.padded_vocab - spec.vocab_size) * spec.d_model
    )
