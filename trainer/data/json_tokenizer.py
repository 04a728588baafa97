"""Tokenizers that only Hugging Face's library reads, such as Llama's.

The library encodes. This module adds the token that ends a document, the bytes of each
token, and a fingerprint.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from trainer.data.bpe_files import printable_bytes, read_json
from trainer.errors import UserError
from trainer.files import write_atomically

FILE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
# end tokens, where no file beside the tokenizer names it
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
SPACE = "\u2581"  # how SentencePiece writes a space
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Ids = dict[bytes, int]


class JSONTokenizer:
    """A tokenizer.json, read by `tokenizers`.

    Nothing is added to a text: no start of text, no end, no padding.

    Args:
      name: as the user gave it.
      tree: the content of the file.
      end: the token that ends a document.
    """

    pattern: str | None = None

    def __init__(self, name: str, tree: dict[str, Any], end: str) -> None:
        self.name, self.end = name, end
        self.tree = tree | {"truncation": None, "padding": None}
        content = json.dumps(self.tree, sort_keys=True)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises this class only
            reason = str(error).splitlines()[0]
            raise UserError(
                f"{name}: {reason}; valid: a {FILE} that Hugging Face's `tokenizers`"
                " reads"
            ) from None
        self._tokenizer.encode_special_tokens = True
        entries = tree.get("added_tokens") or ()
        added = {token["content"]: int(token["id"]) for token in entries}
        self.eot = added[end]
        self.special_tokens = {
            token["content"]: int(token["id"])
            for token in entries
            if token.get("special")
        }
        self.special_tokens[end] = self.eot
        special = {token.encode() for token in self.special_tokens}
        ids = ids_of(tree) or {}
        self.tokens = {token: i for token, i in ids.items() if token not in special}
        self.vocab_size = 1 + max(
            [*self.tokens.values(), *self.special_tokens.values()]
        )
        # A text may be encoded to the unknown token, given by name or, of Unigram, id.
        unknown = (tree["model"].get("unk_token"), tree["model"].get("unk_id"))
        self._special = frozenset(
            i
            for token, i in self.special_tokens.items()
            if token not in unknown and i not in unknown
        )
        self._known = frozenset(self._tokenizer.get_vocab().values())
        self.fingerprint = hashlib.blake2b(
            f"{end}\n{content}".encode(), digest_size=16
        ).hexdigest()

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._without_special(text, ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See Tokenizer."""
        encodings = self._tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=False
        )
        return [
            self._without_special(text, encoding.ids)
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def _without_special(self, text: str, ids: list[int]) -> list[int]:
        """Return `ids`, or those of two halves where the text spells a special token.

        The library has no option that encodes such a text as ordinary text.
        """
        if self._special.isdisjoint(ids):
            return ids
        middle = len(text) // 2
        if not middle:
            return [i for i in ids if i not in self._special]
        return [*self.encode(text[:middle]), *self.encode(text[middle:])]

    def encode_array(self, text: str) -> npt.NDArray[np.unsignedinteger]:
        """See Tokenizer."""
        return np.array(self.encode(text), np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer. A space that the encoding adds before a text is removed."""
        pieces, run = [], list[int]()
        for i in map(int, ids):
            if i in self._known:
                run.append(i)
                continue
            pieces += [self._tokenizer.decode(run, skip_special_tokens=False), "\ufffd"]
            run = []
        return "".join(
            [*pieces, self._tokenizer.decode(run, skip_special_tokens=False)]
        )

    def cut_up(self, text: str, size: int) -> list[str]:
        """See Tokenizer. A text stays uncut: its token boundaries are unknown."""
        return [text]

    def save(self, directory: Path) -> None:
        """See Tokenizer: the file, and beside it the token that ends a document."""
        for name, tree in ((FILE, self.tree), (SETTINGS, {"eos_token": self.end})):
            write_atomically(
                directory / name, json.dumps(tree, ensure_ascii=False) + "\n"
            )


def read_json_tokenizer(name: str, path: Path) -> JSONTokenizer:
    """Return the tokenizer of a file and of the settings beside it.

    Raises:
      UserError: no token ends a document.
    """
    tree = read_json(path)
    added = {
        token.get("content")
        for token in tree.get("added_tokens") or ()
        if isinstance(token, dict)
    }
    default = next((token for token in ENDS if token in added), None)
    end = end_beside(path.parent) or default
    if end is None or end not in added:
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
    return JSONTokenizer(name, tree, end)


def end_beside(directory: Path) -> str | None:
    """Return the token that ends a document by tokenizer_config.json, or None."""
    if not (directory / SETTINGS).is_file():
        return None
    end = read_json(directory / SETTINGS).get("eos_token")
    if isinstance(end, dict):
        end = end.get("content")
    return end if isinstance(end, str) else None


def ids_of(tree: dict[str, Any]) -> Ids | None:
    """Return the ids of a tokenizer.json by the bytes of its tokens.

    None: it has no vocabulary. Bytes may be spelled as GPT-2 or SentencePiece spell
    them. SentencePiece's `<0x41>` is that byte, unless another token is; then it stands
    for its own spelling.
    """
    model = tree.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # of Unigram, with a probability each
        vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
    if not isinstance(vocabulary, dict):
        return None
    added = {
        token["content"].encode(): int(token["id"])
        for token in tree.get("added_tokens") or ()
    }
    added_ids, byte_of = set(added.values()), printable_bytes()
    tokens = {token: i for token, i in vocabulary.items() if i not in added_ids}
    ids: Ids = {}
    if has_part(tree, "ByteLevel"):
        for token, i in tokens.items():
            raw = token.encode()
            if all(char in byte_of for char in token):
                raw = bytes(byte_of[char] for char in token)
            ids[raw] = i
        return ids | added
    for token, i in tokens.items():
        if not BYTE.fullmatch(token):
            ids[token.replace(SPACE, " ").encode()] = i
    for token, i in tokens.items():
        if match := BYTE.fullmatch(token):
            raw = bytes([int(match[1], 16)])
            ids[token.encode() if raw in ids else raw] = i
    return ids | added


def has_part(tree: dict[str, Any], kind: str) -> bool:
    """Return whether the pre-tokenizer or the decoder has a part of this kind."""
    parts = [tree.get("pre_tokenizer"), tree.get("decoder")]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if part.get("type") == kind:
                return True
            parts += [*(part.get("pretokenizers") or ()), *(part.get("decoders") or ())]
    return False
