"""Files as people have them: each kind is read exactly, or refused in one line that
names the file and says what is valid."""

import bz2
import gzip
import json
import os
import re
import resource

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import check_positions, documents_of, prepared, rows, write
from corpora import read as read_source

from trainer.data import TextSource, compressed, corpus
from trainer.data.corpus import open_corpus
from trainer.data.files import BLOCK, column_names_hidden, expand
from trainer.data.preparation import prepare
from trainer.errors import UserError

TEXTS = ["one", "two", "", "four"]
MANY = [f"Document {i} has its own words, {i * i} of them." for i in range(60)]


def read(tmp_path, *paths, **settings):
    source = TextSource(tuple(map(str, paths)), **settings)
    return read_source(source, tmp_path / "cache")


def refused(tmp_path, message, *paths, **settings):
    source = TextSource(tuple(map(str, paths)), **settings)
    with pytest.raises(UserError, match=message) as error:
        prepared(source, tmp_path / "cache")
    assert "\n" not in str(error.value)
    assert ".decompressed" not in str(error.value)


def packed(codec, content, parts=2):
    """Compress members or frames one behind another, as parallel compressors do."""
    content = content.encode()
    size = -(-len(content) // parts)
    starts = range(0, len(content), size)
    pieces = [content[start : start + size] for start in starts]
    return b"".join(pa.compress(piece, codec, asbytes=True) for piece in pieces)


OBJECTS = [{"text": text} for text in TEXTS]
ONE_OBJECT = {"id": 1, "text": "one"}
SPANS = {"spans": [{"text": "Anna"}]}
META = pa.StructArray.from_arrays([pa.array(["x"] * 4)], names=["text"])
TWO, FIRST = {"max_documents": 2}, {"max_documents": 1000}
NULLS = pa.array(["one", "two", None, "four"])
MIXED = {f"{i:02}.txt": text for i, text in enumerate(MANY[:20])}
MIXED |= {"a.jsonl": rows(MANY[20:40]), "b/a.parquet": MANY[40:], ".DS_Store": b"\0"}
READ = {
    "a list": ({"a.json": json.dumps(OBJECTS)}, TEXTS),
    "behind blank lines": ({"a.json": "\n\n" + json.dumps(OBJECTS, indent=1)}, TEXTS),
    "an object": ({"a.NDJSON": json.dumps({"version": 1, "data": OBJECTS})}, TEXTS),
    "pretty": ({"a.json": json.dumps({"data": OBJECTS}, indent=2)}, TEXTS),
    "lines": ({"a.NDJSON": rows(TEXTS)}, TEXTS),
    "lines by a setting": ({"a.txt": rows(TEXTS)}, TEXTS, {"format": "jsonl"}),
    "a mark": ({"a.json": "\ufeff" + rows(TEXTS)}, TEXTS),
    "a mark of a list": ({"a.json": "\ufeff" + json.dumps(OBJECTS)}, TEXTS),
    "marks of texts": ({"a.txt": "\ufeffa\n", "b.txt": "\ufeffb"}, ["a\n", "b"]),
    "other keys": (
        {"a.json": '{"other": 1, "text": "one"}\n' + rows("ab")},
        ["one", *"ab"],
    ),
    "no column at first": ({"a.json": '{"other": 1}\n' + rows(TEXTS)}, ["", *TEXTS]),
    "a list at first": ({"a.json": '{"x": [{"a": 1}]}\n' + rows(TEXTS)}, ["", *TEXTS]),
    "lists": (
        {"a.json": "".join(json.dumps(x | SPANS) + "\n" for x in OBJECTS)},
        TEXTS,
    ),
    # as tools for labels write them
    "an object a file": (
        {
            "1.json": json.dumps(ONE_OBJECT),
            "2.json": json.dumps(ONE_OBJECT | SPANS),
            "3.json": json.dumps(ONE_OBJECT, indent=2),
            "4.json": json.dumps(ONE_OBJECT | SPANS, indent=2),
        },
        ["one"] * 4,
    ),
    "some files": ({"0.txt": "", "1.txt": "one", "2.txt": "two"}, ["one"], TWO),
    "some rows": ({"a.jsonl": rows(["", "one", "two"])}, ["", "one"], TWO),
    "some Parquet": (
        {"a.parquet": MANY * 10, "b.parquet": MANY * 10},
        (MANY * 20)[:1000],
        FIRST,
    ),
    "Parquet of other types": (
        {
            "a.parquet": pa.table({"text": pa.nulls(2), "n": [1, 2]}),
            "b.parquet": pa.table({"m": ["x"] * 4, "text": TEXTS}),
            "c.parquet": pa.table({"text": pa.array([], "utf8")}),
        },
        ["", "", *TEXTS],
    ),
    # no field of another column
    "a dot": (
        {"a.parquet": pa.table({"meta": META, "meta.text": TEXTS})},
        TEXTS,
        {"column": "meta.text"},
    ),
    "gzip": (
        {
            "a.jsonl.gz": packed("gzip", rows(TEXTS)),
            "b.jsonl.gz": packed("gzip", rows("a")),
        },
        [*TEXTS, "a"],
    ),
    "zstd": ({"a.jsonl.zst": packed("zstd", rows(TEXTS))}, TEXTS),
    "a compressed text": (
        {"a.txt.zst": packed("zstd", "\ufeffBücher\r\n")},
        ["Bücher\n"],
    ),
    "zeros behind gzip": (
        {"a.txt.gz": gzip.compress(b"text", mtime=0) + bytes(999)},
        ["text"],
    ),
    **{
        str(kind): ({"a.parquet": pa.table({"text": NULLS.cast(kind)})}, TEXTS)
        for kind in (
            pa.large_string(),
            pa.string_view(),
            pa.dictionary(pa.int32(), pa.string()),
        )
    },
    "formats": (MIXED, MANY),
    "some of formats": (MIXED, MANY[:47], {"max_documents": 47}),
    "some of one format": (MIXED, MANY[:20], {"max_documents": 20}),
    "shards of two splits": (
        {f"{name}-00000-of-00001.parquet": TEXTS for name in ("train", "test")},
        [*TEXTS, *TEXTS],
    ),
}


@pytest.mark.parametrize("kind", READ)
def test_each_kind_of_file_is_read_exactly_from_every_position(
    tmp_path, monkeypatch, kind
):
    files, texts, *settings = READ[kind]
    monkeypatch.setattr(corpus, "DOCUMENTS_PER_READ", 3)
    folder = write(tmp_path / "texts", files)
    source = TextSource((str(folder),), **dict(*settings))
    parts = check_positions(open_corpus(source, tmp_path))
    assert [text for part in parts for text in part.texts] == texts


AS_TEXT = {"format": "text"}
LIKE_OBJECT = '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize(
    ("name", "content", "settings"),
    [
        ("a.html", "<p>text</p>", AS_TEXT),
        ("a.csv", "text\nwords\n", AS_TEXT),
        ("a.txt", "<?xml <p>text</p>", AS_TEXT),
        ("a.txt", rows(TEXTS), AS_TEXT),
        ("a.txt", "<htmlish> text, <html>", {}),
        ("a.txt", "x" * (BLOCK - 1) + "é end", {}),
        *(
            ("a.txt", f"{line}\n" * 50, {})
            for line in ("{not json}", "{{", "[1] A note", '["a"]', "[1, 2]")
        ),
        ("a.txt", LIKE_OBJECT, {}),
    ],
)
def test_text_is_read_as_it_stands(tmp_path, name, content, settings):
    folder = write(tmp_path / "texts", {name: content})
    assert read(tmp_path, folder, **settings) == [content]


HALF = '{"text": "whole"}\n\n{"text": "\\ud83d\\ude00"}\n{"text": "\\ud83d"}'
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1\n"
CUT_OFF = b"x" * (BLOCK - 1) + "é".encode()[:1] + b"x"
LINES = rows(MANY)
NO_TEXT = r"a\.txt is not text: {}; convert it"
NAMED = "is a?n? ?[a-z ]+ by its name: extract"
TAR = b"a.jsonl".ljust(257, b"\0") + b"ustar".ljust(1024, b"\0") + LINES.encode()
LIKE_JSON, LIKE_MARKUP = "looks like JSON lines", "looks like markup, but not by its"
AS_JSONL = {"format": "jsonl"}
BYTES_COLUMN = pa.table({"text": [b"words"]})
TWICE = pa.table([pa.array(["a"])] * 2, names=["text", "text"])
# A frame whose window is 2 GiB, with one raw block.
LARGE_WINDOW = (
    b"\x28\xb5\x2f\xfd\x00\xa8" + (9 << 3 | 1).to_bytes(3, "little") + b"some text"
)
SQUARES = "".join(f"{n * n} " for n in range(9999))
REFUSED = [
    ("a.txt", "", {}, r"the corpus is empty: .*a\.txt has no text"),
    ("a.jsonl", "\n\n", {}, "the corpus is empty: "),
    ("a.jsonl", '{"text": null}\n{"text": ""}\n', {}, "the corpus is empty: "),
    ("a.jsonl", rows("1"), {}, "the train part of a is empty, with 1 document"),
    # no text, in its first block or in a later one
    ("a.txt", b"good text \xff", {}, NO_TEXT.format("byte 0xff at offset 10 is.*")),
    ("a.txt", CUT_OFF, {}, NO_TEXT.format(f"byte 0xc3 at offset {BLOCK - 1} .*")),
    ("a.txt", b"cut off \xc3", {}, NO_TEXT.format("byte 0xc3 at offset 8 is .*")),
    ("a.txt", "text\0more", {}, NO_TEXT.format("NUL at offset 4")),
    ("a.txt", b"x" * BLOCK + b"yz\0", {}, NO_TEXT.format(f"NUL .*{BLOCK + 2}")),
    ("a.txt", "text\0more", AS_JSONL, NO_TEXT.format("NUL at offset 4")),
    (
        "a.txt",
        gzip.compress(b"text", mtime=0),
        {},
        r"not text but gzip .*; decompress it fi",
    ),
    ("part-0000", b"PAR1\0rows", {}, "is Parquet, but not by its name; rename it to"),
    ("a.parquet.gzip", b"PAR1\0rows", {}, "is Parquet, but not by its name; rename it"),
    # rows without text
    ("a.jsonl", '{"id": 1}\n', {"column": "id"}, "1: column 'id' holds a number, no"),
    ("a.jsonl", '{"a": 1}\n{"b": 2}', {}, "no column 'text'; .*: a, b"),
    (
        "a.jsonl",
        '{"text": "a", "text": "b"}\n',
        {},
        "an object has the key 'text' twice",
    ),
    ("a.jsonl", '[\n{"text": 1, "text": 2}]', {}, "an object has the key 'text' twice"),
    ("a.jsonl", HALF, {}, "line 4: column 'text' holds half a character"),
    *(
        ("a.jsonl", LINES + line, {}, r"l, line 61: cannot be read as jsonl")
        for line in ("{broken", "[1, 2]", '"text"')
    ),
    (
        "a.parquet",
        BYTES_COLUMN,
        {},
        "holds binary, bytes that .* not mark as UTF-8; wri",
    ),
    ("a.parquet", "just text", {}, r"a\.parquet: cannot be read as parquet"),
    *(
        ("a.json", f'{{"a": [{{"text": "x"}}], "b": {other}}}', {}, "2 groups of obj")
        for other in (
            '[{"text": "y"}]',
            '[{"text": "y"}, null]',
            '{"c": {"text": "y"}}',
        )
    ),
    # a name and a content or a setting that contradict
    ("a.jsonl", LINES, AS_TEXT, "t, but .*is jsonl by its name; leave d"),
    ("a.parquet", LINES, AS_JSONL, r"=jsonl, but .*a\.parquet is parquet by its n"),
    ("a.txt", LINES, {}, "JSON lines, but not by its name: set data.format=jsonl"),
    ("a.txt", '\ufeff{"text": "a"}\n{"text": "b"}\n', {}, LIKE_JSON),
    ("a.txt", '\n\n{"text": "a"}\n', {}, LIKE_JSON),
    ("a.txt", '{"text": "a"} \n{"text": "b"}\n', {}, LIKE_JSON),
    ("a.txt", '[{"text": "a"}]', {}, LIKE_JSON),
    ("a.txt", '[\n  {\n    "text": "a"\n  }\n]\n', {}, LIKE_JSON),
    ("a.txt", '{\n  "text": "a"\n}\n', {}, LIKE_JSON),
    ("a.txt", '{"text": "' + "a" * (1 << 22) + '"}\n', {}, LIKE_JSON),
    (
        "a.txt",
        "words",
        {"column": "body"},
        "data.column=body, but text files have no c",
    ),
    ("a.txt", "words", {"max_documents": 3}, r"=3, but .*a\.txt is a single text"),
    # text in something else
    *(
        (name, "words", {}, NAMED)
        for name in ("a.html", "a.ipynb", "a.warc", "a.TSV", "a.csv")
    ),
    ("a.tar", TAR, {}, r"a\.tar is a tar archive; unpack it"),
    ("a.tar.gz", gzip.compress(TAR, mtime=0), {}, r"a\.tar\.gz is a tar archive; unp"),
    ("a.txt", "<!DOCTYPE html><p>text</p>", {}, LIKE_MARKUP),
    ("a.txt", "\ufeff \n<html lang=en><p>text</p>", {}, LIKE_MARKUP),
    ("a.txt", "<?xml <p>text</p>", {}, LIKE_MARKUP),
    *(
        (name, POINTER, {}, "pointer to a file .*run `git lfs pull` in")
        for name in ("a.txt", "a.jsonl", "a.parquet")
    ),
    # compressed
    ("a.jsonl.gz", packed("gzip", '{"text": 5}\n'), {}, r"l\.gz, line 1: column"),
    ("a.jsonl.gz", packed("gzip", '{"b": "a"}\n'), {}, r"l\.gz: there is no col"),
    ("a.txt.gz", gzip.compress(b"caf\xe9", mtime=0), {}, r"a\.txt\.gz is not text"),
    ("a.csv.gz", packed("gzip", "text\nx\n"), {}, r"a\.csv\.gz is a table by its n"),
    ("a.arrow.gz", gzip.compress(b"x", mtime=0), {}, NAMED),
    ("a.gz", packed("gzip", rows("a")), {}, r"a\.gz looks like JSON lines"),
    ("a.jsonl.gz", gzip.compress(b"", mtime=0), {}, r"a\.jsonl\.gz has no text"),
    (
        "a.parquet.gz",
        gzip.compress(b"x", mtime=0),
        {},
        r"gz: cannot be read as parquet",
    ),
    ("a.parquet.gz", b"PAR1rows", {}, "is Parquet, and no gzip file; rename it"),
    ("a.txt.gz", packed("gzip", SQUARES)[:9000], {}, "file, or a damaged one .*again$"),
    (
        "a.txt.zst",
        packed("zstd", SQUARES)[:9000],
        {},
        "file, or a damaged one .*again$",
    ),
    ("a.txt.zst", "text", {}, "file, or a damaged one .*again$"),
    (
        "b.zst",
        LARGE_WINDOW,
        {},
        r"decompress it yourself: `zstd -d --long=31 .*b\.zst`$",
    ),
]


@pytest.mark.parametrize(("name", "content", "settings", "message"), REFUSED)
def test_a_file_that_is_not_the_text_it_seems_is_refused(
    tmp_path, name, content, settings, message
):
    write(tmp_path / "texts", {name: content})
    refused(tmp_path, message, tmp_path / "texts" / name, **settings)


IMAGES = (
    r"^2 files are not text: .*/img/photo\.png \(byte 0x89 at offset 0 is not UTF-8\)"
    r", .*/img/scan\.bz2 \(bzip2: byte 0xcb at offset 10 .*; convert them to UTF-8"
)
TWO_SAVES = "are shards of two saves of one data set"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"img/photo.png": b"\x89PNG\xff\0", "img/scan.bz2": bz2.compress(b"text")}
            | {"a.txt.gz": gzip.compress(b"packed", mtime=0), "b.txt": "words"},
            IMAGES,
        ),
        (
            {"a.jsonl": rows("abcd"), "z.jsonl": rows("abc", "body")},
            r"z\.jsonl: there is",
        ),
        (
            {"a.txt": "a", "a.txt.gz": gzip.compress(b"a", mtime=0)},
            r"a\.txt\.gz has the content of .*a\.txt by .*leave one",
        ),
        (
            {
                "a.txt.gz": gzip.compress(b"a", mtime=0),
                "a.txt.zst": packed("zstd", "a"),
            },
            r"a\.txt\.zst has the content of .*a\.txt\.gz by .*leave one",
        ),
        ({}, r"no file is in directory .*; correct the path"),
        # of many Parquet files the one without text, before other files are read
        *(
            ({"a.parquet": MANY, "b.txt": "words", "z.parquet": table}, message)
            for table, message in (
                (
                    pa.table({"body": ["a"], "id": [1]}),
                    "z.parquet: there is no column 'text'; valid for data.column: body,"
                    " id; .* data=mix",
                ),
                (
                    pa.table({"text": [1]}),
                    "z.parquet: column 'text' holds int64, not text; choose another",
                ),
                (TWICE, "z.parquet: several columns are named 'text'"),
            )
        ),
        *(
            ({f"train-{name}.parquet": TEXTS for name in names}, TWO_SAVES)
            for names in (
                ["00000-of-00001", "00000-of-00002"],
                ["00000-of-00002", "00001-of-00004"],
                [f"00000-of-00001-0123456789abcde{end}" for end in "ef"],
            )
        ),
    ],
)
def test_of_a_directory_the_file_that_is_refused_is_named(
    tmp_path, files, message, capfd
):
    folder = write(tmp_path / "texts", files)
    folder.mkdir(exist_ok=True)
    refused(tmp_path, message, folder)
    assert "shards" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.txt", r"there is no file .*none\.txt"),
        ("*.txt", r"no file matches .*\*\.txt"),
        (
            "my books/*.{txt,md}",
            r"list the patterns: \[.*books/\*\.txt,.*books/\*\.md\]$",
        ),
    ],
)
def test_missing_files_and_globs_without_match(tmp_path, name, message):
    refused(tmp_path, message, tmp_path / name)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
def test_a_validation_share_outside_zero_to_one(tmp_path, fraction):
    write(tmp_path, {"a.txt": "text"})
    source = TextSource((f"{tmp_path}/a.txt",))
    with pytest.raises(
        UserError, match=r"val_fraction=.*: expected a number between 0"
    ):
        prepared(source, tmp_path / "cache", val_fraction=fraction)


SHARDS = ("train-00001-of-00003", "train-00002-of-00003", "test-00000-of-00001")


@pytest.mark.parametrize(
    ("files", "line"),
    [
        (
            {"a.txt": "a", "b.txt": "b", "c.jsonl": rows("c"), ".DS_Store": b"\0\1"},
            r"2 formats are read: 2 text \(.*/a.txt\), 1 jsonl \(.*/c.jsonl\)",
        ),
        (
            {
                f"{i}.json": json.dumps({"body": "x", "comments": OBJECTS})
                for i in (1, 2)
            },
            "is read by its list 'comments', without 'body' beside that; data.column=bo",
        ),
        (
            {f"{name}.parquet": TEXTS for name in SHARDS},
            r"train-00001-of-00003.parquet belongs to 3 shards by its name, but only 2 ",
        ),
    ],
)
def test_a_choice_among_files_and_texts_is_said_once(tmp_path, capsys, files, line):
    assert read(tmp_path, write(tmp_path / "texts", files))
    assert len(re.findall(line, capsys.readouterr().err)) == 1


def test_a_file_that_links_reach_twice_counts_once_and_is_said(tmp_path, capsys):
    folder = write(tmp_path / "texts", {"a.txt": "a"})
    (folder / "loop").symlink_to(folder)
    (folder / "b.txt").symlink_to(folder / "a.txt")
    for paths, expected, line in (
        (
            [folder],
            "a.txt",
            rf"{folder}/b.txt is read already, as .*/a.t",
        ),
        ([folder / "b.txt"], "b.txt", "^$"),
        ([folder / "a.txt", f"{folder}/a*"], "a.txt", "once; data=mix data.weights="),
    ):
        assert expand(tuple(map(str, paths))) == [folder / expected]
        assert re.search(line, capsys.readouterr().err)


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_text_that_parquet_stores_by_differences(tmp_path, monkeypatch, encoding):
    path = tmp_path / "a.parquet"
    settings = {"use_dictionary": False, "column_encoding": {"text": encoding}}
    pq.write_table(pa.table({"text": TEXTS}), path, **settings)
    assert read(tmp_path, path) == TEXTS
    monkeypatch.setattr("trainer.data.parquet.TEXT_BYTES", 1 << 16)
    monkeypatch.setattr("trainer.data.parquet.MAX_EXPANSION", 1)
    pq.write_table(pa.table({"text": ["a" * 1000] * 5000}), path, **settings)
    refused(tmp_path, "bytes of text; if this is intended", path)


@pytest.mark.parametrize(
    "texts",
    [
        ["a" * 200_000] * 1000,  # one entry of a dictionary
        ["a" * 100_000_000],  # one compressed page
        [None] * 10_000_000,
    ],
    ids=["entry", "page", "nulls"],
)
def test_a_small_parquet_file_that_holds_much_is_refused(tmp_path, texts):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": pa.array(texts, pa.string())})
    pq.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 50_000
    message = r"a\.parquet: [\d,]+ bytes hold more than 67,108,864 bytes of text; if th"
    refused(tmp_path, message, path)


@pytest.mark.parametrize(("suffix", "codec"), [("gz", "gzip"), ("zst", "zstd")])
def test_a_compressed_bomb_is_refused(tmp_path, monkeypatch, suffix, codec):
    monkeypatch.setattr(compressed, "TEXT_BYTES", 1 << 20)
    write(tmp_path, {f"a.txt.{suffix}": packed(codec, "\0" * (2 << 20), parts=1)})
    message = r"bytes decompress to more than 1,048,576; if this is"
    refused(tmp_path, message, tmp_path / f"a.txt.{suffix}")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_compressed_file_without_the_column_is_named_as_the_user_named_it(tmp_path):
    write(tmp_path, {"a.jsonl.gz": packed("gzip", '{"secret": "a"}\n', parts=1)})
    source = TextSource((str(tmp_path / "a.jsonl.gz"),))
    no_column = pytest.raises(UserError, match="there is no column")
    with no_column as error, column_names_hidden():
        prepared(source, tmp_path / "cache")
    assert str(error.value).startswith(f"{tmp_path}/a.jsonl.gz: ")


@pytest.mark.parametrize("folder", ["a::b", "a[b]", "a b", "http:", "a,b=c", "{a,b}"])
def test_names_of_files_and_directories_mean_nothing(tmp_path, folder):
    names = {
        "x::y*.txt": "text",
        "x::y.jsonl": rows(["text"]),
        "x::y.parquet": ["text"],
    }
    write(tmp_path / folder, names)
    for name in names:
        assert read(tmp_path, tmp_path / folder / name) == ["text"]


def test_a_text_that_the_disk_had_no_room_for_is_not_kept(tmp_path):
    """Linux writes what fits, and refuses the next write only."""
    content = ("some text\n" * 1000).encode()
    path = write(tmp_path, {"a.txt.gz": gzip.compress(content)}) / "a.txt.gz"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(UserError, match="make room"):
            compressed.decompressed(path, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    cached = compressed.decompressed(path, tmp_path)
    written = cached.stat().st_mtime_ns
    assert compressed.decompressed(path, tmp_path).stat().st_mtime_ns == written
    for damage in (content[:4], content[:-1] + b"x"):
        cached.write_bytes(damage)
        assert compressed.decompressed(path, tmp_path).read_bytes() == content
    for other in (b"other", b"texts"):  # of the same name, and of the same size
        write(tmp_path, {"a.txt.gz": gzip.compress(other, mtime=0)})
        assert compressed.decompressed(path, tmp_path).read_bytes() == other


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_that_changes_while_it_is_read_is_not_kept(tmp_path, monkeypatch, name):
    """Its new text would be kept under the digest of the old one."""
    good = rows(f"good words {i}" for i in range(500))
    path = write(tmp_path, {name: good}) / name
    examine_ = corpus.examine

    def examine(*args, **settings):
        files = examine_(*args, **settings)
        path.write_text(good.replace("good", "evil"))
        return files

    monkeypatch.setattr(corpus, "examine", examine)
    source = TextSource((str(path),), name[2:].replace("txt", "text"))
    with pytest.raises(UserError, match=f"{name} changed while it was read; run again"):
        prepared(source, tmp_path / "cache")
    path.write_text(good)
    monkeypatch.undo()
    assert "evil" not in "".join(documents_of(prepared(source, tmp_path / "cache")))


@pytest.mark.parametrize("count", [2, 7])
def test_of_few_files_the_end_is_the_validation_part(count, tmp_path):
    texts = [f"{i}" * 300 for i in range(count)]
    files = {f"few/{i}.txt": text for i, text in enumerate([*texts, ""])}
    write(tmp_path, files | {"few.jsonl": rows(texts)})
    joined, cut = "".join(texts), int(300 * count * 0.9)
    for name in ("few", "few.jsonl"):
        manifest = prepared(TextSource((f"{tmp_path}/{name}",)), tmp_path / "cache")
        assert "".join(documents_of(manifest, "train")) == joined[:cut]
        assert "".join(documents_of(manifest, "val")) == joined[cut:]


def test_links_to_what_holds_them_are_not_followed(tmp_path):
    """Each of two would double the paths, 40 times."""
    (tmp_path / "a.txt").write_text("a")
    for name in ("one", "two"):
        (tmp_path / name).symlink_to(tmp_path)
    assert expand((str(tmp_path),)) == [tmp_path / "a.txt"]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_files_of_holes_are_refused(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(
        gzip.compress(b"some text", mtime=0) if name.endswith("gz") else b"text"
    )
    os.truncate(path, 1 << 40)
    with pytest.raises(UserError, match=f"{name} has .* but only .* are stored"):
        prepare(TextSource((str(path),)), "byte", tmp_path / "cache")


def test_a_directory_of_the_cache_under_a_name_of_another_is_refused(tmp_path):
    directories = []
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name} text")
        source = TextSource((str(tmp_path / f"{name}.txt"),))
        directories.append(prepare(source, "byte", tmp_path / "cache"))
    a, b = directories
    b.rename(tmp_path / "b")
    a.rename(b)
    with pytest.raises(UserError, match=f"{b.name} holds other data"):
        prepare(source, "byte", tmp_path / "cache")
