"""Data that a program gives from memory, in place of a source that the configuration
names.

Texts are written into the cache directory, one JSON object a line under a name made of
their content, and prepared like any file. Batches of token ids are taken as they come.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainer.data.corpus import TextSource
from trainer.data.loader import Batch, Loader
from trainer.data.shards import Manifest, Split
from trainer.data.tokenizer import Ids, Tokenizer
from trainer.errors import UserError


class Batches(Protocol):
    """Batches of token ids: B sequences of T+1 consecutive tokens, inputs and targets,
    with T = model.context.

    Attributes:
      vocab_size: ids are below it.
      validation: batches [B, T+1] that are not trained on.

    It may have a `tokenizer` too (`trainer.data.Tokenizer`); without one samples are
    ids as numbers, the prompt is id 0, and a token counts as one byte in bits per byte.
    """

    vocab_size: int
    validation: Sequence[npt.ArrayLike]

    def batch(self, step: int) -> npt.ArrayLike:
        """The ids [B, T+1] of step `step`, counted from 0; always the same ones, or a
        resumed run is another run.
        """


def text_source(texts: Iterable[str], cache_dir: Path) -> TextSource:
    """The source of a file of these documents in `cache_dir`, written unless it is
    there. UserError for no text.
    """
    if isinstance(texts, str):
        raise UserError(
            "data is one text; expected a list of texts, such as data=[text]"
        )
    digest = hashlib.blake2b(digest_size=16)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=cache_dir, delete=False) as file:
            for number, text in enumerate(texts):
                if not isinstance(text, str):
                    raise UserError(
                        f"data: text {number} is {type(text).__name__}; expected str,"
                        " or `Batches`"
                    )
                line = json.dumps({"text": text}).encode() + b"\n"
                digest.update(line)
                file.write(line)
        path = cache_dir / f"own-{digest.hexdigest()}.jsonl"
        os.replace(file.name, path)
    except OSError as error:
        raise UserError(
            f"cannot write to data.cache_dir={cache_dir}: {error.strerror}"
        ) from error
    finally:
        if "file" in locals():
            Path(file.name).unlink(missing_ok=True)
    return TextSource((str(path),), "jsonl", "text")


class Numbers:
    """The tokenizer of ids that nobody has a text for: a text is the ids as numbers,
    with blanks between.
    """

    name = "numbers"
    eot = 0
    pattern: str | None = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.fingerprint = f"numbers below {vocab_size}"
        self.tokens: dict[bytes, int] = {}
        self.special_tokens: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """The numbers in the text that are ids; without any, id 0."""
        return [
            int(word)
            for word in text.split()
            if word.isdecimal() and int(word) < self.vocab_size
        ] or [0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each."""
        return [self.encode(text) for text in texts]

    def encode_array(self, text: str) -> Ids:
        """`encode` as an array."""
        return np.array(self.encode(text), np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """The numbers, each after a blank."""
        return "".join(f" {int(i)}" for i in ids)

    def cut_up(self, text: str, size: int) -> list[str]:
        """The whole text."""
        return [text]

    def save(self, directory: Path) -> None:
        """Nothing: there is no text to bring back."""


class CustomManifest(Manifest):
    """Of data that is in memory; the tokens of the validation part are all that can be
    opened.
    """

    def open(self, split: str) -> list[npt.NDArray[np.unsignedinteger]]:
        """No shards: nothing of it is on a disk."""
        return []


class CustomLoader(Loader):
    """`Batches` as a loader: those for training, or the validation part.

    Args:
      manifest: of the whole.
      batches: are checked as they come: a wrong shape, type or id is a UserError that
          names the batch.
      split: "train" or "val".
      context, batch_size: T and B.
    """

    def __init__(
        self,
        manifest: Manifest,
        batches: Batches,
        split: str,
        *,
        context: int,
        batch_size: int,
    ) -> None:
        self.manifest, self.context, self.batch_size = manifest, context, batch_size
        self.document_mask = False
        self.tokens = manifest.tokens(split)
        self.windows = len(batches.validation) * batch_size
        self._batches, self._split = batches, split

    @property
    def steps_per_epoch(self) -> int:
        """Batches of the validation part."""
        return len(self._batches.validation)

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """See Loader."""
        if self._split == "train":
            found, where = self._batches.batch(step), f"batch({step})"
        else:
            found, where = self._batches.validation[step], f"validation[{step}]"
        tokens = checked(
            found, where, (self.batch_size, self.context + 1), self._batches.vocab_size
        )
        return Batch(tokens[rows or slice(None)], None)


def checked(
    found: npt.ArrayLike, where: str, shape: tuple[int, int], vocab_size: int
) -> npt.NDArray[np.int32]:
    """The ids as an array of int32. Raises UserError for another shape or type, or an
    id that is none.
    """
    tokens = np.asarray(found)
    if tokens.shape != shape or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(
            f"data: {where} is {tokens.dtype} {list(tokens.shape)}; expected integers"
            f" {list(shape)}: train.batch_tokens / model.context sequences of"
            " model.context + 1 tokens"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise UserError(
            f"data: {where} has ids from {tokens.min()} to {tokens.max()}; expected 0"
            f" to {vocab_size - 1} (vocab_size)"
        )
    return tokens.astype(np.int32)


def custom_loaders(
    batches: Batches, *, steps: int, context: int, batch_size: int
) -> tuple[CustomLoader, CustomLoader, Tokenizer]:
    """Loaders of training and validation, and the tokenizer. Raises UserError where
    something is wrong with them.
    """
    missing = [
        name
        for name in ("vocab_size", "validation", "batch")
        if not hasattr(batches, name)
    ]
    if missing or not len(batches.validation):
        absent = ", ".join(missing) or "batch in validation"
        raise UserError(
            f"data: a {type(batches).__name__} has no {absent}; expected a list of"
            " texts, or an object with vocab_size, validation (a list of batches) and"
            " batch(step)"
        )
    shape = (batch_size, context + 1)
    validation = [
        checked(v, f"validation[{i}]", shape, batches.vocab_size)
        for i, v in enumerate(batches.validation)
    ]
    first = checked(batches.batch(0), "batch(0)", shape, batches.vocab_size)
    given: Any = getattr(batches, "tokenizer", None)
    tokenizer: Tokenizer = given or Numbers(batches.vocab_size)
    digest = hashlib.blake2b(digest_size=16)
    for array in [first, *validation]:
        digest.update(array.tobytes())
    count = sum(v.size for v in validation)
    size = (
        sum(
            len(tokenizer.decode(row.tolist()).encode())
            for v in validation
            for row in v
        )
        if given
        else count
    )
    manifest = CustomManifest(
        directory=Path(type(batches).__name__),
        fingerprint=digest.hexdigest(),
        source={"kind": "own", "name": type(batches).__name__},
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=batches.vocab_size,
        eot=tokenizer.eot,
        dtype="uint32",
        val_fraction=0.0,
        skipped=0,
        splits={
            "train": Split(1, steps * batch_size * context, 0, ()),
            "val": Split(1, count, size, ()),
        },
    )
    train, val = (
        CustomLoader(manifest, batches, s, context=context, batch_size=batch_size)
        for s in ("train", "val")
    )
    return train, val, tokenizer
