"""A log that lost rows is noticed: by the run that goes on, and by the run that still
writes it."""

import os

import pytest
from command import TINY, here

from trainer import Callback, compose, train
from trainer.assembly import run as build
from trainer.observe.records import read_rows

SMALL = [
    *TINY,
    "parallel.data=1",
    "sample.max_new_tokens=0",
    "tracker=jsonl",
    "checkpoint.every=2",
    "run_dir=A",
]
SMALL += [f"compile_cache={os.environ['SCALIFY_TEST_CACHE']}"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_log_that_is_not_what_was_written_is_noticed_when_the_run_goes_on(
    folder, capsys
):
    """Every kind of damage: test_jsonl.py."""
    train(compose([*SMALL, "train.steps=4"]))
    log = folder / "A" / "metrics.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"tokens": ', b'"tokens": 1'))
    capsys.readouterr()
    train(compose([*SMALL, "train.steps=5"]))
    says = "is not what the run wrote up to step"
    assert says in capsys.readouterr().out
    assert any(says in row.get("event", "") for row in read_rows(log))


def test_a_log_that_is_damaged_under_the_run_is_noticed_at_the_next_checkpoint(
    folder, capsys
):
    log = folder / "A" / "metrics.jsonl"

    def steps():
        return [row["step"] for row in read_rows(log) if "event" not in row]

    def harm(moment):
        if moment.step in (3, 5):  # the checkpoints of 2 and 4 have noticed the last
            assert steps() == list(range(1, moment.step))
        if moment.step == 5:
            os.truncate(log, 0)
        elif moment.step % 2:
            log.unlink()
        if moment.step == 3:
            log.write_text("")

    train(compose([*SMALL, "train.steps=6"]), callbacks=[Callback("harm", 1, harm)])
    assert steps()[-1] == 6
    printed = capsys.readouterr().out
    assert printed.count("was removed or replaced") == 2
    assert printed.count("was changed while") == 1


def test_the_end_names_no_report_that_was_not_written(tmp_path, monkeypatch):
    def fail(run_dir):
        raise KeyError("a bug")

    settings = ["train.eval_every=0", "tracker=jsonl"]
    here(tmp_path, "A", "train.steps=1", *settings)
    assert (tmp_path / "A" / "report.html").exists()
    monkeypatch.setattr(build, "write_report", fail)
    printed = here(tmp_path, "A", "train.steps=2", *settings)
    assert "no report.html: KeyError('a bug')" in printed
    done = printed[printed.index("Everything is in ") :]
    assert "metrics.jsonl" in done
    assert "report.html" not in done
