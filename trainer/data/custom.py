"""Data from the memory of the user's program, in place of a configured source.

Texts are written into the cache directory, as JSON lines under a name made of their
content, and prepared like any file. Batches of token ids are used directly.
"""

import hashlib
import json
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainer.data.corpus import TextSource
from trainer.data.loader import Batch
from trainer.data.shards import Manifest, Shard, Split
from trainer.data.tokenizer import Ids, Tokenizer
from trainer.errors import UserError
from trainer.files import MAX_DIGITS


class Batches(Protocol):
    """Batches of token ids: B sequences of T+1 consecutive tokens.

    Inputs are the first T tokens, targets the last T, with T = model.context.

    Attributes:
      vocab_size: ids are below it.
      validation: batches [B, T+1] that are not trained on.

    An optional attribute is `tokenizer` (`trainer.data.Tokenizer`). Without it samples
    are ids as numbers, the prompt is id 0, and a token counts as one byte in bits per
    byte.
    """

    vocab_size: int
    validation: Sequence[npt.ArrayLike]

    def batch(self, step: int) -> npt.ArrayLike:
        """Return the ids [B, T+1] of step `step`, counted from 0.

        A step must always return the same ids, or a resumed run differs.
        """


def text_source(texts: Iterable[str], cache_dir: Path) -> TextSource:
    """Write these documents to a file in `cache_dir`, and return its source.

    Raises:
      UserError: something other than texts, or a full disk.
    """
    # A text is iterable, too: each of its characters would be a document.
    if isinstance(texts, str):
        raise UserError(
            "data is one text; expected a list of texts, such as data=[text]"
        )
    digest = hashlib.blake2b(digest_size=16)
    partial: Path | None = None
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        # The name is known when all texts are written. In the same directory the file
        # can be renamed, not copied.
        with tempfile.NamedTemporaryFile("wb", dir=cache_dir, delete=False) as file:
            partial = Path(file.name)
            for number, text in enumerate(texts):
                if not isinstance(text, str):
                    raise UserError(
                        f"data: text {number} is {type(text).__name__}; expected str,"
                        " or `Batches`"
                    )
                # json.dumps escapes half a character, so the reader refuses it by its
                # line, where `text.encode` would end in a traceback.
                line = json.dumps({"text": text}).encode() + b"\n"
                digest.update(line)
                file.write(line)
        # Keep this name: it is part of the cache key of earlier versions.
        path = cache_dir / f"own-{digest.hexdigest()}.jsonl"
        partial.replace(path)
    except OSError as error:
        raise UserError(
            f"cannot write to data.cache_dir={cache_dir}: {error.strerror}"
        ) from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)
    return TextSource((str(path),), "jsonl", "text")


class NumberTokenizer:
    """A tokenizer for ids without a text, which it writes as numbers.

    Spaces separate the numbers.
    """

    name = "numbers"
    eot = 0
    pattern: str | None = None
    line_safe = True

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.fingerprint = f"numbers below {vocab_size}"
        # Without tokens, `bytes_per_target` counts each id as a byte.
        self.tokens: dict[bytes, int] = {}
        self.special_tokens: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """Return the numbers in the text that are ids; without any, id 0."""
        words = [word for word in text.split() if word.isdecimal()]
        # `int` raises an error for thousands of digits.
        numbers = [int(word) for word in words if len(word) <= MAX_DIGITS]
        return [number for number in numbers if number < self.vocab_size] or [0]

    def encode_array(self, text: str, preceding: str = "", following: str = "") -> Ids:
        """Return `encode` as an array."""
        return np.array(self.encode(text), np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the numbers, each after a space."""
        return "".join(f" {int(i)}" for i in ids)

    def cut_up(self, text: str, size: int) -> list[str]:
        """Return the text uncut."""
        return [text]

    def save(self, directory: Path) -> None:
        """Do nothing: `vocab_size` is all that decides the ids."""


class CustomManifest(Manifest):
    """The manifest of data in memory."""

    @property
    def shards(self) -> list[Shard]:
        """No shards. The validation split lists one without file, for its checksum."""
        return []


class CustomLoader:
    """A `Loader` of `Batches`: those for training, or the validation part.

    Args:
      manifest: the manifest of `custom_loaders`.
      batches: the user's object. A batch of a wrong shape, dtype or id raises a
          UserError that names the batch.
      split: "train" or "val".
      context: T.
      batch_size: B.
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
        self.tokens = manifest.token_count(split)
        self._batches, self._split = batches, split

    @property
    def steps_per_epoch(self) -> int:
        """Number of validation batches. Only the validation loader is asked for it."""
        return len(self._batches.validation)

    def documents(self, tokens: int) -> list[npt.NDArray[np.int64]]:
        """Return no documents: batches have no text."""
        return []

    def validation_bytes_per_token(self, steps: int) -> float:
        """See `Loader`."""
        del steps
        return self.manifest.validation_bytes_per_token

    def batch(self, step: int) -> Batch:
        """See `Loader`."""
        if self._split == "train":
            ids, name = self._batches.batch(step), f"batch({step})"
        else:
            ids, name = self._batches.validation[step], f"validation[{step}]"
        shape = (self.batch_size, self.context + 1)
        tokens = check_ids(ids, name, shape, self._batches.vocab_size)
        return Batch(tokens, None)


def check_ids(
    ids: npt.ArrayLike, name: str, shape: tuple[int, int], vocab_size: int
) -> npt.NDArray[np.int32]:
    """Return the ids as int32; UserError for a wrong shape, dtype or id."""
    tokens = np.asarray(ids)
    if tokens.shape != shape or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(
            f"data: {name} is {tokens.dtype} {list(tokens.shape)}; expected integers"
            f" {list(shape)}: train.batch_tokens / model.context sequences of"
            " model.context + 1 tokens"
        )
    # The models give no error: `embedding` takes a negative id from the end of a table,
    # and gives NaN for an id beyond it.
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise UserError(
            f"data: {name} has ids from {tokens.min()} to {tokens.max()}; expected 0"
            f" to {vocab_size - 1} (vocab_size)"
        )
    return tokens.astype(np.int32)


def custom_loaders(
    batches: Batches, *, steps: int, context: int, batch_size: int
) -> tuple[CustomLoader, CustomLoader, Tokenizer]:
    """Return loaders of training and validation, and the tokenizer.

    Raises:
      UserError: a missing attribute, or a wrong batch.
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
    # All before the first step: a wrong batch would otherwise end the run at a
    # validation, hours later.
    validation = [
        check_ids(v, f"validation[{i}]", shape, batches.vocab_size)
        for i, v in enumerate(batches.validation)
    ]
    first_batch = check_ids(batches.batch(0), "batch(0)", shape, batches.vocab_size)
    user_tokenizer: Any = getattr(batches, "tokenizer", None)
    tokenizer: Tokenizer = user_tokenizer or NumberTokenizer(batches.vocab_size)
    digest = hashlib.blake2b(digest_size=16)
    # One batch stands for all: `batch` has a result for every step, and each may take
    # long to make.
    digest.update(first_batch.tobytes())
    crc = 0
    for array in validation:
        digest.update(array.tobytes())
        crc = zlib.crc32(array.tobytes(), crc)
    count = size = sum(array.size for array in validation)
    if user_tokenizer:
        # There is no source text, so its bytes are those of the decoded rows.
        rows = np.concatenate(validation).tolist()
        size = sum(len(tokenizer.decode(row).encode()) for row in rows)
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
            # Runs are only ranked together if the checksum of their validation tokens
            # is equal.
            "val": Split(1, count, size, (Shard("", count, crc),)),
        },
    )
    train, val = (
        CustomLoader(manifest, batches, s, context=context, batch_size=batch_size)
        for s in ("train", "val")
    )
    return train, val, tokenizer
