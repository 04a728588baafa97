"""Weights in, another tokenizer, training, and out: beside what transformers wrote of
an export of the same journey.

`scripts/studies/family_journeys.py` stored the exports and transformers' texts.
"""

import contextlib
import json
import logging
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from scripts.studies.family_journeys import NEW_TOKENS, PROMPTS, WEIGHTS, journey
from trainer.assembly.saved_model import restore_run
from trainer.data import get_tokenizer
from trainer.data.tokenizer import continuation
from trainer.models import huggingface
from trainer.models.registry import family_of
from trainer.models.sampling import Generator

STORED = Path(__file__).parents[2] / "data" / "journeys"


def greedy_texts(exported, tokenizer):
    """The likeliest texts of an export, read as weights that somebody gives."""
    spec, params = huggingface.load(exported, None)
    generator = Generator(family_of(spec).build(spec).bind, spec)
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        new = generator(params, ids, max_new_tokens=NEW_TOKENS, temperature=0.0)
        texts.append(prompt + continuation(tokenizer, ids, new))
    return texts


# their files and texts, part by part: unit/trainer/models, unit/trainer/data
@pytest.mark.slow
@pytest.mark.parametrize("family", WEIGHTS)
def test_a_family_goes_in_and_out_with_the_texts_of_transformers(
    tmp_path, monkeypatch, family
):
    monkeypatch.setattr(logging.root, "handlers", [])
    stored = json.loads((STORED / family / "greedy.json").read_text())
    # Two machines round differently, and the texts are the same by this margin.
    assert stored["margin"] > 1
    assert journey(tmp_path, family) == stored["texts"]
    exported = tmp_path / "exported"
    tokenizer = get_tokenizer(str(exported))
    assert greedy_texts(exported, tokenizer) == stored["texts"]
    assert greedy_texts(STORED / family, tokenizer) == stored["texts"]
    _, params = huggingface.load(exported, None)
    with contextlib.chdir(tmp_path):
        trained = restore_run(Path("run")).params
    jax.tree.map(np.testing.assert_array_equal, params, trained)
    read = [
        json.loads((f / "config.json").read_text()) for f in (exported, STORED / family)
    ]
    assert read[0] == read[1]
    weights, expected = (
        load_file(folder / "model.safetensors")
        for folder in (exported, STORED / family)
    )
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        right = expected[name]
        assert tensor.shape == right.shape
        # Unrelated tensors, such as those with exchanged rows, are sqrt(2) apart.
        assert np.linalg.norm(tensor - right) < 0.7 * np.linalg.norm(right), name
