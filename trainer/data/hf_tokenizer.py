"""Tokenizers as Hugging Face keeps them: written beside an export, and compared with
those beside weights.

A tokenizer.json says everything in one file: the vocabulary with bytes in GPT-2's
printable spelling, the merges, the pattern that cuts a text into words, special tokens,
and how ids become text again.
"""

import itertools
import json
from pathlib import Path
from typing import Any

from trainer.data.bpe_files import PAIRS, for_hugging_face, printable_bytes, read_json
from trainer.data.json_tokenizer import FILE, SETTINGS, Ids, JSONTokenizer, ids_of
from trainer.data.tokenizer import Tokenizer
from trainer.files import well_formed, write_atomically


def save_hf(directory: Path, tokenizer: Tokenizer, context: int | None) -> list[Path]:
    """Write what `transformers.AutoTokenizer` reads the same tokenizer from; the paths
    of the files.

    In two things they differ: what spells the end-of-text token in a text, Hugging
    Face's reads as that token; and one that puts a token before each text, as Llama's
    do, does so there.

    Args:
      directory: exists.
      tokenizer: a run's.
      context: tokens that the model takes; None: there is no model yet.
    """
    end = next(
        token for token, i in tokenizer.special_tokens.items() if i == tokenizer.eot
    )
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
    }
    if context is not None:
        settings["model_max_length"] = context
    if isinstance(tokenizer, JSONTokenizer):
        trees = {FILE: tokenizer.tree, SETTINGS: settings}
    else:
        trees = {
            FILE: tokenizer_tree(tokenizer),
            SETTINGS: settings | {"bos_token": end},
        }
    for name, tree in trees.items():
        write_atomically(
            directory / name, json.dumps(tree, indent=1, ensure_ascii=False) + "\n"
        )
    return [directory / name for name in trees]


def tokenizer_tree(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of a tokenizer.json."""
    spell = {byte: char for char, byte in printable_bytes().items()}

    def spelt(token: bytes) -> str:
        return "".join(spell[byte] for byte in token)

    special = set(tokenizer.special_tokens.values())
    tokens = {token: i for token, i in tokenizer.tokens.items() if i not in special}
    # Hugging Face's gives a special token that is not in the vocabulary the next id
    # behind it, whatever is said here.
    vocabulary = {
        spelt(token): i for token, i in tokens.items()
    } | tokenizer.special_tokens
    words = [] if tokenizer.pattern is None else [split_by(tokenizer.pattern)]
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
            for token, i in sorted(
                tokenizer.special_tokens.items(), key=lambda item: item[1]
            )
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*words, byte_level()]},
        "post_processor": None,
        "decoder": byte_level(),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # as tiktoken: a word that is a token is not merged up
            "ignore_merges": True,
            "vocab": dict(sorted(vocabulary.items(), key=lambda item: item[1])),
            "merges": [
                [spelt(left), spelt(right)] for left, right in merges_of(tokens)
            ],
        },
    }


def byte_level() -> dict[str, Any]:
    """Bytes to their printable spelling and back, and nothing else."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }


def split_by(pattern: str) -> dict[str, Any]:
    """The words that a pattern finds."""
    regex = {"Regex": for_hugging_face(pattern)}
    return {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}


def merges_of(ranks: Ids) -> list[tuple[bytes, bytes]]:
    """The pairs that byte-pair encoding joins, in order: of each token, the two parts
    that lower ranks make of it.

    A token that they do not leave as two is only found as a whole word, for which it
    needs no merge.
    """
    found = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            of_pair = [
                ranks.get(left + right, rank)
                for left, right in itertools.pairwise(parts)
            ]
            lowest = min(of_pair)
            if lowest >= rank:
                break
            at = of_pair.index(lowest)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            found.append((parts[0], parts[1]))
    return found


def ids_beside(directory: Path) -> Ids | None:
    """What the ids of the tokenizer in a Hugging Face directory stand for; None: there
    is no tokenizer in it.

    Raises:
      UserError: a file that is not JSON.
    """
    byte_of = printable_bytes()

    def raw(token: str) -> bytes:
        known = all(char in byte_of for char in token)
        return bytes(byte_of[char] for char in token) if known else token.encode()

    with well_formed(f"the tokenizer in {directory}", "download or copy it again"):
        if (directory / FILE).is_file() and (
            found := ids_of(read_json(directory / FILE))
        ) is not None:
            return found
        for _, ids in PAIRS:
            if (directory / ids).is_file():
                return {
                    raw(token): i for token, i in read_json(directory / ids).items()
                }
    return None


def first_difference(theirs: Ids, ours: Tokenizer) -> str | None:
    """The lowest id of a prepared text that stands for something else in `theirs`, in
    words; None: there is none.
    """
    end = next(
        token.encode() for token, i in ours.special_tokens.items() if i == ours.eot
    )
    here = {i: token for token, i in ours.tokens.items()} | {ours.eot: end}
    there = {i: token for token, i in theirs.items()}
    for i in sorted(here):
        if here[i] != there.get(i):
            found = repr(there[i].decode(errors="replace")) if i in there else "nothing"
            return f"id {i} is {found} there, {here[i].decode(errors='replace')!r} here"
    return None
