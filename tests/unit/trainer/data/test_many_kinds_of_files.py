"""Files as people have them: links, Parquet's kinds of text, JSON's kinds of lists."""

import gzip
import importlib
import json
import resource

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data import compressed, corpus, get_tokenizer, prepare
from trainer.data.corpus import HubSource, TextSource, open_corpus
from trainer.data.files import expand
from trainer.errors import UserError

TEXTS = ["one", "two", "", "four"]


def read(tmp_path, *paths, **settings):
    source = TextSource(tuple(map(str, paths)), **settings)
    corpus = open_corpus(source, tmp_path / "cache")
    return [text for rows in corpus.read(None) for text in rows.texts]


def test_what_links_reach_twice_counts_once_and_is_said(tmp_path, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (folder / "loop").symlink_to(folder)
    (folder / "b.txt").symlink_to(folder / "a.txt")
    assert expand((str(folder),)) == [folder / "a.txt"]
    output = capsys.readouterr().err
    assert f"{folder / 'b.txt'} (and " in output
    assert f"more) is read already, as {folder / 'a.txt'}, and is read once" in output
    assert expand((str(folder / "b.txt"),)) == [folder / "b.txt"]
    assert capsys.readouterr().err == ""
    assert expand((str(folder / "a.txt"), f"{folder}/a*")) == [folder / "a.txt"]
    assert "a.txt, and is read once; data=mix data.weights=" in capsys.readouterr().err


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
    nulls = pa.table({"text": pa.nulls(2), "n": [1, 2]})
    pq.write_table(nulls, tmp_path / "a.parquet")
    text = pa.array([*TEXTS[:2], None, TEXTS[3]], pa.string()).cast(kind)
    pq.write_table(pa.table({"m": ["x"] * 4, "text": text}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": text[:0]}), tmp_path / "c.parquet")
    assert read(tmp_path, f"{tmp_path}/*.parquet") == ["", "", *TEXTS]


def test_the_most_documents_are_the_same_of_files_and_of_rows(tmp_path):
    texts = ["", "one", "two"]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "rows.jsonl").write_text(rows)
    for paths in (tmp_path / "*.txt", tmp_path / "rows.jsonl"):
        assert [t for t in read(tmp_path, paths, max_documents=2) if t] == ["one"]


def read_hub(tmp_path, folder):
    corpus = open_corpus(HubSource(str(folder)), tmp_path / "cache")
    return [text for rows in corpus.read(None) for text in rows.texts]


def test_a_local_data_set_has_text_of_any_type_and_no_link_twice(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    folder = tmp_path / "set"
    folder.mkdir()
    text = pa.array(TEXTS).cast(pa.dictionary(pa.int32(), pa.string()))
    pq.write_table(pa.table({"text": text}), folder / "b.parquet")
    assert read_hub(tmp_path, folder) == TEXTS
    pq.write_table(pa.table({"text": pa.nulls(2)}), folder / "a.parquet")
    with pytest.raises(
        UserError, match=r"column 'text': .* to null; data=text data.paths="
    ):
        read_hub(tmp_path, folder)
    (folder / "a.parquet").unlink()
    (folder / "c.parquet").symlink_to(folder / "b.parquet")
    with pytest.raises(UserError, match=r"c.parquet is .*b.parquet by a link, and wou"):
        read_hub(tmp_path, folder)
    (folder / "c.parquet").unlink()
    (folder / "more").symlink_to(tmp_path)
    with pytest.raises(UserError, match=r"more is a link to a directory, which data="):
        read_hub(tmp_path, folder)


def test_a_file_of_a_local_data_set_that_becomes_another_split_is_another_content(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    for name in "ab":
        (tmp_path / f"train-{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    source = HubSource(str(tmp_path))
    before = open_corpus(source, tmp_path / "cache").fingerprint
    (tmp_path / "train-b.jsonl").rename(tmp_path / "validation-b.jsonl")
    assert open_corpus(source, tmp_path / "cache").fingerprint != before


def test_texts_beside_a_number_in_a_later_file_are_not_spelled_as_json(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "1", "n": 1}\n{"text": "one", "n": ""}\n')
    assert read_hub(tmp_path, folder) == ["1", "one"]
    (folder / "b.jsonl").write_text('{"text": "two"}\n{"text": 3}\n')
    with pytest.raises(UserError, match="column 'text' holds a mix of types, not text"):
        read_hub(tmp_path, folder)


def test_only_the_text_of_tables_must_be_alike(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.csv").write_text("id,text\n1,one\n")
    (folder / "b.csv").write_text("text,id\ntwo,x\n")
    (folder / "README.md").write_text(
        "---\ndataset_info:\n  features:\n  - {name: id, dtype: int64}\n"
        "  - {name: text, dtype: string}\n---\n"
    )
    assert read_hub(tmp_path, folder) == ["one", "two"]


@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "a"}, {"text": "b\\ud83d"}]',
        '{"n": 1, "text": "a"}\n{"n": "", "text": "b\\ud83d"}\n',
    ],
    ids=["list", "mix"],
)
def test_half_a_character_in_json_of_a_data_set_is_refused(
    tmp_path, monkeypatch, content
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.json").write_text(content)
    with pytest.raises(UserError, match="The surrogate pair in string is invalid"):
        read_hub(tmp_path, tmp_path / "set")


@pytest.mark.parametrize("name", ["packaged_modules.json.json", "utils.json"])
def test_a_version_of_datasets_that_reads_json_otherwise_is_refused(
    tmp_path, monkeypatch, name
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.json").write_text('[{"text": "a"}]')
    module = importlib.import_module(f"datasets.{name}")
    loads = module.ujson_loads
    assert read_hub(tmp_path, tmp_path / "set") == ["a"]
    assert module.ujson_loads is loads
    monkeypatch.delattr(module, "ujson_loads")
    with pytest.raises(UserError, match=r"reads json in a way .* datasets==5\.2\.0"):
        read_hub(tmp_path, tmp_path / "set")


def test_parquet_goes_on_where_it_was(tmp_path):
    for name in "ab":
        texts = [f"{name}{i}" for i in range(600)]
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{name}.parquet")
    source = TextSource((f"{tmp_path}/*.parquet",), max_documents=1000)
    corpus = open_corpus(source, tmp_path / "cache")
    parts = list(corpus.read(None))
    everything = [text for part in parts for text in part.texts]
    assert everything == [f"a{i}" for i in range(600)] + [f"b{i}" for i in range(400)]
    for i, part in enumerate(parts):
        position = json.loads(json.dumps(part.position))
        rest = [text for later in corpus.read(position) for text in later.texts]
        assert rest == [text for later in parts[i + 1 :] for text in later.texts]


@pytest.mark.parametrize(
    "form",
    [
        lambda rows: json.dumps(rows),
        lambda rows: "\n\n" + json.dumps(rows, indent=1),
        lambda rows: json.dumps({"version": 1, "data": rows}),
        lambda rows: json.dumps({"data": rows}, indent=2),
        lambda rows: "\ufeff" + "\n".join(map(json.dumps, rows)),
        lambda rows: "\ufeff" + json.dumps(rows),
        lambda rows: json.dumps({"other": 1}) + "\n" + "\n".join(map(json.dumps, rows)),
    ],
    ids=[
        "list",
        "behind blank lines",
        "object",
        "pretty",
        "mark",
        "mark of a list",
        "first row without",
    ],
)
def test_json_in_the_forms_that_people_have(tmp_path, form):
    rows = [{"text": text} for text in TEXTS]
    (tmp_path / "a.json").write_text(form(rows))
    actual = read(tmp_path, tmp_path / "a.json")
    assert actual in (TEXTS, ["", *TEXTS])


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("more", [{}, {"spans": [{"text": "Anna"}]}, {"tags": ["a"]}])
def test_a_json_file_of_one_object_with_the_column_is_one_document(
    tmp_path, indent, more
):
    """As tools for labels write them, on one line or on many."""
    for text in ("one", "two"):
        row = json.dumps({"id": 1, "text": text} | more, indent=indent)
        (tmp_path / f"{text}.json").write_text(row)
    assert read(tmp_path, f"{tmp_path}/*.json") == ["one", "two"]


@pytest.mark.parametrize("beside", [{"body": "a text"}, {"version": 1}])
def test_a_text_beside_the_list_that_is_read_is_said_once(tmp_path, capsys, beside):
    for name in "ab":
        row = beside | {"comments": [{"text": f"me too, {name}"}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(row))
    assert read(tmp_path, f"{tmp_path}/*.json") == ["me too, a", "me too, b"]
    line = "is read by its list 'comments', without 'body' beside that; data.column=bo"
    assert capsys.readouterr().err.count(line) == ("body" in beside)


def test_json_lines_of_objects_with_lists_are_lines(tmp_path):
    rows = [{"text": text, "spans": [{"a": 1}]} for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read(tmp_path, tmp_path / "a.jsonl") == TEXTS


def test_a_mark_of_byte_order_is_no_text(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"\ufeff{name}\n")
    assert read(tmp_path, tmp_path / "a.txt") == ["a\n"]
    assert read(tmp_path, f"{tmp_path}/*.txt") == ["a\n", "b\n"]


def test_a_directory_that_may_not_be_read_is_not_silently_empty(tmp_path, monkeypatch):
    (tmp_path / "texts" / "closed").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_text("a")
    assert expand((f"{tmp_path}/texts",))
    # the superuser may read all
    monkeypatch.setattr("os.access", lambda path, _: not str(path).endswith("closed"))
    with pytest.raises(UserError, match=r"closed is a directory that you may not read"):
        expand((f"{tmp_path}/texts",))


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
    lines = "\n".join(json.dumps({"text": text}) for text in TEXTS)
    compress(tmp_path / f"a.jsonl.{suffix}", lines.encode())
    compress(tmp_path / f"b.txt.{suffix}", "\ufeffBücher\r\n".encode())
    assert read(tmp_path, tmp_path / f"a.jsonl.{suffix}") == TEXTS
    assert read(tmp_path, f"{tmp_path}/*.{suffix}") == [*TEXTS, "Bücher\n"]
    compress(tmp_path / f"b.txt.{suffix}", b"other")  # of the same name
    assert read(tmp_path, tmp_path / f"b.txt.{suffix}") == ["other"]
    compress(tmp_path / f"c.html.{suffix}", b"<p>")
    with pytest.raises(UserError, match=rf"c\.html\.{suffix} is markup by its name"):
        read(tmp_path, tmp_path / f"c.html.{suffix}")


def test_zeros_behind_a_gzip_file_are_no_damage(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"text") + bytes(1000))
    assert read(tmp_path, path) == ["text"]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_bomb_is_refused_and_leaves_nothing(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(compressed, "SMALL", 1 << 20)
    compress(tmp_path / f"a.txt.{suffix}", bytes(2 << 20), parts=1)
    with pytest.raises(
        UserError, match=r"bytes decompress to more than 1,048,576; if this is"
    ):
        read(tmp_path, tmp_path / f"a.txt.{suffix}")
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("kept", [lambda b: b[: len(b) // 2], lambda b: b"text" + b])
def test_a_damaged_compressed_file_is_a_line(tmp_path, suffix, kept):
    path = tmp_path / f"a.txt.{suffix}"
    compress(path, b"".join(b"%d " % (n * n) for n in range(9999)), parts=1)
    path.write_bytes(kept(path.read_bytes()))
    with pytest.raises(UserError, match=r"file, or a damaged one .*again$") as error:
        read(tmp_path, path)
    assert "\n" not in str(error.value)


def test_a_large_window_of_zstd_is_a_line_with_the_command(tmp_path):
    # A frame whose window is 2 GiB, with one raw block.
    text = b"some text"
    frame = b"\x28\xb5\x2f\xfd\x00\xa8" + (len(text) << 3 | 1).to_bytes(3, "little")
    (tmp_path / "a b.txt.zst").write_bytes(frame + text)
    message = r"decompress it yourself: `zstd -d --long=31 '.*a b\.txt\.zst'`$"
    with pytest.raises(UserError, match=message):
        read(tmp_path, tmp_path / "a b.txt.zst")


@pytest.mark.parametrize("splits", [False, True])
def test_what_datasets_saved_to_disk_is_refused_with_its_setting(
    tmp_path, splits, capsys
):
    saved, rows = tmp_path / "saved", datasets.Dataset.from_dict({"text": TEXTS})
    (datasets.DatasetDict({"train": rows}) if splits else rows).save_to_disk(saved)
    with pytest.raises(UserError, match=f"by data=hf data.name={saved}, or leave"):
        read(tmp_path, saved)
    capsys.readouterr()
    corpus = open_corpus(HubSource(str(saved)), tmp_path / "cache")
    assert [text for part in corpus.read(None) for text in part.texts] == TEXTS
    assert "leaves out" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": 7}, "column 'text' holds int64, not text"),
        ({"text": True}, "column 'text' holds bool, not text"),
        ({"text": {"a": 1}}, "column 'text' holds struct.*, not text"),
        ({"text": "2020-01-01T00:00"}, "holds timestamp.*reads dates of JSON as text"),
        ({"n": 1}, "there is no column 'text'; valid for data.column: n"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_later_file_whose_column_is_no_text_is_refused(
    tmp_path, monkeypatch, row, message, streaming
):
    """`datasets` writes it as text, or as nothing where there is no column."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train-1.jsonl").write_text('{"text": "one", "n": 1}\n')
    (folder / "train-2.jsonl").write_text(json.dumps({"n": 2} | row))
    limit = 9 if streaming else None
    source = HubSource(str(folder), streaming=streaming, max_documents=limit)
    corpus = open_corpus(source, tmp_path / "cache")
    with pytest.raises(UserError, match=message):
        list(corpus.read(None))


def test_a_later_parquet_file_of_numbers_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    folder = tmp_path / "set"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["one"]}), folder / "train-1.parquet")
    pq.write_table(pa.table({"text": [1.5]}), folder / "train-2.parquet")
    with pytest.raises(UserError, match="column 'text' holds double, not text"):
        read_hub(tmp_path, folder)


HASHES = "-0123456789abcdef", "-0123456789abcdee"


@pytest.mark.parametrize(
    ("names", "is_read"),
    [
        (["train-00000-of-00002", "train-00001-of-00002"], True),
        (["train-00000-of-00001", "test-00000-of-00001"], True),
        (["train-00000-of-00001", "train-00000-of-00002"], False),
        (["train-00000-of-00002", "train-00001-of-00004"], False),
        ([f"train-00000-of-00001{end}" for end in HASHES], False),
    ],
)
def test_shards_of_an_earlier_data_set_beside_those_of_a_later(
    tmp_path, monkeypatch, capsys, names, is_read
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    folder = tmp_path / "set"
    folder.mkdir()
    for name in names:
        pq.write_table(pa.table({"text": TEXTS}), folder / f"{name}.parquet")
    for read_folder in (read, read_hub):
        if is_read:
            assert len(read_folder(tmp_path, folder)) >= len(TEXTS)
        else:
            with pytest.raises(UserError, match="are shards of two sets, the earlier"):
                read_folder(tmp_path, folder)
    assert "shards" not in capsys.readouterr().err


def test_files_of_several_formats_are_said(tmp_path, capsys):
    """As the README.md of a downloaded data set, which is no text of it."""
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet")
    assert read(tmp_path, f"{tmp_path}/*.*") == TEXTS
    assert "formats" not in capsys.readouterr().err
    (tmp_path / "README.md").write_text("license: mit")
    assert read(tmp_path, f"{tmp_path}/*.*") == ["license: mit", *TEXTS]
    line = f"2 formats are read: 1 text ({tmp_path}/README.md), 1 parquet ({tmp_path}/a"
    assert capsys.readouterr().err.count(line) == 1


def test_shards_that_are_missing_by_their_names_are_said(tmp_path, capsys):
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("train-00001-of-00003", "train-00002-of-00003", "test-00000-of-00001"):
        pq.write_table(pa.table({"text": TEXTS}), folder / f"{name}.parquet")
    line = "train-00001-of-00003.parquet is one of 2 shards that are read, of 3 by its "
    for read_folder in (read, read_hub):
        read_folder(tmp_path, folder)
        assert capsys.readouterr().err.count(line) == 1


def saved_to_disk(folder, texts=TEXTS, **settings):
    """Save texts, and return them as `load_from_disk` does."""
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder, **settings)
    return datasets.load_from_disk(folder)


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("change", ["map", "fewer", "cache"])
def test_files_that_are_no_part_of_a_saved_data_set_are_refused(
    tmp_path, monkeypatch, splits, change
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    folder = tmp_path / "saved"
    place = folder / "train" if splits else folder
    if splits:
        folder.mkdir()
        (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
    rows = saved_to_disk(place, num_shards=2)
    assert read_hub(tmp_path, folder) == TEXTS
    if change == "fewer":
        saved_to_disk(place, TEXTS[:1])
        name = "data-00000-of-00002"
    else:
        rows.map(lambda row: {"text": row["text"].upper()})
        name = "cache-.*"
    if change == "cache":  # as in the directories of `load_dataset`
        (place / "state.json").unlink()
    message = rf"{place}/{name}.arrow is no part of .*; move it elsewhere$"
    with pytest.raises(UserError, match=message):
        read_hub(tmp_path, folder)


@pytest.mark.parametrize("names", [("a", "b"), ("train", "train_more")])
def test_saved_splits_that_would_be_read_as_one_are_refused(tmp_path, names):
    folder = tmp_path / "saved"
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict(dict.fromkeys(names, rows)).save_to_disk(folder)
    first, second = names
    message = (
        f"reads {first} and {second} as one split, 'train'; choose one by"
        f" data.name={folder / first}$"
    )
    with pytest.raises(UserError, match=message):
        read_hub(tmp_path, folder)
    assert read_hub(tmp_path, folder / first) == TEXTS


def test_a_compressed_file_beside_its_own_text_is_refused(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} text")
        compress(tmp_path / f"{name}.txt.gz", f"{name} text".encode())
    with pytest.raises(
        UserError, match=r"a\.txt(\.gz)? has the content of .*leave one"
    ):
        read(tmp_path, tmp_path)
    assert read(tmp_path, tmp_path / "a.txt", tmp_path / "b.txt.gz") == [
        "a text",
        "b text",
    ]


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.table([pa.array(TEXTS), pa.array(TEXTS)], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(
        UserError, match=r"a\.parquet: several columns are named 'text'"
    ):
        read(tmp_path, tmp_path / "a.parquet")


def test_merges_of_another_pattern_are_not_gpt2_s(tmp_path):
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Qwen2Tokenizer"}'
    )
    with pytest.raises(UserError, match="a Qwen2Tokenizer may split words otherwise"):
        get_tokenizer(str(tmp_path))


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
    (tmp_path / name).write_bytes(gzip.compress(content))
    with pytest.raises(UserError) as caught:
        read(tmp_path, tmp_path / name)
    assert message.format(tmp_path / name) in str(caught.value)
    assert ".decompressed" not in str(caught.value)


def test_a_text_that_the_disk_had_no_room_for_is_not_kept(tmp_path):
    """Linux writes what fits, and refuses the next write only."""
    content = ("some text\n" * 1000).encode()
    packed = tmp_path / "a.txt.gz"
    packed.write_bytes(gzip.compress(content))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(UserError, match="make room"):
            compressed.decompressed(packed, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert compressed.decompressed(packed, tmp_path).read_bytes() == content


def test_a_decompressed_file_that_was_changed_is_not_read(tmp_path):
    packed = tmp_path / "a.txt.gz"
    packed.write_bytes(gzip.compress(b"some text"))
    cached = compressed.decompressed(packed, tmp_path)
    written = cached.stat().st_mtime_ns
    assert compressed.decompressed(packed, tmp_path).stat().st_mtime_ns == written
    for damage in (b"some", b"some tent"):
        cached.write_bytes(damage)
        assert compressed.decompressed(packed, tmp_path).read_bytes() == b"some text"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_that_changes_while_it_is_read_is_not_kept(tmp_path, monkeypatch, name):
    """Its new text would be kept under the digest of the old one."""
    path = tmp_path / name
    row = "".join(f'{{"text": "good words {i}"}}\n' for i in range(500))
    path.write_text(row)
    read = corpus.examine

    def examine(*args, **settings):
        files = read(*args, **settings)
        path.write_text(row.replace("good", "evil"))
        return files

    monkeypatch.setattr(corpus, "examine", examine)
    source = TextSource((str(path),), name[2:].replace("txt", "text"))
    with pytest.raises(UserError, match=f"{name} changed while it was read; run again"):
        prepare(source, "byte", tmp_path / "cache", val_fraction=0.1)
    path.write_text(row)
    monkeypatch.undo()
    directory = prepare(source, "byte", tmp_path / "cache", val_fraction=0.1)
    assert b"evil" not in (directory / "train-00000.bin").read_bytes()[::2]


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_text_that_parquet_stores_by_differences(tmp_path, monkeypatch, encoding):
    def write(name, texts):
        pq.write_table(
            pa.table({"text": texts}),
            tmp_path / name,
            use_dictionary=False,
            column_encoding={"text": encoding},
        )
        return tmp_path / name

    assert read(tmp_path, write("a.parquet", TEXTS)) == TEXTS
    monkeypatch.setattr("trainer.data.parquet.SMALL", 1 << 16)
    monkeypatch.setattr("trainer.data.parquet.EXPANSION", 1)
    with pytest.raises(UserError, match="bytes of text; if this is intended"):
        read(tmp_path, write("b.parquet", ["a" * 1000] * 5000))


def test_a_parquet_column_with_a_dot_is_no_field_of_another(tmp_path):
    texts = pa.array(["a", "b"])
    meta = pa.StructArray.from_arrays([pa.array(["x", "y"])], names=["text"])
    table = pa.table({"meta": meta, "meta.text": texts})
    pq.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path, tmp_path / "a.parquet", column="meta.text") == ["a", "b"]
