"""Files as people have them: of several formats, links, Parquet's kinds of text, JSON's
kinds of lists, compressed."""

import gzip
import json
import os
import resource

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import check_positions, documents_of, prepared, rows, write
from corpora import read as read_source

from trainer.data import TextSource, compressed, corpus
from trainer.data.corpus import HubSource, open_corpus
from trainer.data.files import expand
from trainer.data.preparation import prepare
from trainer.errors import UserError

TEXTS = ["one", "two", "", "four"]
MANY = [f"Document {i} has its own words, {i * i} of them." for i in range(60)]


def read(tmp_path, *paths, **settings):
    source = TextSource(tuple(map(str, paths)), **settings)
    return read_source(source, tmp_path / "cache")


def refused(tmp_path, message, *paths, **settings):
    with pytest.raises(UserError, match=message) as error:
        read(tmp_path, *paths, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_links_to_what_holds_them_are_not_followed(tmp_path):
    """Each of two would double the paths, 40 times."""
    (tmp_path / "a.txt").write_text("a")
    for name in ("one", "two"):
        (tmp_path / name).symlink_to(tmp_path)
    assert expand((str(tmp_path),)) == [tmp_path / "a.txt"]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_files_of_holes_are_refused(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"some text") if name.endswith("gz") else b"text")
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


def test_what_links_reach_twice_counts_once_and_is_said(tmp_path, capsys):
    folder = write(tmp_path / "texts", {"a.txt": "a"})
    (folder / "loop").symlink_to(folder)
    (folder / "b.txt").symlink_to(folder / "a.txt")
    assert expand((str(folder),)) == [folder / "a.txt"]
    output = capsys.readouterr().err
    expected = f"{folder / 'b.txt'} is read already, as {folder / 'a.txt'}, and is read"
    assert expected in output
    assert expand((str(folder / "b.txt"),)) == [folder / "b.txt"]
    assert capsys.readouterr().err == ""
    assert expand((str(folder / "a.txt"), f"{folder}/a*")) == [folder / "a.txt"]
    assert "a.txt, and is read once; data=mix data.weights=" in capsys.readouterr().err


def test_a_directory_of_mixed_files_is_read_whole_each_by_its_name(
    tmp_path, monkeypatch, capsys
):
    """In the home directory, with the documents below it and deeper, and a hidden
    file."""
    files = {f"{i:02}.txt": text for i, text in enumerate(MANY[:20])}
    files |= {"05b.jsonl": rows(MANY[20:40]), ".DS_Store": b"\0\1"}
    table = pa.table({"n": [0] * 20, "text": MANY[40:]})
    folder = write(tmp_path / "home/own", files | {"deeper/rest.parquet": table})
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    manifest = prepared(TextSource(("~/own",)), tmp_path / "cache")
    assert sorted(documents_of(manifest)) == sorted(MANY)
    assert manifest.splits["val"].documents > 0
    said = (
        f"3 formats are read: 20 text ({folder}/00.txt), 1 jsonl ({folder}/05b.jsonl)"
    )
    assert capsys.readouterr().err.count(said) == 1

    monkeypatch.setattr("trainer.data.corpus.DOCUMENTS_PER_READ", 7)
    monkeypatch.setattr("trainer.data.corpus.FILES_PER_READ", 6)
    for most in (20, 47):
        source = TextSource((str(folder),), max_documents=most)
        parts = check_positions(open_corpus(source, tmp_path))
        assert sum(len(part.texts) for part in parts) == most


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
def test_text_of_any_type_and_files_of_other_types_beside_it(tmp_path, kind):
    text = pa.array([*TEXTS[:2], None, TEXTS[3]], pa.string()).cast(kind)
    meta = pa.StructArray.from_arrays([pa.array(["x"] * 4)], names=["text"])
    files = {
        "a.parquet": pa.table({"text": pa.nulls(2), "n": [1, 2]}),
        "b.parquet": pa.table({"m": ["x"] * 4, "text": text}),
        "c.parquet": pa.table({"text": text[:0]}),
        "d/dot.parquet": pa.table({"meta": meta, "meta.text": text}),
    }
    write(tmp_path, files)
    assert read(tmp_path, f"{tmp_path}/*.parquet") == ["", "", *TEXTS]
    dot = tmp_path / "d/dot.parquet"  # no field of another column
    assert read(tmp_path, dot, column="meta.text") == TEXTS


def test_the_most_documents_are_the_same_of_files_and_of_rows(tmp_path):
    texts = ["", "one", "two"]
    files = {f"{i}.txt": text for i, text in enumerate(texts)}
    write(tmp_path, files | {"rows.jsonl": rows(texts)})
    for paths in (tmp_path / "*.txt", tmp_path / "rows.jsonl"):
        assert [t for t in read(tmp_path, paths, max_documents=2) if t] == ["one"]


def test_parquet_goes_on_where_it_was(tmp_path):
    write(tmp_path, {f"{k}.parquet": [f"{k}{i}" for i in range(600)] for k in "ab"})
    source = TextSource((f"{tmp_path}/*.parquet",), max_documents=1000)
    parts = check_positions(open_corpus(source, tmp_path / "cache"))
    everything = [text for part in parts for text in part.texts]
    assert everything == [f"a{i}" for i in range(600)] + [f"b{i}" for i in range(400)]


OBJECTS = [{"text": text} for text in TEXTS]
JSON = {
    "list": json.dumps(OBJECTS),
    "behind blank lines": "\n\n" + json.dumps(OBJECTS, indent=1),
    "object": json.dumps({"version": 1, "data": OBJECTS}),
    "pretty": json.dumps({"data": OBJECTS}, indent=2),
    "lines": rows(TEXTS),
    "mark": "\ufeff" + rows(TEXTS),
    "mark of a list": "\ufeff" + json.dumps(OBJECTS),
    "other keys": '{"other": 1, "text": "one"}\n' + rows(TEXTS[1:]),
    "lists": "".join(json.dumps(row | {"spans": [{"a": 1}]}) + "\n" for row in OBJECTS),
}


@pytest.mark.parametrize("form", JSON)
@pytest.mark.parametrize("suffix", ["json", "NDJSON"])
def test_json_in_the_forms_that_people_have(tmp_path, monkeypatch, form, suffix):
    monkeypatch.setattr("trainer.data.corpus.DOCUMENTS_PER_READ", 3)
    path = write(tmp_path, {f"a.{suffix}": JSON[form]}) / f"a.{suffix}"
    assert read(tmp_path, path) == TEXTS
    check_positions(open_corpus(TextSource((str(path),)), tmp_path))


def test_a_first_row_without_the_column_is_an_empty_text(tmp_path):
    for first in ('{"other": 1}\n', '{"spans": [{"a": 1}]}\n'):
        write(tmp_path, {"a.json": first + rows(TEXTS)})
        assert read(tmp_path, tmp_path / "a.json") == ["", *TEXTS]


def test_json_lines_with_another_name_are_read_as_what_is_said(tmp_path):
    path = write(tmp_path, {"a.txt": rows(MANY)}) / "a.txt"
    assert read(tmp_path, path, format="jsonl") == MANY
    assert read(tmp_path, path, format="text") == [path.read_text()]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("more", [{}, {"spans": [{"text": "Anna"}]}, {"tags": ["a"]}])
def test_a_json_file_of_one_object_with_the_column_is_one_document(
    tmp_path, indent, more
):
    """As tools for labels write them, on one line or on many."""
    for text in ("one", "two"):
        row = json.dumps({"id": 1, "text": text} | more, indent=indent)
        write(tmp_path, {f"{text}.json": row})
    assert read(tmp_path, f"{tmp_path}/*.json") == ["one", "two"]


@pytest.mark.parametrize("beside", [{"body": "a text"}, {"version": 1}])
def test_a_text_beside_the_list_that_is_read_is_said_once(tmp_path, capsys, beside):
    for name in "ab":
        row = beside | {"comments": [{"text": f"me too, {name}"}]}
        write(tmp_path, {f"{name}.json": json.dumps(row)})
    assert read(tmp_path, f"{tmp_path}/*.json") == ["me too, a", "me too, b"]
    line = "is read by its list 'comments', without 'body' beside that; data.column=bo"
    assert capsys.readouterr().err.count(line) == ("body" in beside)


def test_a_mark_of_byte_order_is_no_text(tmp_path):
    write(tmp_path, {f"{name}.txt": f"\ufeff{name}\n" for name in "ab"})
    assert read(tmp_path, tmp_path / "a.txt") == ["a\n"]
    assert read(tmp_path, f"{tmp_path}/*.txt") == ["a\n", "b\n"]


@pytest.mark.parametrize("folder", ["a::b", "a[b]", "a b", "http:", "a,b=c"])
def test_names_of_files_and_directories_mean_nothing(tmp_path, folder):
    files = {
        "x::y*.txt": "text",
        "x::y.jsonl": rows(["text"]),
        "x::y.parquet": ["text"],
    }
    write(tmp_path / folder, files)
    for name in files:
        assert read(tmp_path, tmp_path / folder / name) == ["text"]


def test_a_directory_that_may_not_be_read_is_not_silently_empty(tmp_path, monkeypatch):
    folder = write(tmp_path / "texts", {"a.txt": "a", "closed/b.txt": "b"})
    assert expand((str(folder),))
    # the superuser may read all
    monkeypatch.setattr("os.access", lambda path, _: not str(path).endswith("closed"))
    with pytest.raises(UserError, match=r"closed is a directory that you may not read"):
        expand((str(folder),))


def compress(path, content, parts=2):
    """Write members or frames one behind another, as parallel compressors do."""
    codec = {".gz": "gzip", ".zst": "zstd"}[path.suffix]
    size = -(-len(content) // parts)
    with path.open("wb") as file:
        for start in range(0, len(content), size):
            part = pa.BufferOutputStream()
            with pa.CompressedOutputStream(part, codec) as stream:
                stream.write(content[start : start + size])
            file.write(part.getvalue())


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_text_is_read_as_what_it_holds(tmp_path, suffix):
    compress(tmp_path / f"a.jsonl.{suffix}", rows(TEXTS).encode())
    compress(tmp_path / f"b.txt.{suffix}", "\ufeffBücher\r\n".encode())
    assert read(tmp_path, tmp_path / f"a.jsonl.{suffix}") == TEXTS
    assert read(tmp_path, f"{tmp_path}/*.{suffix}") == [*TEXTS, "Bücher\n"]
    compress(tmp_path / f"b.txt.{suffix}", b"other")  # of the same name
    assert read(tmp_path, tmp_path / f"b.txt.{suffix}") == ["other"]


def test_zeros_behind_a_gzip_file_are_no_damage(tmp_path):
    write(tmp_path, {"a.txt.gz": gzip.compress(b"text") + bytes(1000)})
    assert read(tmp_path, tmp_path / "a.txt.gz") == ["text"]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_bomb_or_a_damaged_file_is_a_line(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(compressed, "ALWAYS_ALLOWED", 1 << 20)
    path = tmp_path / f"a.txt.{suffix}"
    compress(path, bytes(2 << 20), parts=1)
    refused(tmp_path, r"bytes decompress to more than 1,048,576; if this is", path)
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    compress(path, b"".join(b"%d " % (n * n) for n in range(9999)), parts=1)
    data = path.read_bytes()
    for damaged in (data[: len(data) // 2], b"text" + data):
        path.write_bytes(damaged)
        refused(tmp_path, r"file, or a damaged one .*again$", path)


def test_a_large_window_of_zstd_is_a_line_with_the_command(tmp_path):
    # A frame whose window is 2 GiB, with one raw block.
    text = b"some text"
    frame = b"\x28\xb5\x2f\xfd\x00\xa8" + (len(text) << 3 | 1).to_bytes(3, "little")
    write(tmp_path, {"a b.txt.zst": frame + text})
    message = r"decompress it yourself: `zstd -d --long=31 '.*a b\.txt\.zst'`$"
    refused(tmp_path, message, tmp_path / "a b.txt.zst")


def test_a_compressed_file_beside_its_own_text_is_refused(tmp_path):
    write(tmp_path, {f"{name}.txt": f"{name} text" for name in "ab"})
    for name in "ab":
        compress(tmp_path / f"{name}.txt.gz", f"{name} text".encode())
    refused(
        tmp_path, r"a\.txt\.gz has the content of .*a\.txt by .*leave one", tmp_path
    )
    both = tmp_path / "a.txt", tmp_path / "b.txt.gz"
    assert read(tmp_path, *both) == ["a text", "b text"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", b'{"text": "a"}\n{"text": 5}\n', "{}, line 2: column 'text'"),
        ("a.jsonl.gz", b'{"txt": "a"}\n', "{}: there is no column 'text'"),
        ("a.txt.gz", "caf\xe9".encode("latin-1"), "{} is not text"),
        ("a.csv.gz", b"text\nx\n", "{} is a table by its name"),
        ("a.arrow.gz", b"x", "data=hf data.name={0.parent}, or leave"),
        ("a.gz", b'{"text": "a"}\n', "{} looks like JSON lines"),
        ("a.jsonl.gz", b"", "{} has no text"),
        ("a.parquet.gz", b"x", "{}: cannot be read as parquet"),
    ],
)
def test_errors_of_a_compressed_file_name_it(tmp_path, name, content, message):
    write(tmp_path, {name: gzip.compress(content)})
    said = refused(tmp_path, "a", tmp_path / name)
    assert message.format(tmp_path / name) in said
    assert ".decompressed" not in said


def test_parquet_that_is_named_as_compressed_is_told(tmp_path):
    write(tmp_path, {"a.parquet.gz": b"PAR1rows"})
    refused(
        tmp_path, "is Parquet, and no gzip file; rename it", tmp_path / "a.parquet.gz"
    )


def test_a_text_that_the_disk_had_no_room_for_is_not_kept(tmp_path):
    """Linux writes what fits, and refuses the next write only."""
    content = ("some text\n" * 1000).encode()
    packed = write(tmp_path, {"a.txt.gz": gzip.compress(content)}) / "a.txt.gz"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(UserError, match="make room"):
            compressed.decompressed(packed, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert compressed.decompressed(packed, tmp_path).read_bytes() == content


def test_a_decompressed_file_that_was_changed_is_not_read(tmp_path):
    packed = write(tmp_path, {"a.txt.gz": gzip.compress(b"some text")}) / "a.txt.gz"
    cached = compressed.decompressed(packed, tmp_path)
    written = cached.stat().st_mtime_ns
    assert compressed.decompressed(packed, tmp_path).stat().st_mtime_ns == written
    for damage in (b"some", b"some tent"):
        cached.write_bytes(damage)
        assert compressed.decompressed(packed, tmp_path).read_bytes() == b"some text"


@pytest.mark.parametrize("splits", [False, True])
def test_what_datasets_saved_to_disk_is_refused_with_its_setting(tmp_path, splits):
    saved, texts = tmp_path / "saved", datasets.Dataset.from_dict({"text": TEXTS})
    (datasets.DatasetDict({"train": texts}) if splits else texts).save_to_disk(saved)
    refused(tmp_path, f"by data=hf data.name={saved}, or leave", saved)
    assert read_source(HubSource(str(saved)), tmp_path / "cache") == TEXTS


@pytest.mark.parametrize(
    ("names", "is_read"),
    [
        (["train-00000-of-00002", "train-00001-of-00002"], True),
        (["train-00000-of-00001", "test-00000-of-00001"], True),
        (["train-00000-of-00001", "train-00000-of-00002"], False),
        (["train-00000-of-00002", "train-00001-of-00004"], False),
        ([f"train-00000-of-00001-0123456789abcde{end}" for end in "ef"], False),
    ],
)
def test_shards_of_an_earlier_data_set_beside_those_of_a_later(
    tmp_path, capsys, names, is_read
):
    folder = write(tmp_path / "set", {f"{name}.parquet": TEXTS for name in names})
    for source in (TextSource((str(folder),)), HubSource(str(folder))):
        if is_read:
            assert len(read_source(source, tmp_path / "cache")) >= len(TEXTS)
        else:
            with pytest.raises(
                UserError, match="are shards of two saves of one data set"
            ):
                read_source(source, tmp_path / "cache")
    assert "shards" not in capsys.readouterr().err


def test_shards_that_are_missing_by_their_names_are_said(tmp_path, capsys):
    names = ("train-00001-of-00003", "train-00002-of-00003", "test-00000-of-00001")
    folder = write(tmp_path / "set", {f"{name}.parquet": TEXTS for name in names})
    line = "train-00001-of-00003.parquet belongs to 3 shards by its name, but only 2 "
    for source in (TextSource((str(folder),)), HubSource(str(folder))):
        read_source(source, tmp_path / "cache")
        assert capsys.readouterr().err.count(line) == 1


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


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_text_that_parquet_stores_by_differences(tmp_path, monkeypatch, encoding):
    def stored(texts):
        table, path = pa.table({"text": texts}), tmp_path / "a.parquet"
        settings = {"use_dictionary": False, "column_encoding": {"text": encoding}}
        pq.write_table(table, path, **settings)
        return path

    assert read(tmp_path, stored(TEXTS)) == TEXTS
    monkeypatch.setattr("trainer.data.parquet.ALWAYS_ALLOWED", 1 << 16)
    monkeypatch.setattr("trainer.data.parquet.MAX_EXPANSION", 1)
    path = stored(["a" * 1000] * 5000)
    refused(tmp_path, "bytes of text; if this is intended", path)


@pytest.mark.parametrize("count", [2, 7])
def test_of_few_files_the_end_is_the_validation_part(count, tmp_path):
    texts = [f"{i}" * 300 for i in range(count)]
    files = {f"few/{i}.txt": text for i, text in enumerate([*texts, ""])}
    write(tmp_path, files | {"few.jsonl": rows(texts)})
    whole, cut = "".join(texts), int(300 * count * 0.9)
    for name in ("few", "few.jsonl"):
        manifest = prepared(TextSource((f"{tmp_path}/{name}",)), tmp_path / "cache")
        assert "".join(documents_of(manifest, "train")) == whole[:cut]
        assert "".join(documents_of(manifest, "val")) == whole[cut:]


def test_prepared_data_are_called_by_the_directory_that_was_given(tmp_path):
    write(tmp_path / "books/deep", {"a.txt": "words " * 50, "b.txt": "words " * 50})
    for given in ("books/", "books/**/*.txt"):
        opened = open_corpus(TextSource((f"{tmp_path}/{given}",)), tmp_path)
        assert opened.name == ("books" if given == "books/" else "deep")
