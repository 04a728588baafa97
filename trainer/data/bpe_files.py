"""Readers of byte-pair encodings in local files, as tiktoken.Encoding.

tiktoken encodes several times as fast as Hugging Face's `tokenizers`, with the same
ids. Its own readers cache local files under a hash of their path. So they would return
the old content of a file that was replaced; these readers read the file.
"""

import base64
import binascii
import functools
import itertools
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiktoken
from tiktoken_ext.openai_public import ENDOFTEXT, r50k_pat_str

from trainer.data.byte_spelling import BYTE_LEVEL, SPELLING, unspell
from trainer.data.settings_beside import (
    NUL,
    SAVE_AGAIN,
    SETTINGS,
    check_added_later,
    read,
    read_beside,
    read_json,
)
from trainer.data.tokenizer_bounds import check_pattern
from trainer.data.word_patterns import for_hugging_face, splitting_difference
from trainer.errors import UserError

# Merges in order of priority, and ids: in OpenAI's naming and in Hugging Face's.
PAIRS = (("vocab.bpe", "encoder.json"), ("merges.txt", "vocab.json"))

# transformers' tokenizer class by model type, where words are not split as GPT-2's
CLASS_OF_MODEL_TYPE = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
# Classes of transformers, by their beginnings, that split words by GPT-2's pattern.
WITH_GPT2_PATTERN = ("GPT2", "Roberta", "Bart", "PreTrained")
# tiktoken's functions that download the ranks of an encoding
LOADERS = {"load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"}

# With these keys a character has another token inside a word than at its end.
AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")

TokenIds = dict[bytes, int]
Pair = tuple[bytes, bytes]


def read_tiktoken(path: Path) -> tiktoken.Encoding:
    """Return the encoding of a .tiktoken file."""
    ranks: TokenIds = {}
    for number, line in enumerate(read(path).splitlines(), 1):
        if not line:  # tiktoken skips empty lines, too.
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(
                f"{path}, line {number}: expected a token in base64 and its rank"
            ) from None
    return encoding(path, ranks, **settings(path, ranks))


def settings(path: Path, ranks: TokenIds) -> dict[str, Any]:
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
    else:
        tree = known_settings(path.stem, ranks)
        if not tree:
            names = tiktoken.list_encoding_names()
            valid = sorted(name for name in names if known_settings(name, {}))
            raise UserError(
                f"{path} does not say how a text is split into words; put"
                f" {beside.name} beside it, with the keys pat_str (a pattern) and"
                " special_tokens (text to id), or rename it after its encoding:"
                f" {', '.join(valid)}"
            )
    return {key: tree[key] for key in ("pat_str", "special_tokens")}


def known_settings(name: str, ranks: TokenIds) -> dict[str, Any]:
    """Return pattern and special tokens of tiktoken's encoding `name`, without a
    download; {} for an unknown one.
    """
    tiktoken.list_encoding_names()  # fills the registry
    constructor = (tiktoken.registry.ENCODING_CONSTRUCTORS or {}).get(name)
    if constructor is None or not LOADERS & set(constructor.__code__.co_names):
        return {}
    # tiktoken writes them only inside functions that download the ranks, too. Call a
    # copy of the function, whose globals replace the download by `ranks`.
    names = constructor.__globals__ | {
        loader: lambda *_, **__: ranks for loader in LOADERS
    }
    return types.FunctionType(constructor.__code__, names)()


def tree_of_merges(path: Path, ids_path: Path) -> dict[str, Any]:
    """Return the tokenizer.json of a merges file and the ids of `ids_path`, if it
    exists.

    Its pattern of words is GPT-2's. Tokens that no merge makes are special. Raises
    UserError for a tokenizer that has another pattern, or words that were added.
    """
    directory = path.parent
    kind = read_beside(directory, SETTINGS).get("tokenizer_class")
    if kind is None:  # Like transformers, infer the class from the model type.
        model_type = read_beside(directory, "config.json").get("model_type")
        kind = CLASS_OF_MODEL_TYPE.get(str(model_type))
    if isinstance(kind, str) and not kind.startswith(WITH_GPT2_PATTERN):
        raise UserError(
            f"{directory} has no tokenizer.json, and a {kind[:100]} may split words"
            f" otherwise than GPT-2; {SAVE_AGAIN}"
        )
    merges: list[list[str]] = []
    lines = read(path).decode(errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        if line.startswith("#version") or not line:
            continue
        if pair_of(line) is None:
            raise UserError(f"{path}, line {number}: expected two tokens to merge")
        merges.append(line.split())
    ordinary = [*SPELLING.values(), *map("".join, merges)]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(ordinary))}
    if ids_path.is_file():
        vocabulary = read_json(ids_path)
    if vocabulary.keys() <= set(ordinary):
        vocabulary[ENDOFTEXT] = max(vocabulary.values()) + 1
    special = {token: vocabulary[token] for token in vocabulary.keys() - set(ordinary)}
    # A pair does not say where in a text transformers finds an added word.
    check_added_later(directory, ids_path.name, {ENDOFTEXT: vocabulary.get(ENDOFTEXT)})
    words = BYTE_LEVEL | {"use_regex": True}
    return bpe_tree(vocabulary, merges, special, words, ignore_merges=False)


def bpe_tree(
    vocabulary: dict[str, int],
    merges: list[list[str]],
    special: dict[str, int],
    words: dict[str, Any],
    *,
    ignore_merges: bool,
) -> dict[str, Any]:
    """Return the tokenizer.json of a byte-level encoding, whose pre-tokenizer is
    `words`.
    """
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token, i in sorted(special.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": words,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": dict(sorted(vocabulary.items(), key=lambda item: item[1])),
            "merges": merges,
        },
    }


def pair_of(merge: Any) -> Pair | None:
    """Return the tokens of a merge, a pair of spellings or a text with a space between;
    None: it is something else.
    """
    spellings = merge.split() if isinstance(merge, str) else merge
    tokens = [token for token in map(unspell, spellings) if token is not None]
    return (tokens[0], tokens[1]) if len(tokens) == len(spellings) == 2 else None


def tiktoken_merges_alike(
    ids: TokenIds, merges: Sequence[Pair], *, ignore_merges: bool = False
) -> bool:
    """Return whether tiktoken, which gets no merges, encodes as these merges do.

    It merges the adjacent pair whose joint token has the lowest id.

    Args:
      ids: of bytes and tokens.
      merges: in the order of their priorities.
      ignore_merges: whether a word that is a token gets its id without merges. Then a
          token may have no merge.
    """
    merged_ids = [ids.get(left + right, -1) for left, right in merges]
    if not all(bytes([byte]) in ids for byte in range(256)):
        return False
    if ignore_merges:
        # The list may have several merges for a token. Only the one in `merges_of` is
        # ever applied.
        return merged_ids == sorted(merged_ids) and set(merges_of(ids)) <= set(merges)
    return len(ids) == 256 + len(merges) and merges_of(ids) == list(merges)


def merges_of(ranks: TokenIds) -> list[tuple[bytes, bytes]]:
    """Return the merges of a byte-pair encoding, in order.

    The merge of a token joins the two parts that merges of lower ranks make of its
    bytes. A token of which they make more parts is only matched as a whole word, which
    needs no merge.
    """
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pair_ranks = [
                ranks.get(left + right, rank)
                for left, right in itertools.pairwise(parts)
            ]
            lowest = min(pair_ranks)
            if lowest >= rank:
                break
            i = pair_ranks.index(lowest)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def byte_level(
    tree: dict[str, Any], end: str
) -> tuple[TokenIds, dict[str, Any]] | None:
    """Return ids and settings for tiktoken; None: it would encode differently.

    tiktoken reads byte-pair encodings like GPT-2's: without normalizer, with ids in the
    order of the merges, one pattern for words, and documents that end with GPT-2's
    end-of-text token. It finds no added words, which are matched before all others. It
    also reads ids that are the bytes themselves, where NUL ends a document.

    Args:
      tree: the content of a tokenizer.json.
      end: the token that ends a document.
    """
    model, special = tree["model"], special_in(tree)
    if not is_bpe(model) or any(map(model.get, AFFIXES)) or tree.get("normalizer"):
        return None
    ids: TokenIds = {}
    for spelling, i in model["vocab"].items():
        if spelling in special:
            continue
        token = unspell(spelling)
        if token is None:
            return None
        ids[token] = i
    is_bytes = special == {NUL: 0} and ids == {bytes([i]): i for i in range(1, 256)}
    has_added_words = any(
        not token.get("special") and token["content"] != ENDOFTEXT
        for token in tree["added_tokens"]
    )
    pairs = [pair_of(merge) for merge in model["merges"]]
    merges = [pair for pair in pairs if pair is not None]
    ignore_merges = bool(model.get("ignore_merges"))
    is_like_gpt2 = (
        not has_added_words
        and end == ENDOFTEXT
        and len(merges) == len(pairs)
        and tiktoken_merges_alike(ids, merges, ignore_merges=ignore_merges)
    )
    if not is_bytes and not is_like_gpt2:
        return None
    pattern = pattern_of(tree)  # last, because it may take a second
    if pattern is None or (pattern == "" and not is_bytes):
        return None
    return ids, {"pat_str": pattern, "special_tokens": special}


def is_bpe(model: dict[str, Any]) -> bool:
    """Return whether the model of a tokenizer.json is byte-pair encoding.

    Before version 0.9 the library wrote no type of a model, as in GPT-2's own file.
    """
    return "merges" in model and model.get("type", "BPE") == "BPE"


def special_in(tree: dict[str, Any]) -> dict[str, int]:
    """Return the ids of the added tokens of a tokenizer.json."""
    return {
        token["content"]: int(token["id"]) for token in tree.get("added_tokens") or ()
    }


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
    split = words[0]
    regex = split.get("pattern", {}).get("Regex")
    is_split = len(words) == 1 and split.get("type") == "Split"
    if not is_split or last.get("use_regex", True) or not isinstance(regex, str):
        return None
    matches = split.get("behavior") == "Removed" and split.get("invert")
    if not matches:
        if split.get("behavior") != "Isolated" or split.get("invert"):
            return None
        # tiktoken's spelling of the same pattern, for an equal fingerprint
        if known := known_patterns().get(regex):
            return known
    difference = splitting_difference(regex, regex, matches=bool(matches))
    return regex if difference is None else None


@functools.cache
def known_patterns() -> dict[str, str]:
    """Return the patterns of tiktoken's encodings by their spelling in tokenizer.json.

    Both libraries split alike by them.
    """
    settings = (known_settings(name, {}) for name in tiktoken.list_encoding_names())
    patterns = (tree["pat_str"] for tree in settings if tree)
    return {for_hugging_face(pattern): pattern for pattern in patterns}


def encoding(
    path: Path,
    ranks: TokenIds,
    pat_str: str = r50k_pat_str,
    special_tokens: dict[str, int] | None = None,
) -> tiktoken.Encoding:
    """Return an encoding, with an end-of-text token added where it lacks one."""
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing:
        raise UserError(
            f"{path} is not a byte-level encoding: {missing} of the 256 bytes have"
            " no id"
        )
    special, ordinary = dict(special_tokens or {}), set(ranks.values())
    for token, i in special.items():
        if i in ordinary:
            raise UserError(
                f"{path}: the special token {token!r} has the id {i} of an ordinary"
                " token; give it another"
            )
    special.setdefault(ENDOFTEXT, max([*ranks.values(), *special.values()]) + 1)
    check_pattern(path, pat_str)
    try:
        return tiktoken.Encoding(
            str(path), pat_str=pat_str, mergeable_ranks=ranks, special_tokens=special
        )
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
