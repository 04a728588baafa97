"""What a run reads: the loaders of both parts of its data, and their tokenizer."""

import itertools
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from trainer.data.loader import Loader
from trainer.data.shards import Manifest
from trainer.data.tokenizer import Tokenizer


class Dataset(NamedTuple):
    """Loaders of both parts of a prepared directory, or of a mixture of several, and
    their tokenizer.

    Attributes:
      sources: of a mixture, the loaders of the validation parts by the names of the
          sources; else empty.
    """

    train: Loader
    val: Loader
    tokenizer: Tokenizer
    directory: Path
    sources: Mapping[str, Loader] = types.MappingProxyType({})

    @classmethod
    def open(cls, directory: Path, *, seed: int, **settings: Any) -> Self:
        """Open both parts; `settings` are those of `Loader`. Training reads a
        permutation, validation the order.
        """
        train = Loader(directory, "train", seed=seed, shuffle=True, **settings)
        val = Loader(directory, "val", seed=seed, shuffle=False, **settings)
        return cls(train, val, train.manifest.get_tokenizer(), directory)

    @property
    def manifest(self) -> Manifest:
        """What the directory holds."""
        return self.train.manifest

    @property
    def bytes_per_token(self) -> float:
        """The bytes of a token of the validation part's text, on average; of a mixture,
        in its shares.
        """
        return self.val.bytes_per_token("val")

    def beginning(self, size: int) -> str:
        """The first documents of the validation part, of about so many bytes in all, an
        empty line between two.
        """
        tokens, eot = max(1, int(size / self.bytes_per_token)), self.manifest.eot
        parts = self.val.documents("val", tokens)
        return "\n\n".join(
            self.tokenizer.decode(part[part != eot].tolist()) for part in parts
        )

    def validation_text(self, tokens: int) -> str:
        """The text of the first so many tokens, ends of text aside."""
        ids = itertools.chain.from_iterable(
            part.tolist() for part in self.val.documents("val", tokens)
        )
        return self.tokenizer.decode([i for i in ids if i != self.manifest.eot])
