"""Starts that are refused: from weights for other ids than the data's or of another
model, and from checkpoints that are not there."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from trainer.config.schema import Resume
from trainer.data import get_tokenizer
from trainer.data.byte_spelling import BYTE_LEVEL
from trainer.data.hf_tokenizer import save_hf
from trainer.errors import UserError
from trainer.models.gpt2.spec import GPT2Spec
from trainer.run.compatibility import (
    FROM_INIT,
    TokenizerMismatch,
    architecture,
    check_same_model,
)
from trainer.run.initial_weights import (
    compare_huggingface_tokenizer,
    compare_run_tokenizer,
)
from trainer.run.rundir import RunDir
from trainer.run.start import check_fork, check_start


@pytest.fixture
def bpe(tmp_path):
    """Make a tokenizer of merges in a directory of this name."""

    def bpe(name, *merges):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vocab.bpe").write_text("\n".join(merges))
        return get_tokenizer(str(tmp_path / name))

    return bpe


def test_all_differences_are_in_one_message():
    theirs = architecture(GPT2Spec(vocab_size=50257, n_layer=12, d_model=768))
    other = TokenizerMismatch("was trained with gpt2", "set data.tokenizer=gpt2")
    ours = GPT2Spec(vocab_size=256, n_layer=2, n_head=12, d_model=24)
    with pytest.raises(UserError) as error:
        check_same_model("init_from=A", theirs, ours, FROM_INIT, other)
    text = str(error.value)
    assert "n_layer=12 (the model 2)" in text
    assert "model.n_layer=12 model.d_model=768" in text
    assert all(part in text for part in other)
    # which would lead to a model that reads bytes with the rows of words
    assert "vocab_size" not in text
    same = GPT2Spec(vocab_size=50257, n_layer=12, d_model=768)
    check_same_model("init_from=A", theirs, same)


def test_a_run_with_another_tokenizer_of_the_same_size_is_refused(tmp_path, bpe):
    first, second = bpe("a", "t h", "th e"), bpe("b", "t h", "a n")
    first.save(tmp_path)
    meta = {
        "tokenizer": first.name,
        "tokenizer_fingerprint": first.fingerprint,
        "model": {"vocab_size": first.vocab_size},
    }
    same = f"its tokenizer, {first.name}, is that of the data"
    assert compare_run_tokenizer(tmp_path, meta, first) == same
    what, advice = compare_run_tokenizer(tmp_path, meta, second)
    theirs = f"was trained with tokenizer {first.name} of 259 ids"
    assert what == f"{theirs} (the data's is {second.name}, 259 ids)"
    file = f"{tmp_path}/tokenizer.tiktoken"
    assert advice.startswith(f"set data.tokenizer={file}, or init.embeddings=focus")
    assert get_tokenizer(file).fingerprint == first.fingerprint


def test_the_tokenizer_beside_weights_is_compared_with_the_datas(tmp_path, bpe):
    first, second = bpe("a", "t h", "th e"), bpe("b", "t h", "a n")
    spec = GPT2Spec(vocab_size=first.vocab_size)
    save_hf(tmp_path, first, 1024)
    for source in (tmp_path, tmp_path / "model.safetensors"):
        same = f"the tokenizer beside them is that of the data, {first.name}"
        assert compare_huggingface_tokenizer(source, spec, first) == same
        what, _ = compare_huggingface_tokenizer(source, spec, second)
        assert "id 257 is 'the' there, 'an' here" in what


@pytest.mark.parametrize(
    ("rows", "ids", "accepted"),
    [(50257, 50257, True), (50304, 50257, True), (50257, 256, False)],
)
def test_without_a_tokenizer_the_sizes_of_the_vocabularies_decide(
    rows, ids, accepted, tmp_path
):
    tokenizer = SimpleNamespace(name="x", vocab_size=ids)
    spec = GPT2Spec(vocab_size=rows)
    match = compare_huggingface_tokenizer(tmp_path, spec, tokenizer)
    assert isinstance(match, str) == accepted
    if accepted:
        assert "there is no tokenizer beside them, so it is not checked" in match


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("normalizer", {"type": "Lowercase"}, "'Hello'"),
        ("pre_tokenizer", BYTE_LEVEL, "don't"),  # without a pattern
        ("merges", ["t h"], "'the'"),
    ],
)
def test_a_tokenizer_of_the_same_vocabulary_that_splits_otherwise_is_refused(
    key, value, text, tmp_path, bpe
):
    ours = bpe("a", "t h", "th e", "n '")
    spec = GPT2Spec(vocab_size=ours.vocab_size)
    save_hf(tmp_path, ours, 1024)
    file = tmp_path / "tokenizer.json"
    tree = json.loads(file.read_text())
    tree["model"]["ignore_merges"] = False
    part = tree["model"] if key == "merges" else tree
    part[key] = value
    file.write_text(json.dumps(tree))
    assert text in compare_huggingface_tokenizer(tmp_path, spec, ours).problem
    file.write_text(json.dumps(tree | {"decoder": {"type": "Unknown"}}))
    match = compare_huggingface_tokenizer(tmp_path, spec, ours)
    assert "but their tokenizer cannot be read" in match


def test_an_added_word_that_only_the_weights_tokenizer_has_is_refused(tmp_path, bpe):
    ours = bpe("a", "t h", "th e")
    spec = GPT2Spec(vocab_size=ours.vocab_size + 1)
    save_hf(tmp_path, ours, 1024)
    file = tmp_path / "tokenizer.json"
    library = Tokenizer.from_file(str(file))
    library.add_special_tokens(["<pad>"])
    library.save(str(file))
    assert isinstance(compare_huggingface_tokenizer(tmp_path, spec, ours), str)
    library.add_tokens(["<think>"])
    library.save(str(file))
    match = compare_huggingface_tokenizer(tmp_path, spec, ours)
    assert "'<think>' is [260] there" in match.problem


def test_files_that_end_documents_otherwise_are_named(tmp_path, bpe):
    ours = bpe("a", "t h", "th e")
    spec = GPT2Spec(vocab_size=ours.vocab_size)
    save_hf(tmp_path, ours, 1024)

    def write_ends(config, settings):
        tree = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1}
        tree |= {"n_positions": 8, "vocab_size": ours.vocab_size} | config
        (tmp_path / "config.json").write_text(json.dumps(tree))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return compare_huggingface_tokenizer(tmp_path, spec, ours)

    for ids in (None, ours.eot, [3, ours.eot]):
        assert "documents end" not in write_ends({"eos_token_id": ids}, {})
    line = write_ends({"eos_token_id": [3, 4]}, {})
    end = "; documents end with '<|endoftext|>' (id 258), but "
    assert f"{end}eos_token_id=[3, 4] in config.json" in line
    file = tmp_path / "tokenizer.json"
    library = Tokenizer.from_file(str(file))
    library.add_special_tokens(["<|im_end|>"])
    library.save(str(file))
    line = write_ends({"eos_token_id": 3}, {"eos_token": "<|im_end|>"})
    both = "'<|im_end|>' (id 259) in the tokenizer beside them, and eos_token_id=3 in"
    assert end + both in line


def checkpoints(run_dir, *steps):
    for step in steps:
        (run_dir / "checkpoints" / str(step)).mkdir(parents=True)
    (run_dir / "checkpoints" / "40.orbax-checkpoint-tmp").mkdir(parents=True)


def test_a_refusal_for_damaged_checkpoints_holds_until_somebody_acts(tmp_path):
    (tmp_path / "checkpoints" / "damaged" / "40-0").mkdir(parents=True)
    message = r"no usable checkpoint in run_dir=.*remove .*damaged to start this run"
    for source in ("auto", "none"):
        with pytest.raises(UserError, match=message):
            check_start(tmp_path, source, None, None)
    checkpoints(tmp_path, 20)
    check_start(tmp_path, "auto", None, None)


def test_a_sweep_is_no_run_and_its_runs_are_named(tmp_path):
    sweep = tmp_path / "sweep"
    for job in (0, 10, 9):
        checkpoints(sweep / str(job), 20)
    (sweep / "11").mkdir()
    listed = ", ".join(str(sweep / job) for job in ("0", "9", "10"))
    message = f"name one of the runs in it: {listed}; `scalify-trainer compare runs="
    with pytest.raises(UserError, match=re.escape(message)):
        check_start(tmp_path / "new", str(sweep), None, None)
    message = "nowhere has no checkpoints; valid: auto, none, or a run directory"
    with pytest.raises(UserError, match=message):
        check_start(tmp_path / "new", "nowhere", None, None)


def test_a_step_that_is_gone_is_named_with_those_that_are_there(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    checkpoints(old, 20, 5, 100)
    for step in (20, None):
        check_start(new, str(old), step, None)
    # goes on from its own: a fork that was stopped
    check_start(old, str(tmp_path / "gone"), 10, None)
    for run_dir, source, step, message in (
        (new, str(old), 10, r"^resume\.step=10, but .* steps 5, 20, 100; .*keep"),
        (new, str(old), 40, r"^resume\.step=40, but .* steps 5, 20, 100; .*keep"),
        (new, "auto", 20, r"a step of another run's checkpoints; add resume=RUN"),
        (old, "none", None, r"holds checkpoints of steps \[5, 20, 100\] and resume="),
    ):
        with pytest.raises(UserError, match=message):
            check_start(run_dir, source, step, None)


def test_weights_of_a_run_that_still_trains_are_refused(tmp_path):
    checkpoints(tmp_path / "run", 20)
    (tmp_path / "run" / "config.yaml").touch()
    check_start(tmp_path / "new", "auto", None, str(tmp_path / "run"))
    with (
        RunDir(tmp_path / "run"),
        pytest.raises(UserError, match=r"is still training.* step=N out=DIRECTORY"),
    ):
        check_start(tmp_path / "new", "auto", None, str(tmp_path / "run"))


def test_a_run_goes_on_only_as_a_fork_of_the_named_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    forked = {"run": "a", "step": 20}

    def check(source, step, fork):
        check_fork(Resume(source, step, False), Path("new"), fork)

    for source, step in (("auto", None), ("none", None), ("a", None), ("a", 20)):
        check(source, step, forked)
    check(f"{tmp_path}/a", None, forked)
    check("new", None, None)
    for source, step, fork, message in (
        ("b", None, forked, "it is a fork of a after step 20.* to fork b, choose"),
        ("a", 10, forked, "it is a fork of a after step 20.* to fork a after step 10"),
        ("a", None, None, "it is not a fork.* to fork a, choose another run_dir"),
    ):
        with pytest.raises(UserError, match=rf"new holds another run \({message}"):
            check(source, step, fork)
