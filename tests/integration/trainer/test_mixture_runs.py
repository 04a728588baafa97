"""A run on a mixture: its stages, its figures by source, and the same run when it is
stopped and goes on."""

import logging

import numpy as np
import pytest
from command import TINY, crashed_after, here, parameters, stopped_after, values

from trainer import compose
from trainer.assembly.data import build_data
from trainer.cli.train import main

MIX = [
    "data=mix",
    "data.sources=[low.txt,up.txt]",
    "data.weights=[3,1]",
    "data.stages=[[4,1,3]]",
    "data.tokenizer=byte",
]
ARGS = [
    *MIX,
    "train.steps=8",
    "train.eval_every=4",
    "checkpoint.every=2",
]


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "low.txt").write_text("the cat sat on the mat. " * 800)
    (tmp_path / "up.txt").write_text("THE RAT SAT ON THE HAT! " * 800)
    return tmp_path


def test_a_mixture_resumes_across_a_stage_to_the_bit_and_says_what_it_read(
    texts, monkeypatch
):
    output = here(texts, "A", *ARGS)
    assert "low" in output
    rows = values(texts / "A")
    assert rows[-1]["data/low/share"] == pytest.approx(0.5, abs=0.1)
    assert rows[3]["data/low/share"] > 0.6
    assert rows[-1]["val/low/loss"] != rows[-1]["val/up/loss"]
    assert rows[-1]["val/up/bits_per_byte"] > 0
    stopped_after(texts, "B", 3, *ARGS)  # before the stage, and behind it
    crashed_after(texts, "B", 5, *ARGS)
    monkeypatch.chdir(texts)
    monkeypatch.setattr(logging.root, "handlers", [])
    assert main(["resume=B"]) == 0
    assert values(texts / "A") == values(texts / "B")
    assert parameters(texts / "A", 8) == parameters(texts / "B", 8)


def test_every_seed_validates_on_the_same_samples_of_a_mixture(texts, monkeypatch):
    monkeypatch.chdir(texts)
    first, other = (
        build_data(compose([*TINY, *ARGS, f"seed={seed}"])).val for seed in (0, 1)
    )
    for step in range(2):
        np.testing.assert_array_equal(
            first.batch(step).tokens, other.batch(step).tokens
        )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["data.weights=[1]"],
            "1 weights; expected one for each of 2 sources: low, up",
        ),
        (["data.stages=[[8,1,1]]"], "begins after step 8, but train.steps=8"),
        (["data.sources=[low.txt,sub/low.txt]"], "two are called low"),
        (["data.sources=[low.txt,none.txt]"], "none.txt"),
        (["data.sources=[low.txt,empty.txt]"], "empty"),
        (["data.tokenizer=null"], "data.tokenizer is null"),
        (["data.paths=[low.txt]"], "data.paths=[low.txt] is not used by data=mix"),
    ],
)
def test_what_is_no_mixture_is_one_line(texts, monkeypatch, capfd, args, words):
    (texts / "empty.txt").write_text("")
    monkeypatch.chdir(texts)
    monkeypatch.setattr(logging.root, "handlers", [])
    given = ["run_dir=new", "compile_cache=null", "parallel.data=1"]
    assert main([*TINY, *ARGS, *given, *args]) == 2
    lines = capfd.readouterr().err.splitlines()
    errors = [line for line in lines if not line.startswith("preparing data")]
    assert len(errors) == 1, errors
    assert words in errors[0]
    assert not (texts / "new").exists()
