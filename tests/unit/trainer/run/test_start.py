"""Weights that are for other ids than the data's, or of another model, are refused with
all that differs.

What no run can start from is refused before anything is prepared for it.
"""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from command import TINY

from scalify_core import ScaledArray
from trainer.cli.train import main
from trainer.config.inherited import inherit
from trainer.config.schema import Resume
from trainer.data import get_tokenizer
from trainer.data.byte_spelling import BYTE_LEVEL
from trainer.data.hf_tokenizer import save_hf
from trainer.errors import UserError
from trainer.models.gpt2.spec import GPT2Spec
from trainer.run.checkpoint import Restored
from trainer.run.compatibility import (
    FROM_INIT,
    TokenizerMismatch,
    architecture,
    check_same_model,
)
from trainer.run.initial_weights import (
    describe_init,
    hf_tokenizer_mismatch,
    run_tokenizer_mismatch,
)
from trainer.run.rundir import RunDir
from trainer.run.start import check_fork, check_start

BYTE = get_tokenizer("byte")
PARAMS = {
    "a": np.zeros((2, 3), np.float16),
    "b": ScaledArray(np.zeros(4, np.float16), 2.0),
}


def bpe(directory, *merges):
    directory.mkdir()
    (directory / "vocab.bpe").write_text("\n".join(merges))
    return get_tokenizer(str(directory))


def test_all_that_differs_is_in_one_message():
    theirs = architecture(GPT2Spec(vocab_size=50257, n_layer=12, d_model=768))
    other = TokenizerMismatch(
        "was trained with tokenizer gpt2", "set data.tokenizer=gpt2"
    )
    ours = GPT2Spec(vocab_size=256, n_layer=2, n_head=12, d_model=24)
    with pytest.raises(UserError) as error:
        check_same_model("init_from=A", theirs, ours, FROM_INIT, other)
    text = str(error.value)
    for part in (
        "n_layer=12 (the model 2)",
        "d_model=768 (the model 24)",
        "model.n_layer=12 model.d_model=768",
        *other,
    ):
        assert part in text
    assert "model=from_init" in text
    # which would lead to a model that reads bytes with the rows of words
    assert "vocab_size" not in text
    check_same_model(
        "init_from=A", theirs, GPT2Spec(vocab_size=50257, n_layer=12, d_model=768)
    )


def test_a_run_with_another_tokenizer_of_the_same_size_is_refused(tmp_path):
    first, second = (
        bpe(tmp_path / "a", "t h", "th e"),
        bpe(tmp_path / "b", "t h", "a n"),
    )
    assert first.vocab_size == second.vocab_size
    first.save(tmp_path)
    meta = {
        "tokenizer": first.name,
        "tokenizer_fingerprint": first.fingerprint,
        "model": {"vocab_size": first.vocab_size},
    }
    assert run_tokenizer_mismatch(tmp_path, meta, first) is None
    what, advice = run_tokenizer_mismatch(tmp_path, meta, second)
    assert (
        what == f"was trained with tokenizer {first.name} of 259 ids (the data's is"
        f" {second.name}, 259 ids)"
    )
    assert advice.startswith(
        f"set data.tokenizer={tmp_path}/tokenizer.tiktoken, or init.embeddings=focus"
    )
    assert (
        get_tokenizer(f"{tmp_path}/tokenizer.tiktoken").fingerprint == first.fingerprint
    )


def test_the_tokenizer_beside_weights_is_compared_with_the_datas(tmp_path):
    first, second = (
        bpe(tmp_path / "a", "t h", "th e"),
        bpe(tmp_path / "b", "t h", "a n"),
    )
    spec = GPT2Spec(vocab_size=first.vocab_size)
    save_hf(tmp_path, first, 1024)
    for source in (tmp_path, tmp_path / "model.safetensors"):
        assert hf_tokenizer_mismatch(source, spec, first) is None
        assert (
            "id 257 is 'the' there, 'an' here"
            in hf_tokenizer_mismatch(source, spec, second)[0]
        )
        line = describe_init(source, first, spec, PARAMS)
        assert line.startswith(
            f"weights from {source} (Hugging Face, gpt2): 2 tensors; the tokenizer"
        )
        assert line.endswith(f"is that of the data, {first.name}")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "'Hello'"),
        ({"pre_tokenizer": BYTE_LEVEL}, "don't"),  # without a pattern
        ({"model": {"merges": ["t h"]}}, "'the'"),
    ],
)
def test_a_tokenizer_of_the_same_vocabulary_that_splits_otherwise_is_refused(
    change, text, tmp_path
):
    ours = bpe(tmp_path / "a", "t h", "th e", "n '")
    spec = GPT2Spec(vocab_size=ours.vocab_size)
    save_hf(tmp_path, ours, 1024)
    file = tmp_path / "tokenizer.json"
    tree = json.loads(file.read_text())
    tree["model"]["ignore_merges"] = False
    for key, value in change.items():
        tree[key] = tree[key] | value if key == "model" else value
    file.write_text(json.dumps(tree))
    assert text in hf_tokenizer_mismatch(tmp_path, spec, ours)[0]
    file.write_text(json.dumps(tree | {"decoder": {"type": "Unknown"}}))
    assert hf_tokenizer_mismatch(tmp_path, spec, ours) is None
    line = describe_init(tmp_path, ours, spec, PARAMS)
    assert "but their tokenizer cannot be read" in line


@pytest.mark.parametrize(
    ("rows", "ids", "ok"),
    [(50257, 50257, True), (50304, 50257, True), (50257, 256, False)],
)
def test_without_a_tokenizer_the_size_of_the_vocabulary_tells(rows, ids, ok, tmp_path):
    tokenizer = SimpleNamespace(name="x", vocab_size=ids)
    assert (
        hf_tokenizer_mismatch(tmp_path, GPT2Spec(vocab_size=rows), tokenizer) is None
    ) == ok
    line = describe_init(tmp_path, tokenizer, GPT2Spec(vocab_size=rows), PARAMS)
    assert "2 tensors; there is no tokenizer beside them, so nobody checked" in line


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "neither a config.yaml"),
        ("{", "config.json does not tell the sizes of a model"),
        ('{"n_layer": 2}', "config.json: n_head=None: expected a whole number"),
    ],
)
def test_an_architecture_that_is_not_told_is_one_line(config, message, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match=re.escape(message)):
        inherit({}, str(tmp_path))
    (tmp_path / "config.yaml").write_text("model: 3")
    with pytest.raises(UserError, match=r"config\.yaml is damaged"):
        inherit({}, str(tmp_path))


def checkpoints(run_dir, *steps):
    for step in steps:
        (run_dir / "checkpoints" / str(step)).mkdir(parents=True)
    (run_dir / "checkpoints" / "40.orbax-checkpoint-tmp").mkdir(parents=True)


def test_a_refusal_for_damaged_checkpoints_holds_until_somebody_acts(tmp_path):
    damaged = tmp_path / "checkpoints" / "damaged"
    (damaged / "40-0").mkdir(parents=True)
    for source in ("auto", "none"):
        with pytest.raises(
            UserError,
            match=(
                r"no usable checkpoint in run_dir=.*remove .*damaged to start this run"
                r" anew"
            ),
        ):
            check_start(tmp_path, source, None, None)
    checkpoints(tmp_path, 20)
    check_start(tmp_path, "auto", None, None)


def test_a_sweep_is_no_run_and_its_runs_are_named(tmp_path):
    for job in (0, 10, 9):
        checkpoints(tmp_path / "sweep" / str(job), 20)
    (tmp_path / "sweep" / "11").mkdir()
    with pytest.raises(UserError) as error:
        check_start(tmp_path / "new", str(tmp_path / "sweep"), None, None)
    listed = ", ".join(str(tmp_path / "sweep" / job) for job in ("0", "9", "10"))
    assert (
        f"name one of the runs in it: {listed}; `scalify-trainer compare runs="
        in str(error.value)
    )
    with pytest.raises(
        UserError,
        match="nowhere has no checkpoints; valid: auto, none, or a run directory",
    ):
        check_start(tmp_path / "new", "nowhere", None, None)


def test_a_step_that_is_gone_is_named_with_those_that_are_there_and_what_keeps_more(
    tmp_path,
):
    checkpoints(tmp_path / "old", 20, 5, 100)
    check_start(tmp_path / "new", str(tmp_path / "old"), 20, None)
    check_start(tmp_path / "new", str(tmp_path / "old"), None, None)
    for step in (10, 40):
        with pytest.raises(
            UserError,
            match=rf"^resume\.step={step}, but .* steps 5, 20, 100; .*checkpoint\.keep",
        ):
            check_start(tmp_path / "new", str(tmp_path / "old"), step, None)
    with pytest.raises(
        UserError,
        match=r"resume\.step=20 is a step of another run's checkpoints; add resume=RUN",
    ):
        check_start(tmp_path / "new", "auto", 20, None)
    # goes on from its own: a fork that was stopped
    check_start(tmp_path / "old", str(tmp_path / "gone"), 10, None)
    with pytest.raises(
        UserError, match=r"holds checkpoints of steps \[5, 20, 100\] and resume=none"
    ):
        check_start(tmp_path / "old", "none", None, None)


@pytest.mark.parametrize("start", ["resume=sweep", "init_from=nowhere"])
def test_what_no_run_can_start_from_is_refused_before_data_are_prepared(
    start, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    # Hydra's, which would outlive this test's captured output
    monkeypatch.setattr(logging.root, "handlers", [])
    checkpoints(tmp_path / "sweep" / "0", 20)
    assert (
        main([*TINY, "run_dir=new", "parallel.data=1", "compile_cache=null", start])
        == 2
    )
    assert start in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]


def test_weights_of_a_run_that_still_trains_are_refused(tmp_path):
    checkpoints(tmp_path / "run", 20)
    check_start(tmp_path / "new", "auto", None, str(tmp_path / "run"))
    with (
        RunDir(tmp_path / "run"),
        pytest.raises(UserError, match=r"is still training.* step=N out=DIRECTORY"),
    ):
        check_start(tmp_path / "new", "auto", None, str(tmp_path / "run"))


def test_weights_of_a_run_are_told_with_the_step_they_are_of(
    open_checkpointer, tmp_path
):
    checkpointer = open_checkpointer()
    for step in (5, 1200):
        meta = {"model": {"context": GPT2Spec.context}}
        checkpointer.save(step, {"a": jnp.zeros(3)}, meta)
    checkpointer.wait()
    line = describe_init(tmp_path, BYTE, GPT2Spec(vocab_size=256), PARAMS)
    assert line.startswith(f"weights from {tmp_path} after its step 1,200: 2 tensors; ")
    assert line.endswith("its tokenizer, byte, is that of the data")


def test_a_fork_knows_where_it_begins_and_what_it_was_forked_from_when_it_goes_on():
    fork = Restored(9000, None, {"forked": {"run": "runs/mine", "step": 9000}})
    assert fork.is_fork
    assert fork.origin == "runs/mine after step 9,000"
    resumed = Restored(9500, None, fork.meta)
    assert not resumed.is_fork
    assert resumed.origin == "runs/mine after step 9,000"
    for meta in ({}, {"forked": None}):  # of earlier versions, and of this one
        assert not Restored(7, None, meta).is_fork
        assert Restored(7, None, meta).origin == ""


def test_a_run_goes_on_only_as_a_fork_of_what_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    forked = {"run": "a", "step": 20}
    for source, step in (("auto", None), ("none", None), ("a", None), ("a", 20)):
        check_fork(Resume(source, step, False), Path("new"), forked)
    check_fork(Resume(f"{tmp_path}/a", None, False), Path("new"), forked)
    check_fork(Resume("new", None, False), Path("new"), None)
    for source, step, found, wanted in (
        ("b", None, forked, "it is a fork of a after step 20.* to fork b, choose"),
        ("a", 10, forked, "it is a fork of a after step 20.* to fork a after step 10"),
        ("a", None, None, "it is not a fork.* to fork a, choose another run_dir"),
    ):
        with pytest.raises(
            UserError, match=rf"run_dir=new holds another run \({wanted}"
        ):
            check_fork(Resume(source, step, False), Path("new"), found)
