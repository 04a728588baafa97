"""A run continues on the data that it was trained on."""

import dataclasses

from trainer.data import Manifest
from trainer.data.corpus import TextSource
from trainer.data.mixture import MixedManifest
from trainer.data.preparation import prepare
from trainer.run.compatibility import data_difference


def test_other_tokens_under_the_same_fingerprint_are_other_data(tmp_path):
    """A data set of the hub has its name for a fingerprint."""
    (tmp_path / "a.txt").write_text("some text. " * 100)
    source = TextSource((str(tmp_path / "a.txt"),), "text")
    manifest = Manifest.load(prepare(source, "byte", tmp_path / "data"))
    train = manifest.splits["train"]
    shard = dataclasses.replace(train.shards[0], crc32=1)
    splits = manifest.splits | {"train": dataclasses.replace(train, shards=(shard,))}
    changed = dataclasses.replace(manifest, splits=splits)
    for old, new in (
        (manifest, changed),
        (MixedManifest.merge({"a": manifest}), MixedManifest.merge({"a": changed})),
    ):
        meta = {"data": old.fingerprint, "data_content": old.content}
        assert data_difference(meta, old) is None
        assert "trained on other tokens than" in data_difference(meta, new)
        assert data_difference({"data": old.fingerprint}, new) is None
        assert "trained on data x, this is" in data_difference({"data": "x"}, new)
