"""Tokenizers that Hugging Face's library reads: of Llama's and SentencePiece's kinds,
made here by that library."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from corpora import rows, write
from library_tokenizers import KINDS, WORDS, byte_level, llama2, saved, unigram
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from trainer.assembly.evaluation import source_text, validation_text
from trainer.cli.train_tokenizer import train_bpe
from trainer.data import TextSource, prepare
from trainer.data.dataset import Dataset
from trainer.data.hf_tokenizer import save_hf, token_difference, token_ids_in
from trainer.data.json_tokenizer import JSONTokenizer, ids_of
from trainer.data.loader import Batch
from trainer.data.target_bytes import bytes_per_target
from trainer.data.tokenizer import (
    continuation,
    get_tokenizer,
    vocabulary_file,
)
from trainer.errors import UserError

TEXTS = [
    "the earth",
    " the  void\n\nand\tthe light ",
    "",
    "naïve 漢字 🙂 \x00",
    "a </s> b <s> <|end_of_text|>",
]


@pytest.fixture(params=KINDS)
def made(request, tmp_path):
    make, end = KINDS[request.param]
    theirs = make()
    directory = tmp_path / "hub"
    directory.mkdir()
    theirs.save(str(directory / "tokenizer.json"))
    return theirs, get_tokenizer(str(directory)), directory, end


def test_marks_of_a_tokenizer_are_no_bytes_of_text(tmp_path):
    llama2().save(str(tmp_path / "tokenizer.json"))
    ours = get_tokenizer(str(tmp_path))
    parts = [ours.encode(text) for text in ("the and the earth", "the heaven\n漢")]
    row = np.array([[*parts[0], ours.eot, *parts[1]]])
    size = bytes_per_target([Batch(row, None)], ours, np.nan) * (row.size - 1)
    assert size == pytest.approx(len(" and the earth") + len("the heaven\n漢".encode()))


NO_MERGES = {"model": byte_level()["model"], "decoder": decoders.ByteLevel()}
AS_IT_IS = {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False)}
STRIP_ACCENTS = [normalizers.NFD(), normalizers.StripAccents()]


@pytest.mark.parametrize(
    "parts",
    [
        None,
        NO_MERGES | AS_IT_IS | {"normalizer": normalizers.NFC()},
        NO_MERGES | AS_IT_IS | {"normalizer": normalizers.Sequence(STRIP_ACCENTS)},
        NO_MERGES | AS_IT_IS | {"normalizer": normalizers.Strip()},
        NO_MERGES | {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
    ],
    ids=["unigram", "NFC", "accents", "strip", "prefix"],
)
def test_bytes_are_the_sources_where_a_tokenizer_changes_the_text(tmp_path, parts):
    if parts is None:
        unigram().save(str(tmp_path / "tokenizer.json"))
    else:
        saved(tmp_path, **parts)
    texts = [
        f" 天气很好 {i}\n\nf(x)=a-b/c, cafe\u0301 {'earth' * i} \u1112\u1161\u11ab\n"
        for i in range(60)
    ]
    sizes = [len(text.encode()) for text in texts]
    write(tmp_path, {"a.jsonl": rows(texts)})
    source = TextSource((str(tmp_path / "a.jsonl"),))
    folder = prepare(source, str(tmp_path), tmp_path / "cache", val_fraction=0.5)
    data = Dataset.open(folder, seed=0, context=8, batch_size=2)
    split = data.manifest.splits["val"]
    assert split.bytes < sum(sizes)
    w = SimpleNamespace(
        data=data, model=SimpleNamespace(spec=data.val, loss_boundary_id=None)
    )
    size = validation_text(w, 2).bytes_per_token
    assert size == pytest.approx(split.bytes / split.tokens)
    size = source_text(source, tmp_path / "cache", w, 10_000).bytes_per_token
    n_tokens = sum(part.tokens for part in data.manifest.splits.values())
    assert size == pytest.approx(sum(sizes) / n_tokens)


def test_bytes_are_those_of_the_tokens_where_a_tokenizer_keeps_the_text(tmp_path):
    saved(tmp_path, byte_level()["model"], **AS_IT_IS)  # without a decoder
    ours = get_tokenizer(str(tmp_path))
    row = np.array([[ours.eot, *ours.encode("the earth"), ours.eot]])
    assert bytes_per_target([Batch(row, None)], ours, np.nan) == 0.9


@pytest.mark.parametrize("file", ["a.jsonl", "a.parquet"])
def test_empty_rows_are_no_documents_of_an_evaluation(tmp_path, file):
    texts = [f"the earth {i}" for i in range(20)]

    def evaluated(name, texts):
        path = tmp_path / name / file
        write(path.parent, {file: rows(texts) if file == "a.jsonl" else texts})
        data = SimpleNamespace(
            tokenizer=get_tokenizer("byte"),
            val=SimpleNamespace(batch_size=1, document_mask=False),
        )
        model = SimpleNamespace(spec=SimpleNamespace(context=8), loss_boundary_id=None)
        w = SimpleNamespace(data=data, model=model)
        text = source_text(TextSource((str(path),)), tmp_path / "cache", w, 10_000)
        return text.n_batches, text.bytes_per_token, text.left_out

    gaps = [row for text in texts for row in (text, "", None)]
    assert evaluated("gaps", gaps) == evaluated("full", texts)


def test_ids_are_the_librarys_without_what_it_adds(made):
    theirs, ours, _, end = made
    assert isinstance(ours, JSONTokenizer)
    assert ours.eot == theirs.token_to_id(end)
    assert ours.vocab_size == 1 + max(theirs.get_vocab().values())
    theirs.encode_special_tokens = True
    expected = [theirs.encode(text, add_special_tokens=False).ids for text in TEXTS]
    made_up = set(ours.special_tokens.values()) - {theirs.token_to_id("<unk>")}
    actual = [ours.encode(text) for text in TEXTS]
    for ids, wanted in zip(actual, expected, strict=True):
        # Unigram itself takes "</s>" for its token
        assert ids == wanted or made_up & set(wanted)
        assert not made_up & set(ids)
    assert actual[:-1] == expected[:-1]
    assert [ours.encode_array(text).tolist() for text in TEXTS] == actual
    assert ours.cut_up(TEXTS[1], 2) == [TEXTS[1]]


def test_text_that_spells_a_special_token_changes_no_other_text(made):
    """A model such as Unigram may prefer the token."""
    _, ours, _, end = made
    prefix, suffix = "And God created the heaven", "and the earth was void"
    ids = ours.encode(f"{prefix} {end}{suffix}")
    assert ours.eot not in ids
    assert ids[: len(ours.encode(prefix))] == ours.encode(prefix)
    # `suffix` does not start a text, where spaces may be added
    tail = ours.encode(f"x{suffix}")[len(ours.encode("x")) :]
    assert ids[-len(tail) :] == tail


def test_text_comes_back_and_ids_without_a_token_are_told(made):
    _, ours, _, _ = made
    for text in ("the earth was void", "And God created"):
        assert ours.decode(ours.encode(text)) == text
    assert (
        ours.decode([ours.vocab_size + 5, *ours.encode("the earth")])
        == "\ufffdthe earth"
    )
    assert ours.decode([]) == ""
    ids = ours.encode("the earth was")
    assert continuation(ours, ids[:-3], ids[-3:]) == "the earth was".removeprefix(
        ours.decode(ids[:-3])
    )
    assert continuation(ours, [], ids) == "the earth was"


def test_it_is_saved_with_a_run_and_exported_as_the_same(made, tmp_path):
    _, ours, directory, _ = made
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    out.mkdir()
    ours.save(run)
    save_hf(out, ours, 64)
    for source in (run, vocabulary_file(run), out):
        reloaded = get_tokenizer(str(source))
        assert reloaded.fingerprint == ours.fingerprint
        assert reloaded.encode(TEXTS[1]) == ours.encode(TEXTS[1])
    assert token_difference(token_ids_in(directory), ours) is None


def test_tokens_stand_for_bytes_however_they_are_spelt(made):
    theirs, ours, _, _ = made
    assert b"earth" in b" ".join(ours.tokens)
    ids = {*ours.tokens.values(), *ours.special_tokens.values()}
    assert len(ids) == theirs.get_vocab_size()
    for token, i in ours.tokens.items():
        if token.strip().isalpha() and token.isascii():
            assert ours.decode([i]).strip() == token.decode().strip()


def test_a_byte_that_is_a_token_too_keeps_its_spelling():
    vocabulary = {"<0x20>": 0, "▁": 1, "<0x0A>": 2, "a": 3}
    model = {"vocab": vocabulary, "byte_fallback": True}
    tree = {"model": model, "added_tokens": None}
    assert ids_of(tree) == {b"<0x20>": 0, b" ": 1, b"\n": 2, b"a": 3}


def test_names_of_bytes_that_the_model_does_not_use_are_no_bytes(tmp_path):
    tree = json.loads(llama2().to_str())
    tree["model"] |= {"byte_fallback": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    ours = get_tokenizer(str(tmp_path))
    assert b"\n" not in ours.tokens
    assert ours.tokens[b"<0x0A>"] == tree["model"]["vocab"]["<0x0A>"]


@pytest.mark.parametrize("kind", ["llama2", "unigram"])
def test_bytes_that_are_marked_as_special_still_stand_for_characters(kind, tmp_path):
    """The library's trainers can only make them so."""
    tree = json.loads(KINDS[kind][0]().to_str())
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    tree["model"]["byte_fallback"] = True
    if kind == "unigram":
        tree["model"]["vocab"] += [[name, -20.0] for name in names]
    made = Tokenizer.from_str(json.dumps(tree))
    made.add_special_tokens(names)
    made.save(str(tmp_path / "tokenizer.json"))
    ours, byte = get_tokenizer(str(tmp_path)), made.token_to_id("<0xE6>")
    ids = ours.encode("漢字 the earth")
    assert ids == made.encode("漢字 the earth", add_special_tokens=False).ids
    assert byte in ids
    assert ours.tokens[b"\xe6"] == byte


@pytest.mark.parametrize("marked", ["ĠĠ", "ĊĊ", "Ċ", "▁▁"])
def test_spaces_that_are_marked_as_special_are_still_joined(marked, tmp_path):
    pieces = sorted({*pre_tokenizers.ByteLevel.alphabet(), "▁", marked, marked[0]})
    merges = [(marked[0], marked[0])] * (len(marked) - 1)
    ids = {piece: i for i, piece in enumerate(pieces)}
    parts = {"pre_tokenizer": pre_tokenizers.ByteLevel(False, use_regex=False)}
    if marked == "▁▁":
        parts = {"normalizer": normalizers.Replace(" ", "▁")}
    model, special = models.BPE(ids, merges, unk_token="a"), ["</s>", marked]
    made = saved(tmp_path, model, special=special, **parts)
    ours, text = get_tokenizer(str(tmp_path)), "a\n\nb" if "Ċ" in marked else "a  b"
    assert ours.encode(text) == made.encode(text).ids
    assert made.token_to_id(marked) in ours.encode(text)
    assert list(ours.special_tokens) == ["</s>"]


# the files from before the words were added, which lack them
@pytest.mark.parametrize("beside", [False, True])
def test_added_words_are_found_in_a_text(beside, tmp_path):
    made = Tokenizer.from_str(train_bpe(iter(WORDS), 300, "gpt2"))
    made.decoder = decoders.ByteLevel()
    if beside:
        made.model.save(str(tmp_path))
        assert (tmp_path / "merges.txt").exists()
    made.add_tokens(["firmament", "  two"])
    made.save(str(tmp_path / "tokenizer.json"))
    ours, text = get_tokenizer(str(tmp_path)), "the firmament  two earths <|endoftext|>"
    assert ours.encode(text)[:-8].count(made.token_to_id("firmament")) == 1
    made.encode_special_tokens = True
    assert ours.encode(text) == made.encode(text).ids
    assert ours.decode(ours.encode(text)) == text
    assert ours.eot == made.token_to_id("<|endoftext|>")


def added(content, i):
    def add(tree):
        token = {**tree["added_tokens"][0], "content": content, "id": i}
        return {"added_tokens": [*tree["added_tokens"], token]}

    return add


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tree: {"added_tokens": tree["added_tokens"][:1]},
            "put its tokenizer_config.json beside it",
        ),
        (
            lambda tree: {"added_tokens": []},
            "has no added_tokens; give it one with Hugging Face's",
        ),
        (
            lambda tree: {"model": None},
            "valid: a tokenizer.json that Hugging Face's `t",
        ),
        (
            lambda tree: {"model": tree["model"] | {"type": "Huffman"}},
            "valid: a tokenizer.json that Hugging Face's",
        ),
        (
            lambda tree: {"model": tree["model"] | {"dropout": 0.5}},
            r"has dropout=0\.5 in its model",
        ),
        # the id of another token, a gap, a token of the vocabulary
        (
            added("<a>", 2),
            r"'<a>' of added_tokens has the id 2, but .* gives it (\d+); write \1 there",
        ),
        (
            added("<a>", 10**9),
            r"'<a>' of added_tokens has the id 1000000000, but .*it (\d+)",
        ),
        (added("</s>", 9999), "has the id 9999, but .* gives it 2; write 2 there"),
    ],
)
def test_a_file_of_no_tokenizer_is_refused_in_a_line(change, message, tmp_path):
    tree = json.loads(llama2().to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree | change(tree)))
    with pytest.raises(UserError, match=message) as refused:
        get_tokenizer(str(tmp_path))
    assert "\n" not in str(refused.value)
