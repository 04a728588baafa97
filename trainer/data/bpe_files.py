"""Readers of byte-pair encodings in local files, as tiktoken.Encoding.

tiktoken's own readers cache local files under a hash of their path. So they would
return the old content of a file that was replaced; these readers read the file.
"""

import base64
import binascii
import json
import re
import types
from pathlib import Path
from typing import Any

import tiktoken
from tiktoken_ext.openai_public import ENDOFTEXT, r50k_pat_str

from trainer.errors import UserError

# Merges in order of priority, and ids: in OpenAI's naming and in Hugging Face's.
PAIRS = (("vocab.bpe", "encoder.json"), ("merges.txt", "vocab.json"))

Ranks = dict[bytes, int]


def read_tiktoken(path: Path) -> tiktoken.Encoding:
    """Return the encoding of a .tiktoken file."""
    ranks: Ranks = {}
    for number, line in enumerate(read(path).splitlines(), 1):
        fields = line.split()
        try:
            token, rank = fields
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(
                f"{path}, line {number}: expected a token in base64 and its rank, found"
                f" {line[:40]!r}"
            ) from None
    return encoding(path, ranks, settings(path, ranks))


def settings(path: Path, ranks: Ranks) -> dict[str, Any]:
    """Return pattern and special tokens of a .tiktoken file, which holds only ranks."""
    beside = path.with_suffix(".json")
    if beside.is_file():
        tree = read_json(beside)
        if not isinstance(tree.get("pat_str"), str) or not isinstance(
            tree.get("special_tokens"), dict
        ):
            raise UserError(
                f"{beside}: expected the keys pat_str (text) and special_tokens (text"
                " to id)"
            )
        return {"pat_str": tree["pat_str"], "special_tokens": tree["special_tokens"]}
    return known_settings(path.stem, ranks) or {
        "pat_str": r50k_pat_str,
        "special_tokens": {},
    }


def known_settings(name: str, ranks: Ranks) -> dict[str, Any]:
    """Return tiktoken's own settings of encoding `name`; empty for an unknown one."""
    tiktoken.list_encoding_names()  # fills the registry
    constructor = (tiktoken.registry.ENCODING_CONSTRUCTORS or {}).get(name)
    if constructor is None or "load_tiktoken_bpe" not in constructor.__code__.co_names:
        return {}
    # The same function, with these ranks in place of a download.
    names = constructor.__globals__ | {"load_tiktoken_bpe": lambda *_, **__: ranks}
    return types.FunctionType(constructor.__code__, names)()


def read_merges(path: Path, ids_path: Path) -> tiktoken.Encoding:
    """Return the encoding of a merges file, with the ids of `ids_path` if it exists."""
    byte_of = printable_bytes()

    def to_bytes(token: str) -> bytes:
        return bytes(byte_of[char] for char in token)

    ranks: Ranks = {bytes([byte]): rank for rank, byte in enumerate(byte_of.values())}
    lines = read(path).decode(errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        if line.startswith("#version") or not line:
            continue
        pair = line.split()
        if len(pair) != 2 or any(char not in byte_of for char in "".join(pair)):
            raise UserError(
                f"{path}, line {number}: expected two tokens to merge, found"
                f" {line[:40]!r}"
            )
        ranks[to_bytes("".join(pair))] = len(ranks)
    if not ids_path.is_file():
        return encoding(path, ranks, {"pat_str": r50k_pat_str, "special_tokens": {}})
    ids = read_json(ids_path)
    special = {
        token: i
        for token, i in ids.items()
        if any(c not in byte_of for c in token) or to_bytes(token) not in ranks
    }
    given = {to_bytes(token): i for token, i in ids.items() if token not in special}
    merged = [given.get(token, -1) for token in ranks][256:]
    if len(given) != len(ranks) or merged != sorted(merged):
        raise UserError(
            f"{ids_path} does not belong to {path}: its ids are not those of the"
            " merges, in their order"
        )
    return encoding(path, given, {"pat_str": r50k_pat_str, "special_tokens": special})


def is_byte_level(tree: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json is a byte-level encoding like GPT-2's.

    It is byte-pair encoding without normalizer, with ids in the order of its merges,
    one pattern for words, and documents that end with GPT-2's end-of-text token. It has
    no added words, because those are matched before all others.
    """
    byte_of, ids = printable_bytes(), ids_in(tree)
    if ids is None:
        return False
    model: Any = tree["model"]
    special = special_in(tree)
    if is_of_bytes(ids, special):
        return True
    for token in tree.get("added_tokens") or ():
        if token["content"] != ENDOFTEXT and not token.get("special"):
            return False
    merged = [
        ids.get(merged_token(merge, byte_of), -1) for merge in model.get("merges") or ()
    ]
    unmerged = sum(len(token) > 1 for token in ids) - len(merged)
    if any(bytes([byte]) not in ids for byte in range(256)):
        return False
    is_ordered = merged == sorted(merged)
    ignores_merges = bool(not unmerged or model.get("ignore_merges"))
    return ENDOFTEXT in special and is_ordered and ignores_merges


def ids_in(tree: dict[str, Any]) -> Ranks | None:
    """Return the ids of the ordinary tokens of a tokenizer.json.

    None: it is not a byte-pair encoding of printable bytes.
    """
    model, byte_of = tree.get("model"), printable_bytes()
    if not isinstance(model, dict) or model.get("type") != "BPE":
        return None
    if tree.get("normalizer") is not None or pattern_of(tree) is None:
        return None
    special = special_in(tree)
    ids: Ranks = {}
    for token, i in (model.get("vocab") or {}).items():
        if token in special:
            continue
        if any(char not in byte_of for char in token):
            return None
        ids[bytes(byte_of[char] for char in token)] = i
    return ids


def special_in(tree: dict[str, Any]) -> dict[str, int]:
    """Return the ids of the added tokens of a tokenizer.json."""
    return {
        token["content"]: int(token["id"]) for token in tree.get("added_tokens") or ()
    }


def check_added(path: Path, tree: dict[str, Any]) -> None:
    """Refuse added tokens of a tokenizer.json that collide.

    Readers of the file would disagree on their ids.

    Raises:
      UserError: two tokens with one id, or one token with two ids.
    """
    model = tree.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # of Unigram, with a probability each
        vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
    ids: dict[str, int] = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    tokens = {i: token for token, i in ids.items()}
    for entry in tree.get("added_tokens") or ():
        token, i = entry["content"], int(entry["id"])
        if tokens.setdefault(i, token) != token:
            raise UserError(
                f"{path}: {token!r} of added_tokens has the id {i} of {tokens[i]!r};"
                " give it one of its own"
            )
        if ids.setdefault(token, i) != i:
            raise UserError(
                f"{path}: {token!r} has two ids, {ids[token]} and in added_tokens {i};"
                " give it one"
            )


def is_of_bytes(ids: Ranks, special: dict[str, int]) -> bool:
    """Return whether ids are the bytes themselves."""
    return ids == {bytes([i]): i for i in range(1, 256)} and special == {"\0": 0}


def read_tokenizer_json(path: Path) -> tiktoken.Encoding | None:
    """Return the encoding of a tokenizer.json that `is_byte_level`.

    None: its ids are the bytes themselves.
    """
    tree = read_json(path)
    ids, special = ids_in(tree), special_in(tree)
    assert ids is not None
    if is_of_bytes(ids, special):
        return None
    return encoding(path, ids, {"pat_str": pattern_of(tree), "special_tokens": special})


def pattern_of(tree: dict[str, Any]) -> str | None:
    """Return the word pattern of a tokenizer.json; empty where it has none.

    None: its pre-tokenizer is more than a pattern.
    """
    outer: Any = tree.get("pre_tokenizer") or {}
    *words, last = outer.get("pretokenizers") or [outer]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if not words:
        return r50k_pat_str if last.get("use_regex", True) else ""
    regex = words[0].get("pattern", {}).get("Regex")
    is_split = len(words) == 1 and words[0].get("type") == "Split"
    if not is_split or last.get("use_regex", True) or not isinstance(regex, str):
        return None
    # tiktoken's spelling of the same pattern, for an equal fingerprint
    for name in tiktoken.list_encoding_names():
        pattern = known_settings(name, {}).get("pat_str", "")
        if pattern and for_hugging_face(pattern) == regex:
            return pattern
    return regex


def for_hugging_face(pattern: str) -> str:
    """Return a pattern in the spelling of tokenizer.json.

    Its regex engine reads `{1,3}+` as a repetition of the repetition. Where tiktoken
    writes it, at the end of an alternative, the plus can be left out.
    """
    return re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", pattern)


def merged_token(merge: Any, byte_of: dict[str, int]) -> bytes:
    """Return the token that a merge makes: a pair, or a text with a space between."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    return bytes(byte_of.get(char, 0) for char in "".join(parts))


def printable_bytes() -> dict[str, int]:
    """Return GPT-2's characters for bytes, in the order of its ids.

    Printable bytes are themselves, the others are characters from U+0100 on.
    """
    printable = [
        byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def encoding(path: Path, ranks: Ranks, settings: dict[str, Any]) -> tiktoken.Encoding:
    """Return an encoding, with an end-of-text token added where it lacks one."""
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing:
        raise UserError(
            f"{path} is not a byte-level encoding: {missing} of the 256 bytes have"
            " no id"
        )
    special = dict(settings["special_tokens"])
    special.setdefault(ENDOFTEXT, max([*ranks.values(), *special.values()]) + 1)
    try:
        return tiktoken.Encoding(
            str(path),
            pat_str=settings["pat_str"],
            mergeable_ranks=ranks,
            special_tokens=special,
        )
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def read(path: Path) -> bytes:
    """Return the bytes of a file, or raise UserError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"tokenizer file {path}: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or raise UserError."""
    try:
        tree = json.loads(read(path))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(tree).__name__}")
    return tree
