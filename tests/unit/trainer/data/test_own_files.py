"""A user's own files: told by their names, of several formats at once, in directories,
few of them."""

import json
import shutil

import numpy as np
import pytest

from trainer.data import Manifest, TextSource, prepare
from trainer.data.corpus import open_corpus

TEXTS = [f"Document {i} has its own words, {i * i} of them." for i in range(60)]


def decoded(manifest, split):
    """The documents of a split, of bytes."""
    ids = np.concatenate(manifest.open(split)).astype(np.uint8)
    return bytes(ids).decode().split("\0")[:-1]


def lines(texts, column="text"):
    return "".join(json.dumps({column: text}) + "\n" for text in texts)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory in the home directory with the documents in three formats, below it
    and deeper, and a hidden file."""
    import datasets

    datasets.disable_progress_bars()
    root = tmp_path / "home" / "own"
    (root / "deeper").mkdir(parents=True)
    for i, text in enumerate(TEXTS[:20]):
        (root / f"{i:02}.txt").write_text(text)
    (root / "05b.jsonl").write_text(lines(TEXTS[20:40]))
    datasets.Dataset.from_dict({"n": [0] * 20, "text": TEXTS[40:]}).to_parquet(
        root / "deeper" / "rest.parquet"
    )
    (root / ".DS_Store").write_bytes(b"\0\1")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return root


def test_a_directory_of_mixed_files_is_read_whole_each_file_by_its_name(
    folder, tmp_path
):
    manifest = Manifest.load(
        prepare(TextSource(("~/own",)), "byte", tmp_path / "cache")
    )
    actual = decoded(manifest, "train") + decoded(manifest, "val")
    assert sorted(actual) == sorted(TEXTS)
    assert manifest.splits["val"].documents > 0


def test_a_mixed_run_stops_at_max_documents_wherever_it_goes_on(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("trainer.data.corpus.ROWS", 7)
    monkeypatch.setattr("trainer.data.corpus.FILES_PER_READ", 6)
    source = TextSource((str(folder),), max_documents=47)
    read = open_corpus(source, tmp_path).read
    whole = list(read(None))
    assert sum(len(rows.texts) for rows in whole) == 47
    for i, rows in enumerate(whole):
        position = json.loads(json.dumps(rows.position))
        assert [r.texts for r in read(position)] == [r.texts for r in whole[i + 1 :]]
    assert (
        len(
            list(
                open_corpus(
                    TextSource((str(folder),), max_documents=20), tmp_path
                ).read(None)
            )
        )
        == 4
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.NDJSON", "a.json"])
def test_json_lines_are_known_by_their_name(name, tmp_path):
    (tmp_path / name).write_text(lines(TEXTS))
    manifest = Manifest.load(
        prepare(TextSource((str(tmp_path / name),)), "byte", tmp_path / "cache")
    )
    assert sorted(decoded(manifest, "train") + decoded(manifest, "val")) == sorted(
        TEXTS
    )


def test_json_lines_with_another_name_are_read_as_what_is_said(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(lines(TEXTS))
    manifest = Manifest.load(
        prepare(TextSource((str(path),), "jsonl"), "byte", tmp_path / "cache")
    )
    assert sorted(decoded(manifest, "train") + decoded(manifest, "val")) == sorted(
        TEXTS
    )
    as_text = Manifest.load(
        prepare(TextSource((str(path),), "text"), "byte", tmp_path / "cache")
    )
    assert as_text.tokens("train") + as_text.tokens("val") == path.stat().st_size


def test_rows_need_not_have_the_same_keys(tmp_path):
    rows = [
        {"text": text} | extra
        for text, extra in zip(
            TEXTS, [{}, {"id": 1}, {"id": "x"}, {"id": [1]}] * 15, strict=True
        )
    ]
    for i, part in enumerate((rows[:20], rows[20:40], rows[40:])):
        (tmp_path / f"{i}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in part)
        )
    manifest = Manifest.load(
        prepare(TextSource((str(tmp_path / "*.jsonl"),)), "byte", tmp_path / "cache")
    )
    assert sorted(decoded(manifest, "train") + decoded(manifest, "val")) == sorted(
        TEXTS
    )


@pytest.mark.parametrize("indent", [None, 1])
def test_a_file_may_be_one_list_of_objects(indent, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.data.corpus.ROWS", 7)
    rows = [{"text": text, "id": i} for i, text in enumerate(TEXTS)]
    (tmp_path / "a.json").write_bytes(
        b"\xef\xbb\xbf" + json.dumps(rows, indent=indent).encode()
    )
    read = open_corpus(TextSource((str(tmp_path / "a.json"),)), tmp_path).read
    whole = list(read(None))
    assert [text for actual in whole for text in actual.texts] == TEXTS
    for i, actual in enumerate(whole):
        assert [r.texts for r in read(json.loads(json.dumps(actual.position)))] == [
            r.texts for r in whole[i + 1 :]
        ]


@pytest.mark.parametrize("count", [2, 7])
def test_of_few_files_the_end_is_the_validation_part(count, tmp_path):
    folder = tmp_path / "few"
    folder.mkdir()
    texts = [f"{i}" * 300 for i in range(count)]
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text)
    (folder / "none.txt").write_text("")
    manifest = Manifest.load(
        prepare(TextSource((str(folder),)), "byte", tmp_path / "cache")
    )
    whole, cut = "".join(texts), int(300 * count * 0.9)
    assert "".join(decoded(manifest, "train")) == whole[:cut]
    assert "".join(decoded(manifest, "val")) == whole[cut:]
    shutil.rmtree(folder)
    folder.with_suffix(".jsonl").write_text(lines(texts))
    rows = Manifest.load(
        prepare(
            TextSource((str(folder.with_suffix(".jsonl")),)), "byte", tmp_path / "cache"
        )
    )
    assert [rows.tokens(split) for split in ("train", "val")] == [
        manifest.tokens(split) for split in ("train", "val")
    ]


def test_prepared_data_are_called_by_the_directory_that_was_given(tmp_path):
    deep = tmp_path / "books" / "deep"
    deep.mkdir(parents=True)
    for name in ("a.txt", "b.txt"):
        (deep / name).write_text("words " * 50)
    for given in ("books/", "books/**/*.txt"):
        corpus = open_corpus(TextSource((f"{tmp_path}/{given}",)), tmp_path)
        assert corpus.name == ("books" if given == "books/" else "deep")
