"""No text ends another or loses a character without a word, whatever the tokenizer."""

import json

import pytest
from corpora import documents_of, prepared, rows, write
from library_tokenizers import END, byte_level, saved
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from trainer.data import TextSource, get_tokenizer
from trainer.data.byte_spelling import SPELLING
from trainer.data.json_tokenizer import NoToken
from trainer.data.tokenizer import changed_characters
from trainer.errors import UserError

LETTERS = {letter: i for i, letter in enumerate("abcdefghij")}


def test_a_nul_in_a_text_ends_no_document(tmp_path):
    write(tmp_path, {"a.jsonl": rows(f"{i} left\0right" for i in range(99))})
    source = TextSource((str(tmp_path / "a.jsonl"),))
    assert len(documents_of(prepared(source, tmp_path / "cache"))) == 99
    byte = get_tokenizer("byte")
    assert byte.decode(byte.encode("a\0b")) == "a\ufffdb"


def with_unknown(**settings):
    """Letters in byte-pair encoding, whose token for all else is that of `a`."""
    return models.BPE(LETTERS, [], unk_token="a", **settings)


# As the library trains one without being given the alphabet of all bytes, with the
# bytes of a combining accent.
SOME_BYTES = byte_level(of_bytes=[*b"abcdefghij\xc3", *"\u0301".encode()])
WITHOUT = {
    "byte level": SOME_BYTES,
    "composed": SOME_BYTES | {"normalizer": normalizers.NFC()},
    "unigram": {"model": models.Unigram([(letter, -1.0) for letter in LETTERS])},
    "words": {
        "model": models.WordLevel(LETTERS),
        "pre_tokenizer": pre_tokenizers.Split("", "isolated"),
    },
    "word pieces": {
        "model": models.WordPiece(LETTERS | {"##a": 10, "##f": 11}),
        "pre_tokenizer": pre_tokenizers.Whitespace(),
    },
}


@pytest.mark.parametrize("kind", WITHOUT)
def test_a_character_without_a_token_is_refused_and_others_are_not(tmp_path, kind):
    saved(tmp_path, **WITHOUT[kind])
    tokenizer = get_tokenizer(str(tmp_path))
    assert tokenizer.encode("eaf")  # what it was made for
    assert tokenizer.encode_array("eaf").tolist() == tokenizer.encode("eaf")
    text = "eae\u0301f" if kind == "composed" else "eaéf"
    for encode in (tokenizer.encode, tokenizer.encode_array):
        with pytest.raises(NoToken, match=r"no token for .*é.* vanish from a text; tr"):
            encode(text)
    if kind == "byte level":
        assert tokenizer.encode("e\u0301")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"unk_token": "<unk>"},  # a name without a token
        {"byte_fallback": True},
        {"continuing_subword_prefix": "##"},
    ],
    ids=str,
)
def test_letters_without_a_token_for_all_else_are_refused(tmp_path, settings):
    """Byte-pair encoding would leave other characters out of a text."""
    saved(tmp_path, models.BPE(LETTERS | {"<0xC3>": 10}, [], **settings))
    message = r"no token for characters outside of its vocabulary, .*; train it with an"
    with pytest.raises(UserError, match=message):
        get_tokenizer(str(tmp_path))


@pytest.mark.parametrize("kind", ["byte", "with marks"])
def test_special_tokens_that_a_text_spells_are_said(tmp_path, capsys, kind):
    """Elsewhere TinyStories' separator is the token that ends a document."""
    name = kind
    if kind == "with marks":
        words = pre_tokenizers.Whitespace()
        saved(
            tmp_path, with_unknown(), special=(END, "<|im_end|>"), pre_tokenizer=words
        )
        name = str(tmp_path)
    turns = [f"{'abc' * i}<|im_end|>{END}" for i in range(100)]
    write(tmp_path, {"chat.jsonl": rows(turns)})
    prepared(TextSource((str(tmp_path / "chat.jsonl"),)), tmp_path / "cache", name)
    counts = f"'{END}' (100 times)" + ", '<|im_end|>' (100 times)" * (kind != "byte")
    line = f" characters contain {counts}, encoded as ordinary characters"
    assert capsys.readouterr().err.count(line) == 1


def test_characters_that_a_tokenizer_changes_are_said_once(tmp_path, capsys):
    vocabulary = LETTERS | {"[UNK]": 10, "##a": 11, "##b": 12}
    saved(
        tmp_path,
        models.WordPiece(vocabulary, unk_token="[UNK]"),
        special=["[EOS]"],
        normalizer=normalizers.Lowercase(),
        pre_tokenizer=pre_tokenizers.Whitespace(),
    )
    write(tmp_path, {"a.txt": "a b c\n" * 50})
    source = TextSource((str(tmp_path / "a.txt"),))
    for _ in range(2):
        prepared(source, tmp_path / "cache", str(tmp_path))
    [line] = [x for x in capsys.readouterr().err.splitlines() if "ASCII" in x]
    assert "changes or leaves out" in line
    assert r"\n" in line
    assert "AB" in line
    assert changed_characters(get_tokenizer("byte")) == ""


def test_an_end_that_is_the_unknown_token_is_refused(tmp_path):
    saved(tmp_path, models.WordLevel(LETTERS | {END: 10}, unk_token=END))
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
    normalizer = {} if like_gpt2 else {"normalizer": normalizers.NFC()}
    saved(tmp_path, **byte_level(), special=[END, "<b>"], **normalizer)
    assert get_tokenizer(str(tmp_path)).eot == 256
    (tmp_path / name).write_text(json.dumps(NAMES[name]))
    tokenizer = get_tokenizer(str(tmp_path))
    assert tokenizer.eot == 257
    assert not {256, 257} & set(tokenizer.encode(f"{END}<b>"))


def test_of_two_files_that_name_an_end_the_one_of_transformers_counts(tmp_path):
    saved(tmp_path, with_unknown(), special=["<a>", "<b>"])
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<a>"}')
    settings = {"eos_token": "<b>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert get_tokenizer(str(tmp_path)).eot == 10
    settings["added_tokens_decoder"] = {"11": {"content": "<b>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert get_tokenizer(str(tmp_path)).eot == 11
    (tmp_path / "special_tokens_map.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<other>"}')
    with pytest.raises(UserError, match="has no added token '<other>'"):
        get_tokenizer(str(tmp_path))


def pair(tmp_path, end):
    special = {"<s>": 0, end: 1}
    ids = special | {char: i for i, char in enumerate(SPELLING.values(), 2)}
    (tmp_path / "vocab.json").write_text(json.dumps(ids | {"ab": 258}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")


def test_a_pair_of_files_has_the_end_that_is_named_or_known(tmp_path):
    for end in ("</s>", END):
        pair(tmp_path, end)
        assert get_tokenizer(str(tmp_path)).eot == 1
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<s>"}')
    tokenizer = get_tokenizer(str(tmp_path))
    assert tokenizer.eot == 0
    assert tokenizer.encode(f"ab{END}")[0] == 258
    assert not {0, 1} & set(tokenizer.encode(f"ab{END}<s>"))


@pytest.mark.parametrize("name", ["added_tokens.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["pair", "tokenizer.json"])
def test_tokens_that_only_a_file_beside_adds_are_refused(tmp_path, name, kind):
    if kind == "pair":
        pair(tmp_path, END)
    else:
        saved(tmp_path, with_unknown(), words=["<tool>"])
    present, i = (END, 1) if kind == "pair" else ("<tool>", 11)

    def add(token, i):
        tree = {token: i}
        if name == "tokenizer_config.json":
            tree = {"added_tokens_decoder": {str(i): {"content": token}}}
        (tmp_path / name).write_text(json.dumps(tree))
        return get_tokenizer(str(tmp_path))

    assert add(present, i).special_tokens
    with pytest.raises(UserError, match=r"adds '<new>' with the id 300, but .*; save"):
        add("<new>", 300)


SETTINGS = {
    "add_prefix_space": byte_level(True),
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
    saved(tmp_path, **byte_level(), normalizer=normalizers.Strip())
    assert changed_characters(get_tokenizer(str(tmp_path))) == " \t\n\r\x0b\x0c"


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": normalizers.Sequence([normalizers.Prepend("\u2581")])},
        {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first")},
    ],
    ids=["prepend", "metaspace"],
)
def test_a_space_that_transformers_leaves_out_is_not_put_before_a_text(tmp_path, part):
    saved(tmp_path, with_unknown(), special=[END], **part)
    file = tmp_path / "tokenizer_config.json"
    settings = {"eos_token": END, "add_prefix_space": False}
    file.write_text(json.dumps(settings))
    get_tokenizer(str(tmp_path))
    file.write_text(json.dumps(settings | {"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(UserError, match=r"add_prefix_space=False, but .* puts a space"):
        get_tokenizer(str(tmp_path))


def test_merges_of_another_model_are_not_split_as_gpt2_s(tmp_path):
    """transformers asks the model's configuration where no other names a class."""
    pair(tmp_path, END)
    for files, is_read in (
        ({"config.json": '{"model_type": "gpt2"}'}, True),
        ({"config.json": '{"model_type": "qwen2"}'}, False),
        ({"tokenizer_config.json": '{"tokenizer_class": "GPT2Tokenizer"}'}, True),
        ({"tokenizer_config.json": '{"tokenizer_class": "Qwen2Tokenizer"}'}, False),
    ):
        write(tmp_path, files)
        if is_read:
            get_tokenizer(str(tmp_path))
            continue
        with pytest.raises(UserError, match="a Qwen2Tokenizer may split words otherw"):
            get_tokenizer(str(tmp_path))


def beside(tmp_path, **token):
    """Read a tokenizer beside settings that list a flag of an added word."""
    listed = {"257": {"content": "<tool>", **token}}
    settings = {"eos_token": END, "added_tokens_decoder": listed}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return get_tokenizer(str(tmp_path))


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
@pytest.mark.parametrize("value", [True, False])
def test_a_word_with_other_flags_beside_the_file_is_refused(tmp_path, flag, value):
    word = AddedToken("<tool>", **{flag: value})
    saved(tmp_path, **byte_level(), words=[word])
    beside(tmp_path, **{flag: value})
    message = rf"has {flag}={not value} for the added word '<tool>', and tokenizer\.js"
    with pytest.raises(UserError, match=message):
        beside(tmp_path, **{flag: not value})


def test_a_special_token_may_have_other_flags_because_no_text_has_it(tmp_path):
    word = AddedToken("<tool>", special=True, lstrip=True)
    saved(tmp_path, **byte_level(), words=[word])
    assert beside(tmp_path, special=True, lstrip=False).eot == 256


def test_a_token_of_the_vocabulary_that_is_a_word_beside_it_is_refused(tmp_path):
    letters = [*SPELLING.values(), END, "<tool>"]
    model = models.BPE({token: i for i, token in enumerate(letters)}, [])
    saved(tmp_path, **byte_level() | {"model": model})
    beside(tmp_path, special=True)
    with pytest.raises(UserError, match=r"adds the word '<tool>', which is none of"):
        beside(tmp_path)
