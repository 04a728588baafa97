"""Damage to prepared data is found when it is opened, named, and answered with what to
do."""

import json
import os
import shlex
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
from forging import same_crc32

from trainer.cli import prepare_data
from trainer.data import Manifest, ShardLoader, TextSource, prepare, shards
from trainer.data.mixture import MixedManifest
from trainer.errors import UserError
from trainer.run.compatibility import data_difference


@pytest.fixture(scope="module")
def prepared(jsonl, small_dir, tmp_path_factory):
    cache = tmp_path_factory.mktemp("prepared")
    source = TextSource((str(jsonl),))
    return prepare(source, str(small_dir), cache, shard_bytes=60_000)


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


def damaged(directory, message):
    with pytest.raises(UserError, match=message):
        Manifest.load(directory)


def test_a_damaged_shard_is_named(directory):
    for number in (1, 2):
        path = directory / f"train-0000{number}.bin"
        for offset in (0, 1001, -1):
            flip(path, offset)
            damaged(directory, rf"{path.name} has checksum .*: altered; {REPAIR}")
            flip(path, offset)
    path = directory / "val-00001.bin"
    os.truncate(path, path.stat().st_size - 2)
    size = rf"val-00001\.bin has \d+ bytes, its manifest says \d+: .*; {REPAIR}"
    damaged(directory, size)
    path.unlink()
    damaged(directory, rf"val-00001\.bin is missing; {REPAIR}")
    path.symlink_to("val-00000.bin")
    damaged(directory, r"val-00001\.bin is a symbolic link")


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
    content = shards.checksums_and_largest
    monkeypatch.setattr(
        shards,
        "checksums_and_largest",
        lambda path, dtype: read.append(path.name) or content(path, dtype),
    )
    total = len(Manifest.load(directory).shards)
    assert len(read) == total
    Manifest.load(directory)
    assert len(read) == total  # known by size and times
    os.utime(directory / "train-00001.bin")
    Manifest.load(directory)
    assert read[total:] == ["train-00001.bin"]
    prepare_data.main(prepare_data.Arguments(verify=str(directory)), [])
    assert len(read) == 2 * total + 1
    flip(directory / "train-00002.bin")
    damaged(directory, r"train-00002\.bin has checksum")


def test_a_directory_does_not_vouch_for_its_own_shards(directory, memory):
    """Its owner may have overwritten a shard, and have noted the new time."""
    Manifest.load(directory)
    (file,) = memory.iterdir()
    flip(directory / "train-00001.bin")
    stamps = json.loads(file.read_text())
    stat = (directory / "train-00001.bin").stat()
    stamps["train-00001.bin"] = [
        *(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino),
        *stamps["train-00001.bin"][4:],
    ]
    (directory / "verified.json").write_text(json.dumps(stamps))
    damaged(directory, r"train-00001\.bin has checksum")


def forge(directory):
    """Give the training shards other tokens, of which each shard has the same CRC-32."""
    for path in directory.glob("train-*.bin"):
        path.write_bytes(same_crc32(path.read_bytes(), range(0, 2000, 2)))


def forget_digests(tree):
    """Make a manifest one of an earlier version."""
    for split in tree["splits"].values():
        for shard in split["shards"]:
            shard.pop("digest", None)
    tree.update(format=2)


def test_other_tokens_of_the_same_crc32_are_found(directory):
    forge(directory)
    damaged(directory, rf"train-0000\d\.bin has digest .*: altered; {REPAIR}")


def test_other_tokens_of_the_same_crc32_are_not_what_a_checkpoint_was_trained_on(
    directory,
):
    manifest = Manifest.load(directory)
    meta = {"data": manifest.fingerprint, "data_content": manifest.content}
    forge(directory)
    rewrite(directory, forget_digests, signed=True)
    forged = Manifest.load(directory)
    assert forged.content != manifest.content
    assert "trained on other tokens than" in data_difference(meta, forged)


@pytest.mark.parametrize("make", [lambda m: m, lambda m: MixedManifest.merge({"a": m})])
def test_the_same_tokens_of_another_number_of_bytes_are_other_data(directory, make):
    """Bits per byte would be others, and the manifest's own digest anybody can make."""
    manifest = Manifest.load(directory)
    meta = {"data": make(manifest).fingerprint, "data_content": make(manifest).content}
    change = lambda tree: tree["splits"]["val"].update(bytes=10**9)
    rewrite(directory, change, signed=True)
    forged = Manifest.load(directory)
    assert forged.earlier_contents == manifest.earlier_contents
    assert "of a text of another size" in data_difference(meta, make(forged))


def test_data_and_checkpoints_of_before_shards_had_digests_still_agree(directory):
    new = Manifest.load(directory)
    rewrite(directory, forget_digests, signed=True)
    old = Manifest.load(directory)
    shards_as_saved = json.loads((directory / "manifest.json").read_text())["splits"]
    content = shards.digest(
        [shard for split in shards_as_saved.values() for shard in split["shards"]]
    )
    assert content in old.earlier_contents
    for earlier in (content, *new.earlier_contents):
        meta = {"data": new.fingerprint, "data_content": earlier}
        assert data_difference(meta, new) is None
    meta["data_content"] = content
    assert data_difference(meta, old) is None


def test_large_data_are_read_through_again_for_another_manifest(directory, memory):
    """Else a manifest could say that known shards hold other tokens."""
    Manifest.load(directory)

    def change(tree):
        tree["splits"]["train"]["shards"][0].update(crc32=1)

    rewrite(directory, change, signed=True)
    damaged(directory, r"train-00000\.bin has checksum")


def rewrite(directory, change, *, signed=False):
    """Change a manifest; whoever makes a directory can compute its digest."""
    path = directory / "manifest.json"
    tree = json.loads(path.read_text())
    if signed:
        del tree["digest"]
    change(tree)
    if signed:
        tree["digest"] = shards.digest(tree)
    path.write_text(json.dumps(tree))


def test_a_damaged_or_altered_manifest_is_one_message(directory):
    rewrite(directory, lambda tree: tree.update(format=99))
    damaged(directory, r"is of format 99, this version reads 1")
    # the loss in bits per byte depends on it
    change = lambda tree: tree["splits"]["val"].update(bytes=1)
    rewrite(directory, lambda tree: tree.update(format=2) or change(tree))
    damaged(directory, rf"was altered since it was written; {REPAIR}")
    for text in ("", "{", '{"format": 1}', "[]"):
        (directory / "manifest.json").write_text(text)
        damaged(directory, rf"manifest\.json is damaged .*{REPAIR}")


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("fingerprint",), ["x"]),
        (("source",), []),
        (("source", "paths"), 5),
        (("source", "digests"), 7),
        (("source",), {"kind": "python"}),
        (("source",), {}),
        (("eot",), 0.5),
        (("val_fraction",), float("nan")),
        (("splits", "val", "bytes"), float("inf")),
        (("splits", "val", "bytes"), 0),
        (("splits", "train", "documents"), True),
        (("splits", "train", "tokens"), 1e3),
        (("splits", "train", "shards", 0, "crc32"), "0"),
        # an empty shard
        (("splits", "val", "shards", 9), {"name": "e.bin", "tokens": 0, "crc32": 0}),
    ],
)
def test_a_manifest_with_a_right_digest_may_hold_other_types(directory, keys, value):
    (directory / "e.bin").touch()

    def change(part):
        for key in keys[:-1]:
            part = part[key]
        if isinstance(part, list) and keys[-1] >= len(part):
            part.append(value)
        else:
            part[keys[-1]] = value

    rewrite(directory, change, signed=True)
    damaged(directory, rf"manifest\.json is damaged .*{REPAIR}")


def test_a_manifest_that_names_a_file_elsewhere_is_refused(directory):
    def move(tree):
        tree["splits"]["val"]["shards"][0]["name"] = "../val-00000.bin"

    rewrite(directory, move, signed=True)
    damaged(directory, rf"a shard of val is in another directory.*{REPAIR}")


def test_a_manifest_of_the_first_format_is_read_without_a_digest(directory):
    manifest = Manifest.load(directory)
    rewrite(directory, lambda tree: tree.update(format=1) or tree.pop("digest"))
    assert Manifest.load(directory) == manifest


def test_altered_tokenizer_files_are_found(directory):
    path = directory / "tokenizer.json"
    path.write_text(path.read_text().replace('>": 1256', '>": 1300'))
    with pytest.raises(UserError, match=r"tokenizer files of .* were altered"):
        Manifest.load(directory).get_tokenizer()


@pytest.mark.parametrize("change", ["truncated", "overwritten", "removed"])
def test_a_shard_that_changes_under_a_loader_is_an_error_and_no_signal(
    directory, change
):
    loader = ShardLoader(directory, "train", context=8, batch_size=2)
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


def test_a_shard_that_is_replaced_after_it_was_verified_is_verified_again(
    directory, monkeypatch
):
    opened = Manifest.open

    def replaced_and_opened(manifest, split):
        flip(directory / "train-00000.bin")
        return opened(manifest, split)

    monkeypatch.setattr(Manifest, "open", replaced_and_opened)
    loader = ShardLoader(directory, "train", context=8, batch_size=2)
    for _ in range(2):
        with pytest.raises(UserError, match=r"train-00000\.bin has .*: altered"):
            loader.samples(np.arange(loader.windows))


def test_a_shard_that_was_damaged_and_replaced_is_the_new_file(directory):
    loader = ShardLoader(directory, "train", context=8, batch_size=2)
    everything = np.arange(loader.windows)
    expected = loader.samples(everything).tokens
    path = directory / "train-00000.bin"
    copy = directory / "copy"
    copy.write_bytes(path.read_bytes())
    path.write_bytes(bytes(path.stat().st_size))
    copy.rename(path)
    assert (loader.samples(everything).tokens == expected).all()


def test_ids_beyond_the_vocabulary_are_refused(directory):
    path = directory / "train-00001.bin"
    ids = np.fromfile(path, "<u2")
    size = Manifest.load(directory).vocab_size
    for i, is_valid in ((size - 1, True), (size, False)):
        ids[7] = i
        ids.tofile(path)
        shard = {
            "crc32": zlib.crc32(ids.tobytes()),
            "digest": shards.digest_of_bytes(ids.tobytes()).hexdigest(),
        }
        rewrite(
            directory,
            lambda tree, new=shard: tree["splits"]["train"]["shards"][1].update(new),
            signed=True,
        )
        if is_valid:
            Manifest.load(directory)
        else:
            damaged(directory, rf"{path.name} has the id {size}, .* below {size}")


def test_large_data_are_read_through_again_for_a_smaller_vocabulary(directory, memory):
    size = Manifest.load(directory).vocab_size
    rewrite(directory, lambda tree: tree.update(vocab_size=260, eot=1), signed=True)
    damaged(directory, r"has the id \d+, .* below 260")
    rewrite(directory, lambda tree: tree.update(vocab_size=size), signed=True)
    Manifest.load(directory)


@pytest.mark.parametrize("change", [{"vocab_size": 5000}, {"eot": 32}])
def test_a_manifest_says_of_ids_what_its_tokenizer_does(directory, change):
    rewrite(directory, lambda tree: tree.update(change), signed=True)
    message = rf"manifest\.json says .*, its tokenizer has .*{REPAIR}"
    with pytest.raises(UserError, match=message):
        Manifest.load(directory).get_tokenizer()
    with pytest.raises(UserError, match=message):
        prepare_data.main(prepare_data.Arguments(verify=str(directory)), [])
