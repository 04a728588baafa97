"""A single text that is read in pieces has the ids of the whole text."""

import json

import numpy as np
import pytest
from test_json_tokenizer import KINDS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.data import TextSource, corpus, encode, get_tokenizer, preparation, prepare
from trainer.data.shards import Manifest
from trainer.data.tokenizer import tiktoken_file

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
    LINES[i] + "\n" for i in np.random.default_rng(0).integers(0, len(LINES), 400)
)


def words(alphabet=None):
    """Words in WordPiece, between which white space is dropped."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    special = ["[UNK]", "[EOS]"]
    made.train_from_iterator(
        [TEXT],
        trainers.WordPieceTrainer(
            vocab_size=200, special_tokens=special, show_progress=False
        ),
    )
    return made


@pytest.fixture(
    params=["byte", "gpt2", "cl100k_base", "o200k_base", "own", "words", *KINDS]
)
def tokenizer(request, gpt2_dir, tmp_path):
    name = request.param
    if name == "byte":
        return get_tokenizer(name)
    if name in ("gpt2", "cl100k_base", "o200k_base", "own"):
        gpt2 = get_tokenizer(str(gpt2_dir))
        file = tmp_path / f"{name}.tiktoken"
        file.write_bytes(tiktoken_file(gpt2.tokens))
        if name == "own":  # two lines in a word
            settings = {"pat_str": r"[a-z.,;\n]+|[\s\S]", "special_tokens": {}}
            file.with_suffix(".json").write_text(json.dumps(settings))
        return get_tokenizer(str(file))
    make = words if name == "words" else KINDS[name][0]
    (tmp_path / name).mkdir()
    make().save(str(tmp_path / name / "tokenizer.json"))
    return get_tokenizer(str(tmp_path / name))


@pytest.mark.parametrize("piece", [1, 60, 700])
def test_pieces_have_the_ids_of_the_whole_text(tokenizer, piece, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE", piece)
    monkeypatch.setattr(encode, "UNIT_CHARS", 50)
    monkeypatch.setattr(preparation, "get_tokenizer", lambda _: tokenizer)
    (tmp_path / "text.txt").write_text(TEXT)
    source = TextSource((str(tmp_path / "text.txt"),))
    folder = prepare(source, "tokenizer", tmp_path / "cache", val_fraction=0.3)
    cut = int(len(TEXT) * (1 - 0.3))
    manifest = Manifest.load(folder)
    for split, text in (("train", TEXT[:cut]), ("val", TEXT[cut:])):
        ids = np.concatenate(manifest.open(split)).tolist()
        assert ids == tokenizer.encode(text), split
