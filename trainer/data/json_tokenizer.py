"""Tokenizers that only Hugging Face's library reads, such as Llama's.

The library encodes. This module adds the token that ends a document, the bytes of each
token, and a fingerprint.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from trainer.data.bpe_files import TokenIds, added_ids, is_bpe
from trainer.data.byte_spelling import SPELLING, unspell
from trainer.data.line_cuts import is_line_safe
from trainer.data.tokenizer_bounds import check_growth_and_patterns
from trainer.data.tokenizer_settings import (
    ENDS,
    SETTINGS,
    check_no_tokens_added,
    check_same_flags,
    check_settings_beside,
    end_token,
    read_json,
)
from trainer.errors import UserError
from trainer.files import well_formed, write_atomically

TOKENIZER_JSON = "tokenizer.json"
SPACE = "\u2581"  # how SentencePiece writes a space
BYTE_FALLBACK_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Letters that are rare in vocabularies; a tokenizer that drops both encodes them alike.
CUNEIFORM = ("\U00012000", "\U00012001")


def whole_characters(text: str) -> str:
    """Return a text with U+FFFD for each half of a surrogate pair, which is no UTF-8.

    Python has such a half for a byte of the command line that is not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class NoToken(UserError):
    """The error of a text with a character or word that has no token."""


class JSONTokenizer:
    """A tokenizer.json, read by `tokenizers`.

    Nothing is added to a text: no start of text, no end, no padding.

    Args:
      name: as the user gave it.
      tree: the content of the file, from `read_tokenizer_json`.
      library: the library's tokenizer, from `parse_tokenizer`.
      end: the token that ends a document.

    Attributes:
      unknown: the id of the token for unknown characters or words, or None.
    """

    pattern: str | None = None

    def __init__(
        self, name: str, tree: dict[str, Any], library: tokenizers.Tokenizer, end: str
    ) -> None:
        self.name, self.tree, self.end = name, tree, end
        self._library = library
        added = added_ids(tree)
        self.eot = added[end]
        self.special_tokens: dict[str, int] = {}
        for token in tree["added_tokens"]:
            text = token["content"]
            is_special = token.get("special") and not stands_for_other_text(tree, text)
            # An end that is not marked as special ends documents all the same.
            if text == end or is_special:
                self.special_tokens[text] = added[text]
        special = set(self.special_tokens.values())
        ids = ids_of(tree) or {}
        self.tokens = {token: i for token, i in ids.items() if i not in special}
        # Ids may have gaps, so their number is no bound.
        self.vocab_size = 1 + max(
            [*self.tokens.values(), *self.special_tokens.values()]
        )
        # Tokens of other kinds may have marks, such as ## and </w>, that only the
        # decoder removes.
        self.spells_bytes = is_byte_level(tree)
        self._known = frozenset(library.get_vocab().values())
        self.unknown = unknown_id(tree["model"])
        if not any(
            t["content"] == end and t.get("special") for t in tree["added_tokens"]
        ):
            # Otherwise a document would end where a text spells this token.
            library.add_special_tokens([end])
        disable_special_tokens(library, tree, self.special_tokens)
        # Byte-pair encoding drops bytes without a token; other models raise an error.
        self._lost_bytes: set[int] = set()
        if is_bpe(tree["model"]) and self.unknown is None:
            absent_bytes = {i for i in range(256) if bytes([i]) not in self.tokens}
            if has_part(tree.get("pre_tokenizer"), "ByteLevel"):
                self._lost_bytes = absent_bytes | bytes_lost_in_words(library.model)
            elif absent_bytes or self._drops_cuneiform():
                # `_check_encodable` finds lost bytes, but such a tokenizer loses whole
                # characters.
                raise self._no_token("characters outside of its vocabulary")
        self.line_safe = is_line_safe(tree, library)
        # Files that differ in the order of their keys alone are one tokenizer.
        content = json.dumps(tree, sort_keys=True)
        self.fingerprint = hashlib.blake2b(
            f"{end}\n{content}".encode(), digest_size=16
        ).hexdigest()

    def encode(self, text: str) -> list[int]:
        """See Tokenizer. Raises NoToken for text that the model would leave out."""
        # Up to twice as fast as `encode_batch`, which also tells where each token
        # begins.
        encoding = self._encoding(
            whole_characters(text), self._library.encode_batch_fast
        )
        return encoding.ids

    def encode_array(
        self, text: str, preceding: str = "", following: str = ""
    ) -> npt.NDArray[np.unsignedinteger]:
        """See Tokenizer."""
        if not preceding and not following:
            return np.array(self.encode(text), np.uint32)
        encoding = self._encoding(
            preceding + text + following, self._library.encode_batch
        )
        starts = np.array([start for start, _ in encoding.offsets], np.int64)
        ids = np.array(encoding.ids, np.uint32)
        # Without `following`, keep all tokens up to the end: a space that the tokenizer
        # appends may have the length of the text as its offset.
        inside = starts >= len(preceding)
        if following:
            inside &= starts < len(preceding) + len(text)
        return ids[inside]

    def _encoding(
        self, text: str, encode: Callable[..., list[tokenizers.Encoding]]
    ) -> tokenizers.Encoding:
        with well_formed(f"tokenizer {self.name}", "download or copy it again"):
            try:
                if self._lost_bytes:
                    self._check_encodable(text)
                [encoding] = encode([text], add_special_tokens=False)
            except NoToken:
                raise
            except Exception as error:  # the library has no class of its own
                # With an unknown token no text lacks a token, so the error has another
                # cause.
                if self.unknown is not None:
                    raise
                raise self._no_token(
                    # Not the text: a stranger's settings may name a private file.
                    f"a word of a text of {len(text):,} characters"
                ) from error
        return encoding

    def _drops_cuneiform(self) -> bool:
        first, second = map(self.encode, CUNEIFORM)
        return first == second

    def _check_encodable(self, text: str) -> None:
        """Raise NoToken for the first character with a byte that has no token."""
        normalizer = self._library.normalizer
        # A normalizer may compose characters that have tokens to one that has none.
        text = text if normalizer is None else normalizer.normalize_str(text)
        for char in text:
            if not self._lost_bytes.isdisjoint(char.encode()):
                raise self._no_token(f"{char!r} (U+{ord(char):04X})")

    def _no_token(self, text: str) -> NoToken:
        return NoToken(
            f"tokenizer {self.name} has no token for {text}, and no unknown token, so"
            " that it would vanish from a text; train it with an unk_token, or with all"
            " bytes (initial_alphabet=ByteLevel.alphabet()), or remove the character"
        )

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer. A space that the encoding adds before a text is removed."""
        # A decoder may panic at some tokens only.
        with well_formed(f"tokenizer {self.name}", "download or copy it again"):
            return self._decode(ids)

    def _decode(self, ids: Sequence[int]) -> str:
        pieces, run = [], list[int]()
        for i in map(int, ids):
            # The library leaves unknown ids out of a text in silence.
            if i in self._known:
                run.append(i)
                continue
            pieces += [self._library.decode(run, skip_special_tokens=False), "\ufffd"]
            run = []
        return "".join([*pieces, self._library.decode(run, skip_special_tokens=False)])

    def cut_up(self, text: str, size: int) -> list[str]:
        """See Tokenizer. A text stays uncut: its token boundaries are unknown."""
        return [text]

    def save(self, directory: Path) -> None:
        """See Tokenizer. The token that ends a document has a file of its own."""
        for name, tree in (
            (TOKENIZER_JSON, self.tree),
            (SETTINGS, {"eos_token": self.end}),
        ):
            write_atomically(
                directory / name, json.dumps(tree, ensure_ascii=False) + "\n"
            )


def read_tokenizer_json(path: Path) -> dict[str, Any]:
    """Return the content of a tokenizer.json, without truncation and padding."""
    # The library would cut each text to the length in the file, or fill it with pads.
    return read_json(path) | {"truncation": None, "padding": None}


def parse_tokenizer(path: Path, tree: dict[str, Any]) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of a file's content.

    Raises UserError for what the library does not read.
    """
    model = tree.get("model")
    if isinstance(model, dict) and model.get("dropout"):
        raise UserError(
            f"{path} has dropout={model['dropout']} in its model, so that a text's ids"
            " are random; set it to null"
        )
    check_growth_and_patterns(path, tree)
    try:
        # Its pieces may repeat a text, and byte-level ones move the starts of tokens.
        unprocessed = tree | {"post_processor": None}
        library = tokenizers.Tokenizer.from_str(json.dumps(unprocessed))
    except Exception as error:  # the library has no class of its own
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{path}: {reason}; valid: a {TOKENIZER_JSON} that Hugging Face's"
            " `tokenizers` reads"
        ) from None
    for word in tree.get("added_tokens") or ():
        text = word["content"]
        is_plain = word.get("normalized") and not word.get("special")
        # The library finds such a word everywhere, without an end.
        if (
            is_plain
            and library.normalizer
            and not library.normalizer.normalize_str(text)
        ):
            raise UserError(
                f"{path}: its normalizer leaves nothing of the added word {text!r}; set"
                ' "normalized" of the word to false, or remove it'
            )
    return library


def unknown_id(model: dict[str, Any]) -> int | None:
    """Return the id of a model's token for unknown characters or words, or None."""
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    unknown = model.get("unk_token")
    return int(model["vocab"][unknown]) if unknown in model["vocab"] else None


def bytes_lost_in_words(model: tokenizers.models.Model) -> set[int]:
    """Return the bytes that a byte-level model drops at some place of a word.

    With a mark such as ## or </w> a byte has another token inside a word, or at its
    end.
    """
    lost = set()
    for byte, char in SPELLING.items():
        # Alone, and at the start, inside and at the end of a word.
        for word in (char, char * 3):
            tokens = model.tokenize(word)
            # A dropped byte does not count in the ends of tokens.
            if not tokens or tokens[-1].offsets[1] < len(word.encode()):
                lost.add(byte)
    return lost


def disable_special_tokens(
    library: tokenizers.Tokenizer, tree: dict[str, Any], special: dict[str, int]
) -> None:
    """Let a tokenizer encode text that spells a special token as ordinary text.

    With `encode_special_tokens` the library does not look for special tokens in a text.
    But a model with special tokens in its vocabulary may still find them, and Unigram
    prefers them. So the model is replaced by a copy without special tokens.

    Args:
      library: the library's tokenizer, which is changed. It still decodes special
        tokens.
      tree: the content of its tokenizer.json.
      special: ids of the special tokens. The unknown token stays, by the model's
        `unk_token` or `unk_id` (Unigram).
    """
    library.encode_special_tokens = True
    model = tree["model"]
    unknown = (model.get("unk_token"), model.get("unk_id"))
    removed = {
        token
        for token, i in special.items()
        if token not in unknown and i not in unknown
    }
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        # A model without special tokens inside needs no copy, a second parse of it.
        if removed.isdisjoint(token for token, _ in vocabulary):
            return
        # An id is an index of the list, so the empty piece, which no text matches,
        # replaces a token.
        ordinary: Any = [
            ["" if token in removed else token, score] for token, score in vocabulary
        ]
    else:
        if removed.isdisjoint(vocabulary):
            return
        ordinary = {token: i for token, i in vocabulary.items() if token not in removed}
    changes = {"vocab": ordinary}
    if "merges" in model:
        pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        changes["merges"] = [
            [left, right]
            for left, right in pairs
            if removed.isdisjoint((left, right, left + right))
        ]
    copy = tree | {"model": model | changes, "added_tokens": []}
    library.model = parse_tokenizer(Path(TOKENIZER_JSON), copy).model


def check_added_ids(
    path: Path, tree: dict[str, Any], library: tokenizers.Tokenizer
) -> None:
    """Raise UserError for an added token to which the library gives another id.

    The library does so where another token has the id, or where ids have a gap. Also
    raise UserError for an added token that only the files beside the tokenizer.json
    list, and for a setting in these files that overrides it.
    """
    for token, i in added_ids(tree).items():
        library_id = library.token_to_id(token)
        if library_id != i:
            raise UserError(
                f"{path}: {token!r} of added_tokens has the id {i}, but Hugging Face's"
                f" `tokenizers` gives it {library_id}; write {library_id} there"
            )
    check_no_tokens_added(path.parent, path.name, library.get_vocab())
    words = {token["content"]: token for token in tree.get("added_tokens") or ()}
    check_same_flags(path.parent, path.name, words)
    check_settings_beside(path.parent, path.name, tree)


def end_of_document(path: Path, tree: dict[str, Any]) -> str:
    """Return the token that ends a document, one of the added tokens of a file.

    Raises:
      UserError: no added token ends a document.
    """
    added = added_ids(tree)
    end = end_token(path.parent, added)
    if end in added:
        return str(end)
    problem = f"has no added token {end!r}"
    if end is None:
        problem = "names no token that ends a document"
    if not added:
        raise UserError(
            f"{path} {problem}, and has no added_tokens; give it one with Hugging"
            " Face's "
            f'`Tokenizer.add_special_tokens(["{ENDS[0]}"])`, and save it'
        )
    raise UserError(
        f"{path} {problem}; put its {SETTINGS} beside it, with the eos_token that"
        " ends a document, one of its added_tokens"
        f" ({', '.join(sorted(map(repr, added))[:8])})"
    )


def ids_of(tree: dict[str, Any]) -> TokenIds | None:
    """Return the ids of a tokenizer.json by the bytes of its tokens.

    None: the file has no vocabulary. Bytes may be spelled as GPT-2 or SentencePiece
    spell them. With `byte_fallback` of the model, SentencePiece's `<0x41>` is the byte
    0x41, unless another token is that byte. Otherwise `<0x41>` stands for its own six
    characters.
    """
    model = tree.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # Unigram has a list of [token, log probability].
        vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
    if not isinstance(vocabulary, dict):
        return None
    added = {
        token.encode(): i
        for token, i in added_ids(tree).items()
        if token not in vocabulary or not stands_for_other_text(tree, token)
    }
    added_values = set(added.values())
    tokens = {token: i for token, i in vocabulary.items() if i not in added_values}
    if is_byte_level(tree):
        return spelled_ids(tokens) | added
    byte_tokens: dict[str, int] = {}
    if tree["model"].get("byte_fallback"):
        byte_tokens = {
            token: i
            for token, i in tokens.items()
            if BYTE_FALLBACK_TOKEN.fullmatch(token)
        }
    ids: TokenIds = {
        token.replace(SPACE, " ").encode(): i
        for token, i in tokens.items()
        if token not in byte_tokens
    }
    # Last: the spelling of a byte gives way to a token that is that byte.
    for token, i in byte_tokens.items():
        raw = bytes.fromhex(token[3:5])
        ids[token.encode() if raw in ids else raw] = i
    return ids | added


def stands_for_other_text(tree: dict[str, Any], token: str) -> bool:
    """Return whether an added token stands for another text than its own spelling.

    `<0x0A>` stands for a line feed, not for the text `<0x0A>`. Such bytes and runs of
    spaces may be marked as special, but the model encodes text to them.
    """
    if BYTE_FALLBACK_TOKEN.fullmatch(token):
        return bool(tree["model"].get("byte_fallback"))
    if is_byte_level(tree):
        return unspell(token) not in (None, token.encode())
    return not token.strip(SPACE)


def is_byte_level(tree: dict[str, Any]) -> bool:
    """Return whether the tokens of a tokenizer.json are spelled as GPT-2's."""
    return has_part([tree.get("pre_tokenizer"), tree.get("decoder")], "ByteLevel")


def spelled_ids(vocabulary: dict[str, int]) -> TokenIds:
    """Return ids by the bytes of tokens.

    A token that is not in GPT-2's spelling stands for its own UTF-8.
    """
    ids: TokenIds = {}
    for token, i in vocabulary.items():
        raw = unspell(token)
        ids[token.encode() if raw is None else raw] = i
    return ids


def has_part(part: Any, kind: str) -> bool:
    """Return whether a part of a tokenizer.json is, or holds, one of type `kind`."""
    if isinstance(part, dict):
        return part.get("type") == kind or has_part(list(part.values()), kind)
    return isinstance(part, list) and any(has_part(inner, kind) for inner in part)
