"""Weights that were trained with one tokenizer, for another: `init.embeddings` says how
its rows are made.
"""

import dataclasses
from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec

from trainer.data.bpe_files import read_json, special_in
from trainer.data.cooccurrence import MOST_TOKENS, token_vectors
from trainer.data.dataset import Dataset
from trainer.data.hf_tokenizer import ids_beside
from trainer.data.json_tokenizer import FILE, end_beside
from trainer.data.tokenizer import Tokenizer, load_saved
from trainer.errors import UserError
from trainer.models import huggingface
from trainer.models.family import Spec
from trainer.models.functional import Params
from trainer.models.new_tokens import Method, RowMixture, Shared, new_rows
from trainer.models.weight_files import config_beside
from trainer.run.checkpoint import Checkpointer
from trainer.run.compatibility import FROM_INIT, architecture, check_same_model
from trainer.run.initial_weights import restore_weights


class Vocabulary(NamedTuple):
    """The tokens that weights were trained with.

    Attributes:
      tokens: bytes to ids.
      end: the id that ends a document; None where nothing tells.
      size: ids are below it.
    """

    tokens: dict[bytes, int]
    end: int | None
    size: int


def vocabulary_of(source: Path) -> Vocabulary:
    """That of the weights of a run, or of a Hugging Face directory. UserError where
    there is no tokenizer beside them.

    `size` of a directory is that of the tokenizer; its tables may have more rows, which
    then stand for nothing.
    """
    if (source / "checkpoints").is_dir():
        with Checkpointer.reading(source / "checkpoints") as checkpointer:
            meta = checkpointer.meta()
        theirs = load_saved(meta["tokenizer"], source)
        return Vocabulary(theirs.tokens, theirs.eot, meta["model"]["vocab_size"])
    directory = huggingface.directory_of(source)
    tokens = ids_beside(directory)
    if tokens is None:
        raise UserError(
            f"init.embeddings needs the tokenizer of init_from={source}, and there is"
            " none beside the weights; put its tokenizer.json, or vocab.json and"
            " merges.txt, there"
        )
    rows = config_of(directory).get("vocab_size")
    # words that were added to a tokenizer whose model nobody told
    if isinstance(rows, int):
        tokens = {token: i for token, i in tokens.items() if i < rows}
    return Vocabulary(
        tokens,
        end_of(directory, set(tokens.values())),
        max(tokens.values(), default=-1) + 1,
    )


def config_of(directory: Path) -> dict[str, Any]:
    """The content of config.json; empty where there is none."""
    file = config_beside(directory)
    return read_json(file) if file.is_file() else {}


def end_of(directory: Path, ids: Container[int]) -> int | None:
    """The id that ends a document: config.json's, unless the tokenizer beside it has
    that for a word of a text.

    A configuration that nobody gave the ids of its tokenizer has those of its kind's
    first model, such as 50256; then tokenizer_config.json tells, if it does. `ids`:
    those that a row stands for.
    """
    ends = config_of(directory).get("eos_token_id")
    first = ends[0] if isinstance(ends, list) and ends else ends
    told = first if isinstance(first, int) and first in ids else None
    tokenizer = directory / FILE
    added = special_in(read_json(tokenizer)) if tokenizer.is_file() else {}
    beside = added.get(end_beside(directory) or "")
    if beside is None or beside not in ids or told in added.values():
        return told
    return beside


def shared_with(theirs: Vocabulary, ours: Tokenizer, source: Path) -> Shared:
    """The tokens that both have. UserError where there are none but the end of a
    document.
    """
    shared = Shared.match(ours.tokens, theirs.tokens, (ours.eot, theirs.end))
    if len(shared.new) <= (theirs.end is not None):
        raise UserError(
            f"init_from={source} and data.tokenizer={ours.name} have no token in"
            f" common, of {theirs.size:,} and {ours.vocab_size:,}: no row can be made"
            " of others; set init.embeddings=random, or another tokenizer"
        )
    return shared


def weights_for_tokenizer(
    source: Path, spec: Spec, data: Dataset, method: Method, seed: int, like: Params
) -> Params:
    """Parameters from a run or a Hugging Face directory, the rows of its tables made
    for the data's tokenizer.

    Args:
      source: as of `initial_weights`.
      spec: of the model that is to take them; all but its vocabulary must be theirs.
      data: gives the tokenizer, and for `focus` the text from which it is learnt which
          tokens are alike.
      method: as of `new_rows`.
      seed: of what is drawn.
      like: untrained parameters, FP32, placed as the result; rows that the method
          leaves fresh are theirs.

    Raises:
      UserError: no such weights, another architecture, no tokenizer beside them or none
          of its tokens in the data's.
    """
    tokenizer = data.tokenizer
    theirs = vocabulary_of(source)
    shared = (
        shared_with(theirs, tokenizer, source)
        if method != "random"
        else Shared.match({}, {}, (0, None))
    )
    mixture = (
        RowMixture.from_vectors(vectors_of(data), shared) if method == "focus" else None
    )
    tables = of_vocabulary(spec)
    old = old_weights(source, spec, theirs.size, tables, like)

    def place(table: bool, old: Any, fresh: jax.Array) -> jax.Array:
        rows = old
        if table:
            n = tokenizer.vocab_size
            # padding, and rows above the tokenizer's ids, stay
            start = np.array(jax.device_get(fresh), np.float32)
            known = np.asarray(jax.device_get(old), np.float32)[: theirs.size]
            start[:n] = new_rows(method, known, start[:n], shared, mixture, seed)
            rows = start
        return jax.device_put(
            jnp.asarray(rows, fresh.dtype) if table else rows.astype(fresh.dtype),
            fresh.sharding,
        )

    return jax.tree.map(place, tables, old, like)


def old_weights(
    source: Path, spec: Spec, size: int, tables: Any, like: Params
) -> Params:
    """The weights as they are, of which the tables have the rows of the old
    vocabulary.
    """
    named, ours = f"init_from={source}", spec.architecture()
    if not (source / "checkpoints").is_dir():
        found, params = huggingface.load(source, spec)
        check_same_model(
            named,
            architecture(found) | {"vocab_size": ours["vocab_size"]},
            spec,
            FROM_INIT,
        )
        return spec.family().stack_layers(params) if spec.scan_layers else params
    theirs: Any = dataclasses.replace(spec, vocab_size=size)

    def target(table: bool, leaf: jax.Array) -> Any:
        if not table:
            return leaf
        whole: Any = leaf.sharding
        if isinstance(whole, NamedSharding):
            whole = NamedSharding(whole.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(
            (theirs.padded_vocab, *leaf.shape[1:]), leaf.dtype, sharding=whole
        )

    with Checkpointer.reading(source / "checkpoints") as checkpointer:
        meta = checkpointer.meta()
        check_same_model(
            named, meta["model"] | {"vocab_size": ours["vocab_size"]}, spec, FROM_INIT
        )
        return restore_weights(checkpointer, jax.tree.map(target, tables, like))


def of_vocabulary(spec: Spec) -> Any:
    """Which parameters have a row for each id, as booleans in their structure: those
    that change with the vocabulary.

    Axis 0 counts the ids. Nothing is allocated.
    """

    def shapes(size: int) -> Any:
        model: Any = dataclasses.replace(spec, vocab_size=size)
        return jax.eval_shape(spec.family().build(model).init, jax.random.key(0))

    # Twice as many and then some: padded tables differ as well.
    return jax.tree.map(
        lambda a, b: a.shape != b.shape,
        shapes(spec.vocab_size),
        shapes(2 * spec.vocab_size + 4096),
    )


def vectors_of(data: Dataset) -> npt.NDArray[np.float32]:
    """Vectors of the data's tokens, from its training part. UserError where that cannot
    be read as a text.
    """
    parts = data.train.documents("train", MOST_TOKENS)
    if not parts:
        raise UserError(
            "init.embeddings=focus learns from the data's text which tokens are alike,"
            " and this data is batches from a program; choose mean, gaussian or copy"
        )
    return token_vectors(
        np.concatenate(parts), data.tokenizer.vocab_size, end=data.tokenizer.eot
    )


def describe_embeddings(source: Path, ours: Tokenizer, method: Method) -> str:
    """The line at the start about what became of the tables."""
    theirs, ids = vocabulary_of(source), f"{ours.vocab_size:,}"
    named = f"weights from {source}, init.embeddings={method}"
    if method == "random":
        return f"{named}: all {ids} rows are new, none of its {theirs.size:,} is kept"
    kept = len(shared_with(theirs, ours, source).new)
    others = {
        "focus": "are means of those of similar tokens (FOCUS)",
        "mean": "are the mean of all",
        "gaussian": "are drawn with the mean and deviation of all",
        "copy": "are new",
    }[method]
    return (
        f"{named}: {kept:,} of {ids} tokens have the rows that they have there"
        f" ({theirs.size:,} tokens); the others' {others}"
    )
