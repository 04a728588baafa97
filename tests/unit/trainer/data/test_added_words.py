"""Words that were added to a tokenizer are found where transformers finds them."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from trainer.data import get_tokenizer
from trainer.errors import UserError

END = "<|endoftext|>"
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = {char: i for i, char in enumerate([*LETTERS, END, "<tool>"])}


def saved(tmp_path, word):
    made = Tokenizer(models.BPE({char: VOCABULARY[char] for char in LETTERS}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([END])
    made.add_tokens([word])
    made.save(str(tmp_path / "tokenizer.json"))


def beside(tmp_path, **token):
    listed = {str(VOCABULARY["<tool>"]): {"content": "<tool>", **token}}
    settings = {"eos_token": END, "added_tokens_decoder": listed}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return get_tokenizer(str(tmp_path))


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
@pytest.mark.parametrize("value", [True, False])
def test_a_word_with_other_flags_beside_the_file_is_refused(tmp_path, flag, value):
    saved(tmp_path, AddedToken("<tool>", **{flag: value}))
    beside(tmp_path, **{flag: value})
    message = (
        rf"has {flag}={not value} for the added word '<tool>', and tokenizer\.json"
    )
    with pytest.raises(UserError, match=message):
        beside(tmp_path, **{flag: not value})


def test_a_special_token_may_have_other_flags_because_no_text_has_it(tmp_path):
    saved(tmp_path, AddedToken("<tool>", special=True, lstrip=True))
    assert beside(tmp_path, special=True, lstrip=False).eot == VOCABULARY[END]


def test_a_token_of_the_vocabulary_that_is_a_word_beside_it_is_refused(tmp_path):
    saved(tmp_path, AddedToken("<tool>"))
    file = tmp_path / "tokenizer.json"
    tree = json.loads(file.read_text())
    tree["model"]["vocab"]["<tool>"] = VOCABULARY["<tool>"]
    del tree["added_tokens"][1]
    tree["added_tokens"][0]["id"] = tree["model"]["vocab"][END] = VOCABULARY[END]
    file.write_text(json.dumps(tree))
    beside(tmp_path, special=True)
    with pytest.raises(UserError, match=r"adds the word '<tool>', which is none of"):
        beside(tmp_path)


def test_a_word_that_was_added_to_a_pair_of_files_is_refused(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps(VOCABULARY))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    message = r"adds '<tool>' with the id 257, but vocab\.json has no such token"
    assert get_tokenizer(str(tmp_path)).eot == VOCABULARY[END]
    for special in (True, False):
        with pytest.raises(UserError, match=message):
            beside(tmp_path, special=special)
    (tmp_path / "tokenizer_config.json").unlink()
    added = {"<tool>": VOCABULARY["<tool>"]}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    with pytest.raises(UserError, match=message):
        get_tokenizer(str(tmp_path))
