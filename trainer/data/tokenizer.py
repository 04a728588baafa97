"""Text to ids and back: raw bytes, tiktoken's encodings, or a byte-pair encoding in local files.

Encoding never makes special tokens: the characters "<|endoftext|>" in a text are encoded as ordinary text, so that no
document can pretend to end. The end-of-text id comes from the preparation alone.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trainer.errors import UserError

Ids = npt.NDArray[np.unsignedinteger]


class Tokenizer(Protocol):
    """What every tokenizer offers.

    Attributes:
      name: what `get_tokenizer` takes.
      vocab_size: ids are below it.
      eot: the id that ends a document.
      fingerprint: of everything that decides the ids; equal for equal tokenizers, whatever they are called.
    """

    name: str
    vocab_size: int
    eot: int
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each, on all cores."""

    def encode_array(self, text: str) -> Ids:
        """`encode` as an array [n]; other threads run meanwhile."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text; bytes that are not UTF-8, and ids that have no text, become U+FFFD."""

    def cut_up(self, text: str, size: int) -> list[str]:
        """Pieces of about `size` characters whose ids, joined, are the ids of the text."""

    def save(self, directory: Path) -> None:
        """Write what `load` needs."""


class ByteTokenizer:
    """UTF-8 bytes as ids. End-of-text is 0, the byte that text does not use: a NUL in a text ends a document too."""

    name = "byte"
    vocab_size = 256
    eot = 0
    fingerprint = "byte"

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See Tokenizer; one thread, since this is a copy."""
        return [self.encode(text) for text in texts]

    def encode_array(self, text: str) -> Ids:
        """See Tokenizer."""
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        return bytes(ids).decode(errors="replace")

    def cut_up(self, text: str, size: int) -> list[str]:
        """See Tokenizer; anywhere will do."""
        return [text[i : i + size] for i in range(0, len(text), size)]

    def save(self, directory: Path) -> None:
        """See Tokenizer; the name says all."""


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name."""
    if name == "byte":
        return ByteTokenizer()
    raise UserError(f"unknown tokenizer {name!r}; valid: byte")
