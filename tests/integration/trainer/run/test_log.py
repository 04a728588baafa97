"""A log that lost rows is noticed: by the run that goes on, and by the run that still
writes it."""

import os

import pytest
from command import tiny_config

from trainer import Callback, train
from trainer.assembly import training as build
from trainer.compiled.fp8 import StepReport
from trainer.observe.records import read_rows


def test_a_changed_log_is_noticed_by_the_run_that_goes_on_and_a_missing_report_told(
    tmp_path, monkeypatch, capsys
):
    """Every kind of damage: test_jsonl.py."""
    monkeypatch.chdir(tmp_path)
    train(tiny_config("checkpoint.every=2", "train.steps=2"))
    assert (tmp_path / "A" / "report.html").exists()
    log = tmp_path / "A" / "metrics.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"tokens": ', b'"tokens": 1'))
    capsys.readouterr()

    def fail(run_dir):
        raise KeyError("a bug")

    monkeypatch.setattr(build, "write_report", fail)
    train(tiny_config("checkpoint.every=2", "train.steps=3"))
    printed = capsys.readouterr().out
    changed = "is not what the run wrote up to step"
    assert changed in printed
    assert any(changed in row.get("event", "") for row in read_rows(log))
    assert "no report.html: KeyError('a bug')" in printed
    done = printed[printed.index("Everything is in ") :]
    assert "metrics.jsonl" in done
    assert "report.html" not in done


def test_a_log_that_is_damaged_under_the_run_is_noticed_at_the_next_checkpoint(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "A" / "metrics.jsonl"

    def steps():
        return [row["step"] for row in read_rows(log) if "event" not in row]

    def harm(context):
        if context.step in (3, 5):  # the checkpoints of 2 and 4 have noticed the last
            assert steps() == list(range(1, context.step))
        if context.step == 5:
            os.truncate(log, 0)
        elif context.step % 2:
            log.unlink()
        if context.step == 3:
            log.write_text("")

    config = tiny_config("checkpoint.every=2", "train.steps=6")
    train(config, callbacks=[Callback("harm", 1, harm)])
    assert steps()[-1] == 6
    printed = capsys.readouterr().out
    assert printed.count("was removed or replaced") == 2
    assert printed.count("was changed while") == 1


def test_the_line_about_fp8_is_logged_once_however_often_a_checkpoint_is_continued(
    tmp_path, monkeypatch
):
    """A GPU's check, which a CPU does not have. A restart is killed in the first step
    after the checkpoint, so the next one starts from the same checkpoint.
    """
    monkeypatch.chdir(tmp_path)
    line = "FP8: all matmuls"
    monkeypatch.setattr(build, "check_fp8", lambda *_: StepReport(1.0, [line]))

    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    train(tiny_config("checkpoint.every=2", "train.steps=2"))
    config = tiny_config("checkpoint.every=2", "train.steps=4")
    with monkeypatch.context() as patch:
        patch.setattr(build, "train", kill)
        with pytest.raises(Killed):
            train(config)
    train(config)
    rows = read_rows(tmp_path / "A" / "metrics.jsonl")
    steps = [row["step"] for row in rows if row.get("event") == line]
    assert steps == [1, 3]
