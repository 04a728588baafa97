"""Batched generation, with a position of its own in the key-value cache for each row.

Legend: B rows, T prompt's tokens (padded), S cache length, N tokens of a part, V
vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trainer.models.model_functions import Params
from trainer.models.sampling import extend, prefill, sample
from trainer.tasks.batching import Sized, make_batches, rows_at_once
from trainer.workload import TrainTask

PART = 16  # new tokens between two checks whether all rows have ended


class DecodingParams(NamedTuple):
    """Parameters of decoding, as in `sampling.sample`; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


LIKELIEST = DecodingParams()


class Writer:
    """`writer(params, prompts, ...)` returns a continuation of each prompt.

    Two programs are compiled for each length of batches.

    Args:
      task: the model; matmuls are those of sampling, see `model.Model`.
      batch: B at most.
    """

    def __init__(self, task: TrainTask, batch: int) -> None:
        self.batch, self.context = batch, task.model.spec.context
        bind = task.model.sampling.bind

        def prefill_rows(
            params: Params, tokens_BxT: jax.Array, length_B: jax.Array, room: jax.Array
        ) -> tuple[jax.Array, Any]:
            """Return logits [B, V] after `length` tokens of each row, and the caches.

            The caches are [B, ...] of one row each. `room` has their length.
            """
            model = bind(params)
            # A vmap of single rows, because `decode` of a model takes one position for
            # a batch.
            return jax.vmap(
                lambda tokens_T, length: prefill(model, tokens_T, length, len(room))
            )(tokens_BxT, length_B)

        def decode(
            params: Params,
            logits_BxV: jax.Array,
            caches: Any,
            at_B: jax.Array,
            keys_BxN: jax.Array,
            controls: tuple[jax.Array, jax.Array, jax.Array] | None,
        ) -> tuple[jax.Array, jax.Array, Any]:
            """Return N new tokens of each row [B, N] from position `at`.

            The logits and caches after them are returned too.
            """
            model = bind(params)

            def choose(logits_V: jax.Array, key: jax.Array) -> jax.Array:
                # Without controls no logits are sorted, and greedy decoding needs no
                # key.
                if controls is None:
                    return jnp.argmax(logits_V).astype(jnp.int32)
                return sample(logits_V, key, *controls)

            def decode_row(
                logits_V: jax.Array, cache: Any, at: jax.Array, key: jax.Array
            ) -> tuple[jax.Array, Any, Any]:
                new = choose(logits_V, key)
                return new, *extend(model, new, cache, at)

            def step(
                carry: tuple[jax.Array, Any, jax.Array], keys_B: jax.Array
            ) -> tuple[Any, jax.Array]:
                logits_BxV, caches, at_B = carry
                new_B, logits_BxV, caches = jax.vmap(decode_row)(
                    logits_BxV, caches, at_B, keys_B
                )
                return (logits_BxV, caches, at_B + 1), new_B

            (logits_BxV, caches, _), new_NxB = jax.lax.scan(
                step, (logits_BxV, caches, at_B), keys_BxN.T
            )
            return new_NxB.T, logits_BxV, caches

        self._prefill = task.jit(prefill_rows)
        # Logits and caches are donated, so that the caches exist once.
        self._decode = task.jit(decode, donate_argnums=(1, 2))

    def __call__(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        ended: Callable[[list[int]], bool],
        decoding: DecodingParams = LIKELIEST,
    ) -> list[list[int]]:
        """Return new ids of each prompt, at most `max_new_tokens`.

        They may go on after the end of a row.

        Args:
          params: unscaled, on one device.
          prompts: a token or more each; with `max_new_tokens` they fit into the
              context.
          max_new_tokens: at least 1.
          ended: whether new ids need no continuation.
          decoding: the choice of tokens; that of prompt n depends on the seed and n.

        Raises:
          ValueError: a prompt that does not fit.
        """
        sizes = [Sized(len(prompt), 1) for prompt in prompts]
        if max_new_tokens < 1 or any(
            not 1 <= size.tokens <= self.context - max_new_tokens for size in sizes
        ):
            raise ValueError(
                f"expected prompts of 1 to {self.context} - {max_new_tokens} tokens"
            )
        new_ids: dict[int, list[int]] = {}
        batch_size = rows_at_once(self.batch, len(sizes))
        for rows, length, _ in make_batches(
            sizes, batch_size, self.context - max_new_tokens
        ):
            batch = [prompts[row] for row in rows]
            written = self._write(
                params,
                batch,
                (batch_size, length),
                rows,
                max_new_tokens,
                ended,
                decoding,
            )
            new_ids |= dict(zip(rows, written, strict=True))
        return [new_ids[row] for row in range(len(prompts))]

    def _write(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        shape: tuple[int, int],
        rows: Sequence[int],
        max_new_tokens: int,
        ended: Callable[[list[int]], bool],
        decoding: DecodingParams,
    ) -> list[list[int]]:
        """Continue the prompts of a batch, whose arrays have the shape [B, T]."""
        batch_size, length = shape
        tokens_BxT = np.zeros(shape, np.int32)
        # Rows of padding have one token, since `prefill` reads the logits at length -
        # 1.
        length_B = np.ones(batch_size, np.int32)
        for place, prompt in enumerate(prompts):
            tokens_BxT[place, : len(prompt)] = prompt
            length_B[place] = len(prompt)
        parts = -(-max_new_tokens // PART)
        # Tokens beyond `max_new_tokens`, up to a full part, may lie beyond the context;
        # they are dropped.
        # An array, because its length is a constant inside of jit, and its content is
        # not read.
        room = np.zeros(min(length + parts * PART, self.context), np.int8)
        logits_BxV, caches = self._prefill(params, tokens_BxT, length_B, room)
        # A prompt's number and not its row, so that no batch size changes its text.
        seeds_B = np.resize(np.array(rows, np.uint32), batch_size)
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(
            jax.random.key(decoding.seed), seeds_B
        )
        controls = None
        if decoding.temperature > 0:
            controls = (
                jnp.float32(decoding.temperature),
                jnp.int32(decoding.top_k),
                jnp.float32(decoding.top_p),
            )
        written: list[list[int]] = [[] for _ in prompts]
        for part in range(parts):
            # A key for each number of a token, so that the length of a part changes no
            # text.
            numbers_N = part * PART + jnp.arange(PART)
            keys_BxN = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(
                keys_B, numbers_N
            )
            at_B = length_B + part * PART
            new_BxN, logits_BxV, caches = self._decode(
                params, logits_BxV, caches, at_B, keys_BxN, controls
            )
            # Rows of padding come after those of `written`.
            for ids, new in zip(written, np.asarray(new_BxN), strict=False):
                ids += new[: max_new_tokens - len(ids)].tolist()
            if all(map(ended, written)):
                break
        return written
