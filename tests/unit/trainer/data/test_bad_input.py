"""Whatever a user can get wrong about text: one message that names the thing and what
is valid; never a traceback."""

import bz2
import gzip
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
import tiktoken
from corpora import write

from trainer.assembly.data import build_data
from trainer.cli.prepare_data import command
from trainer.config.composition import compose_config
from trainer.data import TextSource, prepare
from trainer.data.corpus import open_corpus
from trainer.data.files import BLOCK
from trainer.errors import UserError

ROOT = Path(__file__).resolve().parents[4]


def fails(source, tmp_path, message, **settings):
    with pytest.raises(UserError, match=message) as caught:
        prepare(source, "byte", tmp_path / "cache", **settings)
    assert "\n" not in str(caught.value)


def file(tmp_path, data, name="a.txt"):
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


LINES = "\n".join(f'{{"text": "document {i}"}}' for i in range(50)) + "\n"
HALF = '{"text": "whole"}\n\n{"text": "\\ud83d\\ude00"}\n{"text": "\\ud83d"}'
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1\n"
CUT_OFF = b"x" * (BLOCK - 1) + "é".encode()[:1] + b"x"
NO_TEXT = r"a\.txt is not text: {}; convert it"
NAMED = "is a?n? ?[a-z ]+ by its name: extract"
LIKE_JSON, LIKE_MARKUP = "looks like JSON lines", "looks like markup, but not by its"
AS_JSONL, BY_COLUMN = {"format": "jsonl"}, {"column": "body"}


@pytest.mark.parametrize(
    ("name", "content", "settings", "message"),
    [
        ("a.txt", "", {}, r"the corpus is empty: .*a\.txt has no text"),
        ("a.jsonl", "\n\n", {}, "the corpus is empty: "),
        ("a.jsonl", '{"text": null}\n{"text": ""}\n', {}, "the corpus is empty: "),
        # no text, in its first block or in a later one
        ("a.txt", b"good text \xff", {}, NO_TEXT.format("byte 0xff at offset 10 is.*")),
        ("a.txt", CUT_OFF, {}, NO_TEXT.format(f"byte 0xc3 at offset {BLOCK - 1} .*")),
        ("a.txt", b"cut off \xc3", {}, NO_TEXT.format("byte 0xc3 at offset 8 is .*")),
        ("a.txt", "text\0more", {}, NO_TEXT.format("NUL at offset 4")),
        ("a.txt", b"x" * BLOCK + b"yz\0", {}, NO_TEXT.format(f"NUL .*{BLOCK + 2}")),
        ("a.txt", CUT_OFF, AS_JSONL, NO_TEXT.format(f"byte 0xc3 at .*{BLOCK - 1} .*")),
        ("a.txt", "text\0more", AS_JSONL, NO_TEXT.format("NUL at offset 4")),
        (
            "a.txt",
            gzip.compress(b"text", mtime=0),
            {},
            r"not text but gzip .*; decompress it fi",
        ),
        *(
            (name, b"PAR1\0rows", {}, r"is Parquet, but not by its name; rename it to")
            for name in ("part-0000", "a.parquet.gzip", "_metadata")
        ),
        # rows without text
        (
            "a.jsonl",
            '{"id": 1}\n',
            {"column": "id"},
            "1: column 'id' holds a number, no",
        ),
        ("a.jsonl", '{"a": 1}\n{"b": 2}', {}, "no column 'text'; .*: a, b"),
        *(
            ("a.jsonl", content, {}, "an object has the key 'text' twice")
            for content in (
                '{"text": "a", "text": "b"}\n',
                '[\n{"text": 1, "text": 2}]',
            )
        ),
        ("a.jsonl", HALF, {}, "line 4: column 'text' holds half a character"),
        *(
            ("a.jsonl", LINES + line, {}, r"l, line 51: cannot be read as jsonl")
            for line in ("{broken", "[1, 2]", '"text"')
        ),
        ("a.parquet", "just text", {}, r"a\.parquet: cannot be read as parquet"),
        # a name and a content or a setting that contradict
        (
            "a.jsonl",
            LINES,
            {"format": "text"},
            "t, but .*is jsonl by its name; leave d",
        ),
        ("a.parquet", LINES, AS_JSONL, r"=jsonl, but .*a\.parquet is parquet by its n"),
        ("a.txt", LINES, {}, "JSON lines, but not by its name: set data.format=jsonl"),
        ("a.txt", '\ufeff{"text": "a"}\n{"text": "b"}\n', {}, LIKE_JSON),
        ("a.txt", '\n\n{"text": "a"}\n', {}, LIKE_JSON),
        ("a.txt", '{"text": "a"} \n{"text": "b"}\n', {}, LIKE_JSON),
        ("a.txt", '[{"text": "a"}]', {}, LIKE_JSON),
        ("a.txt", '[\n  {\n    "text": "a"\n  }\n]\n', {}, LIKE_JSON),
        ("a.txt", '{\n  "text": "a"\n}\n', {}, LIKE_JSON),
        ("a.txt", '{"text": "' + "a" * (1 << 22) + '"}\n', {}, LIKE_JSON),
        ("a.txt", "words", BY_COLUMN, "data.column=body, but text files have no colum"),
        ("a.txt", "words", {"max_documents": 3}, r"=3, but .*a\.txt is a single text"),
        # text in something else
        *((name, "words", {}, NAMED) for name in ("a.html", "a.csv", "a.TSV", "a.rtf")),
        *(
            (name, "words", {}, NAMED)
            for name in ("a.ipynb", "a.svg", "a.warc", "a.wet")
        ),
        ("a.txt", "<!DOCTYPE html><p>text</p>", {}, LIKE_MARKUP),
        ("a.txt", "\ufeff \n<html lang=en><p>text</p>", {}, LIKE_MARKUP),
        ("a.txt", "<?xml <p>text</p>", {}, LIKE_MARKUP),
        *(
            (name, POINTER, {}, "pointer to a file .*run `git lfs pull` in")
            for name in ("a.txt", "a.jsonl", "a.parquet")
        ),
    ],
)
def test_a_file_that_is_not_the_text_it_seems_is_refused(
    tmp_path, name, content, settings, message
):
    fails(
        TextSource((str(file(tmp_path, content, name)),), **settings), tmp_path, message
    )


@pytest.mark.parametrize(
    ("name", "content", "settings"),
    [
        ("a.html", "<p>text</p>", {"format": "text"}),
        ("a.csv", "text\nwords\n", {"format": "text"}),
        ("a.txt", "<?xml <p>text</p>", {"format": "text"}),
        ("a.txt", "<htmlish> text, <html>", {}),
        ("a.txt", b"x" * (BLOCK - 1) + "é".encode() + b" end", {}),
        *(
            ("a.txt", f"{line}\n" * 50, {})
            for line in ("{not json}", "{{", "[1] A note", '["a"]', "[1, 2]")
        ),
        ("a.txt", '{"a":' + "[" * 100_000 + "]" * 100_000 + "}", {}),
    ],
)
def test_text_and_what_is_said_to_be_text_are_read(tmp_path, name, content, settings):
    source = TextSource((str(file(tmp_path, content, name)),), **settings)
    prepare(source, "byte", tmp_path / "cache")


def test_too_little_text_for_two_parts(tmp_path):
    source = TextSource((str(file(tmp_path, '{"text": "1"}\n', "a.jsonl")),))
    message = r"the train part of a is empty, with 1 documents and val_fraction=0.001"
    fails(source, tmp_path, message, val_fraction=0.001)


def test_a_directory_with_something_else_is_told_all_of_it(tmp_path):
    files = {
        "img/photo.png": b"\x89PNG\xff\0",
        "img/scan.bz2": bz2.compress(b"text"),
        "a.txt.gz": gzip.compress(b"packed"),
        "b.txt": "words",
    }
    folder = write(tmp_path / "texts", files)
    fails(
        TextSource((str(folder),)),
        tmp_path,
        r"^2 files are not text: .*/img/photo\.png \(byte 0x89 at offset 0 is not UTF-8\)"
        r", .*/img/scan\.bz2 \(bzip2: byte 0xcb at offset 10 .*; convert them to UTF-8",
    )


def test_braces_are_spelled_out(tmp_path):
    with pytest.raises(UserError, match="braces are not understood") as caught:
        open_corpus(TextSource(("my books/*.{txt,md}",)), tmp_path)
    assert str(caught.value).endswith(
        "list the patterns: [my books/*.txt,my books/*.md]"
    )
    file(tmp_path, "words", "{a,b}.txt")  # a name as any other
    open_corpus(TextSource((str(tmp_path / "{a,b}.txt"),)), tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.txt", r"there is no file .*none\.txt"),
        ("*.txt", r"no file matches .*\*\.txt"),
        ("", r"no file is in directory .*; correct data\.paths"),
    ],
)
def test_missing_files_and_globs_without_match(tmp_path, name, message):
    fails(TextSource((str(tmp_path / name),)), tmp_path, message)


def test_a_file_without_the_column_is_named_where_others_have_it(tmp_path):
    for name, column in (("a", "text"), ("b", "body")):
        file(tmp_path, f'{{"{column}": "words", "id": 1}}\n' * 9, f"{name}.jsonl")
    source = TextSource((str(tmp_path / "*.jsonl"),))
    fails(
        source,
        tmp_path,
        r"b\.jsonl: there is no column 'text'; valid for data\.column: body, id; .*"
        r" data=mix",
    )


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"body": ["a"], "id": [1]},
            "there is no column 'text'; valid for data.column: body, id; .* data=mix .*",
        ),
        (
            {"text": [1]},
            "column 'text' holds int64, not text; choose another data.column",
        ),
        (None, "several columns are named 'text'"),
    ],
)
def test_of_many_parquet_files_the_one_without_text_is_named_and_nothing_else_said(
    tmp_path, columns, message, capfd
):
    bad = pa.table([pa.array(["a"])] * 2, names=["text", "text"])
    if columns is not None:
        bad = pa.table(columns)
    good = {f"{i}.parquet": ["words"] * 50 for i in range(4)}
    write(tmp_path / "a", good | {"z.parquet": bad})
    message = rf"^{re.escape(str(tmp_path))}/a/z\.parquet: {message}$"
    fails(TextSource((f"{tmp_path}/a/*.parquet",)), tmp_path, message)
    assert capfd.readouterr() == ("", "")
    # it is found before the files of other formats are read
    write(tmp_path / "a", {f"{i}.txt": "words" for i in range(3)})
    with pytest.raises(UserError, match=message):
        next(iter(open_corpus(TextSource((f"{tmp_path}/a",)), tmp_path).read(None)))


@pytest.mark.parametrize(
    "bomb",
    [
        {"text": ["a" * 200_000] * 1000},  # one entry of a dictionary
        {"text": ["a" * 100_000_000]},  # one compressed page
        {"text": [None] * 10_000_000},
    ],
)
def test_a_small_parquet_file_that_holds_much_is_refused(tmp_path, bomb):
    schema = pa.schema({"text": pa.string()})
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(bomb, schema=schema), path, compression="zstd")
    assert path.stat().st_size < 50_000
    fails(
        TextSource((str(path),)),
        tmp_path,
        r"a\.parquet: [\d,]+ bytes hold more than 67,108,864 bytes of text; if this is"
        " intended, give the text as jsonl",
    )


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
def test_a_validation_share_outside_zero_to_one(tmp_path, fraction):
    source = TextSource((str(file(tmp_path, "text")),))
    fails(
        source,
        tmp_path,
        "val_fraction=.*: expected a number between 0 and 1",
        val_fraction=fraction,
    )


def test_the_command_prints_counts_and_the_directory(tmp_path, capsys):
    assert command([f"data.cache_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert (
        "train: 1 documents, 3,723,705 tokens, 3,723,705 bytes of text, 1 shards" in out
    )
    directory = Path(out.rsplit("directory: ", 1)[1].strip())
    assert (directory / "manifest.json").is_file()
    assert command([f"verify={directory}"]) == 0


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_tokenizer_that_cannot_be_downloaded_names_that_of_the_weights(
    tmp_path, monkeypatch, has_tokenizer
):
    def offline(name):
        raise requests.ConnectionError

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    if has_tokenizer:
        file(tmp_path, "{}", "tokenizer.json")
    text = file(tmp_path, "words")
    settings = [
        "data=text",
        f"data.paths=[{text}]",
        f"init_from={tmp_path}",
        f"data.cache_dir={tmp_path}/cache",
    ]
    with pytest.raises(UserError) as caught:
        build_data(compose_config(settings))
    hint = f"; that of the weights is data.tokenizer={tmp_path}/" * has_tokenizer
    assert str(caught.value).startswith(
        "tokenizer 'gpt2' is not on this machine and could not be downloaded"
        f" (ConnectionError){hint}. Fetch its file"
    )
