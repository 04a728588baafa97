"""Tokenizers that only Hugging Face's library reads: what a tokenizer.json says beyond
a byte-level encoding.

Those of Llama 2 and Llama 3, of SentencePiece's kinds, with normalizers or prefixes.
The library does the encoding; here is what it has no word for: which token ends a
document, what bytes a token stands for, and a fingerprint.
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
# where nothing beside the file says which it is
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
SPACE = "\u2581"  # how SentencePiece writes a space
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Ids = dict[bytes, int]


class JSONTokenizer:
    """A tokenizer.json, read by `tokenizers`. Nothing is added to a text: no begin of
    text, no end, no padding.

    Args:
      name: as the user gave it.
      tree: the content of the file.
      end: the token that ends a document.
    """

    pattern: str | None = None

    def __init__(self, name: str, tree: dict[str, Any], end: str) -> None:
        self.name, self.tree, self.end = (
            name,
            tree | {"truncation": None, "padding": None},
            end,
        )
        content = json.dumps(self.tree, sort_keys=True)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises no other kind
            reason = str(error).splitlines()[0]
            raise UserError(
                f"{name}: {reason}; valid: a {FILE} that Hugging Face's `tokenizers`"
                " reads"
            ) from None
        self._tokenizer.encode_special_tokens = True
        added = {
            token["content"]: int(token["id"])
            for token in tree.get("added_tokens") or ()
        }
        self.special_tokens = {
            t["content"]: int(t["id"])
            for t in tree.get("added_tokens") or ()
            if t.get("special")
        }
        self.special_tokens[end] = added[end]
        taken = {token.encode() for token in self.special_tokens}
        self.tokens = {
            token: i for token, i in (ids_of(tree) or {}).items() if token not in taken
        }
        self.vocab_size = 1 + max(
            [*self.tokens.values(), *self.special_tokens.values()]
        )
        self.eot = added[end]
        # by its name, or of Unigram its id
        unknown = (tree["model"].get("unk_token"), tree["model"].get("unk_id"))
        self._special = frozenset(
            i
            for t, i in self.special_tokens.items()
            if t not in unknown and i not in unknown
        )
        self._known = frozenset(self._tokenizer.get_vocab().values())
        self.fingerprint = hashlib.blake2b(
            f"{end}\n{content}".encode(), digest_size=16
        ).hexdigest()

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        return self._checked(
            text, self._tokenizer.encode(text, add_special_tokens=False).ids
        )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See Tokenizer."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [
            self._checked(text, x.ids) for text, x in zip(texts, found, strict=True)
        ]

    def _checked(self, text: str, ids: list[int]) -> list[int]:
        """`ids`, unless what the text spells is a special token to the model itself:
        then those of its two halves.
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
        """See Tokenizer. Where the encoding puts a space in front of a text, this takes
        it away again.
        """
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
        """See Tokenizer: a text stays whole, as nobody knows where its tokens end."""
        return [text]

    def save(self, directory: Path) -> None:
        """See Tokenizer: the file as it is, and beside it which token ends a
        document.
        """
        for name, tree in ((FILE, self.tree), (SETTINGS, {"eos_token": self.end})):
            write_atomically(
                directory / name, json.dumps(tree, ensure_ascii=False) + "\n"
            )


def read_json_tokenizer(name: str, path: Path) -> JSONTokenizer:
    """The tokenizer of a file, and of what stands beside it. UserError where no token
    ends a document.
    """
    tree = read_json(path)
    added = {
        token.get("content")
        for token in tree.get("added_tokens") or ()
        if isinstance(token, dict)
    }
    end = end_beside(path.parent) or next(
        (token for token in ENDS if token in added), None
    )
    if end is None or end not in added:
        what = (
            "says no token that ends a document"
            if end is None
            else f"has no added token {end!r}"
        )
        if not added:
            raise UserError(
                f"{path} {what}, and has no added_tokens; give it one with Hugging"
                " Face's "
                f'`Tokenizer.add_special_tokens(["{ENDS[0]}"])`, and save it'
            )
        raise UserError(
            f"{path} {what}; put its {SETTINGS} beside it, with the eos_token that ends"
            " a document, one of its added_tokens"
            f" ({', '.join(sorted(map(repr, added))[:8])})"
        )
    return JSONTokenizer(name, tree, end)


def end_beside(directory: Path) -> str | None:
    """The token that ends a document, as tokenizer_config.json says it; None: there is
    none, or it says nothing.
    """
    if not (directory / SETTINGS).is_file():
        return None
    end = read_json(directory / SETTINGS).get("eos_token")
    found = end.get("content") if isinstance(end, dict) else end
    return found if isinstance(found, str) else None


def ids_of(tree: dict[str, Any]) -> Ids | None:
    """What the ids of a tokenizer.json stand for: bytes for tokens of a text; None: it
    has no vocabulary.

    Bytes may be spelled as GPT-2 spells them, or as SentencePiece does; then a token of
    a single byte, `<0x41>`, stands for itself where another one is that byte.
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
    taken, byte_of = set(added.values()), printable_bytes()
    tokens = {token: i for token, i in vocabulary.items() if i not in taken}
    if has_part(tree, "ByteLevel"):
        spelt = {
            t: (
                bytes(byte_of[c] for c in t)
                if all(c in byte_of for c in t)
                else t.encode()
            )
            for t in tokens
        }
        return {spelt[token]: i for token, i in tokens.items()} | added
    found: Ids = {
        token.replace(SPACE, " ").encode(): i
        for token, i in tokens.items()
        if not BYTE.fullmatch(token)
    }
    for token, i in tokens.items():
        if byte := BYTE.fullmatch(token):
            raw = bytes([int(byte[1], 16)])
            found[token.encode() if raw in found else raw] = i
    return found | added


def has_part(tree: dict[str, Any], kind: str) -> bool:
    """Return whether what cuts a text into words, or makes a text of tokens, has a part
    of this kind.
    """
    parts = [tree.get("pre_tokenizer"), tree.get("decoder")]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if part.get("type") == kind:
                return True
            parts += [*(part.get("pretokenizers") or ()), *(part.get("decoders") or ())]
    return False
