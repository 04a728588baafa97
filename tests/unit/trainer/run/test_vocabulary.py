"""Weights of one tokenizer, for another: every table of a family, tied or not, with
padding, sharded."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tokenizers import Tokenizer, models

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
    Vocabulary,
    describe_embeddings,
    shared_with,
    vocabulary_of,
    weights_for_tokenizer,
    with_special,
)

END = "<|endoftext|>"

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
    return family_of(spec).build(spec).init(jax.random.key(seed))


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


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *((family, "focus") for family in SPECS),
        ("scanned", "random"),
        ("untied", "random"),
    ],
)
def test_all_tables_get_the_rows_of_the_datas_tokens_and_all_else_stays(
    family, method, tmp_path, data, old
):
    params = exported(tmp_path / "hf", SPECS[family], old)
    spec = dataclasses.replace(SPECS[family], vocab_size=data.tokenizer.vocab_size)
    like = initial(spec, 8)
    actual = weights_for_tokenizer(tmp_path / "hf", spec, data, method, 0, like)
    tables = row_arrays_of(spec, "vocab_size")
    assert sum(jax.tree.leaves(tables)) == (2 if family == "untied" else 1)

    def compare(table, new, before, fresh):
        assert (new.shape, new.dtype) == (fresh.shape, fresh.dtype)
        if not table:
            np.testing.assert_array_equal(new, before)
            return
        n = data.tokenizer.vocab_size
        np.testing.assert_array_equal(new[n:], 0)  # padding
        if method == "random":
            np.testing.assert_array_equal(new, fresh)
            return
        for token in (b"t", b"th", b"at", b"\xff"):
            np.testing.assert_array_equal(
                new[data.tokenizer.tokens[token]], before[old.tokens[token]]
            )
        np.testing.assert_array_equal(new[data.tokenizer.eot], before[old.eot])
        made = np.asarray(new[data.tokenizer.tokens[b"the"]])
        assert not (made == np.asarray(before)).all(axis=1).any()
        assert not np.array_equal(
            made, np.asarray(fresh[data.tokenizer.tokens[b"the"]])
        )

    jax.tree.map(compare, tables, actual, params, like)
    line = describe_embeddings(tmp_path / "hf", data.tokenizer, method)
    assert (
        f"init.embeddings={method}: {'all 261' if method == 'random' else '259 of 261'}"
        in line
    )


def test_the_rows_are_placed_and_typed_as_those_of_the_model(tmp_path, data, old):
    exported(tmp_path / "hf", SPECS["untied"], old)
    spec = dataclasses.replace(SPECS["untied"], vocab_size=data.tokenizer.vocab_size)
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    whole = NamedSharding(mesh, PartitionSpec())
    like = jax.tree.map(
        lambda table, x: jax.device_put(
            x.astype(jnp.bfloat16), sharding if table else whole
        ),
        row_arrays_of(spec, "vocab_size"),
        initial(spec, 8),
    )
    actual = weights_for_tokenizer(tmp_path / "hf", spec, data, "mean", 0, like)
    assert jax.tree.map(lambda x: (x.dtype, x.sharding), actual) == jax.tree.map(
        lambda x: (x.dtype, x.sharding), like
    )


def test_which_parameters_have_a_row_for_each_id_is_not_guessed_by_size():
    """A table of positions with as many rows as the vocabulary has is none of them."""
    spec = GPT2Spec(vocab_size=64, n_head=2, n_layer=1, d_model=16, context=64)
    assert sum(jax.tree.leaves(row_arrays_of(spec, "vocab_size"))) == 1


def test_bad_input_is_one_line(tmp_path, data, old):
    like = initial(
        dataclasses.replace(SPECS["gpt2"], vocab_size=data.tokenizer.vocab_size), 8
    )
    spec = dataclasses.replace(SPECS["gpt2"], vocab_size=data.tokenizer.vocab_size)
    exported(tmp_path / "hf", SPECS["gpt2"], old)
    with pytest.raises(UserError, match=r"n_layer=1 \(the model 2\)") as error:
        weights_for_tokenizer(
            tmp_path / "hf", dataclasses.replace(spec, n_layer=2), data, "mean", 0, like
        )
    assert "vocab_size" not in str(error.value)
    (tmp_path / "hf" / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"ж": 0, "д": 1}}})
    )
    with pytest.raises(UserError, match="no token in common"):
        weights_for_tokenizer(tmp_path / "hf", spec, data, "focus", 0, like)
    (tmp_path / "hf" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="none beside the weights"):
        vocabulary_of(tmp_path / "hf")


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
    config, tree = (
        json.loads((directory / name).read_text())
        for name in ("config.json", "tokenizer.json")
    )
    (directory / "config.json").write_text(
        json.dumps(config | {"eos_token_id": eos, "vocab_size": 261})
    )
    tree["added_tokens"].append(
        tree["added_tokens"][0] | {"id": 260, "content": "<|other|>"}
    )
    (directory / "tokenizer.json").write_text(json.dumps(tree))
    assert vocabulary_of(directory).end == wanted
    assert get_tokenizer(str(directory)).eot == wanted
    (directory / "tokenizer_config.json").unlink()
    # without it the configuration decides, if it names a special token
    assert vocabulary_of(directory).end == (260 if eos == 260 else 259)
    assert get_tokenizer(str(directory)).eot == vocabulary_of(directory).end


def test_words_that_were_added_to_a_tokenizer_alone_have_no_rows(tmp_path, data, old):
    exported(tmp_path / "hf", SPECS["untied"], old)
    tree = json.loads((tmp_path / "hf/tokenizer.json").read_text())
    tree["added_tokens"].append(
        tree["added_tokens"][0] | {"id": 260, "content": "the", "special": False}
    )
    (tmp_path / "hf/tokenizer.json").write_text(json.dumps(tree))
    actual = vocabulary_of(tmp_path / "hf")
    assert (actual.size, b"the" in actual.tokens) == (260, False)
    spec = dataclasses.replace(SPECS["untied"], vocab_size=data.tokenizer.vocab_size)
    weights_for_tokenizer(tmp_path / "hf", spec, data, "focus", 0, initial(spec, 8))


def test_special_tokens_that_both_have_keep_their_rows(tmp_path):
    """Marks of a chat, for example, when words are added to a tokenizer."""
    letters = {chr(97 + i): i for i in range(26)}
    for name, special in (("old", ["<a>", "<b>", END]), ("new", ["<c>", "<b>", END])):
        made = Tokenizer(models.BPE(letters, [], unk_token="a"))
        made.add_special_tokens(special)
        (tmp_path / name).mkdir()
        made.save(str(tmp_path / name / "tokenizer.json"))
    old = vocabulary_of_tokenizer(get_tokenizer(str(tmp_path / "old")))
    shared = shared_with(old, get_tokenizer(str(tmp_path / "new")), tmp_path / "old")
    pairs = dict(zip(shared.new.tolist(), shared.old.tolist(), strict=True))
    assert pairs == {i: i for i in range(26)} | {27: 27, 28: 28}


def vocabulary_of_tokenizer(tokenizer):
    return Vocabulary(with_special(tokenizer), tokenizer.eot, tokenizer.vocab_size)
