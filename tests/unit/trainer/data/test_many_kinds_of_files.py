"""Files as people have them: links, Parquet's kinds of text, JSON's kinds of lists."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.corpus import TextSource, open_corpus
from trainer.data.files import NoColumn, expand
from trainer.errors import UserError

TEXTS = ["one", "two", "", "four"]


def read(tmp_path, *paths, **settings):
    source = TextSource(tuple(map(str, paths)), **settings)
    corpus = open_corpus(source, tmp_path / "cache")
    return [text for rows in corpus.read(None) for text in rows.texts]


def test_what_links_reach_twice_counts_once(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (folder / "loop").symlink_to(folder)
    (folder / "b.txt").symlink_to(folder / "a.txt")
    assert expand((str(folder),)) == [folder / "a.txt"]
    assert expand((str(folder / "b.txt"),)) == [folder / "b.txt"]


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
        lambda rows: json.dumps({"other": 1}) + "\n" + "\n".join(map(json.dumps, rows)),
    ],
    ids=["list", "behind blank lines", "object", "pretty", "mark", "first row without"],
)
def test_json_in_the_forms_that_people_have(tmp_path, form):
    rows = [{"text": text} for text in TEXTS]
    (tmp_path / "a.json").write_text(form(rows))
    found = read(tmp_path, tmp_path / "a.json")
    assert found in (TEXTS, ["", *TEXTS])


def test_json_lines_of_objects_with_lists_are_lines(tmp_path):
    rows = [{"text": text, "spans": [{"a": 1}]} for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read(tmp_path, tmp_path / "a.jsonl") == TEXTS


def test_a_column_that_no_row_has_is_named_with_those_that_rows_have(tmp_path):
    rows = [{"a": 1}, {"b": 2}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(NoColumn, match=r"no column 'text'; .*: a, b"):
        read(tmp_path, tmp_path / "a.jsonl")


def test_a_mark_of_byte_order_is_no_text(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"\ufeff{name}\n")
    assert read(tmp_path, tmp_path / "a.txt") == ["a\n"]
    assert read(tmp_path, f"{tmp_path}/*.txt") == ["a\n", "b\n"]


def test_markup_is_not_silently_text(tmp_path):
    (tmp_path / "a.html").write_text("<p>text</p>")
    with pytest.raises(UserError, match=r"a\.html is markup by its name: extract"):
        read(tmp_path, tmp_path / "a.html")
    assert read(tmp_path, tmp_path / "a.html", format="text") == ["<p>text</p>"]


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.table([pa.array(TEXTS), pa.array(TEXTS)], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(
        UserError, match=r"a\.parquet: several columns are named 'text'"
    ):
        read(tmp_path, tmp_path / "a.parquet")
