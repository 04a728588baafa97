"""Corpora in files: written in few words, read or prepared whole."""

import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data import Manifest, corpus, datasets_patches, prepare
from trainer.data.corpus import open_corpus


def rows(texts, column="text"):
    """Texts as JSON lines."""
    return "".join(json.dumps({column: text}) + "\n" for text in texts)


def write(folder, files):
    """Write files by name: text, bytes, or what Parquet holds, a table or texts."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content)
        else:
            table = content
            if not isinstance(content, pa.Table):
                table = pa.table({"text": content})
            pq.write_table(table, path)
    return folder


def directories_as_hub(monkeypatch, cache):
    """Let directories stand in for data sets of the hub, which no test asks."""
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    monkeypatch.setattr(corpus, "check_hub_name", lambda _: None)
    monkeypatch.setattr(datasets_patches, "home_of", lambda name: f"{name}/")


def read(source, cache):
    """Return the texts of a source."""
    parts = open_corpus(source, cache).read(None)
    return [text for part in parts for text in part.texts]


def check_positions(opened):
    """Check that reading goes on from each position, and return the parts."""
    parts = list(opened.read(None))
    for i, part in enumerate(parts):
        position = json.loads(json.dumps(part.position))
        rest = [text for later in opened.read(position) for text in later.texts]
        assert rest == [text for later in parts[i + 1 :] for text in later.texts]
    return parts


def prepared(source, cache, tokenizer="byte", **settings):
    """Prepare a source, and return the manifest."""
    return Manifest.load(prepare(source, tokenizer, cache, **settings))


def tokens(manifest, split):
    """Return the tokens of a split."""
    return np.concatenate(manifest.open(split))


def documents_of(manifest, *splits):
    """Return the documents of splits, of bytes; by default of both."""
    ids = [tokens(manifest, split) for split in splits or ("train", "val")]
    text = bytes(np.concatenate(ids).astype(np.uint8)).decode()
    return text.split("\0")[:-1]
