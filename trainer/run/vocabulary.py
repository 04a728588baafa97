"""Make embedding and LM-head rows for a new tokenizer, from weights that were trained
with another one; `init.embeddings` is the method.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils

from trainer.data.bpe_files import added_ids
from trainer.data.cooccurrence import MAX_TOKENS, token_vectors
from trainer.data.dataset import Dataset
from trainer.data.hf_tokenizer import token_ids_in
from trainer.data.json_tokenizer import TOKENIZER_JSON
from trainer.data.tokenizer import Tokenizer
from trainer.data.tokenizer_settings import ENDS, end_token, read_beside
from trainer.errors import UserError
from trainer.files import directory_of
from trainer.models.family import Spec
from trainer.models.model_functions import Params
from trainer.models.new_tokens import Method, RowMixture, SharedTokens, new_rows
from trainer.models.weight_files import CONFIG
from trainer.run.checkpoint import Checkpointer
from trainer.run.initial_weights import (
    place_cropped,
    row_arrays_of,
    saved_weights,
    tokenizer_of_run,
)


class Vocabulary(NamedTuple):
    """The tokens that weights were trained with.

    Attributes:
      tokens: bytes to ids.
      end: the id that ends a document; None if unknown.
      size: all ids are below it.
    """

    tokens: dict[bytes, int]
    end: int | None
    size: int


def vocabulary_of(source: Path) -> Vocabulary:
    """Return the vocabulary of the weights of a run or of a Hugging Face directory.

    For a directory `size` is that of the tokenizer. The embeddings may have more rows,
    which are not used.

    Raises:
      UserError: there is no tokenizer beside the weights.
    """
    if (source / "checkpoints").is_dir():
        with Checkpointer.reading(source / "checkpoints") as checkpointer:
            meta = checkpointer.manifest().meta
        tokenizer = tokenizer_of_run(source, meta)
        size = meta["model"]["vocab_size"]
        return Vocabulary(with_special(tokenizer), tokenizer.eot, size)
    # `source` may be a file, with its tokenizer beside it.
    directory = directory_of(source)
    tokens = token_ids_in(directory)
    if tokens is None:
        raise UserError(
            f"init.embeddings needs the tokenizer of init_from={source}, and there is"
            " none beside the weights; put its tokenizer.json, or vocab.json and"
            " merges.txt, there"
        )
    model_rows = read_beside(directory, CONFIG).get("vocab_size")
    # A tokenizer may have added words for which the model has no rows.
    if isinstance(model_rows, int):
        tokens = {token: i for token, i in tokens.items() if i < model_rows}
    # The size is the largest id plus one: ids may have gaps.
    return Vocabulary(
        tokens,
        end_of_text_id(directory, tokens),
        max(tokens.values(), default=-1) + 1,
    )


def with_special(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Return the ids of all tokens, special ones among them."""
    special = {token.encode(): i for token, i in tokenizer.special_tokens.items()}
    # An ordinary token of the same bytes goes before: encoding a text gives its id.
    return special | tokenizer.tokens


def end_of_text_id(directory: Path, tokens: Mapping[bytes, int]) -> int | None:
    """Return the id that ends a document; None if unknown, or if it has no row.

    Args:
      directory: that of the weights.
      tokens: the tokens that have a row.
    """
    tokenizer_json = read_beside(directory, TOKENIZER_JSON)
    special = added_ids(tokenizer_json)
    if not tokenizer_json:  # a vocab.json does not say which tokens are special
        special = {t: tokens[t.encode()] for t in ENDS if t.encode() in tokens}
    special = {token: i for token, i in special.items() if token.encode() in tokens}
    end = end_token(directory, special)
    if end is None:
        return None
    return tokens.get(end.encode())


def shared_with(old: Vocabulary, new: Tokenizer, source: Path) -> SharedTokens:
    """Return the tokens that both have. Raises UserError if only the end of a document
    is shared.
    """
    shared = SharedTokens.match(with_special(new), old.tokens, new.eot, old.end)
    # `SharedTokens.match` always pairs the two ends, if the old one is known.
    end_pairs = 0 if old.end is None else 1
    # Every other row would be made of the row of one token.
    if len(shared.new) <= end_pairs:
        raise UserError(
            f"init_from={source} and data.tokenizer={new.name} have no token in"
            f" common, of {old.size:,} and {new.vocab_size:,}: no new row can be"
            " derived; set init.embeddings=random, or another tokenizer"
        )
    return shared


def weights_for_tokenizer(
    source: Path, spec: Spec, data: Dataset, method: Method, seed: int, like: Params
) -> tuple[Params, str]:
    """Load weights, with embedding and LM-head rows for the data's tokenizer, and
    describe the rows in a line.

    Args:
      source: a run, or a Hugging Face directory.
      spec: the model. Only its vocabulary may differ from that of the weights.
      data: has the tokenizer, and for `focus` the text that tells which tokens are
        similar.
      method: see `new_rows`.
      seed: that of random rows.
      like: untrained parameters, FP32, placed as the result; rows without a source keep
        their values.

    Raises:
      UserError: no such weights, another architecture, no tokenizer beside them, or no
        shared token.
    """
    tokenizer = data.tokenizer
    old_vocabulary = vocabulary_of(source)
    if method == "random":
        # No row is taken over, so tokenizers without a token in common are fine.
        shared = SharedTokens.none()
    else:
        shared = shared_with(old_vocabulary, tokenizer, source)
    # The other methods need no text, which batches of a program do not have.
    mixture = None
    if method == "focus":
        mixture = RowMixture.from_vectors(vectors_of(data), shared)
    # With tokenizer=None vocabularies of another size are not refused.
    saved_params, _ = saved_weights(source, spec, like, tokenizer=None)

    def place(has_rows: bool, saved: Any, fresh: jax.Array) -> jax.Array:
        if not has_rows:
            return place_cropped(saved, fresh)
        # Padding, and rows above the tokenizer's ids, stay fresh.
        rows = whole_on_host(fresh)
        old_rows = whole_on_host(saved)[: old_vocabulary.size]
        n = tokenizer.vocab_size
        rows[:n] = new_rows(method, old_rows, rows[:n], shared, mixture, seed)
        return jax.device_put(jnp.asarray(rows, fresh.dtype), fresh.sharding)

    params = jax.tree.map(place, row_arrays_of(spec, "vocab_size"), saved_params, like)
    rows = describe_rows(method, len(shared.new), old_vocabulary, tokenizer)
    return params, f"weights from {source}, init.embeddings={method}: {rows}"


def whole_on_host(array: Any) -> npt.NDArray[np.float32]:
    """Return a copy of an array in FP32. All processes must call this."""
    # `jax.device_get` refuses an array that FSDP has split over processes.
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.array(array, np.float32)


def vectors_of(data: Dataset) -> npt.NDArray[np.float32]:
    """Return vectors of the data's tokens, FP32 [tokens, dimension], from its training
    documents.

    Raises UserError if the data is no text.
    """
    documents = data.train.documents(MAX_TOKENS)
    if not documents:
        raise UserError(
            "init.embeddings=focus learns from the data's text which tokens are alike,"
            " and this data is batches from a program; choose mean, gaussian or copy"
        )
    return token_vectors(
        np.concatenate(documents), data.tokenizer.vocab_size, end=data.tokenizer.eot
    )


def describe_rows(method: Method, shared: int, old: Vocabulary, new: Tokenizer) -> str:
    """Return a clause about the rows of embedding and LM head.

    `shared`: the number of tokens that both vocabularies have.
    """
    if method == "random":
        return (
            f"all {new.vocab_size:,} rows are newly initialized; none of the weights'"
            f" {old.size:,} rows is kept"
        )
    other_rows = {
        "focus": "are weighted means of the rows of similar tokens (FOCUS)",
        "mean": "are the mean of all old rows",
        "gaussian": "are drawn with the mean and standard deviation of all old rows",
        "copy": "are newly initialized",
    }[method]
    return (
        f"{shared:,} of {new.vocab_size:,} tokens keep their rows (the weights have"
        f" {old.size:,} tokens); the other rows {other_rows}"
    )
