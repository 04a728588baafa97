"""Tokenizers: UTF-8 bytes, tiktoken's encodings, and encodings in local files.

Encoding never makes special tokens: the characters "<|endoftext|>" in a text are
encoded as ordinary text, so that no document can pretend to end. Only the preparation
adds the end-of-text id.
"""

import base64
import contextlib
import difflib
import functools
import hashlib
import json
import string
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tiktoken
from tiktoken_ext.openai_public import ENDOFTEXT

from trainer.data.bpe_files import (
    MERGES_AND_IDS_FILES,
    added_ids,
    byte_level_ids,
    check_unique_ids,
    is_same_in_tiktoken,
    make_encoding,
    merges_to_tokenizer_json,
    pattern_of,
    read_tiktoken,
)
from trainer.data.json_tokenizer import (
    TOKENIZER_JSON,
    JSONTokenizer,
    NoToken,
    check_added_ids,
    end_of_document,
    parse_tokenizer,
    read_tokenizer_json,
    whole_characters,
)
from trainer.data.line_cuts import cut_at_lines
from trainer.data.tokenizer_settings import NUL
from trainer.data.word_patterns import KNOWN_PATTERNS
from trainer.errors import UserError
from trainer.files import has_file, path_of, well_formed, write_atomically

Ids = npt.NDArray[np.unsignedinteger]


# Characters that are tried with each tokenizer: ASCII, a combining accent, and letters
# and signs of other scripts.
TRIED = string.printable + (
    "\u0301\u00e9\u03c9\u0436\u05d0\u0639\u0915\u4e2d\u3042\ud55c\u20ac\U0001f642"
)
UNUSED_CHARACTER = "\U0010fffd"
COPY_AGAIN = "download or copy it again"
REPLACEMENT = "\ufffd"
# Ids must be below MIN_ID_LIMIT, or below MAX_IDS_PER_TOKEN times the number of tokens
# if that is more. Ids may have gaps, where a model's table is padded. But a file of a
# few bytes with the id 10^9 would need an embedding table of that size.
MIN_ID_LIMIT = 1 << 20
MAX_IDS_PER_TOKEN = 64


class Tokenizer(Protocol):
    """The interface of tokenizers.

    Attributes:
      name: the argument of `get_tokenizer`.
      vocab_size: ids are below it.
      eot: the id that ends a document.
      fingerprint: a digest of everything that decides the ids; equal for equal
          tokenizers, whatever their names are.
      pattern: matches the words that are encoded one by one; None: there is no pattern.
      tokens: ids of ordinary tokens. In a byte-pair encoding they are in the order of
          the merges.
      special_tokens: ids of tokens that no text is encoded to, `eot` among them.
      line_safe: whether a text that is cut at each `line_cuts.LINE_START` gets the same
          ids as in one piece.
    """

    name: str
    vocab_size: int
    eot: int
    fingerprint: str
    pattern: str | None
    tokens: dict[bytes, int]
    special_tokens: dict[str, int]
    line_safe: bool

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""

    def encode_array(self, text: str, preceding: str = "", following: str = "") -> Ids:
        """Return `encode` as an array [n]; other threads run meanwhile.

        For a piece of a longer text, a line-safe tokenizer returns the ids that begin
        in the piece. `preceding` and `following` are the text around the piece that can
        change its ids.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; bytes that are not UTF-8 and unknown ids become U+FFFD."""

    def cut_up(self, text: str, size: int) -> list[str]:
        """Cut a text into pieces of about `size` characters.

        Their ids, joined, are the ids of the text.
        """

    def save(self, directory: Path) -> None:
        """Write the files that `load_saved` reads."""


class ByteTokenizer:
    """UTF-8 bytes as ids.

    End-of-text is 0, the byte of NUL. A NUL in a text is encoded as U+FFFD, as in HTML
    and Markdown, so that it ends no document.
    """

    name = "byte"
    vocab_size = 256
    eot = 0
    fingerprint = "byte"
    pattern: str | None = None
    line_safe = True

    def __init__(self) -> None:
        self.tokens = {bytes([i]): i for i in range(self.vocab_size)}
        self.special_tokens = {"\0": self.eot}

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str, preceding: str = "", following: str = "") -> Ids:
        """See Tokenizer."""
        text = whole_characters(text).replace("\0", REPLACEMENT)
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        # 0xFF is in no UTF-8 text, so an id beyond the bytes becomes U+FFFD as well.
        return bytes(min(int(i), 0xFF) for i in ids).decode(errors="replace")

    def cut_up(self, text: str, size: int) -> list[str]:
        """See Tokenizer. Any place is a token boundary."""
        return [text[i : i + size] for i in range(0, len(text), size)]

    def save(self, directory: Path) -> None:
        """See Tokenizer. No file is needed: `load_saved` knows the name."""


class BPETokenizer:
    """A tiktoken encoding.

    Args:
      name: as the user gave it.
      encoding: the encoding.
      end: the special token that ends a document.
    """

    def __init__(
        self, name: str, encoding: tiktoken.Encoding, end: str = ENDOFTEXT
    ) -> None:
        self.name = name
        self.vocab_size = encoding.n_vocab
        self.eot = encoding._special_tokens[end]
        self.encoding = encoding
        # tiktoken has no public names for these.
        self.tokens: dict[bytes, int] = encoding._mergeable_ranks
        self.special_tokens: dict[str, int] = encoding._special_tokens
        self.pattern: str | None = encoding._pat_str
        self.line_safe = self.pattern in KNOWN_PATTERNS
        self._settings = {
            "pat_str": self.pattern,
            "special_tokens": self.special_tokens,
        }
        # Left out for the usual end, so that older fingerprints stay valid.
        if end != ENDOFTEXT:
            self._settings["eos_token"] = end
        digest = hashlib.blake2b(
            json.dumps(self._settings, sort_keys=True).encode(), digest_size=16
        )
        digest.update(tiktoken_file(self.tokens))
        self.fingerprint = digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str, preceding: str = "", following: str = "") -> Ids:
        """See Tokenizer."""
        try:
            # By default, tiktoken raises an error for the text of a special token.
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self.encode_array(whole_characters(text))
        except ValueError as error:
            if self.pattern not in KNOWN_PATTERNS:
                raise UserError(
                    f"tokenizer {self.name}: tiktoken cannot split a text of"
                    f" {len(text):,} characters ({error}); cut it, or leave it out"
                ) from error
        # Its regular expressions end at a million spaces in a row.
        return self._in_hf.encode_array(text)

    @functools.cached_property
    def _in_hf(self) -> JSONTokenizer:
        """The same tokenizer in Hugging Face's library, which is slower."""
        # `hf_tokenizer` imports this module.
        from trainer.data.hf_tokenizer import to_tokenizer_json

        tree = to_tokenizer_json(self)
        library = parse_tokenizer(Path(self.name), tree)
        return JSONTokenizer(self.name, tree, library, end_of(self))

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        # An untrained model also samples ids in the gaps of a vocabulary.
        parts = (self._bytes.get(int(i), REPLACEMENT.encode()) for i in ids)
        return b"".join(parts).decode(errors="replace")

    @functools.cached_property
    def _bytes(self) -> dict[int, bytes]:
        special = {i: token.encode() for token, i in self.special_tokens.items()}
        return special | {i: token for token, i in self.tokens.items()}

    def cut_up(self, text: str, size: int) -> list[str]:
        """See Tokenizer. A text stays uncut if the pattern is not line-safe."""
        if self.line_safe:
            return cut_at_lines(text, size)
        return [text]

    def save(self, directory: Path) -> None:
        """See Tokenizer.

        `tokenizer.tiktoken` has the ranks, `tokenizer.json` their number, the pattern,
        the special tokens and the end of a document if that is not "<|endoftext|>".
        """
        write_atomically(directory / "tokenizer.tiktoken", tiktoken_file(self.tokens))
        write_atomically(
            directory / "tokenizer.json",
            json.dumps(
                {"name": self.name, "ranks": len(self.tokens)} | self._settings,
                indent=1,
            ),
        )


def tiktoken_file(ranks: dict[bytes, int]) -> bytes:
    """Return a .tiktoken file's content: a token in base64 and its rank per line."""
    lines = (
        b"%s %d\n" % (base64.b64encode(token), rank)
        # By rank, so that equal encodings have equal files, and so one fingerprint.
        for token, rank in sorted(ranks.items(), key=lambda x: x[1])
    )
    return b"".join(lines)


def get_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer by name.

    Args:
      name: one of
        - `byte`;
        - a tiktoken encoding such as `gpt2` or `cl100k_base`, downloaded once by
          tiktoken (TIKTOKEN_CACHE_DIR);
        - a `.tiktoken` file: pattern and special tokens are in a `.json` file beside it
          (`pat_str`, `special_tokens`, perhaps `eos_token`), or are those of the
          encoding with its name;
        - a directory with `vocab.bpe` and perhaps `encoder.json`, or with `merges.txt`
          and `vocab.json`, or the first file of such a pair: GPT-2's pattern, and the
          ids of the .json file if there is one;
        - Hugging Face's `tokenizer.json`, or its directory, such as an export of a run.
          Byte-level encodings like GPT-2's with one of `KNOWN_PATTERNS` are read by
          tiktoken, all others by Hugging Face's library (`json_tokenizer`).

    `end_token` says which special token ends a document.

    Raises:
      UserError: unknown name, missing or malformed file, or an encoding that cannot be
          downloaded.
    """
    if name == "byte":
        return ByteTokenizer()
    # Before files: a directory of such a name is given as ./gpt2.
    if name in tiktoken.list_encoding_names():
        return BPETokenizer(name, download(name))
    with well_formed(f"tokenizer {name}", COPY_AGAIN):
        tokenizer = from_files(name)
        check_usable_ids(tokenizer)
        return tokenizer


def end_of(tokenizer: Tokenizer) -> str:
    """Return the text of the token that ends a document."""
    return next(t for t, i in tokenizer.special_tokens.items() if i == tokenizer.eot)


def check_usable_ids(tokenizer: Tokenizer) -> None:
    """Check the ids of a tokenizer, and try it on a text.

    Raises:
      UserError: ids that no model could have, or text that is encoded to end-of-text.
    """
    ids = [*tokenizer.tokens.values(), *tokenizer.special_tokens.values()]
    limit = max(MIN_ID_LIMIT, MAX_IDS_PER_TOKEN * len(ids))
    # isinstance would take a bool for an id.
    bad = next((i for i in ids if type(i) is not int or not 0 <= i < limit), None)
    if bad is not None:
        raise UserError(
            f"tokenizer {tokenizer.name} has the id {bad!r}; expected whole numbers"
            f" below {limit:,} for {len(ids):,} tokens"
        )
    check_unique_ids(f"tokenizer {tokenizer.name}", tokenizer.tokens)
    end = end_of(tokenizer)
    with contextlib.suppress(NoToken):  # The tokenizer may lack these characters.
        # A text may spell the end without becoming it. U+10FFFD is in no alphabet, so a
        # vocabulary without bytes gives its unknown token for it.
        ids = tokenizer.encode(f"A text, of 2 lines, and {end}.\n{UNUSED_CHARACTER}")
        if tokenizer.eot in ids:
            raise UserError(
                f"tokenizer {tokenizer.name} ends a document with {end!r}, which is"
                " also its unknown token, so that a text would end at each unknown"
                " character; give it an end or an unknown token of its own"
            )
    # A decoder may panic at some characters.
    changed_characters(tokenizer)


def changed_characters(tokenizer: Tokenizer) -> str:
    """Return the characters of TRIED that encoding and decoding changes or drops.

    A tokenizer may lower letters, drop line ends, a script or the spaces around a text,
    or have no token for a character.
    """
    changed = []
    for char in TRIED:
        with contextlib.suppress(NoToken):  # A text with `char` is refused.
            # At the start, inside and at the end: a normalizer may strip the ends of a
            # text.
            ids = tokenizer.encode(f"{char}a{char}a{char}")
            # Composing and decomposing change no character.
            text = unicodedata.normalize("NFD", tokenizer.decode(ids))
            if text.count(unicodedata.normalize("NFD", char)) < 3:
                changed.append(char)
    return "".join(changed)


def from_files(name: str) -> Tokenizer:
    """Read a tokenizer from files; see `get_tokenizer`."""
    path, names = path_of(name), tiktoken.list_encoding_names()
    if path.is_dir():
        # The .tiktoken file comes first: `save` puts its settings in a tokenizer.json
        # beside it, which is not Hugging Face's. Merges come last: only Hugging Face's
        # tokenizer.json has the words that were added to them.
        merges_files = (merges for merges, _ in MERGES_AND_IDS_FILES)
        files = ["tokenizer.tiktoken", TOKENIZER_JSON, *merges_files]
        for file in files:
            if has_file(path / file):
                return from_files(str(path / file))
        raise UserError(f"tokenizer directory {name} holds none of {', '.join(files)}")
    if path.suffix == ".tiktoken":
        return BPETokenizer(name, *read_tiktoken(path))
    for merges, ids in MERGES_AND_IDS_FILES:
        if path.name == merges:
            tree = merges_to_tokenizer_json(path, path.with_name(ids))
            return from_tokenizer_json(name, path, tree)
    if path.name == TOKENIZER_JSON:
        return from_tokenizer_json(name, path, read_tokenizer_json(path))
    if path.name != name and not path.exists():
        raise UserError(
            f"there is no tokenizer directory or file {name} (looked from"
            f" {Path.cwd()}); correct data.tokenizer"
        )
    close = difflib.get_close_matches(name, ["byte", *names], n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise UserError(
        f"unknown tokenizer {name!r}; {hint}Valid: byte, {', '.join(names)}, a"
        f" .tiktoken file, a {TOKENIZER_JSON}, or a directory with"
        f" {' or '.join(merges for merges, _ in MERGES_AND_IDS_FILES)}"
    )


def from_tokenizer_json(name: str, path: Path, tree: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of `tree`, the content of the tokenizer.json `path`."""
    library = parse_tokenizer(path, tree)
    check_added_ids(path, tree, library)
    end = end_of_document(path, tree)
    pattern, ids, special = pattern_of(tree), byte_level_ids(tree), added_ids(tree)
    if pattern is None or ids is None:
        return JSONTokenizer(name, tree, library, end)
    # `save_hf` writes a ByteTokenizer so.
    if special == {NUL: 0} and ids == {bytes([i]): i for i in range(1, 256)}:
        return ByteTokenizer()
    # tiktoken encodes several times as fast, with the same ids.
    if pattern and end == ENDOFTEXT and is_same_in_tiktoken(tree, ids):
        return BPETokenizer(name, make_encoding(path, ids, pattern, special))
    return JSONTokenizer(name, tree, library, end)


def is_missing(name: str) -> bool:
    """Return whether a name of `get_tokenizer` is a path that does not exist."""
    if name in (ByteTokenizer.name, *tiktoken.list_encoding_names()):
        return False
    return not path_of(name).exists()


def continuation(tokenizer: Tokenizer, ids: Sequence[int], new: Sequence[int]) -> str:
    """Return the text that `new` adds to the text of `ids`.

    `new` is not decoded alone: SentencePiece drops the space before a first token.
    """
    start, text = tokenizer.decode(ids), tokenizer.decode([*ids, *new])
    if text.startswith(start):
        return text[len(start) :]
    return tokenizer.decode(new)


def load_saved(name: str, directory: Path) -> Tokenizer:
    """Return the tokenizer that `save` wrote into `directory`."""
    if name == "byte":
        return ByteTokenizer()
    file = vocabulary_file(directory)
    with well_formed(file, COPY_AGAIN):
        tokenizer: Tokenizer
        if file.name == TOKENIZER_JSON:
            tree = read_tokenizer_json(file)
            library, end = parse_tokenizer(file, tree), end_of_document(file, tree)
            tokenizer = JSONTokenizer(name, tree, library, end)
        else:
            tokenizer = BPETokenizer(name, *read_tiktoken(file))
        check_usable_ids(tokenizer)
        return tokenizer


def vocabulary_file(directory: Path) -> Path:
    """Return the file into which `save` wrote the vocabulary."""
    # Before tokenizer.json, which beside it holds settings only.
    file = directory / "tokenizer.tiktoken"
    if file.is_file():
        return file
    return directory / TOKENIZER_JSON


class DownloadFailed(UserError):
    """The error of an encoding that could not be downloaded.

    Attributes:
      problem: names the encoding, and the reason.
      advice: says how to get it, in a sentence of its own.
    """

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(problem, advice)
        self.problem, self.advice = problem, advice

    def __str__(self) -> str:
        return f"{self.problem}. {self.advice}"


def download(name: str) -> tiktoken.Encoding:
    """Return one of tiktoken's own encodings, from its cache or the network."""
    import requests  # tiktoken's downloads raise its errors

    try:
        return tiktoken.get_encoding(name)
    except requests.RequestException as error:
        url = str(error.request.url) if error.request is not None else "its file"
        file = url.rsplit("/", 1)[-1]
        raise DownloadFailed(
            f"tokenizer {name!r} is not on this machine and could not be downloaded"
            f" ({type(error).__name__})",
            f"Fetch {url} where there is a network; then"
            f" either pass the file, data.tokenizer=DIRECTORY/{file}, or save it as"
            # tiktoken names a file of its cache by this hash of its address.
            f" DIRECTORY/{hashlib.sha1(url.encode()).hexdigest()} and set"
            " TIKTOKEN_CACHE_DIR=DIRECTORY. data.tokenizer=byte needs no file",
        ) from error
    # A download of another hash is a ValueError.
    except (ValueError, OSError) as error:
        raise UserError(f"tokenizer {name!r}: {str(error).splitlines()[0]}") from error
