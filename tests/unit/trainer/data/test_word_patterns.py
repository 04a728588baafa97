"""Known word patterns give the words of Hugging Face's library, others are left to it."""

import itertools
import json
import sys
import unicodedata

import pytest
import tiktoken
from library_tokenizers import BYTES, write_tiktoken
from tiktoken_ext import openai_public
from tiktoken_ext.openai_public import r50k_pat_str
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from trainer.data import get_tokenizer
from trainer.data.byte_spelling import spell
from trainer.data.hf_tokenizer import save_hf, to_tokenizer_json
from trainer.data.json_tokenizer import JSONTokenizer
from trainer.data.tokenizer import BPETokenizer
from trainer.data.word_patterns import (
    ENCODINGS,
    KNOWN_PATTERNS,
    QWEN2,
    to_hf_pattern,
)
from trainer.errors import UserError

SHORT_TEXTS = (
    *("Hello, I'M it's don't we'LL '\u017f", "  two   spaces\t\ttabs \n\n\n", "a"),
    *("def f(x):\n    return x\n\n\n  end", "line one\nline two", "x\r\n\r\n y\r", " "),
    *("1234567 3.14 a1b2 1,000,000 _x_", "camelCase XMLFile //... != -5%", "\n\na\n"),
)
# Each with a text that two regex engines split otherwise.
READ_OTHERWISE = {
    "letters of all scripts": (r"[[:alpha:]]+|[^[:alpha:]]+", "caf\u00e9 na\u00efve"),
    "begin of a line": (r"^ +|[^ \n]+\n?|\n| ", "a\n  b"),
    "end of a line": (r"[^\n]+$|\n|[^\n]", "one\ntwo\n"),
    "two letters as one": (r"(?i:strasse)|\s|\S", "a Stra\u00dfe"),
    "word characters": (r"\w+|\W", "m\u00b2"),
    "digits before a word's end": (r"\d{1,3}(?=(?:\d{3})*\b)|\d|\D+", "12\u00b2"),
    "a word's bound": (r"\b\p{L}|\p{L}+|\s|\S", "\u00b2\u03a9a"),
    "repeated repetition": (r"\p{N}{1,3}+|\P{N}+", "1234"),
}


def saved(tmp_path, pattern, text):
    """A byte-level encoding in which every part of a text is a token."""
    ranks = dict(BYTES)
    for start, end in itertools.combinations(range(len(text) + 1), 2):
        ranks.setdefault(text[start:end].encode(), len(ranks))
    path = write_tiktoken(tmp_path / "own.tiktoken", r50k_pat_str, ranks)
    tree = to_tokenizer_json(get_tokenizer(str(path)))
    tree["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    return Tokenizer.from_str(json.dumps(tree))


@pytest.mark.parametrize("kind", READ_OTHERWISE)
def test_an_unknown_pattern_is_left_to_the_library(tmp_path, kind):
    pattern, text = READ_OTHERWISE[kind]
    made = saved(tmp_path, pattern, text)
    tokenizer = get_tokenizer(str(tmp_path))
    assert isinstance(tokenizer, JSONTokenizer)
    assert tokenizer.encode(text) == made.encode(text).ids


def test_a_known_pattern_is_encoded_by_tiktoken(tmp_path):
    made = saved(tmp_path, QWEN2, "don't  12")
    tokenizer = get_tokenizer(str(tmp_path))
    assert isinstance(tokenizer, BPETokenizer)
    text = "I don't\n  12 \u0141\u00f3d\u017a"
    assert tokenizer.encode(text) == made.encode(text).ids


def test_the_table_is_that_of_tiktoken(monkeypatch):
    for download in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(openai_public, download, lambda *_, **__: {})
    for name, (pattern, special_tokens) in ENCODINGS.items():
        settings = openai_public.ENCODING_CONSTRUCTORS[name]()
        assert settings["pat_str"] == pattern
        assert settings["special_tokens"] == special_tokens


@pytest.mark.parametrize("pattern", KNOWN_PATTERNS)
def test_both_engines_split_all_characters_alike_by_a_known_pattern(pattern):
    # Each merge joins two letters or digits, or an ASCII byte and the first or last
    # byte of a character beyond ASCII. In the texts merges do not overlap, so a merge
    # is applied exactly where no word ends inside it.
    merges = [
        *((b"a", b"b"), (b"1", b"2")),
        *itertools.product(map(BYTE, range(0x80)), map(BYTE, range(0xC2, 0xF5))),
        *itertools.product(map(BYTE, range(0x80, 0xC0)), map(BYTE, range(0x80))),
    ]
    ranks = BYTES | {left + right: 256 + i for i, (left, right) in enumerate(merges)}
    theirs = Tokenizer(
        models.BPE(
            {spell(token): i for token, i in ranks.items()},
            [(spell(left), spell(right)) for left, right in merges],
        )
    )
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(to_hf_pattern(pattern)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    ours = tiktoken.Encoding(
        "probe", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
    )
    for text in texts_of_all_characters():
        assert ours.encode_ordinary(text) == theirs.encode(text).ids, text


def BYTE(value):
    return bytes([value])


def texts_of_all_characters():
    """Short texts, as a search may take time quadratic in a text's length."""
    yield from SHORT_TEXTS
    named = [
        char
        for char in map(chr, range(sys.maxunicode + 1))
        if unicodedata.category(char) not in ("Cs", "Co", "Cn")
    ]
    # From U+3400 on most characters are ideographs.
    chosen = [c for i, c in enumerate(named) if c < "\u3400" or i % 64 == 0]
    around = (f" {c}cab. abc{c} 123{c}312.\n" for c in [*chosen, "\u0378", "\ue000"])
    yield from map("".join, itertools.batched(around, 16))


def test_an_unknown_pattern_is_not_exported(tmp_path):
    path, out = tmp_path / "mine.tiktoken", tmp_path / "out"
    out.mkdir()
    refused = get_tokenizer(str(write_tiktoken(path, r"\p{L}+|\P{L}+")))
    with pytest.raises(UserError, match=r"may read its word pattern .*P\{L\}"):
        save_hf(out, refused, None)
    assert not list(out.iterdir())
    exported = get_tokenizer(str(write_tiktoken(path, QWEN2)))
    save_hf(out, exported, None)
    theirs = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert theirs.encode("\u0141 1").ids == exported.encode("\u0141 1")
