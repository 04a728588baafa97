"""No text ends another or loses a character without a word, whatever the tokenizer."""

import json
import os
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from trainer.data import Manifest, TextSource, get_tokenizer, prepare
from trainer.data.corpus import HubSource, open_corpus
from trainer.data.hub_data import check_tables
from trainer.data.json_tokenizer import NoToken
from trainer.data.tokenizer import changed_characters
from trainer.errors import UserError

END = "<|endoftext|>"
LETTERS = {letter: i for i, letter in enumerate("abcdefghij")}


def prepared(tmp_path, source, tokenizer):
    return Manifest.load(prepare(source, tokenizer, tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_nul_in_a_text_ends_no_document(tmp_path, kind):
    texts = [f"{i} left\0right" for i in range(99)]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    else:
        pq.write_table(pa.table({"text": texts}), path)
    manifest = prepared(tmp_path, TextSource((str(path),)), "byte")
    shards = [shard for split in ("train", "val") for shard in manifest.open(split)]
    ids = [i for shard in shards for i in shard.tolist()]
    assert ids.count(manifest.eot) == len(texts)
    byte = get_tokenizer("byte")
    assert byte.decode(byte.encode("a\0b")) == "a\ufffdb"


def saved(tmp_path, model, *, special=(END,), words=(), **parts):
    made = Tokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    made.add_tokens(list(words))
    made.add_special_tokens(list(special))
    made.save(str(tmp_path / "tokenizer.json"))
    return made


def byte_level(tmp_path):
    """As the library trains one without being given the alphabet of all bytes."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    texts = ["the earth was without form"] * 9
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(special_tokens=[END], show_progress=False),
    )
    made.save(str(tmp_path / "tokenizer.json"))


WITHOUT = {
    "byte level": byte_level,
    "letters": lambda folder: saved(folder, models.BPE(LETTERS, [])),
    "a name without a token": lambda folder: saved(
        folder, models.BPE(LETTERS, [], unk_token="<unk>")
    ),
    "some bytes": lambda folder: saved(
        folder, models.BPE(LETTERS | {"<0xC3>": 10}, [], byte_fallback=True)
    ),
    "unigram": lambda folder: saved(
        folder, models.Unigram([(letter, -1.0) for letter in LETTERS])
    ),
    "words": lambda folder: saved(
        folder,
        models.WordLevel(LETTERS),
        pre_tokenizer=pre_tokenizers.Split("", "isolated"),
    ),
    "word pieces": lambda folder: saved(
        folder,
        models.WordPiece(LETTERS | {"##a": 10, "##f": 11}),
        pre_tokenizer=pre_tokenizers.Whitespace(),
    ),
}


@pytest.mark.parametrize("kind", WITHOUT)
def test_a_character_without_a_token_is_refused_and_others_are_not(tmp_path, kind):
    WITHOUT[kind](tmp_path)
    tokenizer = get_tokenizer(str(tmp_path))
    assert tokenizer.encode("eaf")  # what it was made for
    assert tokenizer.encode_array("eaf").tolist() == tokenizer.encode("eaf")
    for encode in (tokenizer.encode, tokenizer.encode_array):
        with pytest.raises(NoToken, match=r"no token for .*é.* vanish from a text; tr"):
            encode("eaéf")


@pytest.mark.parametrize(
    ("tokenizer", "mark"),
    [("byte", END), ("byte", "<|im_end|>"), ("with marks", "<|im_end|>")],
)
def test_a_text_that_spells_a_special_token_is_said(tmp_path, capsys, mark, tokenizer):
    """Elsewhere TinyStories' separator is the token that ends a document."""
    known = {"byte": {END}, "with marks": {END, "<|im_end|>"}}[tokenizer]
    if tokenizer == "with marks":
        saved(
            tmp_path,
            models.BPE(LETTERS, [], unk_token="a"),
            special=(END, "<|im_end|>"),
            pre_tokenizer=pre_tokenizers.Whitespace(),
        )
        tokenizer = str(tmp_path)
    path = tmp_path / "stories.txt"
    path.write_text(f"\n{mark}\n".join(["abcdefgh"] * 50))
    prepared(tmp_path, TextSource((str(path),)), tokenizer)
    said = capsys.readouterr().err
    line = f" characters spell {mark!r} (49 times): encoded as ordinary characters"
    assert said.count(line) == (mark in known)
    assert " characters spell " not in said.replace(line, "")


def test_every_special_token_that_a_text_spells_is_said(tmp_path, capsys):
    saved(
        tmp_path,
        models.BPE(LETTERS, [], unk_token="a"),
        special=(END, "<|im_start|>", "<|im_end|>"),
        pre_tokenizer=pre_tokenizers.Whitespace(),
    )
    path = tmp_path / "chat.jsonl"
    turns = [f"<|im_start|>{'abc' * i}<|im_end|>" for i in range(100)]
    path.write_text("".join(json.dumps({"text": turn}) + "\n" for turn in turns))
    prepared(tmp_path, TextSource((str(path),)), str(tmp_path))
    counts = "'<|im_end|>' (100 times), '<|im_start|>' (100 times): encoded"
    assert f" characters spell {counts}" in capsys.readouterr().err


def test_a_model_of_which_the_file_names_no_type_loses_no_character(tmp_path):
    saved(tmp_path, models.BPE(LETTERS, []))
    file = tmp_path / "tokenizer.json"
    tree = json.loads(file.read_text())
    del tree["model"]["type"]
    file.write_text(json.dumps(tree))
    tokenizer = get_tokenizer(str(tmp_path))
    assert tokenizer.encode("ab") == [0, 1]
    with pytest.raises(NoToken, match=r"'\u0436' \(U\+0436\)"):
        tokenizer.encode("a\u0436b")


JOINING = {
    "NFC": (normalizers.NFC(), "e\u0301", "'\u00e9'"),
    "NFKC": (normalizers.NFKC(), "a\u1112\u1161\u11ab", "'\ud55c'"),
    "several letters": (normalizers.Replace("ab", "x"), "cab", "'x'"),
    "at the end": (normalizers.Replace(Regex("a$"), "x"), "aba", "'x'"),
}


@pytest.mark.parametrize("kind", JOINING)
def test_a_character_that_a_normalizer_makes_of_several_is_not_lost(tmp_path, kind):
    normalizer, text, lost = JOINING[kind]
    letters = {char: i for i, char in enumerate("abce\u0301\u1112\u1161\u11ab")}
    saved(tmp_path, models.BPE(letters, []), words=["[x]"], normalizer=normalizer)
    tokenizer = get_tokenizer(str(tmp_path))
    assert tokenizer.encode("a[x]c") == [0, 8, 2]
    with pytest.raises(NoToken, match=rf"no token for {lost}"):
        tokenizer.encode(f"c[x]{text}")


@pytest.mark.parametrize(
    "affix", [{"continuing_subword_prefix": "##"}, {"end_of_word_suffix": "</w>"}]
)
def test_a_character_with_a_token_in_one_place_of_a_word_only_is_refused(
    tmp_path, affix
):
    saved(tmp_path, models.BPE(LETTERS, [], **affix))
    [key] = affix
    with pytest.raises(UserError, match=rf"has {key}=.* and no unk_token, so that"):
        get_tokenizer(str(tmp_path))
    unknown = LETTERS | {"<unk>": 10}
    saved(tmp_path, models.BPE(unknown, [], unk_token="<unk>", **affix))
    assert 10 in get_tokenizer(str(tmp_path)).encode("ab")


def test_a_character_in_an_added_word_needs_no_other_token(tmp_path):
    made = saved(tmp_path, models.BPE(LETTERS, []), words=["漢字"])
    tokenizer = get_tokenizer(str(tmp_path))
    assert tokenizer.encode("a漢字b") == [0, made.token_to_id("漢字"), 1]
    with pytest.raises(NoToken, match=r"'字' \(U\+5B57\)"):
        tokenizer.encode("a漢字b字")


def test_characters_that_a_tokenizer_changes_are_said_once(tmp_path, capsys):
    vocabulary = LETTERS | {"[UNK]": 10, "##a": 11, "##b": 12}
    saved(
        tmp_path,
        models.WordPiece(vocabulary, unk_token="[UNK]"),
        special=["[EOS]"],
        normalizer=normalizers.Lowercase(),
        pre_tokenizer=pre_tokenizers.Whitespace(),
    )
    (tmp_path / "a.txt").write_text("a b c\n" * 50)
    source = TextSource((str(tmp_path / "a.txt"),))
    for _ in range(2):
        prepared(tmp_path, source, str(tmp_path))
    [line] = [x for x in capsys.readouterr().err.splitlines() if "ASCII" in x]
    assert "changes or leaves out" in line
    assert r"\n" in line
    assert "AB" in line
    assert changed_characters(get_tokenizer("byte")) == ""


@pytest.mark.parametrize("kind", ["letters", "words"])
def test_an_end_that_is_the_unknown_token_is_refused(tmp_path, kind):
    vocabulary = LETTERS | {END: 10}
    model = models.WordLevel(vocabulary, unk_token=END)
    if kind == "letters":
        model = models.BPE(vocabulary, [], unk_token=END)
    saved(tmp_path, model)
    with pytest.raises(UserError, match="which is also its unknown token"):
        get_tokenizer(str(tmp_path))


def test_an_end_that_is_an_ordinary_token_of_a_tiktoken_file_is_refused(
    small_dir, tmp_path
):
    get_tokenizer(str(small_dir)).save(tmp_path)
    file = tmp_path / "tokenizer.json"
    tree = json.loads(file.read_text()) | {"special_tokens": {END: 0}}
    file.write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"'<\|endoftext\|>' has the id 0 of an ordin"):
        get_tokenizer(str(tmp_path))


def test_text_that_spells_an_end_which_is_not_marked_special_does_not_end(tmp_path):
    model = models.BPE(LETTERS | {"<unk>": 10}, [], unk_token="<unk>", fuse_unk=True)
    made = saved(tmp_path, model, special=(), words=[AddedToken("</s>")])
    tokenizer = get_tokenizer(str(tmp_path))
    assert tokenizer.eot == made.token_to_id("</s>")
    assert tokenizer.encode("a</s>b") == [0, 10, 1]


NAMES = {
    "tokenizer_config.json": {"eos_token": "<b>"},
    "special_tokens_map.json": {"eos_token": {"content": "<b>"}},
    "generation_config.json": {"eos_token_id": [999, 257]},
    "config.json": {"eos_token_id": 257},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("like_gpt2", [True, False])
def test_the_end_is_read_from_whichever_file_names_it(tmp_path, name, like_gpt2):
    """Also of an encoding as GPT-2's, with its end among other tokens."""
    vocabulary = {
        char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    normalizer = None if like_gpt2 else normalizers.NFC()
    saved(
        tmp_path,
        models.BPE(vocabulary, []),
        special=[END, "<b>"],
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        **({} if normalizer is None else {"normalizer": normalizer}),
    )
    assert get_tokenizer(str(tmp_path)).eot == 256
    (tmp_path / name).write_text(json.dumps(NAMES[name]))
    tokenizer = get_tokenizer(str(tmp_path))
    assert tokenizer.eot == 257
    assert not {256, 257} & set(tokenizer.encode(f"{END}<b>"))


def test_of_two_files_that_name_an_end_the_one_of_transformers_counts(tmp_path):
    saved(tmp_path, models.BPE(LETTERS, []), special=["<a>", "<b>"])
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<a>"}')
    settings = {"eos_token": "<b>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert get_tokenizer(str(tmp_path)).eot == 10
    settings["added_tokens_decoder"] = {"11": {"content": "<b>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert get_tokenizer(str(tmp_path)).eot == 11


def pair(tmp_path, end):
    special = {"<s>": 0, end: 1}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = special | {char: i for i, char in enumerate(letters, 2)} | {"ab": 258}
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")


def test_a_pair_of_files_with_another_end_is_refused(tmp_path):
    pair(tmp_path, "</s>")
    with pytest.raises(UserError, match=r"its documents end with '</s>'.*; save all"):
        get_tokenizer(str(tmp_path))
    pair(tmp_path, END)
    assert get_tokenizer(str(tmp_path)).eot == 1
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<s>"}')
    with pytest.raises(UserError, match=r"its documents end with '<s>'"):
        get_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["added_tokens.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["pair", "tokenizer.json"])
def test_tokens_that_only_a_file_beside_adds_are_refused(tmp_path, name, kind):
    if kind == "pair":
        pair(tmp_path, END)
    else:
        saved(tmp_path, models.BPE(LETTERS, []), words=["<tool>"])
    present, i = (END, 1) if kind == "pair" else ("<tool>", 10)

    def add(token, i):
        tree = {token: i}
        if name == "tokenizer_config.json":
            tree = {"added_tokens_decoder": {str(i): {"content": token}}}
        (tmp_path / name).write_text(json.dumps(tree))
        return get_tokenizer(str(tmp_path))

    assert add(present, i).special_tokens
    with pytest.raises(
        UserError, match=r"adds '<new>' with the id 300, which .*; save"
    ):
        add("<new>", 300)


def byte_level_model(prefix):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {
        "model": models.BPE({char: i for i, char in enumerate(letters)}, []),
        "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=prefix),
    }


SETTINGS = {
    "add_prefix_space": byte_level_model(True),
    "do_lower_case": {
        "model": models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"),
        "normalizer": normalizers.BertNormalizer(),
        "pre_tokenizer": pre_tokenizers.BertPreTokenizer(),
    },
}


@pytest.mark.parametrize("key", SETTINGS)
def test_settings_by_which_transformers_changes_a_tokenizer_are_refused(tmp_path, key):
    saved(tmp_path, **SETTINGS[key])
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({key: True}))
    get_tokenizer(str(tmp_path))
    settings.write_text(json.dumps({key: False}))
    with pytest.raises(UserError, match=f"has {key}=False, .*=True in its .*; make"):
        get_tokenizer(str(tmp_path))


def test_a_space_in_front_is_refused_for_a_pair_of_files(tmp_path):
    pair(tmp_path, END)
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    with pytest.raises(UserError, match=r"has add_prefix_space=True, and merges\.txt"):
        get_tokenizer(str(tmp_path))


def test_spaces_that_are_cut_off_a_text_are_among_what_changes(tmp_path):
    saved(tmp_path, **byte_level_model(False), normalizer=normalizers.Strip())
    assert changed_characters(get_tokenizer(str(tmp_path))) == " \t\n\r\x0b\x0c"


@pytest.mark.parametrize("folder", ["a::b", "a[b]", "a b", "http:", "a,b=c"])
def test_names_of_files_and_directories_mean_nothing(tmp_path, folder):
    inside = tmp_path / folder
    inside.mkdir()
    (inside / "x::y*.txt").write_text("text\n" * 40)
    rows = [json.dumps({"text": f"row {i}"}) for i in range(40)]
    (inside / "x::y.jsonl").write_text("\n".join(rows))
    pq.write_table(pa.table({"text": rows}), inside / "x::y.parquet")
    for name in ("x::y*.txt", "x::y.jsonl", "x::y.parquet"):
        manifest = prepared(tmp_path, TextSource((str(inside / name),)), "byte")
        assert manifest.tokens("train") > 100


@pytest.mark.parametrize("folder", ["a::b", "a[b]"])
def test_a_local_data_set_with_a_name_that_datasets_misreads_is_refused(
    tmp_path, folder
):
    inside = tmp_path / folder
    inside.mkdir()
    pq.write_table(pa.table({"text": ["row"] * 40}), inside / "x.parquet")
    with pytest.raises(UserError, match=r"data=text data\.paths=.*reads files of any"):
        prepared(tmp_path, HubSource(str(inside)), "byte")


@pytest.mark.parametrize(
    "other",
    ["x::y.parquet", "x.jsonl", "__x/x.parquet", "x.jsonl.gz", "X.JSONL", "x", "x.zip"],
)
def test_files_that_datasets_leaves_out_are_said(tmp_path, capsys, monkeypatch, other):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    folder = tmp_path / "set"
    (folder / other).parent.mkdir(parents=True)
    for name in ("a.parquet", "b.parquet", "test.parquet"):
        rows = [f"{name} {i}" for i in range(40)]
        pq.write_table(pa.table({"text": rows}), folder / name)
    for name in ("LICENSE.txt", "card.md", "README", ".gitattributes"):
        (folder / name).write_text("text")
    (folder / "a.parquet").rename(folder / "train-a.parquet")
    (folder / "b.parquet").rename(folder / "train-b.parquet")
    prepared(tmp_path, HubSource(str(folder)), "byte")
    assert "leaves out" not in capsys.readouterr().err
    (folder / other).write_bytes((folder / "test.parquet").read_bytes())
    prepared(tmp_path, HubSource(str(folder)), "byte")
    line = f"`datasets` leaves out {folder / other} (1 of 4 files); data=text"
    assert capsys.readouterr().err.count(line) == 1


def test_a_local_data_set_that_changed_within_its_time_is_read_again(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    folder = tmp_path / "set"
    folder.mkdir()
    for text in ("one", "two"):
        (folder / "train.txt").write_text(f"{text}\nmore\n")
        os.utime(folder / "train.txt", (1, 1))  # as `rsync --times` may do
        corpus = open_corpus(HubSource(str(folder)), tmp_path / "cache")
        for _ in range(2):
            texts = [text for rows in corpus.read(None) for text in rows.texts]
            assert texts == [text, "more"]
    line = f"data.name={folder}: `datasets` makes each line a document; data=text"
    assert capsys.readouterr().err.count(line) == 2


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": normalizers.Sequence([normalizers.Prepend("\u2581")])},
        {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first")},
    ],
    ids=["prepend", "metaspace"],
)
def test_a_space_that_transformers_leaves_out_is_not_put_before_a_text(tmp_path, part):
    saved(tmp_path, models.BPE(LETTERS | {"\u2581": 10}, []), special=[END], **part)
    file = tmp_path / "tokenizer_config.json"
    settings = {"eos_token": END, "add_prefix_space": False}
    file.write_text(json.dumps(settings))
    get_tokenizer(str(tmp_path))
    file.write_text(json.dumps(settings | {"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(UserError, match=r"add_prefix_space=False, but .* puts a space"):
        get_tokenizer(str(tmp_path))


def test_merges_of_another_model_are_not_split_as_gpt2_s(tmp_path):
    """transformers asks the model's configuration where no other names a class."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {char: i for i, char in enumerate([*letters, END])}
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    get_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(UserError, match="a Qwen2Tokenizer may split words otherwise"):
        get_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["csv", "parquet"])
def test_a_version_of_datasets_that_casts_otherwise_is_refused(name):
    with pytest.raises(UserError, match=rf"reads {name} in a way .* datasets==5\.2\.0"):
        check_tables(SimpleNamespace(name=name), "text")
    check_tables(SimpleNamespace(name="webdataset"), "text")  # casts nothing
