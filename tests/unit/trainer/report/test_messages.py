"""What a run says of itself."""

import dataclasses
import json

import numpy as np
import pytest

from trainer.assembly.startup_log import describe_change, describe_validation
from trainer.config.composition import compose_config
from trainer.config.fields import to_tree
from trainer.data import EmbeddedSource, Manifest, TextSource, prepare
from trainer.data.dataset import Dataset
from trainer.report.messages import describe_data, describe_schedule_change, text_of
from trainer.run.checkpoint import Restored


def test_a_longer_schedule_is_told_by_its_learning_rates():
    before, now = np.float32([4, 3, 2, 1]), np.float32([4, 3.5, 3, 2.5, 2, 1.5, 1])
    (line,) = describe_schedule_change(4, before, now, "train.steps=7, was 4")
    assert "train.steps=7, was 4)" in line
    assert "from 1.00e+00 in step 4 to 2.00e+00 in step 5" in line


def test_a_schedule_that_goes_on_as_before_is_not_worth_a_line():
    rates = np.float32([1, 2, 2, 2, 2])
    assert describe_schedule_change(3, rates, rates, "") == []
    # only the warm-up, which is over, was another
    assert describe_schedule_change(3, rates, np.float32([2, 2, 2, 2]), "") == []
    assert (
        describe_schedule_change(4, rates, np.float32([4, 3, 2, 1]), "") == []
    )  # it ends here


def test_the_keys_that_were_changed_are_named_and_no_others():
    before = compose_config(["train.steps=40", "run_dir=a"])
    given = [
        "train.steps=40",
        "run_dir=b",
        "optimizer.lr=1e-4",
        "schedule.min_ratio=0.2",
        "seed=1",
    ]
    actual = Restored(20, None, {"config": to_tree(before)})
    (line,) = describe_change(compose_config(given), actual)
    lr, ratio = before.optimizer.lr, before.schedule.min_ratio
    assert (
        f"(optimizer.lr=0.0001, was {lr}; schedule.min_ratio=0.2, was {ratio}):" in line
    )


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (4096, "go on at token 81,920, not 40,960; the 40,960 tokens between are left"),
        (1024, "go on at token 20,480, not 40,960; the 20,480 tokens between are seen"),
        (2048, None),
    ],
)
def test_another_batch_size_says_which_data_come_next(tokens, said):
    keys = ["train.steps=40", "schedule=constant", "schedule.warmup_fraction=0"]
    before = compose_config([*keys, "train.batch_tokens=2048", "run_dir=a"])
    now = compose_config([*keys, f"train.batch_tokens={tokens}", "run_dir=b"])
    actual = Restored(20, None, {"config": to_tree(before)})
    lines = describe_change(now, actual)
    assert bool(lines) == (said is not None)
    assert all("(was 2,048): batches are counted in steps" in line for line in lines)
    assert all(str(said) in line for line in lines)


def test_a_source_is_named_for_a_reader():
    assert text_of({"kind": "embedded"}) == "the King James Bible"
    assert text_of({"kind": "hub", "name": "org/set"}) == "org/set"
    assert text_of({"kind": "text", "paths": ["a.txt", "b.txt"]}) == "a.txt, b.txt"


def data_line(tmp_path, *names, **settings):
    source = TextSource(tuple(str(tmp_path / name) for name in names))
    return describe_data(
        Manifest.load(prepare(source, "byte", tmp_path / "cache", **settings))
    )


def test_the_files_and_documents_that_were_read_are_counted(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("words " * 100)
    rows = [{"text": f"{i} words"} for i in range(97)] + [{"text": ""}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert data_line(tmp_path, "*.txt", "a.jsonl").startswith(
        "4 files (3 text, 1 jsonl), 100 documents; "
    )
    assert data_line(tmp_path, "a.jsonl").startswith("1 file, 97 documents; ")
    assert "; 1 document was skipped, which holds no text" in data_line(
        tmp_path, "a.jsonl"
    )
    assert (
        data_line(tmp_path, "0.txt")
        == "1 file, a single text; 540 training and 60 validation tokens (10.0% for"
        " validation)"
    )
    assert describe_data(
        Manifest.load(prepare(EmbeddedSource(), "byte", tmp_path))
    ).startswith("the King James Bible;")


def test_a_validation_of_the_first_of_several_files_is_told(tmp_path):
    for name in "ab":
        rows = [{"text": f"{name} {i} words"} for i in range(300)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)

    def lines(pattern, **train):
        source = TextSource((str(tmp_path / pattern),))
        directory = prepare(source, "byte", tmp_path / "cache")
        c = compose_config(["train.batch_tokens=128", "model.context=64"])
        c = dataclasses.replace(c, train=dataclasses.replace(c.train, **train))
        data = Dataset.open(directory, seed=0, context=64, batch_size=2)
        return describe_validation(c, data)

    [line] = lines("*.jsonl", eval_batches=2)
    assert line.startswith("a validation reads the first 256 of ")
    batches = int(line.partition("eval_batches=")[2].partition(" ")[0])
    assert lines("*.jsonl", eval_batches=batches) == []
    assert lines("*.jsonl", eval_batches=2, eval_every=0) == []
    assert lines("a.jsonl", eval_batches=2) == []


def test_a_document_that_both_parts_have_a_piece_of_is_counted_once(tmp_path):
    for i in range(7):
        (tmp_path / f"{i}.txt").write_text(f"{i}" * 300)
    assert data_line(tmp_path, "*.txt").startswith("7 files, 7 documents; ")


@pytest.mark.parametrize("long", [0, 1])
def test_a_share_of_validation_that_was_not_asked_for_is_told(tmp_path, long):
    rows = [{"text": f"{i} words"} for i in range(1000)] + [
        {"text": "long " * 2000}
    ] * long
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = data_line(tmp_path, "a.jsonl", val_fraction=0.3)
    assert (
        "not data.val_fraction=30.0%: whole documents are chosen for it" in line
    ) == (long == 1), line
