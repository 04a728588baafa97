"""A tokenizer.json, as Hugging Face's library reads it, gives the ids and texts of the
tokenizer it was made of."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from corpora import write
from families import slow
from tokenizers import Tokenizer

from trainer.cli.export import (
    generation_config,
    model_config,
    original_directory,
)
from trainer.cli.train_tokenizer import train_bpe
from trainer.data import get_tokenizer
from trainer.data.byte_spelling import BYTE_LEVEL, SPELLING
from trainer.data.hf_tokenizer import (
    save_hf,
    token_difference,
    token_ids_in,
    tokenizer_in,
)
from trainer.data.tokenizer import tiktoken_file
from trainer.data.word_patterns import RANKS
from trainer.errors import UserError
from trainer.models.weight_files import carry_tokenizer, tokenizer_files
from trainer.run.initial_weights import keep_tokenizer

TEXTS = [
    (
        "In the beginning God created the heaven and the earth.\nAnd the earth was"
        " without form"
    ),
    "  two  spaces,   three\t\ttabs \n\n\n lines \r\n and trailing   ",
    (
        "it's you'LL we'd I'M 12345678 3.14159 1,000,000 x=1;y==2 __init__(self):\n   "
        " return 0"
    ),
    "Ünïcödé мир 日本語 🙂🏽 \u00a0\u2003 Ā ÿ \u0130 e\u0301",
    "".join(map(chr, range(1, 700))),
    "",
    " ",
]


LARGE = ("cl100k_base", "o200k_base")


@pytest.fixture(params=["byte", "gpt2", "end first", *map(slow, LARGE)])
def ours(request, small, tmp_path, monkeypatch):
    """Bytes; GPT-2's; of Hugging Face's trainer, whose special token has the first id;
    GPT-2's tokens cut up by the patterns of later encodings."""
    name = request.param
    if name == "gpt2":
        return small
    if name == "end first":
        tree = train_bpe(iter(TEXTS), 300, "gpt2")
        return get_tokenizer(str(write(tmp_path / "made", {"tokenizer.json": tree})))
    if name in LARGE:
        monkeypatch.setitem(RANKS, name, len(small.tokens))
        name = str(tmp_path / f"{name}.tiktoken")
        Path(name).write_bytes(tiktoken_file(small.tokens))
    return get_tokenizer(name)


def test_hugging_faces_library_reads_the_same_tokenizer(ours, tmp_path):
    save_hf(tmp_path, ours, 1024)
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    rng = np.random.default_rng(0)
    noise = ["".join(rng.choice(list("aé 日\n\t1'.sA"), 60)) for _ in range(200)]
    for text in [*TEXTS, *noise]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ids == ours.encode(text), text
        assert theirs.decode(ids) == text
    special = ours.special_tokens
    names = ours.tokens.keys() | {name.encode() for name in special}
    assert theirs.get_vocab_size() == len(names)
    end = json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"]
    assert theirs.token_to_id(end) == ours.eot
    assert {token: theirs.token_to_id(token) for token in special} == special
    assert theirs.decode([ours.encode("a")[0], ours.eot]) == "a"


def test_a_written_tokenizer_is_read_again_as_the_same(ours, small, tmp_path):
    directory = tmp_path / "export"
    directory.mkdir()
    assert token_ids_in(directory) is None
    save_hf(directory, ours, 1024)
    beside = token_ids_in(directory)
    assert token_difference(beside, ours) is None
    other = small if ours.name == "byte" else get_tokenizer("byte")
    assert token_difference(beside, other) is not None
    for name in (directory, directory / "tokenizer.json"):
        assert get_tokenizer(str(name)).fingerprint == ours.fingerprint


def test_a_directory_named_as_an_encoding_has_its_own_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("gpt2").mkdir()
    save_hf(Path("gpt2"), get_tokenizer("byte"), None)
    assert tokenizer_in(Path("gpt2")).name == "byte"


def test_a_tokenizer_of_the_same_size_is_told_apart_by_the_first_other_id(
    small, small_dir, tmp_path
):
    (tmp_path / "vocab.json").write_bytes((small_dir / "encoder.json").read_bytes())
    assert token_difference(token_ids_in(tmp_path), small) is None
    ids = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    ids["Ġthe"], ids["Ġa"] = ids["Ġa"], ids["Ġthe"]
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    assert (
        token_difference(token_ids_in(tmp_path), small)
        == "id 257 is ' the' there, ' a' here"
    )


def test_gpt2s_own_tokenizer_json_is_gpt2(small, tmp_path):
    """The hub's file has merges as texts, words by the ByteLevel's pattern, and
    no type of the model."""
    save_hf(tmp_path, small, 1024)
    file = tmp_path / "tokenizer.json"
    tree = json.loads(file.read_text(encoding="utf-8"))
    tree["pre_tokenizer"] = {k: v for k, v in BYTE_LEVEL.items() if k != "use_regex"}
    tree["model"] |= {
        "merges": [" ".join(pair) for pair in tree["model"]["merges"]],
        "ignore_merges": False,
    }
    tree["model"]["vocab"]["<|endoftext|>"] = small.eot
    del tree["model"]["type"]
    file.write_text(json.dumps(tree))
    assert get_tokenizer(str(tmp_path)).fingerprint == small.fingerprint


def split_by(tree, regex, behavior="Isolated"):
    """Split words by another pattern."""
    split = {"type": "Split", "pattern": {"Regex": regex}, "invert": False}
    tree["pre_tokenizer"]["pretokenizers"][0] = split | {"behavior": behavior}


def merge_otherwise(tree):
    """Leave three tokens, of which "the" is merged of "t" and "he", which are gone when
    "th" was merged first."""
    tokens = [*SPELLING.values(), "th", "he", "the", "<|endoftext|>"]
    tree["model"] |= {
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [["t", "h"], ["h", "e"], ["t", "he"]],
    }
    tree["added_tokens"][0]["id"] = tree["model"]["vocab"]["<|endoftext|>"]


def add_word_without_merge(tree):
    """A word that no merge makes: only tiktoken would find it."""
    tree["model"]["ignore_merges"] = False
    tree["model"]["vocab"]["Ġcafe"] = 60000


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update(normalizer={"type": "NFC"}),
        lambda t: t.update(
            model=t["model"] | {"unk_token": "!"},  # for spaces, which have no token
            pre_tokenizer={
                "type": "Metaspace",
                "replacement": "▁",
                "prepend_scheme": "always",
            },
        ),
        lambda t: t["model"]["vocab"].update({"▁the": 60000}),
        lambda t: t["added_tokens"].append(
            t["added_tokens"][0] | {"id": len(t["model"]["vocab"]), "content": "</s>"}
        ),
        lambda t: t["model"]["merges"].reverse(),
        # tiktoken would lose what a pattern leaves between its matches
        lambda t: split_by(t, r"\d"),
        lambda t: split_by(t, r"\s+", behavior="Removed"),
        lambda t: t.update(pre_tokenizer=t["pre_tokenizer"]["pretokenizers"][-1]),
        # tiktoken merges all that makes a token
        lambda t: t["model"]["vocab"].update({"\u00cc\u0123": 60000}),
        lambda t: merge_otherwise(t),
        lambda t: add_word_without_merge(t),
        lambda t: t["model"].update(end_of_word_suffix="e", unk_token="!"),
    ],
)
def test_an_encoding_unlike_gpt2s_is_left_to_hugging_faces_library(
    change, small, tmp_path
):
    save_hf(tmp_path, small, 1024)
    file = tmp_path / "tokenizer.json"
    tree = json.loads(file.read_text(encoding="utf-8"))
    change(tree)
    file.write_text(json.dumps(tree))
    actual, theirs = get_tokenizer(str(tmp_path)), Tokenizer.from_file(str(file))
    assert actual.eot == theirs.token_to_id("<|endoftext|>")
    text = "the cafe\u0301 of the world, and the"
    assert actual.encode(text) == theirs.encode(text).ids


TEMPLATE = "chat_template.jinja"


@pytest.fixture
def origin(tmp_path, monkeypatch):
    """Given weights with a tokenizer of bytes, in the working directory."""
    monkeypatch.chdir(tmp_path)
    names = ("config.json", TEMPLATE, "model.safetensors")
    origin = write(tmp_path / "base", dict.fromkeys(names, "{}"))
    save_hf(origin, get_tokenizer("byte"), 32)
    return origin


def test_an_export_carries_files_and_no_link_to_another_place(origin, tmp_path):
    names = ["special_tokens_map.json", "additional_chat_templates/tool_use.jinja"]
    write(origin, dict.fromkeys(names, "{}"))
    names += ["tokenizer.json", "tokenizer_config.json", TEMPLATE]
    carried = carry_tokenizer(tokenizer_files(origin), tmp_path / "out")
    assert {str(path.relative_to(tmp_path / "out")) for path in carried} == set(names)
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (origin / name).read_bytes()
    # in the cache of the hub, blobs are beside the snapshots
    snapshot, blobs = tmp_path / "hub/snapshots/revision", tmp_path / "hub/blobs"
    keys = write(tmp_path / "keys", {"0123": "{}"})
    shutil.copytree(keys, blobs)
    shutil.copytree(origin, snapshot)
    (snapshot / "merges.txt").symlink_to("../../blobs/0123")
    assert snapshot / "merges.txt" in tokenizer_files(snapshot)
    shutil.rmtree(blobs)
    blobs.symlink_to(keys)
    (origin / "merges.txt").symlink_to(keys / "0123")
    message = r"merges.txt is a link to .*keys/0123; replace it by the file itself"
    for folder in (origin, snapshot):
        with pytest.raises(UserError, match=message):
            tokenizer_files(folder)


def test_a_run_has_a_copy_of_the_files_beside_its_weights(origin, tmp_path, small):
    byte, runs = get_tokenizer("byte"), tmp_path / "runs"
    keep_tokenizer(origin, runs / "a", byte)
    keep_tokenizer(runs / "a", runs / "b", byte)
    shutil.rmtree(origin)
    keep_tokenizer(origin, runs / "a", byte)
    for name in "ab":
        copy = original_directory(runs / name, byte)
        assert copy == runs / name / "init_from"
        assert (copy / TEMPLATE).exists()
        assert not (copy / "model.safetensors").exists()
        assert original_directory(runs / name, small) is None
    assert original_directory(runs / "c", byte) is None


def test_a_link_is_no_copy_of_the_files_beside_the_weights(origin, tmp_path):
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "init_from").symlink_to(origin)
    with pytest.raises(UserError, match="init_from is a symbolic link"):
        keep_tokenizer(stranger, tmp_path / "new", get_tokenizer("byte"))


def test_an_export_keeps_the_ids_of_special_tokens(tmp_path):
    ids = {"eos_token_id": 5, "pad_token_id": 2}
    written = {"bos_token_id": 5, "eos_token_id": 5, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({**ids, "hidden_size": 4}))
    assert model_config(tmp_path, written) == {"hidden_size": 8, **ids}
    assert generation_config(tmp_path, 5) == ids
    theirs = {"bos_token_id": 1, "eos_token_id": [7, 5], "temperature": 0.5}
    (tmp_path / "generation_config.json").write_text(json.dumps(theirs))
    assert generation_config(tmp_path, 5) == theirs | {"eos_token_id": [5, 7]}
    assert generation_config(None, 5) == {"bos_token_id": 5, "eos_token_id": 5}
