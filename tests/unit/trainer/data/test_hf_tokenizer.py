"""A tokenizer.json, as Hugging Face's library reads it, gives the ids and texts of the
tokenizer it was made of."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tokenizers
from families import slow
from tokenizers import Tokenizer

from trainer.cli.export import (
    describe_origin,
    generation_config,
    original_directory,
    special_ids,
    with_ids_of,
)
from trainer.cli.train_tokenizer import train_bpe
from trainer.config.composition import compose_config
from trainer.data import get_tokenizer
from trainer.data.bpe_files import builtin_settings
from trainer.data.byte_spelling import BYTE_LEVEL, SPELLING
from trainer.data.hf_tokenizer import (
    save_hf,
    token_difference,
    token_ids_in,
    tokenizer_in,
)
from trainer.data.tokenizer import BPETokenizer
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


def few_merges(gpt2_dir, directory):
    """A tokenizer of GPT-2's first 400 merges, without an ids file, in a directory that
    has only them."""
    merges = (gpt2_dir / "vocab.bpe").read_text(encoding="utf-8").splitlines()[:400]
    (directory / "vocab.bpe").write_text("\n".join(merges), encoding="utf-8")
    return get_tokenizer(str(directory))


LARGE = [slow(name) for name in ("cl100k_base", "o200k_base")]


@pytest.fixture(params=["byte", "gpt2", *LARGE, "no ids", "end first"])
def ours(request, small, small_dir, tmp_path):
    """Bytes; GPT-2's; its tokens cut up by the patterns of later encodings; its first
    merges, without an ids file; of Hugging Face's trainer, whose special token has the
    first id."""
    if request.param == "end first":
        folder = tmp_path / "made"
        folder.mkdir()
        (folder / "tokenizer.json").write_text(train_bpe(iter(TEXTS), 300, "gpt2"))
        return get_tokenizer(str(folder))
    if request.param == "byte":
        return get_tokenizer("byte")
    if request.param == "no ids":
        return few_merges(small_dir, tmp_path)
    if request.param == "gpt2":
        return small
    encoding = tiktoken.Encoding(
        "own",
        pat_str=builtin_settings(request.param)["pat_str"],
        mergeable_ranks=small.tokens,
        special_tokens={"<|endoftext|>": 50256, "<|other|>": 50300},
    )
    return BPETokenizer("own", encoding)


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


def test_what_was_written_is_read_again_as_the_same_tokenizer(ours, small, tmp_path):
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
    """As it is on the hub: merges as texts, words by the ByteLevel's own pattern, and
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
        lambda t: split_by(t, r"[\x00-\x7f]+"),
        lambda t: split_by(t, r"\s+", behavior="Removed"),
        lambda t: split_by(t, r"\s", behavior="MergedWithPrevious"),
        lambda t: t.update(pre_tokenizer=t["pre_tokenizer"]["pretokenizers"][-1]),
        # tiktoken merges all that makes a token
        lambda t: t["model"]["vocab"].update({"\u00cc\u0123": 60000}),
        lambda t: merge_otherwise(t),
        lambda t: t["model"].update(end_of_word_suffix="e", unk_token="!"),
    ],
)
def test_what_is_no_encoding_as_gpt2s_is_left_to_hugging_faces_library(
    change, small_dir, tmp_path
):
    (tmp_path / "origin").mkdir()
    save_hf(tmp_path, few_merges(small_dir, tmp_path / "origin"), 1024)
    file = tmp_path / "tokenizer.json"
    tree = json.loads(file.read_text(encoding="utf-8"))
    change(tree)
    file.write_text(json.dumps(tree))
    actual, theirs = (
        get_tokenizer(str(tmp_path)),
        tokenizers.Tokenizer.from_file(str(file)),
    )
    assert actual.eot == theirs.token_to_id("<|endoftext|>")
    text = "the cafe\u0301 of the world, and the"
    assert actual.encode(text) == theirs.encode(text).ids


def carried_files(init_from, run_dir, ours, out):
    c = compose_config([f"init_from={init_from}", f"run_dir={run_dir}"])
    origin = original_directory(c, run_dir, ours)
    return [] if origin is None else carry_tokenizer(tokenizer_files(origin), out)


def test_an_export_carries_the_tokenizer_that_the_run_began_with(tmp_path):
    origin, run_dir, out = (tmp_path / name for name in ("origin", "run", "out"))
    for directory in (origin, run_dir, out):
        directory.mkdir()
    ours = get_tokenizer("byte")
    save_hf(origin, ours, 32)
    (origin / "config.json").write_text("{}")
    (origin / "special_tokens_map.json").write_text('{"pad_token": "x"}')
    carried = carried_files(origin, run_dir, ours, out)
    names = {path.name for path in carried}
    assert names >= {"tokenizer.json", "special_tokens_map.json"}
    for path in carried:
        assert path.read_bytes() == (origin / path.name).read_bytes()
    assert carried_files("null", run_dir, ours, out) == []

    template, secret = "chat_template.jinja", tmp_path / "keys/0123"
    secret.parent.mkdir()
    secret.write_text("{}")
    (origin / template).symlink_to(secret)
    message = rf"{template} is a link to .*keys/0123; replace it by the file itself"
    with pytest.raises(UserError, match=message):
        carried_files(origin, run_dir, ours, out)
    (origin / template).unlink()
    # in the cache of the hub, blobs are beside the snapshots
    snapshot, blobs = tmp_path / "hub/snapshots/revision", tmp_path / "hub/blobs"
    shutil.copytree(origin, snapshot)
    shutil.copytree(secret.parent, blobs)
    (snapshot / template).symlink_to("../../blobs/0123")
    carried = carried_files(snapshot, run_dir, ours, out)
    assert template in {path.name for path in carried}
    shutil.rmtree(blobs)
    blobs.symlink_to(secret.parent)
    with pytest.raises(UserError, match=message):
        carried_files(snapshot, run_dir, ours, out)

    tree = json.loads((origin / "tokenizer.json").read_text())
    vocab = tree["model"]["vocab"]
    first, second = list(vocab)[:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (origin / "tokenizer.json").write_text(json.dumps(tree))
    assert carried_files(origin, run_dir, ours, out) == []  # another tokenizer


def test_the_original_is_sought_where_the_run_began(tmp_path, monkeypatch):
    ours = get_tokenizer("byte")
    for place in ("here", "there"):
        origin = tmp_path / place / "base"
        origin.mkdir(parents=True)
        save_hf(origin, ours, 32)
        (origin / "config.json").write_text("{}")
    run_dir = tmp_path / "here/runs/a"
    run_dir.mkdir(parents=True)
    c = compose_config(["init_from=base", "run_dir=runs/a"])
    monkeypatch.chdir(tmp_path / "there")
    assert original_directory(c, run_dir, ours) == tmp_path / "here/base"


def test_an_export_has_all_chat_templates_and_the_sampling_settings(tmp_path):
    origin, out = tmp_path / "origin", tmp_path / "out"
    names = ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    for name in names:
        (origin / name).parent.mkdir(parents=True, exist_ok=True)
        (origin / name).write_text(name)
    out.mkdir()
    carried = carry_tokenizer(tokenizer_files(origin), out)
    assert carried == [out / name for name in names]
    assert [(out / name).read_text() for name in names] == names
    settings = {"do_sample": True, "temperature": 0.6, "eos_token_id": 7}
    (origin / "generation_config.json").write_text(json.dumps(settings))
    ids = special_ids(origin, 5)
    assert generation_config(origin, 5) == settings | ids
    assert generation_config(None, 5) == special_ids(None, 5)


def test_a_run_has_a_copy_of_the_files_beside_its_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    origin, ours = tmp_path / "base", get_tokenizer("byte")
    origin.mkdir()
    save_hf(origin, ours, 32)
    (origin / "config.json").write_text('{"eos_token_id": 5}')
    (origin / "chat_template.jinja").write_text("{{ messages }}")
    (origin / "model.safetensors").write_text("large")
    keep_tokenizer([origin], tmp_path / "runs/a", ours)
    keep_tokenizer([tmp_path / "runs/a"], tmp_path / "runs/b", ours)
    shutil.rmtree(origin)
    keep_tokenizer([origin], tmp_path / "runs/a", ours)
    c = compose_config(["init_from=base", "run_dir=runs/a"])
    for name in "ab":
        found = original_directory(c, tmp_path / "runs" / name, ours)
        assert found == tmp_path / "runs" / name / "init_from"
        assert (found / "chat_template.jinja").read_text() == "{{ messages }}"
        assert not (found / "model.safetensors").exists()


@pytest.mark.parametrize("given", [{"bos_token_id": 0}, {"pad_token_id": 2}, {}])
def test_an_export_keeps_the_ids_of_special_tokens(tmp_path, given):
    ids = {"eos_token_id": 5} | given
    written = {"bos_token_id": 5, "eos_token_id": 5, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({**ids, "hidden_size": 4}))
    assert with_ids_of(tmp_path, written) == {"hidden_size": 8, **ids}
    assert special_ids(tmp_path, 5) == ids
    theirs = {"bos_token_id": 1, "eos_token_id": [7, 5], "temperature": 0.5}
    (tmp_path / "generation_config.json").write_text(json.dumps(theirs))
    assert special_ids(tmp_path, 5) == {
        "bos_token_id": 1,
        "eos_token_id": [5, 7],
    }
    assert special_ids(None, 5) == {"bos_token_id": 5, "eos_token_id": 5}


def test_an_export_names_a_chat_template_only_where_there_is_one(tmp_path):
    said = f"and the ids of its special tokens are those of {tmp_path}"
    files = [tmp_path / "tokenizer.json"]
    assert describe_origin(tmp_path, files) == f"the tokenizer {said}"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    line = f"the tokenizer, its chat template {said}"
    assert describe_origin(tmp_path, files) == line
