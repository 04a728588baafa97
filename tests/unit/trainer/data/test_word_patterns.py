"""Word patterns give the words of Hugging Face's library, or are left to it."""

import itertools
import json

import pytest
from library_tokenizers import BYTES, write_tiktoken
from tiktoken_ext.openai_public import r50k_pat_str
from tokenizers import Tokenizer

from trainer.data import get_tokenizer
from trainer.data.bpe_files import known_patterns
from trainer.data.hf_tokenizer import save_hf, to_tokenizer_json
from trainer.data.json_tokenizer import JSONTokenizer
from trainer.data.tokenizer import BPETokenizer
from trainer.data.word_patterns import splitting_difference
from trainer.errors import UserError

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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
def test_a_pattern_that_tiktoken_reads_otherwise_is_left_to_the_library(tmp_path, kind):
    pattern, text = READ_OTHERWISE[kind]
    made = saved(tmp_path, pattern, text)
    tokenizer = get_tokenizer(str(tmp_path))
    assert isinstance(tokenizer, JSONTokenizer)
    assert tokenizer.encode(text) == made.encode(text).ids


def test_a_pattern_that_both_read_alike_is_encoded_by_tiktoken(tmp_path):
    made = saved(tmp_path, QWEN, "don't  12")
    tokenizer = get_tokenizer(str(tmp_path))
    assert isinstance(tokenizer, BPETokenizer)
    text = "I don't\n  12 \u0141\u00f3d\u017a"
    assert tokenizer.encode(text) == made.encode(text).ids


def test_the_patterns_of_tiktoken_s_encodings_are_read_alike():
    for theirs, ours in known_patterns().items():
        assert splitting_difference(ours, theirs) is None


def test_characters_between_matches_are_left_out_by_both_or_by_none():
    assert splitting_difference(r"\S+", r"\S+") == "Hello, I'M it's don't we'LL '\u017f"
    assert splitting_difference(r"[^\u0378]+", r"[^\u0378]+") is not None


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"[[:alpha:]]+|[^[:alpha:]]+", "Hello, I'M"),
        (r"\s+$|[^\s]+|\s", "def f"),
        (r"(?s).\n|.|\n", "undefined group option"),
    ],
)
def test_a_pattern_that_the_library_reads_otherwise_is_not_exported(
    tmp_path, pattern, reason
):
    path, out = tmp_path / "mine.tiktoken", tmp_path / "out"
    out.mkdir()
    refused = get_tokenizer(str(write_tiktoken(path, pattern)))
    with pytest.raises(UserError, match=rf"reads its word pattern .*{reason}"):
        save_hf(out, refused, None)
    assert not list(out.iterdir())
    exported = get_tokenizer(str(write_tiktoken(path, QWEN)))
    save_hf(out, exported, None)
    theirs = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert theirs.encode("\u0141 1").ids == exported.encode("\u0141 1")
