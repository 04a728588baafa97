"""Damage to prepared data is found when it is opened, named, and answered with what to
do."""

import json
import os
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from trainer.data import Loader, Manifest, TextSource, prepare, shards
from trainer.errors import UserError


@pytest.fixture(scope="module")
def prepared(jsonl, small_dir, tmp_path_factory):
    return prepare(
        TextSource((str(jsonl),), "jsonl"),
        str(small_dir),
        tmp_path_factory.mktemp("prepared"),
        shard_bytes=60_000,
    )


@pytest.fixture
def directory(prepared, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(prepared, tmp_path / prepared.name)


def flip(path, offset=-1):
    """Change one bit and keep the size."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


REPAIR = r"remove it \(rm -r .*\) and prepare the data again"


def test_the_command_that_removes_a_directory_removes_no_other():
    command = shards.repair(Path("my data")).partition("(")[2].partition(")")[0]
    assert shlex.split(command) == ["rm", "-r", "my data"]


@pytest.mark.parametrize(
    "name", ["train-00000.bin", "train-00002.bin", "val-00001.bin"]
)
def test_a_truncated_shard_is_named(directory, name):
    path = directory / name
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(
        UserError,
        match=rf"shard .*{name} has \d+ bytes, its manifest says \d+: .*; {REPAIR}",
    ):
        Loader(directory, "train", context=8, batch_size=1)


@pytest.mark.parametrize("offset", [0, 1001, -1])
def test_one_altered_bit_is_found(directory, offset):
    flip(directory / "train-00001.bin", offset)
    with pytest.raises(
        UserError, match=rf"train-00001\.bin has checksum .*: altered; {REPAIR}"
    ):
        Loader(directory, "train", context=8, batch_size=1)


def test_a_missing_shard_is_named(directory):
    (directory / "val-00000.bin").unlink()
    with pytest.raises(UserError, match=rf"val-00000\.bin is missing; {REPAIR}"):
        Manifest.load(directory)


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """All data count as large, and are noted here once they are verified."""
    monkeypatch.setattr(shards, "ALWAYS_VERIFY", 0)
    monkeypatch.setattr(shards, "VERIFIED", str(tmp_path / "verified"))
    return tmp_path / "verified"


def test_large_data_is_read_through_once_and_again_when_touched(
    directory, memory, monkeypatch
):
    read = []
    crc32 = shards.crc32
    monkeypatch.setattr(
        shards, "crc32", lambda path: read.append(path.name) or crc32(path)
    )
    total = len(Manifest.load(directory).shards)
    assert len(read) == total
    Manifest.load(directory)
    assert len(read) == total  # known by size and times
    os.utime(directory / "train-00001.bin")
    Manifest.load(directory)
    assert read[total:] == ["train-00001.bin"]
    Manifest.load(directory, thorough=True)
    assert len(read) == 2 * total + 1
    flip(directory / "train-00002.bin")
    with pytest.raises(UserError, match=r"train-00002\.bin has checksum"):
        Manifest.load(directory)


def test_a_torn_memory_of_what_was_verified_only_costs_time(directory, memory):
    Manifest.load(directory)
    (file,) = memory.iterdir()
    file.write_text('{"train-000')
    assert Manifest.load(directory).tokens("train") > 0


def test_without_a_place_for_the_memory_data_are_read_again(directory, memory):
    memory.write_text("no directory")
    assert Manifest.load(directory).tokens("train") > 0


def test_a_directory_does_not_vouch_for_its_own_shards(directory, memory):
    """Its owner may have overwritten a shard, and have noted the new time."""
    Manifest.load(directory)
    (file,) = memory.iterdir()
    flip(directory / "train-00001.bin")
    stamps = json.loads(file.read_text())
    stat = (directory / "train-00001.bin").stat()
    stamps["train-00001.bin"] = [
        stat.st_size,
        stat.st_mtime_ns,
        stat.st_ctime_ns,
        stat.st_ino,
    ]
    (directory / "verified.json").write_text(json.dumps(stamps))
    with pytest.raises(UserError, match=r"train-00001\.bin has checksum"):
        Manifest.load(directory)


@pytest.mark.parametrize("text", ["", "{", '{"format": 1}', "[]"])
def test_a_damaged_manifest_is_one_message(directory, text):
    (directory / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=rf"manifest\.json is damaged .*{REPAIR}"):
        Manifest.load(directory)


def test_another_format_is_refused(directory):
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(UserError, match=r"is of format 99, this version reads 1"):
        Manifest.load(directory)


def test_an_altered_manifest_is_refused(directory):
    path = directory / "manifest.json"
    tree = json.loads(path.read_text())
    tree["splits"]["val"]["bytes"] += 1  # the loss in bits per byte depends on it
    path.write_text(json.dumps(tree))
    with pytest.raises(UserError, match=rf"was altered since it was written; {REPAIR}"):
        Manifest.load(directory)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("fingerprint",), ["x"]),
        (("source",), []),
        (("source", "kind"), 5),
        (("source", "paths"), 5),
        (("source", "paths"), [5]),
        (("source", "digests"), 7),
        (("source",), {"kind": "python"}),
        (("source",), {"kind": "mix"}),
        (("source",), {}),
        (("eot",), 0.5),
        (("val_fraction",), "x"),
        (("val_fraction",), float("nan")),
        (("splits", "val", "bytes"), float("inf")),
        (("splits", "val", "bytes"), 0),
        (("splits", "train", "documents"), True),
        (("splits", "train", "tokens"), 1e3),
        (("splits", "train", "shards", 0, "crc32"), "0"),
    ],
)
def test_a_manifest_with_a_right_digest_may_hold_other_types(directory, keys, value):
    """Whoever makes a directory can compute the digest."""
    path = directory / "manifest.json"
    tree = json.loads(path.read_text())
    del tree["digest"]
    part = tree
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    tree["digest"] = shards.digest(tree)
    path.write_text(json.dumps(tree))
    with pytest.raises(UserError, match=rf"manifest\.json is damaged .*{REPAIR}"):
        Manifest.load(directory)


def test_an_empty_shard_is_refused(directory):
    path = directory / "manifest.json"
    tree = json.loads(path.read_text())
    del tree["digest"]
    (directory / "e.bin").touch()
    tree["splits"]["val"]["shards"].append({"name": "e.bin", "tokens": 0, "crc32": 0})
    tree["digest"] = shards.digest(tree)
    path.write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        Manifest.load(directory)


def test_a_manifest_of_the_first_format_is_read_without_a_digest(directory):
    path, whole = directory / "manifest.json", Manifest.load(directory)
    tree = json.loads(path.read_text()) | {"format": 1}
    del tree["digest"]
    path.write_text(json.dumps(tree))
    assert Manifest.load(directory) == whole


def test_a_shard_is_no_link(directory):
    shard = directory / "val-00000.bin"
    shard.rename(directory / "elsewhere")
    shard.symlink_to("elsewhere")
    with pytest.raises(UserError, match=r"val-00000\.bin is a symbolic link"):
        Manifest.load(directory)


def test_altered_tokenizer_files_are_found(directory):
    path = directory / "tokenizer.json"
    path.write_text(path.read_text().replace("1256", "1300"))
    with pytest.raises(UserError, match=r"tokenizer files of .* were altered"):
        Manifest.load(directory).get_tokenizer()


def test_the_manifest_says_what_it_was_made_of(directory, jsonl, small_dir):
    tree = json.loads((directory / "manifest.json").read_text())
    assert tree["format"] == 2
    assert tree["source"]["paths"] == [str(jsonl)]
    assert tree["tokenizer"] == str(small_dir / "vocab.bpe")
    for name, part in tree["splits"].items():
        sizes = [(directory / shard["name"]).stat().st_size for shard in part["shards"]]
        assert [shard["tokens"] * 2 for shard in part["shards"]] == sizes, name
        assert part["tokens"] == sum(shard["tokens"] for shard in part["shards"])


def test_shards_are_memory_mapped_and_cannot_be_written(directory):
    shard = Manifest.load(directory).open("train")[0]
    assert isinstance(shard, np.memmap)
    assert shard.dtype == np.dtype("<u2")
    with pytest.raises(ValueError, match="read-only"):
        shard[0] = 1


@pytest.mark.parametrize("change", ["truncated", "overwritten", "removed"])
def test_a_shard_that_changes_under_a_loader_is_an_error_and_no_signal(
    directory, change
):
    loader = Loader(directory, "train", context=8, batch_size=2)
    loader.batch(0)
    path = directory / loader.manifest.splits["train"].shards[0].name
    data = path.read_bytes()
    if change == "truncated":
        os.truncate(path, 2)
    elif change == "overwritten":
        path.write_bytes(bytes(len(data)))
    else:
        path.unlink()
    everything = np.arange(loader.windows)
    with pytest.raises(UserError, match=r"truncated or altered|: altered|is missing"):
        loader.samples(everything)
    # the same content is what the manifest says, whatever its times
    path.write_bytes(data)
    loader.samples(everything)
