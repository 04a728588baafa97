"""The data of a run: the loaders of both splits, and their tokenizer."""

import itertools
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from trainer.data.loader import Loader, validation_rows
from trainer.data.shards import Manifest
from trainer.data.tokenizer import Tokenizer


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
    sources: Mapping[str, Loader] = types.MappingProxyType({})

    @classmethod
    def open(
        cls, directory: Path, *, seed: int, batch_parts: int = 1, **settings: Any
    ) -> Self:
        """Open both splits; `settings` are those of `Loader`.

        Only training is shuffled. `batch_parts` is micro-batches times devices, over
        which a batch is split. If validation has fewer windows than `batch_size`, its
        batches have fewer rows: the largest multiple of `batch_parts` for which there
        are windows.
        """
        train = Loader(directory, "train", seed=seed, shuffle=True, **settings)
        val = Loader(directory, "val", seed=seed, shuffle=False, **settings)
        val.batch_size = validation_rows(
            val.windows,
            val.batch_size,
            batch_parts,
            f"the validation part of {directory}",
        )
        return cls(train, val, train.manifest.get_tokenizer(), directory)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the directory."""
        return self.train.manifest

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes of text per token of the whole validation part."""
        return self.manifest.byte_count("val") / self.manifest.token_count("val")

    def first_documents(self, size: int) -> str:
        """Return the first validation documents, of about `size` bytes in all.

        An empty line separates them.
        """
        tokens, eot = max(1, int(size / self.bytes_per_token)), self.manifest.eot
        parts = self.val.documents("val", tokens)
        return "\n\n".join(
            self.tokenizer.decode(part[part != eot].tolist()) for part in parts
        )

    def validation_text(self, tokens: int) -> str:
        """Return the text of the first validation tokens, without end-of-text."""
        ids = itertools.chain.from_iterable(
            part.tolist() for part in self.val.documents("val", tokens)
        )
        return self.tokenizer.decode([i for i in ids if i != self.manifest.eot])
