"""Data sets that package `datasets` reads: what is read exactly, said, or refused."""

import bz2
import gzip
import importlib
import io
import lzma
import os
import re
import socket
import tarfile
import zipfile

import datasets
import pyarrow as pa
import pytest
from corpora import check_positions, documents_of, prepared, read, rows, write

from trainer.data import HubSource, corpus
from trainer.data.corpus import open_corpus
from trainer.data.datasets_patches import check_is_own
from trainer.data.hub_data import hub_errors, load_hub, open_builder
from trainer.errors import UserError

TEXTS = ["one", "two", "", "four"]
AS_CATEGORIES = pa.table(
    {"text": pa.array(TEXTS).cast(pa.dictionary(pa.int32(), "utf8"))}
)


@pytest.fixture(autouse=True)
def cache_of_datasets(tmp_path, monkeypatch):
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))


def read_hub(tmp_path, folder, *, streaming=False, **settings):
    if streaming:
        settings |= {"streaming": True, "max_documents": 9}
    return read(HubSource(str(folder), **settings), tmp_path / "cache")


def refused(tmp_path, message, folder="set", **settings):
    with pytest.raises(UserError, match=message) as error:
        read_hub(tmp_path, tmp_path / folder, **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("files", "name", "column"),
    [
        (
            {"a.png": b"pixels", "metadata.csv": "file_name,text\na.png,NA\n"},
            "image",
            "text",
        ),
        (
            {"train/task.toml": "", "train/instruction.md": "# canary\nb"},
            "har",
            "instruction",
        ),
    ],
    ids=["pandas drops NA", "first lines are cut"],
)
def test_a_format_whose_texts_are_not_checked_is_refused(tmp_path, files, name, column):
    write(tmp_path / "set", files)
    message = rf"`datasets` reads it as {name}\w+, and may change or drop texts"
    refused(tmp_path, message, column=column)


NO_ROWS = pa.table({"text": pa.array([], "utf8")})
LONG = "x" * 200_000
FILTER = 'filters=[[text, "==", b]]'
FEATURES = """---
dataset_info:
  features:
  - {name: id, dtype: int64}
  - {name: text, dtype: string}
---
"""


def zipped(files):
    """The bytes of a zip file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


CSV_SETTINGS = """---
configs:
- config_name: default
  data_files: train.csv
  {}
---
"""
READ = {
    "quotes, line ends and blank lines": (
        {"train.csv": '\ufeffid,text\r\n1,"a\r\nb, ""c"""\r\n\r\n2,d "e"\r\n'},
        ['a\r\nb, "c"', 'd "e"'],
    ),
    "a field of 200,000 characters": ({"train.csv": f"text\n{LONG}\n"}, [LONG]),
    "a CSV file without rows": (
        {"train-1.csv": "id,text\n", "train-2.csv": "text\na\n", "train-3.csv": ""},
        ["a"],
    ),
    "a file without rows": (
        {"train-1.parquet": NO_ROWS, "train-2.parquet": TEXTS},
        TEXTS,
    ),
    "an archive of one split": (
        {"a.zip": zipped({"train/a.jsonl": rows("a"), "train/dev.jsonl": rows("b")})},
        ["a", "b"],
    ),
    "tabs": ({"train.tsv": 'id\ttext\n1\t"a\n""b"""\n2\tc,d\n'}, ['a\n"b"', "c,d"]),
    "a README.md without quotes": (
        {"train.csv": 'text\n"a\n', "README.md": CSV_SETTINGS.format("quoting: 3")},
        ['"a'],
    ),
    "a README.md whose number is a text, and whose UTF-8 has a mark": (
        {
            "train.csv": '\ufeff"a,1\n',
            "README.md": CSV_SETTINGS.format(
                "names: [text, id]\n  quoting: '3'\n  encoding: utf-8"
            ),
        },
        ['"a'],
    ),
    "a README.md with names": (
        {"train.csv": "1,a\n", "README.md": CSV_SETTINGS.format("names: [id, text]")},
        ["a"],
    ),
    "categories": ({"b.parquet": AS_CATEGORIES}, TEXTS),
    "numbers beside texts": (
        {"a.jsonl": '{"text": "1", "n": 1}\n{"text": "one", "n": ""}\n'},
        ["1", "one"],
    ),
    "a list": ({"a.json": '[{"text": "a"}]'}, ["a"]),
    "columns of other types": (
        {
            "a.csv": "id,text\n1,one\n",
            "b.csv": "text,id\ntwo,x\n",
            "README.md": FEATURES,
        },
        ["one", "two"],
    ),
    "no empty fields": (
        {"train.csv": "text\nNA\nnull\nNone\n007\nsome text\n"},
        ["NA", "null", "None", "007", "some text"],
    ),
    "numbers": (
        {"train.csv": "n,text\n1,007\n1,1e5\n1,3.10\n"},
        ["007", "1e5", "3.10"],
    ),
    "truth": (
        {"train-0.csv": "n,text\n1,one\n", "train-1.csv": "n,text\n1,True\n1,FALSE\n"},
        ["one", "True", "FALSE"],
    ),
}


@pytest.mark.parametrize("kind", READ)
def test_texts_are_read_as_they_are_spelled(tmp_path, kind):
    files, texts = READ[kind]
    assert read_hub(tmp_path, write(tmp_path / "set", files)) == texts


FIRST = {"train-1.jsonl": '{"text": "one", "n": 1}\n'}
FIRST_CSV = {"train-1.csv": "text,label\nsome,1\n"}
NO_TEXT = "column 'text' holds {}, not text"
FIELDS = r"{}, line {}: the number of fields is {}, of columns {}; put a field that "
ROWS_OF_TABS = 'id\ttext\n1\t"Hello\n2\tmid\n3\tbye"\n4\tx\n'
CARRIAGE_RETURN = r"line {}: new-line character seen in unquoted field; put"


def csv(data, message):
    """A CSV file, and the message that refuses it."""
    return {"train.csv": data}, message


def fields(name, line, actual, expected):
    """The message of a row with another number of fields than its header."""
    return FIELDS.format(name, line, actual, expected)


SAVES = {f"train-00000-of-0000{i}.parquet": TEXTS for i in "12"}
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
    (
        {"a.zip": zipped({"train/a.jsonl": rows("a"), "test/a.jsonl": rows("b")})},
        "a.zip holds files of test and train, which .* reads as one split; unpack it",
    ),
    (FIRST | {"train-2.jsonl": '{"n": 2, "text": 7}'}, NO_TEXT.format("int64")),
    (
        FIRST | {"train-2.jsonl": '{"n": 2, "text": {"a": 1}}'},
        NO_TEXT.format("struct.*"),
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
    csv("text\nhalf a, half b\nhalf c, half d\n", fields("train.csv", 2, 2, 1)),
    csv("label,text\n1,half a, half b\n", fields("train.csv", 2, 3, 2)),
    (
        FIRST_CSV | {"train-2.csv": "text\nhalf a, half b\nwithout a comma\n"},
        fields("train-2.csv", 2, 2, 1),
    ),
    (
        FIRST_CSV | {"train-2.csv": "text,label\nhalf a, half b,1\n"},
        fields("train-2.csv", 2, 3, 2),
    ),
    # as pandas numbers rows, so that it took these fields for an index
    csv("id,text\n0,hello, world\n1,foo, bar\n", fields("train.csv", 2, 3, 2)),
    csv("id,text\n0,hello,\n1,foo,\n", fields("train.csv", 2, 3, 2)),
    csv('id,text\n1,"a\nb"\n\n2\n', fields("train.csv", 5, 1, 2)),
    csv("id,text\n1,hello\rworld\n", CARRIAGE_RETURN.format(2)),
    csv("text\nhello\rworld\n", CARRIAGE_RETURN.format(2)),
    csv('id,text\n1,"say \\"hi\\", now"\n', "line 2: ',' expected after"),
    csv('id,text\n1,"open\n2,more\n', "line 2: unexpected end of data; put"),
    csv("text,text\na,b\n", "train.csv: several columns are named 'text'; rename"),
    ({"train.csv": b"text\n\xe9\n"}, "train.csv: .*codec.*; convert it to UTF-8$"),
    ({"train.tsv": ROWS_OF_TABS}, "line 2: quotes join 3 lines, most of which may be"),
    ({"train.tsv": 'id\ttext\n1\t"a\n2\tb\n\n3\tc"\n'}, "line 2: quotes join 4 lines"),
    *(
        (
            {"train.csv": "text\na\n", "README.md": CSV_SETTINGS.format(setting)},
            rf"train.csv: the README.md sets {setting.split(':')[0]}, which data=hf",
        )
        for setting in ("nrows: 1", "skiprows: 1", "header: 1")
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
    csv("text\na\n\0\0", "train.csv: a line holds NUL, as where a file was damaged"),
    ({"a.txt": "one\n\0\0\0\nthree"}, "a text holds NUL, as where a file was damaged"),
    (SAVES, "are shards of two saves of one data set"),
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


def test_a_link_is_followed_nowhere_and_no_file_is_read_twice(tmp_path):
    folder = write(tmp_path / "set", {"b.parquet": TEXTS})
    (folder / "c.parquet").symlink_to(folder / "b.parquet")
    refused(tmp_path, r"c.parquet is .*b.parquet by a link, and wou")
    (folder / "c.parquet").unlink()
    (folder / "more").symlink_to(tmp_path)
    refused(tmp_path, r"more is a link to a directory, which data=")
    (folder / "more").unlink()
    (folder / "d.parquet").symlink_to("../blobs/d")
    refused(tmp_path, r"d.parquet is a link to ../blobs/d, where no file can be read")


def tar(mode, member):
    """The bytes of a tar archive of one file without content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        archive.addfile(tarfile.TarInfo(member))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tar", tar("w", "a.txt"), "reads it as webdataset, and may"),
        ("a.tar.gz", tar("w:gz", "a.txt"), "reads it as webdataset, and may"),
        ("a.jsonl.tar", tar("w", "a.jsonl"), r"a\.jsonl\.tar is a tar arch.*; unpack"),
        ("a.jsonl.bz2", bz2.compress(rows("a").encode()), r"2 is bzip2: .*decompress"),
        ("a.jsonl.xz", lzma.compress(rows("a").encode()), r"z is xz: .*; decompress"),
    ],
)
def test_a_format_whose_reader_takes_damage_for_the_end_is_refused(
    tmp_path, name, content, message
):
    """One bit of the header of a file or of a stream ends the archive."""
    write(tmp_path / "set", {name: content})
    refused(tmp_path, message)


def test_no_file_is_read_twice_by_its_names_or_patterns(tmp_path, monkeypatch):
    packed = gzip.compress(rows("a").encode())
    write(tmp_path / "set", {"a.jsonl": rows("a"), "a.jsonl.gz": packed})
    refused(tmp_path, r"a\.jsonl\.gz has the content of .*a\.jsonl by its name")
    (tmp_path / "set" / "a.jsonl.gz").unlink()
    paths = '{split: train, path: [a.jsonl, "*.jsonl"]}'
    readme = f"---\nconfigs:\n- config_name: default\n  data_files: [{paths}]\n---\n"
    write(tmp_path / "set", {"README.md": readme})
    message = r"README.md names .*a\.jsonl by several patterns, and it would be read"
    refused(tmp_path, message)
    refused(tmp_path, message, streaming=True)
    write(tmp_path / "set", {"README.md": readme.replace("a.jsonl, ", "")})
    (tmp_path / "link").symlink_to("set")
    monkeypatch.chdir(tmp_path)
    for name in (tmp_path / "set", "set", "./set/", "link", tmp_path / "link"):
        assert read_hub(tmp_path, name) == ["a"]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        (".", "http://localhost/a.csv"),
        (".", "zip://a.csv::a.zip"),
        ("own/set", "hf://datasets/you/private/a.csv"),
        ("own/set", "hf://datasets/own/set@main/../../../you/private/a.csv"),
        ("own/set", "/etc/passwd"),
    ],
)
def test_a_file_elsewhere_is_not_the_data_sets_own(name, file):
    check_is_own("own/set", "hf://datasets/own/set@main/data/a.csv")
    check_is_own(".", "data/a.csv")
    with pytest.raises(UserError, match=ELSEWHERE.format(".*")):
        check_is_own(name, file)


def test_a_file_that_becomes_another_split_is_another_content(tmp_path):
    files = {f"train-{name}.jsonl": f'{{"text": "{name}"}}\n' for name in "ab"}
    source = HubSource(str(write(tmp_path / "set", files)))
    first_fingerprint = open_corpus(source, tmp_path / "cache").fingerprint
    file = tmp_path / "set" / "train-b.jsonl"
    file.rename(file.with_name("validation-b.jsonl"))
    assert open_corpus(source, tmp_path / "cache").fingerprint != first_fingerprint


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


def saved_to_disk(folder, texts=TEXTS, **settings):
    """Save texts, and return them as `load_from_disk` does."""
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder, **settings)
    return datasets.load_from_disk(folder)


@pytest.mark.parametrize(
    ("splits", "change"),
    [(False, "map"), (True, "map"), (True, "fewer"), (False, "cache")],
)
def test_files_that_are_no_part_of_a_saved_data_set_are_refused(
    tmp_path, capsys, splits, change
):
    folder = tmp_path / "set"
    place = folder / "train" if splits else folder
    if splits:
        write(folder, {"dataset_dict.json": '{"splits": ["train"]}'})
    saved = saved_to_disk(place, num_shards=2)
    assert read_hub(tmp_path, folder) == TEXTS
    assert "leaves out" not in capsys.readouterr().err
    if change == "fewer":
        saved_to_disk(place, TEXTS[:1])
        name = "data-00000-of-00002"
    else:
        saved.map(lambda row: {"text": row["text"].upper()})
        name = "cache-.*"
    if change == "cache":  # as in the directories of `load_dataset`
        (place / "state.json").unlink()
    refused(tmp_path, rf"{place}/{name}.arrow is no part of .*; move it elsewhere$")


@pytest.mark.parametrize("names", [("a", "b"), ("train", "train_more")])
def test_saved_splits_that_would_be_read_as_one_are_refused(tmp_path, names):
    folder = tmp_path / "set"
    saved = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict(dict.fromkeys(names, saved)).save_to_disk(folder)
    first, second = names
    refused(
        tmp_path,
        f"reads {first} and {second} as one split, 'train'; choose one by"
        f" data.name={folder / first}$",
    )
    assert read_hub(tmp_path, folder / first) == TEXTS


@pytest.mark.parametrize("folder", ["a::b", "a[b]"])
def test_a_directory_whose_name_datasets_misreads_is_refused(tmp_path, folder):
    write(tmp_path / folder, {"x.parquet": ["row"] * 40})
    refused(tmp_path, r"data=text data\.paths=.*reads files of any", folder)


@pytest.mark.parametrize(
    "other",
    ["x::y.parquet", "x.jsonl", "__x/x.parquet", "x.jsonl.gz", "X.JSONL", "x"],
)
def test_files_that_datasets_leaves_out_are_said(tmp_path, capsys, other):
    names = ("train-a.parquet", "train-b.parquet", "test.parquet")
    documentation = ("LICENSE.txt", "card.md", "README", ".gitattributes")
    files = dict.fromkeys(names, TEXTS) | dict.fromkeys(documentation, "text")
    folder = write(tmp_path / "set", files)
    assert read_hub(tmp_path, folder)
    assert "leaves out" not in capsys.readouterr().err
    write(folder, {other: (folder / "test.parquet").read_bytes()})
    assert read_hub(tmp_path, folder)
    line = f"`datasets` leaves out {folder / other} (1 of 4 files); data=text"
    assert capsys.readouterr().err.count(line) == 1


def test_rows_that_a_readme_leaves_out_are_said(tmp_path, capsys):
    write(tmp_path / "set", {"a.parquet": ["a", "b"]})
    write(tmp_path / "set", {"README.md": settings_of("parquet", FILTER)})
    assert read_hub(tmp_path, tmp_path / "set") == ["b"]
    line = "its README.md leaves out rows, by filters=[['text', '==', 'b']]"
    assert line in capsys.readouterr().err


def test_a_set_that_changed_within_its_time_is_read_again(tmp_path, capsys):
    folder = tmp_path / "set"
    for text in ("one", "two"):
        write(folder, {"train.txt": f"{text}\nmore\n"})
        os.utime(folder / "train.txt", (1, 1))  # as `rsync --times` may do
        assert read_hub(tmp_path, folder) == [text, "more"]
    line = f"data.name={folder}: `datasets` makes each line a document; data=text"
    assert capsys.readouterr().err.count(line) == 2


def test_a_table_that_another_program_left_of_a_set_of_the_hub_is_not_taken(tmp_path):
    """`datasets` writes the number as a text there."""
    files = {"train-a.jsonl": rows(TEXTS), "train-b.jsonl": '{"text": 7}\n'}
    source = HubSource(str(write(tmp_path / "set", files)))
    assert "7" in datasets.load_dataset(source.name)["train"]["text"]
    of_the_hub = open_builder(source, (), "content")
    with pytest.raises(UserError, match="'text' holds int64"), hub_errors(source):
        load_hub(source, of_the_hub)


def test_a_set_of_the_hub_that_changed_is_not_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "local_files", lambda _: [])
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


def test_a_table_of_a_file_that_changed_meanwhile_is_not_taken_later(tmp_path):
    """The file is given its old content, and its old time of modification."""
    folder = write(tmp_path / "set", {"a.jsonl": rows("a")})
    os.utime(folder / "a.jsonl", (1, 1))
    opened = open_corpus(HubSource(str(folder)), tmp_path)
    for text in "ba":
        write(folder, {"a.jsonl": rows(text)})
        os.utime(folder / "a.jsonl", (1, 1))
        list(opened.read(None))
    assert read_hub(tmp_path, folder) == ["a"]


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
        # `datasets` reads the working directory then
        ("text", {}, "data.name=text is a file format"),
        ("a/b", {"streaming": True}, "streaming a/b needs an end: set data.max_docum"),
    ],
)
def test_a_name_that_is_no_data_set(tmp_path, monkeypatch, name, settings, message):
    monkeypatch.chdir(write(tmp_path, {"a.txt": "private"}))
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
