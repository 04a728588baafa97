"""Weights of one tokenizer, for another: every table of a family, tied or not, with
padding, sharded."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import small_models
from jax.sharding import NamedSharding, PartitionSpec

from trainer.data import TextSource, get_tokenizer, prepare
from trainer.data.dataset import Dataset
from trainer.data.hf_tokenizer import save_hf
from trainer.errors import UserError
from trainer.models import huggingface
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.llama.spec import LlamaSpec
from trainer.models.registry import family_of
from trainer.run.initial_weights import row_arrays_of
from trainer.run.vocabulary import (
    vocabulary_of,
    weights_for_tokenizer,
)

TEXT = "the cat sat on the mat and the rat sat on the hat and that was that\n" * 400
SIZES = {"n_layer": 1, "d_model": 16, "context": 32}
SPECS = {
    "gpt2": GPT2Spec(vocab_size=1, n_head=2, **SIZES),
    "scanned": GPT2Spec(vocab_size=1, n_head=2, scan_layers=True, **SIZES),
    "llama": LlamaSpec(vocab_size=1, n_head=2, n_kv_head=1, tied=True, **SIZES),
    "untied": LlamaSpec(vocab_size=1, n_head=2, n_kv_head=2, tied=False, **SIZES),
}


def bpe(directory, *merges):
    directory.mkdir()
    (directory / "vocab.bpe").write_text("\n".join(merges))
    return get_tokenizer(str(directory))


def initial(spec, seed):
    return small_models.initial(family_of(spec).build(spec), seed)


@pytest.fixture
def data(tmp_path):
    bpe(tmp_path / "new", "t h", "th e", "a t", "Ġ th")
    (tmp_path / "text.txt").write_text(TEXT)
    directory = prepare(
        TextSource((str(tmp_path / "text.txt"),)),
        str(tmp_path / "new"),
        tmp_path / "cache",
    )
    return Dataset.open(directory, seed=0, context=32, batch_size=2)


@pytest.fixture
def old(tmp_path):
    return bpe(tmp_path / "old", "s a", "t h", "a t")


def exported(directory, spec, tokenizer):
    spec = dataclasses.replace(spec, vocab_size=tokenizer.vocab_size)
    params = initial(spec, 7)
    huggingface.save(directory, spec, params, tokenizer.eot)
    save_hf(directory, tokenizer, spec.context)
    return params


def untrained(family, data):
    """Return a model for the data's tokenizer, and its parameters on two devices."""
    vocab_size = data.tokenizer.vocab_size
    spec = dataclasses.replace(SPECS[family], vocab_size=vocab_size)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    replicated = NamedSharding(mesh, PartitionSpec())
    return spec, jax.device_put(initial(spec, 8), replicated)


@pytest.mark.parametrize(
    ("family", "method"),
    [*((family, "focus") for family in SPECS), ("untied", "random")],
)
def test_all_tables_get_the_rows_of_the_datas_tokens_and_all_else_stays(
    family, method, tmp_path, data, old
):
    params = exported(tmp_path / "hf", SPECS[family], old)
    spec, fresh = untrained(family, data)
    actual, line = weights_for_tokenizer(tmp_path / "hf", spec, data, method, 0, fresh)
    tables = row_arrays_of(spec, "vocab_size")
    assert sum(jax.tree.leaves(tables)) == (2 if family == "untied" else 1)
    tokens = data.tokenizer.tokens

    def compare(is_table, new, trained, fresh):
        assert (new.shape, new.dtype) == (fresh.shape, fresh.dtype)
        assert new.sharding == fresh.sharding
        if not is_table:
            np.testing.assert_array_equal(new, trained)
            return
        np.testing.assert_array_equal(new[data.tokenizer.vocab_size :], 0)  # padding
        if method == "random":
            np.testing.assert_array_equal(new, fresh)
            return
        for token in (b"t", b"th", b"at", b"\xff"):
            np.testing.assert_array_equal(
                new[tokens[token]], trained[old.tokens[token]]
            )
        np.testing.assert_array_equal(new[data.tokenizer.eot], trained[old.eot])
        made = np.asarray(new[tokens[b"the"]])
        assert not (made == np.asarray(trained)).all(axis=1).any()
        assert not np.array_equal(made, np.asarray(fresh[tokens[b"the"]]))

    jax.tree.map(compare, tables, actual, params, fresh)
    rows = "all 261" if method == "random" else "259 of 261"
    assert f"init.embeddings={method}: {rows}" in line


def test_tokenizers_with_no_token_in_common_are_refused(tmp_path, data, old):
    source = tmp_path / "hf"
    spec, fresh = untrained("gpt2", data)
    exported(source, SPECS["gpt2"], old)
    other = {"model": {"vocab": {"ж": 0, "д": 1}}}
    (source / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match="no token in common"):
        weights_for_tokenizer(source, spec, data, "focus", 0, fresh)


def test_parameters_with_a_row_for_each_id_are_not_guessed_by_size():
    """A table of positions with as many rows as the vocabulary has is none of them."""
    spec = GPT2Spec(vocab_size=64, n_head=2, n_layer=1, d_model=16, context=64)
    assert sum(jax.tree.leaves(row_arrays_of(spec, "vocab_size"))) == 1


@pytest.mark.parametrize(
    ("eos", "wanted"),
    [
        (50256, 259),  # nobody told the configuration: the tokenizer does
        ([2, 7], 259),  # of its kind's first model, here a letter
        (None, 259),
        (260, 259),  # another of the special tokens; tokenized data end with 259
    ],
)
def test_the_end_of_a_document_is_one_that_the_tokenizer_knows(
    eos, wanted, tmp_path, old
):
    directory = tmp_path / "hf"
    exported(directory, SPECS["gpt2"], old)
    config = json.loads((directory / "config.json").read_text())
    config |= {"eos_token_id": eos, "vocab_size": 261}
    (directory / "config.json").write_text(json.dumps(config))
    file = directory / "tokenizer.json"
    tree = json.loads(file.read_text())
    other = {"id": 260, "content": "<|other|>"}
    tree["added_tokens"].append(tree["added_tokens"][0] | other)
    file.write_text(json.dumps(tree))
    assert vocabulary_of(directory).end == wanted
    assert get_tokenizer(str(directory)).eot == wanted
    (directory / "tokenizer_config.json").unlink()
    # without it the configuration decides, if it names a special token
    assert vocabulary_of(directory).end == (260 if eos == 260 else 259)
    assert get_tokenizer(str(directory)).eot == vocabulary_of(directory).end
