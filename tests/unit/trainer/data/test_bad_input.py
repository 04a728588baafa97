"""Whatever a user can get wrong about text: one message that names the thing and what
is valid; never a traceback."""

import bz2
import gzip
import re
from pathlib import Path

import pytest
import requests
import tiktoken

from trainer.assembly.data import build_data
from trainer.cli.prepare_data import command
from trainer.config.composition import compose_config
from trainer.data import HubSource, TextSource, prepare
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
        # rows without text
        (
            "a.jsonl",
            '{"id": 1}\n',
            {"column": "id"},
            "1: column 'id' holds a number, no",
        ),
        ("a.jsonl", '{"a": 1}\n{"b": 2}', {}, "no column 'text'; .*: a, b"),
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
        *(("a.txt", f"{line}\n" * 50, {}) for line in ("{not json}", "{{", "{a set}")),
        *(
            ("a.txt", f"{line}\n" * 50, {})
            for line in ("[1] A note", '["a"]', "[1, 2]")
        ),
    ],
)
def test_what_is_text_or_is_said_to_be_is_read(tmp_path, name, content, settings):
    source = TextSource((str(file(tmp_path, content, name)),), **settings)
    prepare(source, "byte", tmp_path / "cache")


def test_too_little_text_for_two_parts(tmp_path):
    source = TextSource((str(file(tmp_path, '{"text": "1"}\n', "a.jsonl")),))
    message = r"the train part of a is empty, with 1 documents and val_fraction=0.001"
    fails(source, tmp_path, message, val_fraction=0.001)


@pytest.mark.parametrize("name", ["img/photo.png", "broken.txt"])
def test_a_directory_with_something_else_is_told_all_of_it_and_what_takes_the_rest(
    tmp_path, name, capsys
):
    (tmp_path / "img").mkdir()
    file(tmp_path, b"\x89PNG\xff\0", name)
    file(tmp_path, bz2.compress(b"text"), "img/scan.bz2")
    file(tmp_path, gzip.compress(b"packed"), "a.txt.gz")
    for kind in ("txt", "jsonl", "parquet"):
        file(tmp_path, "words", f"b.{kind}")
    other = file(tmp_path.parent, "words", "other.txt")
    with pytest.raises(UserError, match="2 files are not text") as caught:
        open_corpus(TextSource((str(tmp_path), str(other))), tmp_path)
    assert f"{tmp_path / name} (byte 0x89 at offset 0 is not UTF-8)" in str(
        caught.value
    )
    assert (
        f"{tmp_path}/img/scan.bz2 (bzip2: byte 0xcb at offset 10 is not UTF-8)"
        in str(caught.value)
    )
    kinds = [f"{tmp_path}/**/*.{kind}" for kind in ("gz", "jsonl", "parquet", "txt")]
    # a pattern for broken.txt would take it again, so the others of that name are
    # listed
    kinds = [*kinds[:3], f"{tmp_path}/b.txt"] if name == "broken.txt" else kinds
    left = "convert them to UTF-8, or leave them out of data.paths, by patterns: "
    assert str(caught.value).endswith(
        f"{left}'data.paths=[{','.join([*kinds, str(other)])}]'"
    )
    assert "\n" not in str(caught.value)
    assert (
        command(
            [
                "data=text",
                f"data.paths=[{tmp_path},{other}]",
                f"data.cache_dir={tmp_path / 'cache'}",
                "data.tokenizer=byte",
            ]
        )
        == 2
    )
    told = capsys.readouterr().err
    assert told.startswith("error: 2 files are not text: ")
    assert told.endswith(f"{left}'data.paths=[{','.join([*kinds, str(other)])}]'\n")


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


def test_an_unknown_column_of_a_data_set_lists_the_columns(tmp_path):
    (tmp_path / "set").mkdir()
    file(tmp_path, '{"body": "a", "id": 1}\n', "set/train.jsonl")
    source = HubSource(str(tmp_path / "set"), streaming=True, max_documents=1)
    message = r"there is no column 'text'; valid for data\.column: body, id$"
    fails(source, tmp_path, message)


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


def test_files_that_name_their_column_otherwise_are_mixed_as_the_message_says(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name, column in (("a", "text"), ("b", "body")):
        file(
            tmp_path,
            "".join(f'{{"{column}": "{i} of {name}"}}\n' for i in range(99)),
            f"{name}.jsonl",
        )
        assert (
            command(
                [
                    "data=text",
                    f"data.paths=[{name}.jsonl]",
                    f"data.column={column}",
                    "data.tokenizer=byte",
                ]
            )
            == 0
        )
    settings = [
        "data=mix",
        "model.context=8",
        "train.batch_tokens=64",
        "data.tokenizer=byte",
    ]
    with pytest.raises(
        UserError,
        match=r"b\.jsonl: there is no column 'text'; .*; if files name their columns differently",
    ):
        build_data(compose_config([*settings, "data.sources=[a.jsonl,b.jsonl]"]))
    made = [
        line.partition(": ")[2]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("directory")
    ]
    actual = build_data(compose_config([*settings, f"data.sources=[{','.join(made)}]"]))
    assert {"of a", "of b"} <= set(re.findall("of [ab]", actual.validation_text(200)))


def parquet(path, **columns):
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns).to_parquet(path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"body": ["a"], "id": [1]},
            (
                "there is no column 'text'; valid for data.column: body, id; .*"
                " data=mix .*"
            ),
        ),
        (
            {"text": [1]},
            "column 'text' holds int64, not text; choose another data.column",
        ),
    ],
)
def test_of_many_parquet_files_the_one_without_text_is_named_and_nothing_else_said(
    tmp_path, columns, message, capfd
):
    for i in range(4):
        parquet(tmp_path / f"{i}.parquet", text=["words"] * 50, id=[1] * 50)
    parquet(tmp_path / "z.parquet", **columns)
    fails(
        TextSource((str(tmp_path / "*.parquet"),)),
        tmp_path,
        rf"^{re.escape(str(tmp_path))}/z\.parquet: {message}$",
    )
    assert capfd.readouterr() == ("", "")


def test_a_parquet_file_without_the_column_is_found_before_the_files_of_other_formats_are_read(
    tmp_path,
):
    for i in range(3):
        file(tmp_path, "words " * 50, f"{i}.txt")
    parquet(tmp_path / "z.parquet", body=["words"])
    read = open_corpus(TextSource((str(tmp_path),)), tmp_path).read
    with pytest.raises(UserError, match=r"z\.parquet: there is no column 'text'"):
        next(iter(read(None)))


@pytest.mark.parametrize(
    "bomb",
    [
        {"text": ["a" * 200_000] * 1000},  # one entry of a dictionary
        {"text": ["a" * 100_000_000]},  # one compressed page
        {"text": [None] * 10_000_000},
    ],
)
def test_a_small_parquet_file_that_holds_much_is_refused(tmp_path, bomb):
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema({"text": pyarrow.string()})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table(bomb, schema=schema), path, compression="zstd"
    )
    assert path.stat().st_size < 50_000
    fails(
        TextSource((str(path),)),
        tmp_path,
        r"a\.parquet: [\d,]+ bytes hold more than 67,108,864 bytes of text; if this is"
        " intended, give the text as jsonl",
    )


def test_a_hub_name_that_does_not_exist(tmp_path, monkeypatch):
    import datasets

    def answer(*_, **__):
        raise datasets.exceptions.DatasetNotFoundError(
            "Dataset 'a/b' doesn't exist on the Hub or cannot be accessed."
        )

    monkeypatch.setattr(datasets, "load_dataset_builder", answer)
    fails(
        HubSource("a/b"),
        tmp_path,
        r"there is no data set 'a/b' on the hub, or it needs a login .*correct"
        r" data\.name",
    )


def test_a_hub_that_cannot_be_reached(tmp_path):
    # tests run offline
    fails(
        HubSource("a/b"), tmp_path, r"data set 'a/b' cannot be reached .*data=prepared"
    )


def test_a_directory_that_does_not_exist_and_an_unknown_split(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "a"}\n')
    fails(
        HubSource(str(tmp_path / "none")),
        tmp_path,
        r"data set '.*none', split 'train': Couldn't find",
    )
    source = HubSource(
        str(tmp_path / "set"), split="trian", streaming=True, max_documents=1
    )
    fails(source, tmp_path, r"split 'trian': .*trian.*train")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("../secret.txt", "takes .*secret.txt for its own data, which is elsewhere"),
        ("{tmp_path}/secret.txt", "which is elsewhere; correct its README.md"),
        ("../set2/a.txt", "which is elsewhere"),
        ("http://localhost:1/a.txt", "split 'train': "),
    ],
)
def test_a_data_set_that_names_files_elsewhere(tmp_path, path, message):
    for name in ("secret.txt", "set/a.txt", "set2/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a")
    path = path.format(tmp_path=tmp_path)
    (tmp_path / "set" / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        f"  - split: train\n    path: {path}\n---\n"
    )
    fails(HubSource(str(tmp_path / "set")), tmp_path, message)


def test_texts_that_spell_nothing_are_no_empty_fields(tmp_path):
    rows = ["NA", "null", "None", "007", "some text"]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.csv").write_text("\n".join(["text", *rows]) + "\n")
    corpus = open_corpus(HubSource(str(tmp_path / "set")), tmp_path / "cache")
    assert [text for part in corpus.read(None) for text in part.texts] == rows


@pytest.mark.parametrize(
    ("before", "texts"),
    [([], ["007", "1e5", "3.10"]), (["one", "two"], ["True", "FALSE"])],
)
def test_numbers_of_a_csv_stay_as_they_are_spelled(tmp_path, texts, before):
    (tmp_path / "set").mkdir()
    for number, rows in enumerate(filter(None, [before, texts])):
        lines = ["label,text", *(f"1,{row}" for row in rows)]
        (tmp_path / "set" / f"train-{number}.csv").write_text("\n".join(lines) + "\n")
    corpus = open_corpus(HubSource(str(tmp_path / "set")), tmp_path / "cache")
    read = [text for part in corpus.read(None) for text in part.texts]
    assert read == [*before, *texts]


@pytest.mark.parametrize(
    ("streaming", "lines"),
    [
        (False, ["text", "half a, half b", "half c, half d"]),
        (True, ["text", "half a, half b", "without a comma"]),
        (True, ["text,label", "half a, half b,1"]),
        (False, ["label,text", "1,half a, half b"]),
    ],
)
def test_a_csv_whose_rows_have_more_fields_than_its_header(tmp_path, lines, streaming):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train-1.csv").write_text("text,label\nsome,1\n" * streaming)
    (tmp_path / "set" / "train-2.csv").write_text("\n".join(lines) + "\n")
    if not streaming:
        (tmp_path / "set" / "train-1.csv").unlink()
    source = HubSource(
        str(tmp_path / "set"),
        streaming=streaming,
        max_documents=9 if streaming else None,
    )
    fails(source, tmp_path, "^a row of the CSV file has more fields than its header")


def test_a_file_format_is_no_data_set(tmp_path, monkeypatch):
    """`datasets` reads the working directory then."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("private")
    fails(HubSource("text"), tmp_path, "data.name=text is a file format")


def test_streaming_without_end_is_refused(tmp_path):
    fails(
        HubSource("a/b", streaming=True),
        tmp_path,
        "streaming a/b needs an end: set data.max_documents or data.max_tokens",
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
