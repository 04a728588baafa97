"""Sampling text from a model: temperature, top-k, top-p, a seed, and a key-value cache.

Legend: B batch (one here), T time, S cache length, V vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.bounds import MAX_NEW_TOKENS
from trainer.errors import UserError
from trainer.models.family import LanguageModel, Spec
from trainer.models.model_functions import Params

# The shortest cache, in positions. A longer one is rounded up to a power of two, at
# most the context.
MIN_CACHE = 256


def sample(
    logits_V: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
) -> jax.Array:
    """Sample one token id, an int32 scalar.

    Args:
      logits_V: FP32.
      key: PRNG key.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: int32; keeps the k likeliest tokens; 0: all.
      top_p: keeps the fewest likeliest of these tokens whose probabilities reach this
        sum; 1: all.

    Reference for top-p: Holtzman et al. 2020, "The curious case of neural text
    degeneration".
    """
    # All logits are sorted, likeliest first: `top_k` is traced and cannot be a size.
    logits_V, ids_V = jax.lax.top_k(logits_V, logits_V.shape[0])
    rank_V = jnp.arange(logits_V.shape[0])
    masked_V = jnp.where(
        (top_k == 0) | (rank_V < top_k),
        logits_V / jnp.where(temperature > 0, temperature, 1),
        -jnp.inf,
    )
    p_V = jax.nn.softmax(masked_V)
    # The sum is 0 for the likeliest token, which therefore always remains.
    likelier_V = jnp.cumsum(p_V) - p_V
    # A sum of rounded probabilities may reach 1 before the last token: then `top_p=1`
    # would leave tokens out.
    masked_V = jnp.where((top_p >= 1) | (likelier_V < top_p), masked_V, -jnp.inf)
    # The likeliest is the first of the sorted ids.
    return ids_V[jnp.where(temperature > 0, jax.random.categorical(key, masked_V), 0)]


def prefill(
    model: LanguageModel, tokens_T: jax.Array, length: jax.Array, cache_length: int
) -> tuple[jax.Array, Any]:
    """Return logits [V] after the first `length` tokens, and the cache.

    The tokens after them are never attended to. The cache has `cache_length`
    positions.
    """
    cache = model.init_cache(1, cache_length)
    h_1xTxD, cache = model.decode(tokens_T[None], cache, 0)
    # Before the head, which would compute logits of all positions for the one that is
    # used.
    last_1xD = jax.lax.dynamic_slice_in_dim(h_1xTxD[0], length - 1, 1)
    return model.logits(last_1xD)[0], cache


def extend(
    model: LanguageModel, token: jax.Array, cache: Any, position: jax.Array
) -> tuple[jax.Array, Any]:
    """Return logits [V] after one more token at `position`, and the new cache."""
    h_1x1xD, cache = model.decode(token[None, None], cache, position)
    return model.logits(h_1x1xD[0])[0], cache


class Generator:
    """`generator(params, prompt, ...)` samples a continuation.

    It compiles two programs, whatever the arguments.

    Args:
      bind: a function from parameters to the model, see `ModelFunctions`.
      spec: the model's spec.
    """

    def __init__(self, bind: Callable[[Params], LanguageModel], spec: Spec) -> None:
        self.spec = spec

        @jax.jit
        def prefill_window(
            params: Params, window_S: jax.Array, length: jax.Array
        ) -> tuple[jax.Array, Any]:
            return prefill(bind(params), window_S, length, len(window_S))

        @functools.partial(jax.jit, static_argnames="positions")
        def sample_window(
            params: Params,
            logits_V: jax.Array,
            cache: Any,
            length: jax.Array,
            count: jax.Array,
            key: jax.Array,
            sampled: jax.Array,
            controls: tuple[jax.Array, jax.Array, jax.Array],
            positions: int,
        ) -> jax.Array:
            """Return `count` new ids after `length` cached tokens, then zeros, `[S]`.

            `sampled`: the number of ids of earlier windows. `positions`: S.
            """
            model = bind(params)

            def step(carry: tuple) -> tuple:
                i, ids_S, logits_V, cache = carry
                # Keyed by the index in the continuation: ids do not depend on windows.
                token_key = jax.random.fold_in(key, sampled + i)
                token = sample(logits_V, token_key, *controls)
                # The last token of a full window has no place in the cache; its logits
                # are never used.
                position = jnp.minimum(length + i, positions - 1)
                logits_V, cache = extend(model, token, cache, position)
                return i + 1, ids_S.at[i].set(token), logits_V, cache

            first = 0, jnp.zeros(positions, jnp.int32), logits_V, cache
            # `count` is traced, so that windows of all lengths share this program.
            return jax.lax.while_loop(lambda carry: carry[0] < count, step, first)[1]

        self._prefill, self._sample = prefill_window, sample_window

    def __call__(
        self,
        params: Params,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        before_window: Callable[[], object] = lambda: None,
    ) -> list[int]:
        """Return `max_new_tokens` ids that continue the prompt, deterministically.

        When the context is full, its later half is prefilled as the new beginning:
        positions are absolute, so the cache cannot be shifted. `before_window` is
        called before each prefill; its exceptions propagate.

        Raises:
          UserError: an empty prompt, or a number out of its range.
        """
        check_sampling_arguments(
            prompt, max_new_tokens, temperature, top_k, top_p, seed
        )
        controls = jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p)
        # The cache is only as large as needed: the spec's context may be very long.
        needed = max(len(prompt) + max_new_tokens, MIN_CACHE)
        # A power of two, so that texts of similar lengths share their compiled
        # programs.
        S = min(self.spec.context, 1 << (needed - 1).bit_length())
        # Of a prompt that exceeds the context only the end can be read.
        ids, sampled = list(prompt[-S:]), 0
        while sampled < max_new_tokens:
            before_window()
            # `max`, for a context of one token.
            window = ids if len(ids) <= S else ids[-max(1, S // 2) :]
            # Always S tokens: another length would compile another program.
            padded_S = np.zeros(S, np.int32)
            padded_S[: len(window)] = window
            logits_V, cache = self._prefill(params, padded_S, jnp.int32(len(window)))
            # One more than there are places: the last token is not read again.
            count = min(max_new_tokens - sampled, S - len(window) + 1)
            key = jax.random.key(seed)
            new_ids = self._sample(
                params,
                logits_V,
                cache,
                jnp.int32(len(window)),
                jnp.int32(count),
                key,
                jnp.int32(sampled),
                controls,
                positions=S,
            )
            ids += np.asarray(new_ids)[:count].tolist()
            sampled += count
        # Not `ids[-max_new_tokens:]`, which is all of them for 0.
        return ids[len(ids) - max_new_tokens :]


def check_sampling_arguments(
    prompt: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
) -> None:
    """Raise UserError for arguments that are out of range."""
    if not prompt:
        raise UserError("the prompt has no token; give it some text")
    for ok, setting, valid in (
        (
            0 <= max_new_tokens <= MAX_NEW_TOKENS,
            f"max_new_tokens={max_new_tokens}",
            f"0 to {MAX_NEW_TOKENS:,} tokens",
        ),
        (
            temperature >= 0,
            f"temperature={temperature}",
            "0 (the likeliest token) or more",
        ),
        (top_k >= 0, f"top_k={top_k}", "0 (all tokens) or more"),
        (0 < top_p <= 1, f"top_p={top_p}", "more than 0, at most 1 (all tokens)"),
        (0 <= seed < 2**32, f"seed={seed}", f"0 to {2**32 - 1}"),
    ):
        if not ok:
            raise UserError(f"{setting}: expected {valid}")
