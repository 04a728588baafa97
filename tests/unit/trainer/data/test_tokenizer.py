import base64
import json

import numpy as np
import pytest
import tiktoken
from corpora import write
from hypothesis import given, settings
from hypothesis import strategies as st
from library_tokenizers import BYTES, llama2, write_tiktoken

from trainer.assembly.data import build_data
from trainer.config.composition import compose_config
from trainer.data.hf_tokenizer import save_hf
from trainer.data.line_cuts import cut_at_lines
from trainer.data.tokenizer import (
    get_tokenizer,
    load_saved,
    tiktoken_file,
)
from trainer.data.word_patterns import GPT4, KNOWN_PATTERNS, RANKS
from trainer.errors import UserError


def test_bytes_are_their_own_ids():
    byte = get_tokenizer("byte")
    text = "Grüße\n日本"
    assert byte.encode(text) == byte.encode_array(text).tolist() == list(text.encode())
    assert byte.decode(byte.encode(text)) == text
    assert (byte.vocab_size, byte.eot) == (256, 0)
    # no text, and an id beyond the bytes
    assert byte.decode(np.array([72, 105, 0xC3, 300, 33], np.uint16)) == "Hi��!"


def test_local_files_give_gpt2_s_ids(gpt2):
    for text, ids in {  # from GPT-2's published tokenizer
        "Hello world": [15496, 995],
        "The quick brown fox": [464, 2068, 7586, 21831],
        " it's 1984\n\nand ": [340, 338, 12844, 198, 198, 392, 220],
    }.items():
        assert gpt2.encode(text) == gpt2.encode_array(text).tolist() == ids
        assert gpt2.decode(ids) == text
    assert (gpt2.vocab_size, gpt2.eot) == (50257, 50256)
    assert gpt2.decode([15496, 60000, 60001, 995]) == "Hello�� world"


def test_tiktoken_s_own_gpt2_from_its_cache_is_the_same_tokenizer(
    gpt2, gpt2_dir, tmp_path, monkeypatch
):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    cached = {"vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"}
    cached["encoder.json"] = "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"
    for name, key in cached.items():
        (tmp_path / key).write_bytes((gpt2_dir / name).read_bytes())
    tokenizer = get_tokenizer("gpt2")
    assert tokenizer.fingerprint == gpt2.fingerprint
    assert tokenizer.encode("Hello world") == [15496, 995]


@pytest.mark.parametrize(
    "names",
    [("vocab.bpe",), ("vocab.bpe", "encoder.json"), ("merges.txt", "vocab.json")],
)
def test_merges_alone_or_with_ids_in_either_naming_are_the_same_tokenizer(
    small, small_dir, tmp_path, names
):
    for source, name in zip(("vocab.bpe", "encoder.json"), names, strict=False):
        (tmp_path / name).write_bytes((small_dir / source).read_bytes())
    for path in (tmp_path, tmp_path / names[0]):
        assert get_tokenizer(str(path)).fingerprint == small.fingerprint


def test_a_tiktoken_file_of_gpt2_s_ranks_is_gpt2(gpt2, tmp_path):
    path = tmp_path / "r50k_base.tiktoken"
    path.write_bytes(b"\n" + tiktoken_file(gpt2.tokens) + b"\n\n")
    assert get_tokenizer(str(path)).fingerprint == gpt2.fingerprint


def test_a_tiktoken_file_named_after_an_encoding_has_its_pattern_and_special_tokens(
    small, tmp_path, monkeypatch
):
    path = tmp_path / "cl100k_base.tiktoken"
    # not cl100k's ranks, which are not on this machine
    path.write_bytes(tiktoken_file(small.tokens))
    with pytest.raises(UserError, match="has 1,256 tokens of 100256; download or copy"):
        get_tokenizer(str(path))
    monkeypatch.setitem(RANKS, "cl100k_base", 1256)
    actual = get_tokenizer(str(path))
    assert actual.eot == 100257
    assert actual.vocab_size == 100277
    # cl100k splits digits into threes
    parts = actual.encode("123"), actual.encode("456")
    assert actual.encode("123456") == [*parts[0], *parts[1]]


def test_a_json_file_beside_a_tiktoken_file_gives_pattern_and_special_tokens(
    small, tmp_path
):
    path = tmp_path / "mine.tiktoken"
    write_tiktoken(path, r"\S|\s", small.tokens, **{"<|endoftext|>": 60000})
    actual = get_tokenizer(str(path))
    assert actual.eot == 60000
    assert len(actual.encode("Hello")) == 5


LLAMA3_TOKENS = {"<|begin_of_text|>": 259, "<|end_of_text|>": 260, "<|eot_id|>": 261}


@pytest.mark.parametrize(
    ("settings", "end"),
    [(None, 260), ({"eos_token": "<|eot_id|>"}, 261), ({"eos_token_id": 259}, 260)],
)
def test_a_tiktoken_file_s_documents_end_as_a_tokenizer_json_s_would(
    tmp_path, settings, end
):
    path = write_tiktoken(tmp_path / "llama3.tiktoken", r"\S|\s", **LLAMA3_TOKENS)
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    actual = get_tokenizer(str(path))
    assert (actual.eot, actual.vocab_size) == (end, 262)
    out = tmp_path / "run"
    out.mkdir()
    actual.save(out)
    saved = load_saved("mine", out)
    assert (saved.eot, saved.fingerprint) == (end, actual.fingerprint)
    exported = tmp_path / "exported"
    exported.mkdir()
    known = get_tokenizer(str(write_tiktoken(path, GPT4, **LLAMA3_TOKENS)))
    save_hf(exported, known, context=8)
    assert get_tokenizer(str(exported)).eot == end


def test_other_ends_are_other_tokenizers(tmp_path):
    path = write_tiktoken(tmp_path / "llama3.tiktoken", r"\S|\s", **LLAMA3_TOKENS)
    first = get_tokenizer(str(path)).fingerprint
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|eot_id|>"}')
    assert get_tokenizer(str(path)).fingerprint != first


@pytest.mark.parametrize("lines", [-1, -9, 500])
def test_a_file_that_was_cut_at_the_end_of_a_line_is_no_smaller_tokenizer(
    small, small_dir, tmp_path, lines
):
    merges = (small_dir / "vocab.bpe").read_bytes().splitlines(keepends=True)
    ids = (small_dir / "encoder.json").read_bytes()
    cut = b"".join(merges[:lines])
    write(tmp_path / "merges", {"merges.txt": cut, "vocab.json": ids})
    message = r"vocab\.json has '.*', which no merge of merges\.txt makes; download or"
    with pytest.raises(UserError, match=message):
        get_tokenizer(f"{tmp_path}/merges")
    small.save(tmp_path)
    ranks = (tmp_path / "tokenizer.tiktoken").read_bytes().splitlines(keepends=True)
    for content, message in (
        (ranks[:lines], r"tokenizer\.tiktoken has .* tokens of 1256; download or copy"),
        ([*ranks, ranks[0].replace(b" 0", b" 2000")], "line 1257: .* each token once"),
    ):
        (tmp_path / "tokenizer.tiktoken").write_bytes(b"".join(content))
        with pytest.raises(UserError, match=message):
            get_tokenizer(str(tmp_path))


def test_merges_whose_ids_have_no_end_are_refused(small_dir, tmp_path):
    (tmp_path / "vocab.bpe").write_bytes((small_dir / "vocab.bpe").read_bytes())
    ids = json.loads((small_dir / "encoder.json").read_text())
    del ids["<|endoftext|>"]
    (tmp_path / "encoder.json").write_text(json.dumps(ids))
    with pytest.raises(UserError, match="names no token that ends a document"):
        get_tokenizer(str(tmp_path))


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}])
def test_two_tokens_of_one_id_in_a_tokenizer_json_are_refused(
    small, tmp_path, capfd, normalizer
):
    file, _ = save_hf(tmp_path, small, small.vocab_size)
    tree = json.loads(file.read_text())
    tree["model"]["vocab"]["\u0120the"] += 1
    file.write_text(json.dumps(tree | {"normalizer": normalizer}))
    with pytest.raises(UserError, match="have one id, 263"):
        get_tokenizer(str(tmp_path))
    assert not capfd.readouterr().err


def test_text_comes_back_and_that_of_a_special_token_is_ordinary(small, documents):
    for text in (*documents[:100], "<|endoftext|>", "a<|endoftext|>b"):
        ids = small.encode(text)
        assert small.encode_array(text).tolist() == ids
        assert small.decode(ids) == text
        assert small.eot not in ids


@pytest.mark.parametrize("pattern", KNOWN_PATTERNS)
def test_cutting_at_lines_changes_no_id(small, pattern):
    encoding = tiktoken.Encoding(
        "x", pat_str=pattern, mergeable_ranks=small.tokens, special_tokens={}
    )
    letters = "aB é1.,'/s\n\r\t <|日\x85\x1c\u2028"

    @settings(max_examples=100, deadline=None, database=None)
    @given(st.text(alphabet=letters, max_size=60), st.integers(1, 10))
    def check(text, size):
        pieces = cut_at_lines(text, size)
        assert "".join(pieces) == text
        ids = [i for piece in pieces for i in encoding.encode_ordinary(piece)]
        assert ids == encoding.encode_ordinary(text)

    check()


def test_long_texts_are_cut_and_unknown_patterns_are_not(small, tmp_path):
    text = "A line.\n" * 100
    assert len(small.cut_up(text, 80)) > 5
    path = write_tiktoken(tmp_path / "mine.tiktoken", r"[\s\S]{1,9}")
    assert get_tokenizer(str(path)).cut_up(text, 80) == [text]


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    for variable in ("HTTPS_PROXY", "https_proxy"):
        # the discard port: refused at once
        monkeypatch.setenv(variable, "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("gpt2", "vocab.bpe"),
        ("cl100k_base", "cl100k_base.tiktoken"),
        ("o200k_base", "o200k_base"),
    ],
)
def test_an_encoding_that_cannot_be_downloaded_says_what_to_fetch_and_where_to_put_it(
    name, file, offline
):
    message = rf"Fetch https://\S*{file}.*DIRECTORY/[0-9a-f]{{40}}"
    with pytest.raises(UserError, match=message) as caught:
        get_tokenizer(name)
    assert "TIKTOKEN_CACHE_DIR=DIRECTORY" in str(caught.value)


@pytest.mark.parametrize("beside", [{}, {"tokenizer.json": "{}"}])
def test_a_tokenizer_that_cannot_be_downloaded_names_that_of_the_weights(
    tmp_path, offline, beside
):
    write(tmp_path, {"a.txt": "words", **beside})
    settings = ["data=text", f"data.paths=[{tmp_path}/a.txt]", f"init_from={tmp_path}"]
    hint = f"; that of the weights is data.tokenizer={tmp_path}/" * len(beside)
    message = rf"^tokenizer 'gpt2' .* could not be downloaded \(.*\){hint}\. Fetch"
    with pytest.raises(UserError, match=message):
        build_data(compose_config([*settings, f"data.cache_dir={tmp_path}/cache"]))


ALL_BYTES = tiktoken_file(BYTES)
TWICE = tiktoken_file(BYTES | {b"other": 300, b"twice": 300})
ANY = json.dumps({"pat_str": r"\S|\s", "special_tokens": {}})
END_400 = json.dumps({"pat_str": r"\S|\s", "special_tokens": {"<|endoftext|>": 400}})
END_0 = json.dumps({"pat_str": r"\S|\s", "special_tokens": {"<|endoftext|>": 0}})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"x.tiktoken": "IQ== 0\nnot base64 at all\n"},
            r"x\.tiktoken, line 2: expected",
        ),
        (
            {"x.tiktoken": base64.b64encode(b"a" * 2000) + b" 0\n"},
            r"x\.tiktoken has a token of 2,000 bytes, of at most 1,024",
        ),
        ({"gpt2.tiktoken": "IQ== 0\n"}, r"n has 1 tokens of 50256; download or copy"),
        (
            {"a.tiktoken": "IQ== 0\n", "a.json": END_400},
            "255 of the 256 bytes have no id",
        ),
        (
            {"vocab.bpe": "#version: 0.2\na b c\n"},
            r"bpe, line 2: expected two tokens to",
        ),
        ({"vocab.bpe": b"\x00\xff"}, r"vocab\.bpe, line 1"),
        ({"qwen.tiktoken": ALL_BYTES}, r"put qwen\.json beside it.* cl100k_base, gpt2"),
        ({"a.tiktoken": ALL_BYTES, "a.json": "{}"}, "expected the keys pat_str"),
        (
            {"a.tiktoken": ALL_BYTES, "a.json": END_0},
            "'.*' has the id 0 of an ordinary",
        ),
        (
            {"a.tiktoken": TWICE, "a.json": END_400},
            "the tokens 'other' and 'twice' have one id, 300",
        ),
        (
            {"a.tiktoken": ALL_BYTES, "a.json": ANY},
            r"a\.tiktoken has no special tokens.* special_tokens of a\.json",
        ),
        (
            {
                "a.tiktoken": ALL_BYTES,
                "a.json": END_400,
                "tokenizer_config.json": '{"eos_token": "</s>"}',
            },
            "names the end '</s>', which is none of .*<|endoftext|>",
        ),
    ],
)
def test_a_malformed_file_is_named_with_its_line(tmp_path, capfd, files, message):
    write(tmp_path, files)
    with pytest.raises(UserError, match=message):
        get_tokenizer(str(tmp_path / next(iter(files))))
    assert not capfd.readouterr().err  # Rust would print its stack


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gtp2",
            r"unknown tokenizer 'gtp2'; did you mean 'gpt2'\? Valid: byte, .*cl100k",
        ),
        ("./none.tiktoken", r"tokenizer file .*none\.tiktoken: No such file"),
        (".", r"holds none of tokenizer\.tiktoken, .*merges\.txt"),
    ],
)
def test_a_tokenizer_that_is_not_there_is_named(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        get_tokenizer(name)


def test_ids_of_other_merges_are_those_of_the_file_or_refused(small_dir, tmp_path):
    (tmp_path / "vocab.bpe").write_bytes((small_dir / "vocab.bpe").read_bytes())
    ids = json.loads((small_dir / "encoder.json").read_text())
    # tiktoken takes ids for priorities
    ids["the"], ids["and"] = ids["and"], ids["the"]
    (tmp_path / "encoder.json").write_text(json.dumps(ids))
    assert get_tokenizer(str(tmp_path)).encode("the") == [ids.pop("the")]
    (tmp_path / "encoder.json").write_text(json.dumps(ids))
    with pytest.raises(UserError, match=r"vocab\.bpe: Token `the` out of vocabulary"):
        get_tokenizer(str(tmp_path))


def test_a_file_that_is_too_large_for_a_tokenizer_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.data.tokenizer_settings.MAX_BYTES", 10)
    write(tmp_path, {"tokenizer.json": '{"model": {}}'})
    with pytest.raises(UserError, match=r"tokenizer\.json has more than 10 bytes"):
        get_tokenizer(str(tmp_path))


def test_a_million_spaces_are_encoded(gpt2):
    """The regular expressions of tiktoken end there."""
    text = "table:" + " " * 1_000_002 + "end <|endoftext|>"
    ids = gpt2.encode_array(text)
    assert gpt2.decode(ids) == text
    assert ids.tolist()[-7:] == gpt2.encode("  end <|endoftext|>")[-7:]


def test_half_of_a_character_is_encoded_as_unknown(gpt2, tmp_path):
    """A byte of a prompt that is not UTF-8."""
    llama2().save(str(tmp_path / "tokenizer.json"))
    for tokenizer in (gpt2, get_tokenizer("byte"), get_tokenizer(str(tmp_path))):
        for encode in (tokenizer.encode, tokenizer.encode_array):
            assert list(encode("a\udcff b")) == tokenizer.encode("a\ufffd b")
