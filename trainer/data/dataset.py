"""The data of a run: the loaders of both splits, and their tokenizer."""

import itertools
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from trainer.data.loader import Loader, ShardLoader, validation_rows
from trainer.data.shards import Manifest
from trainer.data.tokenizer import Tokenizer


def open_splits(
    directory: Path, *, row_multiple: int = 1, **settings: Any
) -> tuple[ShardLoader, ShardLoader]:
    """Return the loaders of training and validation; only training is shuffled.

    If validation has fewer windows than `batch_size`, its batches have fewer rows: the
    largest multiple of `row_multiple` for which there are windows.

    Args:
      directory: a prepared directory.
      row_multiple: micro-batches times devices, over which rows are split.
      settings: those of `ShardLoader`, for both.
    """
    train = ShardLoader(directory, "train", shuffle=True, **settings)
    # In order, so that the first batches are the same for every seed.
    val = ShardLoader(directory, "val", shuffle=False, **settings)
    # A window that a batch repeats would weigh more in the loss, by another share for
    # each batch size.
    val.batch_size = validation_rows(
        val.windows,
        val.batch_size,
        row_multiple,
        f"the validation part of {directory}",
    )
    return train, val


class Dataset(NamedTuple):
    """Loaders of training and validation, and their tokenizer.

    Attributes:
      train: the training loader of a prepared directory, or of a mixture of several.
      val: the validation loader.
      tokenizer: the tokenizer of both.
      directory: the prepared directory.
      sources: a mixture's validation loaders by source name; else empty.
    """

    train: Loader
    val: Loader
    tokenizer: Tokenizer
    directory: Path
    # Read-only, since all instances share a default.
    sources: Mapping[str, Loader] = types.MappingProxyType({})

    @classmethod
    def open(cls, directory: Path, **settings: Any) -> Self:
        """Open both splits; for `settings` see `open_splits`."""
        train, val = open_splits(directory, **settings)
        return cls(train, val, train.manifest.get_tokenizer(), directory)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the directory."""
        return self.train.manifest

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes of text per token of the whole validation part."""
        return self.manifest.validation_bytes_per_token

    def first_documents(self, size: int) -> str:
        """Return the first validation documents, of about `size` bytes in all.

        An empty line separates them.
        """
        tokens, eot = max(1, int(size / self.bytes_per_token)), self.manifest.eot
        return "\n\n".join(
            # Decoding an end-of-text would give its own text, such as <|endoftext|>.
            self.tokenizer.decode(document[document != eot].tolist())
            for document in self.val.documents(tokens)
        )

    def validation_text(self, tokens: int) -> str:
        """Return the text of the first validation tokens, without end-of-text."""
        ids = itertools.chain.from_iterable(
            document.tolist() for document in self.val.documents(tokens)
        )
        return self.tokenizer.decode([i for i in ids if i != self.manifest.eot])
