"""Data sets that package `datasets` reads: what is read exactly, said, or refused."""

import bz2
import importlib
import io
import lzma
import re
import socket
import tarfile
import zipfile

import datasets
import pyarrow as pa
import pytest
from corpora import (
    check_positions,
    directories_as_hub,
    documents_of,
    prepared,
    read,
    rows,
    write,
)

from trainer.data import HubSource
from trainer.data.corpus import open_corpus
from trainer.data.datasets_patches import check_is_own
from trainer.data.hub_data import hub_errors, load_hub, open_builder
from trainer.errors import UserError

TEXTS = ["one", "two", "", "four"]
AS_CATEGORIES = pa.table(
    {"text": pa.array(TEXTS).cast(pa.dictionary(pa.int32(), "utf8"))}
)


@pytest.fixture(autouse=True)
def hub(tmp_path, monkeypatch):
    directories_as_hub(monkeypatch, tmp_path / "hf")


def read_hub(tmp_path, folder, *, streaming=False, **settings):
    if streaming:
        settings |= {"streaming": True, "max_documents": 9}
    return read(HubSource(str(folder), **settings), tmp_path / "cache")


def refused(tmp_path, message, folder="set", **settings):
    with pytest.raises(UserError, match=message) as error:
        read_hub(tmp_path, tmp_path / folder, **settings)
    assert "\n" not in str(error.value)


def tar(member):
    """The bytes of a tar archive of one file without content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(member))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("files", "reader"),
    [
        ({"a.png": b"pixels", "metadata.csv": "file_name,text\na.png,NA\n"}, "image"),
        ({"train/task.toml": "", "train/instruction.md": "# canary\nb"}, "har"),
        ({"a.csv": "text\nNA\n"}, "csv"),
        ({"a.tar": tar("a.txt")}, "webdataset"),
        ({"data.arrow": b"ARROW1"}, "arrow"),
    ],
    ids=["images", "harbor", "csv", "tar", "arrow"],
)
def test_a_format_whose_texts_are_not_checked_is_refused(tmp_path, files, reader):
    write(tmp_path / "set", files)
    refused(
        tmp_path, rf"`datasets` reads it as {reader}\w*, and may change or drop tex"
    )


NO_ROWS = pa.table({"text": pa.array([], "utf8")})


def zipped(files):
    """The bytes of a zip file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


FILTER = 'filters=[[text, "==", b]]'
READ = {
    "a file without rows": (
        {"train-1.parquet": NO_ROWS, "train-2.parquet": TEXTS},
        TEXTS,
    ),
    "categories": ({"b.parquet": AS_CATEGORIES}, TEXTS),
    "numbers beside texts": (
        {"a.jsonl": '{"text": "1", "n": 1}\n{"text": "one", "n": ""}\n'},
        ["1", "one"],
    ),
    "a list": ({"a.json": '[{"text": "a"}]'}, ["a"]),
}


@pytest.mark.parametrize("kind", READ)
def test_texts_are_read_as_they_are_spelled(tmp_path, kind):
    files, texts = READ[kind]
    assert read_hub(tmp_path, write(tmp_path / "set", files)) == texts


FIRST = {"train-1.jsonl": '{"text": "one", "n": 1}\n'}
NO_TEXT = "column 'text' holds {}, not text"
SURROGATE = "The surrogate pair in string is invalid"
ELSEWHERE = "takes .*{} for its own data, which is elsewhere; correct its README.md"


def settings_of(suffix, setting):
    """A README.md with a setting for the files of a suffix."""
    return (
        f'---\nconfigs:\n- config_name: default\n  data_files: "*.{suffix}"\n'
        f"  {setting.replace('=', ': ', 1)}\n---\n"
    )


REFUSED = [
    # texts that `datasets` would write anew
    (
        {"a.parquet": pa.table({"text": pa.nulls(2)}), "b.parquet": AS_CATEGORIES},
        "cast array of type dictionary.* to null; data=text data.paths=",
    ),
    ({"a.jsonl": '{"text": "two"}\n{"text": 3}\n'}, NO_TEXT.format("a mix of types")),
    ({"a.json": '[{"text": "a"}, {"text": "b\\ud83d"}]'}, SURROGATE),
    ({"a.json": '{"n": 1, "text": "a"}\n{"n": "", "text": "b\\ud83d"}\n'}, SURROGATE),
    (
        {"a.json": '[{"text": "a", "text": "b"}]'},
        "an object has the key 'text' twice",
    ),
    (FIRST | {"train-2.jsonl": '{"n": 2, "text": 7}'}, NO_TEXT.format("int64")),
    (
        FIRST | {"train-2.jsonl": '{"n": 2, "text": {"a": 1}}'},
        NO_TEXT.format("struct"),
    ),
    (
        FIRST | {"train-2.jsonl": '{"n": 2, "text": "2020-01-01T00:00"}'},
        "holds timestamp.*reads dates of JSON as text",
    ),
    (
        FIRST | {"train-2.jsonl": '{"n": 2}'},
        r"there is no column 'text'; valid for data\.column: n$",
    ),
    (
        {"train-1.parquet": ["one"], "train-2.parquet": pa.table({"text": [1.5]})},
        NO_TEXT.format("double"),
    ),
    *(
        (
            {f"a.{suffix}": ["a"] if suffix == "parquet" else "{}"}
            | {"README.md": settings_of(suffix, setting)},
            rf"the README.md sets {setting}, by which texts or characters may be lost",
        )
        for suffix, setting in (
            ("parquet", "on_bad_files=skip"),
            ("txt", "encoding_errors=ignore"),
            ("jsonl", "encoding_errors=replace"),
        )
    ),
    *(
        ({name: content}, rf"{name} may lose texts, .*; valid: \.json, ")
        for name, content in (
            ("a.jsonl.bz2", bz2.compress(rows("a").encode())),
            ("a.jsonl.xz", lzma.compress(rows("a").encode())),
            ("a.zip", zipped({"train/a.jsonl": rows("a"), "__a.jsonl": rows("b")})),
        )
    ),
    ({"a.txt": "one\n\0\0\0\nthree"}, "a text holds NUL, as where a file was damaged"),
    # files elsewhere
    *(
        (
            {
                "../secret.txt": "a",
                "a.txt": "a",
                "../set2/a.txt": "a",
                "README.md": "---\nconfigs:\n- config_name: default\n  data_files:\n"
                f"  - split: train\n    path: {path}\n---\n",
            },
            message,
        )
        for path, message in (
            ("../secret.txt", ELSEWHERE.format("secret.txt")),
            ("../set2/a.txt", ELSEWHERE.format("set2/a.txt")),
            ("http://localhost:1/a.txt", ELSEWHERE.format("localhost:1/a.txt")),
        )
    ),
]


@pytest.mark.parametrize(("files", "message"), REFUSED)
@pytest.mark.parametrize("streaming", [False, True])
def test_what_would_be_read_otherwise_is_refused(tmp_path, files, message, streaming):
    write(tmp_path / "set", files)
    refused(tmp_path, message, streaming=streaming)


def test_a_server_that_a_readme_names_is_not_asked(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"webhdfs://127.0.0.1:{server.getsockname()[1]}/x.csv"
        readme = f"---\nconfigs:\n- config_name: default\n  data_files: {url}\n---\n"
        write(tmp_path / "set", {"a.csv": "text\na\n", "README.md": readme})
        refused(tmp_path, ELSEWHERE.format(url))
        server.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody waits
            server.accept()


def test_aliases_of_a_readme_that_stand_for_millions_are_refused(tmp_path):
    levels = [f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]" for i in range(9)]
    lines = ["---", "a0: &a0 [x]", *levels, "configs:", "- data_files: [*a9]", "---"]
    write(tmp_path / "set", {"a.csv": "text\na\n", "README.md": "\n".join(lines)})
    refused(tmp_path, "aliases in its README.md stand for more than 1,048,576 values")


@pytest.mark.parametrize("streaming", [False, True])
def test_no_file_is_read_twice_by_its_patterns(tmp_path, streaming):
    paths = '{split: train, path: [a.jsonl, "*.jsonl"]}'
    readme = f"---\nconfigs:\n- config_name: default\n  data_files: [{paths}]\n---\n"
    write(tmp_path / "set", {"a.jsonl": rows("a"), "README.md": readme})
    message = r"README.md names .*a\.jsonl by several patterns, and it would be read"
    refused(tmp_path, message, streaming=streaming)
    write(tmp_path / "set", {"README.md": readme.replace("a.jsonl, ", "")})
    assert read_hub(tmp_path, tmp_path / "set", streaming=streaming) == ["a"]


@pytest.mark.parametrize(
    "file",
    [
        "hf://datasets/you/private/a.csv",
        "hf://datasets/own/set@main/../../../you/private/a.csv",
        "/etc/passwd",
        "http://localhost/a.csv",
        "hf://datasets/own/set@main/zip://a.csv::https://localhost/a.zip",
    ],
)
def test_a_file_elsewhere_is_not_the_data_sets_own(monkeypatch, file):
    monkeypatch.undo()
    check_is_own("own/set", "hf://datasets/own/set@main/data/a.csv")
    with pytest.raises(UserError, match=ELSEWHERE.format(".*")):
        check_is_own("own/set", file)


def test_a_version_of_datasets_that_reads_json_otherwise_is_refused(
    tmp_path, monkeypatch
):
    write(tmp_path / "set", {"a.json": '[{"text": "a"}]'})
    module = importlib.import_module("datasets.packaged_modules.json.json")
    loads = module.ujson_loads
    assert read_hub(tmp_path, tmp_path / "set") == ["a"]
    assert module.ujson_loads is loads
    monkeypatch.delattr(module, "ujson_loads")
    refused(tmp_path, r"reads json in a way .* datasets==5\.2\.0")


def test_rows_that_a_readme_leaves_out_are_said(tmp_path, capsys):
    write(tmp_path / "set", {"a.parquet": ["a", "b"]})
    write(tmp_path / "set", {"README.md": settings_of("parquet", FILTER)})
    assert read_hub(tmp_path, tmp_path / "set") == ["b"]
    line = "its README.md leaves out rows, by filters=[['text', '==', 'b']]"
    assert line in capsys.readouterr().err


def test_lines_that_become_documents_are_said(tmp_path, capsys):
    folder = write(tmp_path / "set", {"train.txt": "one\nmore\n"})
    assert read_hub(tmp_path, folder) == ["one", "more"]
    line = f"data.name={folder}: `datasets` makes each line a document"
    assert capsys.readouterr().err.count(line) == 1


def test_a_table_that_another_program_left_of_a_set_of_the_hub_is_not_taken(tmp_path):
    """`datasets` writes the number as a text there."""
    files = {"train-a.jsonl": rows(TEXTS), "train-b.jsonl": '{"text": 7}\n'}
    source = HubSource(str(write(tmp_path / "set", files)))
    assert "7" in datasets.load_dataset(source.name)["train"]["text"]
    of_the_hub = open_builder(source, "content")
    with pytest.raises(UserError, match="'text' holds int64"), hub_errors(source):
        load_hub(source, of_the_hub)


def test_a_table_that_lost_its_end_in_the_cache_is_not_taken(tmp_path):
    """As after a power failure: `datasets` takes zeros for the end of a table."""
    folder = write(tmp_path / "set", {"a.jsonl": rows(["text"] * 2500)})
    assert len(read_hub(tmp_path, folder)) == 2500
    [table] = (tmp_path / "hf").rglob("*.arrow")
    content = table.read_bytes()
    second_batch = content.index(b"\xff\xff\xff\xff", len(content) // 2)
    table.write_bytes(content[:second_batch] + bytes(len(content) - second_batch))
    refused(tmp_path, r"table of split train in .* of 2,500 rows; remove that dir")


def test_a_set_of_the_hub_that_changed_is_not_continued(tmp_path):
    texts = [f"document {i}" for i in range(600)]
    source = HubSource(str(write(tmp_path / "set", {"a.jsonl": rows(texts)})))
    check_positions(open_corpus(source, tmp_path))
    first = next(open_corpus(source, tmp_path).read(None))
    of_earlier_versions = first.position["state"]
    [rest, *_] = open_corpus(source, tmp_path).read(of_earlier_versions)
    assert rest.texts[0] == texts[len(first.texts)]
    write(tmp_path / "set", {"a.jsonl": rows([*texts, "one more"])})
    with pytest.raises(UserError, match=r"has changed since .* data\.revision="):
        next(open_corpus(source, tmp_path).read(first.position))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_position_of_streaming_is_none_of_a_table(tmp_path, streaming):
    texts = [f"document {i}" for i in range(600)]
    folder = write(tmp_path / "set", {"a.jsonl": rows(texts), "b.jsonl": rows(texts)})

    def corpus_of(*, streaming):
        source = HubSource(str(folder), streaming=streaming, max_documents=1100)
        return open_corpus(source, tmp_path)

    first = next(corpus_of(streaming=streaming).read(None))
    [rest, *_] = corpus_of(streaming=streaming).read(first.position)
    assert rest.texts[0] == texts[len(first.texts)]
    message = f"in part with data.streaming={str(streaming).lower()}, by"
    with pytest.raises(UserError, match=re.escape(message)):
        next(corpus_of(streaming=not streaming).read(first.position))


def test_an_unknown_column_a_directory_without_files_and_an_unknown_split(tmp_path):
    write(tmp_path / "set", {"train.jsonl": '{"body": "a", "id": 1}\n'})
    message = r"there is no column 'text'; valid for data\.column: body, id$"
    refused(tmp_path, message, streaming=True)
    refused(tmp_path, r"data set '.*none', split 'train': Couldn't find", "none")
    write(tmp_path / "set", {"train.jsonl": '{"text": "a"}\n'})
    settings = {"split": "trian", "streaming": True}
    refused(tmp_path, r"split 'trian': .*trian.*train", **settings)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        # tests run offline
        ("a/b", {}, r"data set 'a/b' cannot be reached .*data=prepared"),
        # `datasets` reads the working directory, or the directory, then
        ("text", {}, "data.name=text is a file format"),
        ("own/set", {}, r"own/set is a path, .*; data=text data\.paths=\[own/set\] re"),
        ("a/b", {"streaming": True}, "streaming a/b needs an end: set data.max_docum"),
    ],
)
def test_a_name_that_is_no_data_set(tmp_path, monkeypatch, name, settings, message):
    monkeypatch.undo()
    monkeypatch.chdir(write(tmp_path, {"a.txt": "private", "own/set/a.jsonl": "{}"}))
    with pytest.raises(UserError, match=message):
        read(HubSource(name, **settings), tmp_path / "cache")


@pytest.mark.parametrize("streaming", [False, True])
def test_max_documents_and_max_tokens_end_a_set(tmp_path, streaming):
    texts = [f"document {i}" for i in range(90)]
    parts = enumerate((texts[:30], texts[30:60], texts[60:]))
    files = {f"train-{k}.jsonl": rows(part) for k, part in parts}
    folder = str(write(tmp_path / "set", files))
    source = HubSource(folder, streaming=streaming, max_documents=70)
    assert read(source, tmp_path / "cache") == texts[:70]
    source = HubSource(folder, streaming=streaming, max_tokens=500)
    manifest = prepared(source, tmp_path / "cache", shard_bytes=300)
    count, size = 0, 0
    while size < 500:
        size += len(texts[count]) + 1
        count += 1
    assert sorted(documents_of(manifest)) == sorted(texts[:count])
