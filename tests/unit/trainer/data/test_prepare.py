"""Sources of every kind to shards: what is in them, that interruptions change nothing,
that errors name the cause."""

import errno
import itertools
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from corpora import (
    check_positions,
    directories_as_hub,
    prepared,
    rows,
    tokens,
    write,
)
from library_tokenizers import write_tiktoken

from trainer.cli.commands import run
from trainer.data import (
    EmbeddedSource,
    HubSource,
    Manifest,
    PreparedSource,
    TextSource,
    corpus,
    get_tokenizer,
    preparation,
    prepare,
)
from trainer.data.encode import uniform
from trainer.data.shards import digest
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import UserError
from trainer.files import write_atomically

ROOT = Path(__file__).resolve().parents[4]


def expected(documents, tokenizer, val_fraction):
    """By the definition, one document after the other."""
    actual = {"train": [], "val": []}
    for text in documents:
        if text:
            part = actual["val" if uniform(text) < val_fraction else "train"]
            part += [*tokenizer.encode(text), tokenizer.eot]
    return actual


def content(directory):
    """Every file that training reads, by name."""
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.name != ".lock"
    }


def test_the_embedded_corpus_is_one_text_whose_last_tenth_is_for_validation(tmp_path):
    manifest = prepared(EmbeddedSource(), tmp_path)
    train, val = (
        bytes(tokens(manifest, split).astype(np.uint8)).decode()
        for split in ("train", "val")
    )
    assert train.startswith("In the beginning God created the heaven and the earth.\n")
    assert val.endswith("The grace of our Lord Jesus Christ be with you all. Amen.")
    assert len(train + val) == 4_137_451
    assert manifest.byte_count("train") == len(train) == int(0.9 * 4_137_451)
    assert (manifest.vocab_size, manifest.eot, manifest.dtype) == (256, 0, "uint16")


def test_the_command_prints_counts_and_the_directory(tmp_path, capsys):
    assert run("prepare-data", [f"data.cache_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    line = "train: 1 document, 3,723,705 tokens, 3,723,705 bytes of text, 1 shard"
    assert line in out
    directory = Path(out.rsplit("directory: ", 1)[1].strip())
    assert (directory / "manifest.json").is_file()
    assert run("prepare-data", [f"verify={directory}"]) == 0


def test_preparing_the_embedded_corpus_neither_imports_it_nor_datasets(tmp_path):
    code = (
        "import sys; from trainer.data import EmbeddedSource, prepare; "
        f"prepare(EmbeddedSource(), 'byte', {str(tmp_path)!r}); "
        "print({'bible', 'datasets', 'jax'} & set(sys.modules))"
    )
    output = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert output.strip() == "set()"


@pytest.mark.parametrize("tokenizer", ["byte", "small_dir"])
def test_documents_are_joined_by_end_of_text_and_split_by_their_hash(
    tokenizer, request, jsonl, documents, tmp_path
):
    name = tokenizer if tokenizer == "byte" else str(request.getfixturevalue(tokenizer))
    source = TextSource((str(jsonl),))
    manifest = prepared(source, tmp_path, name, val_fraction=0.2, shard_bytes=40_000)
    assert len(manifest.splits["train"].shards) > 3
    wanted = expected(documents, get_tokenizer(name), 0.2)
    for split in ("train", "val"):
        assert tokens(manifest, split).tolist() == wanted[split]
    nonempty = [text for text in documents if text]
    assert manifest.skipped == len(documents) - len(nonempty) > 0
    parts = manifest.splits.values()
    assert sum(part.documents for part in parts) == len(nonempty)
    assert sum(part.bytes for part in parts) == sum(len(x.encode()) for x in nonempty)
    share = manifest.splits["val"].documents / len(nonempty)
    assert abs(share - 0.2) < 5 * (0.2 * 0.8 / len(nonempty)) ** 0.5


def test_a_large_vocabulary_takes_32_bits(jsonl, tmp_path):
    end = {"<|endoftext|>": 70_000}
    path = write_tiktoken(tmp_path / "a.tiktoken", r"\S|\s", **end)
    manifest = prepared(TextSource((str(jsonl),)), tmp_path / "cache", str(path))
    actual = manifest.dtype, manifest.vocab_size, manifest.eot
    assert actual == ("uint32", 70_001, 70_000)
    assert tokens(manifest, "val").max() == 70_000


def test_prepared_data_is_found_again_by_content_and_settings(jsonl, tmp_path):
    source, cache = TextSource((str(jsonl),)), tmp_path / "cache"
    first = prepare(source, "byte", cache)
    complete, seen = content(first), []
    assert prepare(source, "byte", cache, progress=seen.append) == first
    assert (content(first), seen) == (complete, [])
    longer = write(tmp_path, {"a.jsonl": jsonl.read_text() + '{"text": "more"}\n'})
    others = [
        prepare(source, "byte", cache, val_fraction=0.2),
        prepare(TextSource((str(jsonl),), max_documents=1000), "byte", cache),
        prepare(TextSource((f"{longer}/a.jsonl",)), "byte", cache),
    ]
    assert len({first, *others}) == 4


PREPARE = """
import sys, time
from pathlib import Path
from trainer.data import TextSource, corpus, preparation

corpus.PIECE_CHARS = 2_000
write = preparation.write_atomically
def slowly(path, data):
    write(path, data)
    time.sleep(0.02)
preparation.write_atomically = slowly
path, tokenizer, cache = sys.argv[1:]
source = TextSource((path,))
preparation.prepare(source, tokenizer, Path(cache), shard_bytes=12_000)
"""


@pytest.fixture(scope="module")
def sources(documents, tmp_path_factory):
    """The documents as one text, and as a data set of the hub with a limit."""
    parts = [documents[i : i + 600] for i in range(0, 3000, 600)]
    files = {f"hub/train-{i}.jsonl": rows(part) for i, part in enumerate(parts)}
    folder = write(
        tmp_path_factory.mktemp("corpora"), files | {"a.txt": "\n".join(documents)}
    )
    limits = {"streaming": True, "max_documents": 2900, "max_tokens": 80_000}
    return {
        "text": TextSource((f"{folder}/a.txt",)),
        "hub": HubSource(f"{folder}/hub", **limits),
    }


def test_killed_at_any_moment_and_continued_it_is_the_same_to_the_byte(
    sources, small_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr("trainer.data.corpus.PIECE_CHARS", 2_000)
    source, tokenizer = sources["text"], str(small_dir)
    complete = prepare(source, tokenizer, tmp_path / "complete", shard_bytes=12_000)
    cache = tmp_path / "killed"
    journal = cache / complete.name / "journal.jsonl"
    rng = random.Random(0)
    lengths = [0]
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", PREPARE, *source.paths, tokenizer, str(cache)],
            cwd=ROOT,
        )
        # Kill inside one of the next chunks, anywhere in it.
        goal = lengths[-1] + rng.randint(1, 3)
        while not (journal.exists() and journal.read_bytes().count(b"\n") >= goal):
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.06))
        process.kill()
        process.wait()
        lengths.append(journal.read_bytes().count(b"\n"))
    assert 0 < lengths[1] < lengths[2] < len(list(complete.glob("train-*.bin")))
    # If the first process had been ignored, these shards would be written again.
    shards = list(journal.parent.glob(f"train-0000[0-{lengths[1] - 1}].bin"))
    times = [path.stat().st_mtime_ns for path in shards]
    continued = prepare(source, tokenizer, cache, shard_bytes=12_000)
    assert content(continued) == content(complete)
    assert [path.stat().st_mtime_ns for path in shards] == times


@pytest.fixture
def hub(tmp_path, monkeypatch):
    directories_as_hub(monkeypatch, tmp_path / "hf")


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("kind", ["text", "hub"])
def test_every_position_continues_with_the_rows_that_follow_it(
    kind, sources, tmp_path, monkeypatch
):
    monkeypatch.setattr(corpus, "DOCUMENTS_PER_READ", 97)
    monkeypatch.setattr(corpus, "PIECE_CHARS", 3_000)
    assert len(check_positions(corpus.open_corpus(sources[kind], tmp_path))) > 5


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """Let the disk be full after three shards, and return how it continues."""

    def interrupt(source):
        calls = itertools.count()

        def full(path, data):
            if next(calls) == 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write_atomically(path, data)

        def proceed():
            return prepare(source, "byte", tmp_path / "cache", shard_bytes=20_000)

        with monkeypatch.context() as patch:
            patch.setattr(preparation, "write_atomically", full)
            message = "No space left on device; make room .* run again to continue"
            with pytest.raises(UserError, match=message):
                proceed()
        return proceed

    return interrupt


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("kind", ["text", "hub"])
def test_an_interruption_with_a_torn_journal_and_partial_files_loses_nothing(
    kind, sources, tmp_path, monkeypatch, interrupted
):
    """A limit of tokens, as of the hub, counts those before the interruption."""
    monkeypatch.setattr(corpus, "PIECE_CHARS", 3_000)
    proceed = interrupted(sources[kind])
    complete = prepare(sources[kind], "byte", tmp_path, shard_bytes=20_000)
    directory = tmp_path / "cache" / complete.name
    with (directory / "journal.jsonl").open("a") as file:
        file.write('{"position": nothing')
    (directory / ".0123456789abcdef.partial").write_bytes(b"half")
    with pytest.raises(
        UserError, match="preparation is unfinished: run it again to continue"
    ):
        Manifest.load(directory)
    assert content(proceed()) == content(complete)


def test_a_backup_of_hard_links_of_a_journal_stays_as_it_was(
    jsonl, tmp_path, interrupted
):
    proceed = interrupted(TextSource((str(jsonl),)))
    [journal] = tmp_path.glob("cache/*/journal.jsonl")
    with journal.open("ab") as file:
        file.write(b"torn")
    backup = tmp_path / "backup"
    backup.hardlink_to(journal)
    before = backup.read_bytes()
    proceed()
    assert backup.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line[:-20],
        lambda line: b"[" * 20_000,
        lambda line: line.replace(b'"documents": ', b'"documents": 1'),
        lambda line: b"{}",
        lambda line: line + b"\n" + line,
    ],
)
def test_an_altered_journal_is_one_message(jsonl, tmp_path, change, interrupted):
    proceed = interrupted(TextSource((str(jsonl),)))
    [journal] = tmp_path.glob("cache/*/journal.jsonl")
    first, *others = journal.read_bytes().split(b"\n")
    journal.write_bytes(b"\n".join([change(first), *others]))
    with pytest.raises(UserError, match=r"journal.jsonl is damaged .*rm -r .*"):
        proceed()


def test_a_journal_under_the_name_of_another_is_not_continued(tmp_path, interrupted):
    """Rows of one size: each position is the start of a row in both files."""
    proceed, directories = {}, {}
    for name in ("alpha", "gamma"):
        write(tmp_path, {f"{name}.jsonl": rows(f"{name} {i:05}" for i in range(9000))})
        proceed[name] = interrupted(TextSource((str(tmp_path / f"{name}.jsonl"),)))
        [directories[name]] = (tmp_path / "cache").glob(f"{name}-*")
    directories["alpha"].rename(tmp_path / "alpha")
    directories["gamma"].rename(directories["alpha"])
    with pytest.raises(UserError, match="holds other data than its name says"):
        proceed["alpha"]()
    directories["alpha"].rename(directories["gamma"])
    journal = directories["gamma"] / "journal.jsonl"
    lines = map(json.loads, journal.read_text().splitlines())
    left_out = ("fingerprint", "digest")
    of_earlier_versions = [
        {k: v for k, v in x.items() if k not in left_out} for x in lines
    ]
    sealed = [line | {"digest": digest(line)} for line in of_earlier_versions]
    journal.write_text("".join(f"{json.dumps(line)}\n" for line in sealed))
    assert Manifest.load(proceed["gamma"]()).splits["train"].documents > 8000


def test_ids_that_the_tokenizer_does_not_have_are_not_rounded_away(
    jsonl, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        ByteTokenizer, "encode_array", lambda *_: np.array([65536 + 7], np.uint32)
    )
    with pytest.raises(UserError, match="byte makes the id 65543 of a text"):
        prepare(TextSource((str(jsonl),)), "byte", tmp_path / "cache")


def test_several_processes_prepare_once(jsonl, tmp_path):
    source, seen = TextSource((str(jsonl),)), []
    with ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(prepare, source, "byte", tmp_path, progress=seen.append)
            for _ in range(3)
        ]
    assert len({call.result() for call in calls}) == 1
    assert [p.documents for p in seen] == sorted({p.documents for p in seen})


def test_a_journal_that_is_a_link_is_not_shortened(jsonl, tmp_path):
    source, secret = TextSource((str(jsonl),)), tmp_path / "netrc"
    folder = prepare(source, "byte", tmp_path / "cache")
    secret.write_text("machine")
    for path in folder.iterdir():
        path.unlink()
    (folder / "journal.jsonl").symlink_to(secret)
    with pytest.raises(UserError, match="symbolic links"):
        prepare(source, "byte", tmp_path / "cache")
    assert secret.read_text() == "machine"


def test_a_cache_directory_that_cannot_be_made_is_one_message(jsonl, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write prepared data to"):
        prepare(EmbeddedSource(), "byte", tmp_path / "file" / "cache")


def test_a_prepared_directory_is_a_source_and_keeps_its_tokenizer(
    jsonl, small, small_dir, tmp_path
):
    directory = prepare(TextSource((str(jsonl),)), str(small_dir), tmp_path)
    moved = directory.rename(tmp_path / "moved")
    assert prepare(PreparedSource(moved), None, tmp_path) == moved
    assert prepare(PreparedSource(moved), str(small_dir), tmp_path) == moved
    loaded = Manifest.load(moved).get_tokenizer()
    assert loaded.encode("Hello world") == small.encode("Hello world")
    with pytest.raises(
        UserError,
        match=r"of 1257 ids, not with 'byte' of 256; set data.tokenizer=null",
    ):
        prepare(PreparedSource(moved), "byte", tmp_path)
    with pytest.raises(UserError, match="holds no prepared data"):
        prepare(PreparedSource(tmp_path / "nowhere"), None, tmp_path)


def test_the_split_hash_is_stable():
    # Another hash would move documents between the parts of every corpus that was
    # prepared before.
    assert [round(uniform(text), 6) for text in ("", "a", "日本")] == [
        0.705848,
        0.184607,
        0.228933,
    ]
