"""A single text that is read in pieces has the ids of the whole text."""

import itertools
import json

import numpy as np
import pytest
from library_tokenizers import llama2, write_tiktoken
from tokenizers import (
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from trainer.data import TextSource, corpus, encode, get_tokenizer, preparation, prepare
from trainer.data.json_tokenizer import JSONTokenizer
from trainer.data.shards import Manifest
from trainer.data.word_patterns import LLAMA3

LINES = (
    "In the beginning God created the heaven and the earth.",
    "  And  the earth was without form, and void;  ",
    "naïve 漢字 🙂,",
    "",
    "x",
    "the earth;",
    "\tthe  heaven and,",
    "a.",
)
TEXT = "".join(
    LINES[i] + "\n" for i in np.random.default_rng(0).integers(0, len(LINES), 200)
)


@pytest.fixture(params=["byte", "small", "k-mers", "llama2"])
def tokenizer(request, small, tmp_path):
    name = request.param
    if name == "small":
        return small
    if name == "k-mers":
        name = write_tiktoken(tmp_path / "a.tiktoken", r"[\s\S]{1,6}")
    if name == "llama2":
        llama2().save(str(tmp_path / "tokenizer.json"))
        name = tmp_path
    return get_tokenizer(str(name))


def test_pieces_have_the_ids_of_the_whole_text(
    tokenizer, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(corpus, "PRECEDING_CHARS", 80)
    monkeypatch.setattr(encode, "UNIT_CHARS", 50)
    monkeypatch.setattr(preparation, "get_tokenizer", lambda _: tokenizer)
    (tmp_path / "text.txt").write_text(TEXT)
    source = TextSource((str(tmp_path / "text.txt"),))
    cut = int(len(TEXT) * (1 - 0.3))
    for piece in (1, 60, 700):
        monkeypatch.setattr(corpus, "PIECE_CHARS", piece)
        cache = tmp_path / str(piece)
        manifest = Manifest.load(prepare(source, "tokenizer", cache, val_fraction=0.3))
        for split, text in (("train", TEXT[:cut]), ("val", TEXT[cut:])):
            ids = np.concatenate(manifest.open(split)).tolist()
            assert ids == tokenizer.encode(text), (split, piece)
        is_noted = "encoded at once" in capsys.readouterr().err
        assert is_noted != tokenizer.line_safe


UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
MISTRAL = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NORMALIZERS = {
    "none": None,
    "spaces": normalizers.Replace(" ", "▁"),
    "lines": normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()]),
    "joined": normalizers.Replace("\n", ""),
    "runs": normalizers.Replace(Regex(" {2,}"), "▁"),
    "bert": normalizers.BertNormalizer(),
    "letters": normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()]),
    "far": normalizers.Replace(Regex(r"(?m)heaven\n.*"), "x"),
}


def split_by(pattern):
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([words, bytes_])


WORDS = {
    "none": None,
    "spaces": pre_tokenizers.Metaspace(),
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    "gpt2": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    ),
    "lines": pre_tokenizers.BertPreTokenizer(),
    "llama3": split_by(LLAMA3),
    "mistral": split_by(MISTRAL),
    "punctuation": pre_tokenizers.Punctuation(),
    "merged": pre_tokenizers.Split("▁", "merged_with_next"),
    "fixed": pre_tokenizers.FixedLength(5),
    "k-mers": pre_tokenizers.Split(Regex(r"[\s\S]{1,6}"), "isolated"),
    "scripts": pre_tokenizers.UnicodeScripts(),
}
MODELS = {
    "bpe": (models.BPE(unk_token="<unk>", fuse_unk=True), trainers.BpeTrainer),
    "unigram": (models.Unigram(), trainers.UnigramTrainer),
}


@pytest.mark.parametrize("kind", MODELS)
def test_every_combination_of_parts_that_is_line_safe_is_so(
    tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(corpus, "PIECE_CHARS", 1)
    monkeypatch.setattr(corpus, "PRECEDING_CHARS", 80)
    (tmp_path / "text.txt").write_text(TEXT)
    opened = corpus.open_corpus(TextSource((str(tmp_path / "text.txt"),)), tmp_path)
    pieces, safe = list(opened.read(None)), []
    model, trainer = MODELS[kind]
    special = {"special_tokens": ["<unk>", "</s>"], "show_progress": False}
    if kind == "unigram":
        special["unk_token"] = "<unk>"
    for names in itertools.product(NORMALIZERS, WORDS):
        made = Tokenizer(model)
        made.normalizer, made.pre_tokenizer = NORMALIZERS[names[0]], WORDS[names[1]]
        made.train_from_iterator([TEXT[:2000]], trainer(vocab_size=150, **special))
        ours = JSONTokenizer("x", json.loads(made.to_str()), made, "</s>")
        if not ours.line_safe:
            continue
        safe.append(names)
        ids = [ours.encode_array(rows.texts[0], *rows[2:]) for rows in pieces]
        assert np.concatenate(ids).tolist() == ours.encode(TEXT), names
    assert len(safe) > 16
    assert ("none", "mistral") in safe
