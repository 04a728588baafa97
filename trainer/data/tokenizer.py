"""Text to ids and back: raw bytes, tiktoken's encodings, a byte-pair encoding in local
files, or a tokenizer.json.

Encoding never makes special tokens: the characters "<|endoftext|>" in a text are
encoded as ordinary text, so that no document can pretend to end. The end-of-text id
comes from the preparation alone.
"""

import base64
import difflib
import functools
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import tiktoken

from trainer.data.bpe_files import (
    PAIRS,
    check_added,
    is_byte_level,
    known_settings,
    read_json,
    read_merges,
    read_tiktoken,
    read_tokenizer_json,
)
from trainer.data.json_tokenizer import FILE as HF_FILE
from trainer.data.json_tokenizer import read_json_tokenizer
from trainer.errors import UserError
from trainer.files import well_formed, write_atomically

Ids = npt.NDArray[np.unsignedinteger]


COPY_AGAIN = "download or copy it again"
# Ids may have gaps, as those of models whose tables are padded. A file of a few bytes
# with the id 10^9 would ask for a table of that size.
MOST_IDS, MOST_HOLES = 1 << 20, 64  # of any file; for each token of a larger one


class Tokenizer(Protocol):
    """What every tokenizer offers.

    Attributes:
      name: what `get_tokenizer` takes.
      vocab_size: ids are below it.
      eot: the id that ends a document.
      fingerprint: of everything that decides the ids; equal for equal tokenizers,
          whatever they are called.
      pattern: of the words that are encoded one by one; None: every byte is.
      tokens: ids of ordinary tokens, in a byte-pair encoding in the order of its
          merges.
      special_tokens: ids of those that no text is encoded to, `eot` among them.
    """

    name: str
    vocab_size: int
    eot: int
    fingerprint: str
    pattern: str | None
    tokens: dict[bytes, int]
    special_tokens: dict[str, int]

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each, on all cores."""

    def encode_array(self, text: str) -> Ids:
        """`encode` as an array [n]; other threads run meanwhile."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text; bytes that are not UTF-8, and ids that have no text, become
        U+FFFD.
        """

    def cut_up(self, text: str, size: int) -> list[str]:
        """Pieces of about `size` characters whose ids, joined, are the ids of the
        text.
        """

    def save(self, directory: Path) -> None:
        """Write what `load_saved` needs."""


class ByteTokenizer:
    """UTF-8 bytes as ids. End-of-text is 0, the byte that text does not use: a NUL in a
    text ends a document too.
    """

    name = "byte"
    vocab_size = 256
    eot = 0
    fingerprint = "byte"
    pattern: str | None = None

    def __init__(self) -> None:
        self.tokens = {bytes([i]): i for i in range(self.vocab_size)}
        self.special_tokens = {"\0": self.eot}

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
        # 0xFF is in no UTF-8 text, so an id beyond the bytes becomes U+FFFD as well.
        return bytes(min(int(i), 0xFF) for i in ids).decode(errors="replace")

    def cut_up(self, text: str, size: int) -> list[str]:
        """See Tokenizer; anywhere will do."""
        return [text[i : i + size] for i in range(0, len(text), size)]

    def save(self, directory: Path) -> None:
        """See Tokenizer; the name says all."""


class BPETokenizer:
    """A tiktoken encoding.

    Args:
      name: as the user gave it.
      encoding: has the special token "<|endoftext|>".
    """

    def __init__(self, name: str, encoding: tiktoken.Encoding) -> None:
        self.name = name
        self.vocab_size = encoding.n_vocab
        self.eot = encoding.eot_token
        self.encoding = encoding
        self._ranks: dict[bytes, int] = encoding._mergeable_ranks
        self.tokens = self._ranks
        self.special_tokens: dict[str, int] = encoding._special_tokens
        self.pattern: str | None = encoding._pat_str
        self._settings = {
            "pat_str": self.pattern,
            "special_tokens": self.special_tokens,
        }
        digest = hashlib.blake2b(
            json.dumps(self._settings, sort_keys=True).encode(), digest_size=16
        )
        digest.update(tiktoken_file(self._ranks))
        self.fingerprint = digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        return self.encoding.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See Tokenizer."""
        return self.encoding.encode_ordinary_batch(
            list(texts), num_threads=os.cpu_count() or 1
        )

    def encode_array(self, text: str) -> Ids:
        """See Tokenizer; nothing disallowed means that all of it is ordinary text."""
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer. Some vocabularies have gaps, which an untrained model samples
        from.
        """
        known = self._known
        unknown = "\ufffd".encode()
        tokens = (int(i) for i in ids)
        parts = (
            self.encoding.decode_single_token_bytes(i) if i in known else unknown
            for i in tokens
        )
        return b"".join(parts).decode(errors="replace")

    @functools.cached_property
    def _known(self) -> frozenset[int]:
        return frozenset(self._ranks.values()) | frozenset(self.special_tokens.values())

    def cut_up(self, text: str, size: int) -> list[str]:
        """See Tokenizer. A text split by a pattern that is not known stays whole."""
        return (
            cut_at_lines(text, size) if self.pattern in line_safe_patterns() else [text]
        )

    def save(self, directory: Path) -> None:
        """See Tokenizer: `tokenizer.tiktoken` and, for pattern and special tokens,
        `tokenizer.json`.
        """
        write_atomically(directory / "tokenizer.tiktoken", tiktoken_file(self._ranks))
        write_atomically(
            directory / "tokenizer.json",
            json.dumps({"name": self.name} | self._settings, indent=1),
        )


def tiktoken_file(ranks: dict[bytes, int]) -> bytes:
    """The content of a .tiktoken file: a token in base64 and its rank per line."""
    lines = (
        b"%s %d\n" % (base64.b64encode(token), rank)
        for token, rank in sorted(ranks.items(), key=lambda x: x[1])
    )
    return b"".join(lines)


# Between a line that ends in a printable ASCII character and one that starts with a
# letter, no token of GPT-2's, cl100k's or o200k's pattern crosses: none holds a newline
# followed by a letter, and a newline alone is matched alike before a letter and at the
# end of the text.
LINE_START = re.compile(r"(?<=[!-~]\n)(?=[A-Za-z])")


def cut_at_lines(text: str, size: int) -> list[str]:
    """Cut a text at the first fitting line start after every `size` characters."""
    pieces, start = [], 0
    while found := LINE_START.search(text, start + size):
        pieces.append(text[start : found.start()])
        start = found.start()
    return [*pieces, text[start:]]


@functools.cache
def line_safe_patterns() -> frozenset[str]:
    """Those that `LINE_START` was made for."""
    return frozenset(
        known_settings(name, {})["pat_str"]
        for name in ("r50k_base", "cl100k_base", "o200k_base")
    )


def get_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by name.

    Args:
      name: one of
        `byte`;
        a tiktoken encoding such as `gpt2` or `cl100k_base`, downloaded once by tiktoken
        (TIKTOKEN_CACHE_DIR); a `.tiktoken` file: pattern and special tokens are those
        of the encoding it is named after, or stand in a `.json` file beside it
        (`pat_str`, `special_tokens`), or are GPT-2's; a directory with `vocab.bpe` and
        perhaps `encoder.json`, or with `merges.txt` and `vocab.json`, or the first file
        of such a pair: GPT-2's pattern, and the ids of the .json file where there is
        one; Hugging Face's `tokenizer.json`, or its directory, such as an export of a
        run. A byte-level encoding as GPT-2's is read as those above are, any other by
        Hugging Face's library (`json_tokenizer`).

    Where end-of-text has no id in the files of an encoding it takes the first free one.

    Raises:
      UserError: unknown name, missing or malformed file, or an encoding that cannot be
          downloaded.
    """
    if name == "byte":
        return ByteTokenizer()
    if name in tiktoken.list_encoding_names():
        return BPETokenizer(name, download(name))
    with well_formed(f"tokenizer {name}", COPY_AGAIN):
        return usable(from_files(name))


def usable(tokenizer: Tokenizer) -> Tokenizer:
    """Refuse a tokenizer whose ids no table of embeddings could have, and one that
    fails at its first text.
    """
    ids = [*tokenizer.tokens.values(), *tokenizer.special_tokens.values()]
    most = max(MOST_IDS, MOST_HOLES * len(ids))
    wrong = next((i for i in ids if type(i) is not int or not 0 <= i < most), None)
    if wrong is not None:
        raise UserError(
            f"tokenizer {tokenizer.name} has the id {wrong!r}; expected whole numbers"
            f" below {most:,} for {len(ids):,} tokens"
        )
    tokenizer.decode(tokenizer.encode("A text, of 2 lines.\n"))
    return tokenizer


def from_files(name: str) -> Tokenizer:
    """Read a tokenizer from files; see `get_tokenizer`."""
    path, names = Path(name).expanduser(), tiktoken.list_encoding_names()
    if path.is_dir():
        # which has the words that were added to a pair's
        whole = HF_FILE if is_hugging_face(path / HF_FILE) else ""
        for merges, _ in PAIRS:
            if (path / merges).is_file():
                return from_files(str(path / (whole or merges)))
        # of a run, which has another file of the second name as well
        for file in ("tokenizer.tiktoken", HF_FILE):
            if (path / file).is_file():
                return from_files(str(path / file))
        valid = [*(merges for merges, _ in PAIRS), "tokenizer.tiktoken", HF_FILE]
        raise UserError(f"tokenizer directory {name} holds none of {', '.join(valid)}")
    if path.name == HF_FILE:
        tree = read_json(path)
        check_added(path, tree)
        if not is_byte_level(tree):
            return read_json_tokenizer(name, path)
        found = read_tokenizer_json(path)
        return ByteTokenizer() if found is None else BPETokenizer(name, found)
    if path.suffix == ".tiktoken":
        return BPETokenizer(name, read_tiktoken(path))
    for merges, ids in PAIRS:
        if path.name == merges:
            return BPETokenizer(name, read_merges(path, path.with_name(ids)))
    close = difflib.get_close_matches(name, ["byte", *names], n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise UserError(
        f"unknown tokenizer {name!r}; {hint}Valid: byte, {', '.join(names)}, a"
        f" .tiktoken file, a {HF_FILE}, or a directory with"
        f" {' or '.join(merges for merges, _ in PAIRS)}"
    )


def is_hugging_face(path: Path) -> bool:
    """Return whether a file is a tokenizer.json of Hugging Face, not the settings that
    a run has under this name.
    """
    return path.is_file() and "model" in read_json(path)


def is_gone(name: str) -> bool:
    """Return whether a name of `get_tokenizer` is that of files, which are not
    there.
    """
    return (
        name not in (ByteTokenizer.name, *tiktoken.list_encoding_names())
        and not Path(name).expanduser().exists()
    )


def continuation(tokenizer: Tokenizer, ids: Sequence[int], new: Sequence[int]) -> str:
    """The text that ids add to those before them: SentencePiece's tokens have no space
    in front where a text begins.
    """
    before, whole = tokenizer.decode(ids), tokenizer.decode([*ids, *new])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new)


def load_saved(name: str, directory: Path) -> Tokenizer:
    """The tokenizer that `save` wrote into `directory`."""
    if name == "byte":
        return ByteTokenizer()
    file = file_of(directory)
    with well_formed(file, COPY_AGAIN):
        return usable(
            read_json_tokenizer(name, file)
            if file.name == HF_FILE
            else BPETokenizer(name, read_tiktoken(file))
        )


def file_of(directory: Path) -> Path:
    """The file in which `save` wrote the vocabulary of a tokenizer that is not of
    bytes.
    """
    file = directory / "tokenizer.tiktoken"
    return file if file.is_file() else directory / HF_FILE


class NotAtHand(UserError):
    """An encoding that could not be downloaded."""


def download(name: str) -> tiktoken.Encoding:
    """One of tiktoken's own encodings, from its cache or the network."""
    import requests  # what tiktoken downloads with

    try:
        return tiktoken.get_encoding(name)
    except requests.RequestException as error:
        url = str(error.request.url) if error.request is not None else "its file"
        file = url.rsplit("/", 1)[-1]
        raise NotAtHand(
            f"tokenizer {name!r} is not on this machine and could not be downloaded"
            f" ({type(error).__name__}). Fetch {url} where there is a network; then"
            f" either pass the file, data.tokenizer=DIRECTORY/{file}, or save it as"
            f" DIRECTORY/{hashlib.sha1(url.encode()).hexdigest()} and set"
            " TIKTOKEN_CACHE_DIR=DIRECTORY. data.tokenizer=byte needs no file"
        ) from error
    except (ValueError, OSError) as error:
        raise UserError(f"tokenizer {name!r}: {str(error).splitlines()[0]}") from error
