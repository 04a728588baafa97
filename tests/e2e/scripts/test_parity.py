"""Parity runs: what is asked for, what is run, and that it is run in the precision that
it is called by."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from scripts.studies import parity, runs
from scripts.studies.parity import Arguments
from scripts.studies.runs import Trial
from trainer.errors import UserError
from trainer.observe.records import encode_row
from trainer.run.rundir import RunDir


def test_items_are_precisions_with_further_overrides_separated_by_commas():
    items, multiples = runs.parse(
        Arguments("a+precision.exclude=[h.0.*,h.1.*],bf16,fp32", lr="1,0.5")
    )
    assert items == ["fp32", "a+precision.exclude=[h.0.*,h.1.*]", "bf16"]
    assert multiples == [1.0, 0.5]
    assert runs.safe(items[1]) == "a+precision.exclude=_h.0.__h.1.__"
    assert runs.overrides("bf16") == ["precision=bf16"]
    assert runs.overrides("bf16+precision.mu=e4m3") == [
        "precision=bf16",
        "precision.mu=e4m3",
    ]
    assert runs.overrides("experiment=fishman+seed=1") == [
        "experiment=fishman",
        "seed=1",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seeds": 0}, "seeds=0: expected at least 1"),
        ({"evaluations": 3}, "evaluations=3: expected a divisor of steps=1000"),
        ({"last": 21}, "not below last=21"),
        ({"presets": "bf16,bf16"}, "bf16 stands there twice"),
        ({"lr": "1,high"}, "lr=1,high: expected multiples"),
        ({"lr": "0"}, "lr=0: expected positive multiples"),
        (
            {"overrides": "model.lr=1e-3 tracker=none"},
            "tracker=none: the study sets tracker itself; leave it out",
        ),
        ({"presets": "bf16+seed=3"}, "seed=3: the study sets seed itself"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(arguments, message):
    with pytest.raises(UserError, match=re.escape(message)):
        runs.parse(Arguments(**{"presets": "bf16"} | arguments))


def write(run_dir, *rows):
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_bytes(
        b"".join(encode_row(row.pop("step"), row) for row in rows)
    )


def test_only_a_run_with_its_last_validation_is_finished(tmp_path):
    write(
        tmp_path / "a",
        {"step": 5, "val/loss": 2.0, "watchdog/skipped": 1},
        {"step": 10, "watchdog/skipped": 1},
    )
    assert parity.read_outcome(tmp_path / "a", 10) is None
    assert parity.read_outcome(tmp_path / "never started", 10) is None
    write(
        tmp_path / "b",
        {"step": 5, "val/loss": 2.0, "watchdog/skipped": 1},
        {"step": 10, "val/loss": 1.0},
    )
    assert parity.read_outcome(tmp_path / "b", 10) == (
        {5: 2.0, 10: 1.0},
        1,
        False,
        None,
    )


def test_a_run_that_was_stopped_or_ends_without_a_finite_loss_has_diverged(tmp_path):
    write(tmp_path / "a", {"step": 5, "val/loss": 2.0})
    (tmp_path / "a" / "divergence.txt").touch()
    write(tmp_path / "b", {"step": 10, "val/loss": float("nan")})
    for name in "ab":
        actual = parity.read_outcome(tmp_path / name, 10)
        assert actual is not None
        assert actual.diverged


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """A study's only run, ended but not evaluated, and its checkpoints; evaluations
    answer at once, or fail."""
    args = Arguments(
        "fp32",
        seeds=1,
        steps=10,
        evaluations=1,
        last=1,
        evaluate_in="fp32",
        out=str(tmp_path),
    )
    run_dir = runs.folder(tmp_path, Trial(1.0, "fp32", 0))
    write(run_dir, {"step": 10, "val/loss": 1.0})
    (run_dir / "checkpoints" / "10").mkdir(parents=True)

    really = subprocess.run

    def answer(command, **settings):
        if command[0] == "git":
            return really(command, **settings)
        if "--cfg" in command:
            return subprocess.CompletedProcess(command, 0, "model: {lr: 1}", "")
        if (tmp_path / "fails").exists():
            return subprocess.CompletedProcess(command, 2, "", "error: it is damaged\n")
        assert command[2:4] == ["trainer", "evaluate"]
        results = [{"precision": name, "loss": 1.0} for name in ("as trained", "fp32")]
        step = 5 if (tmp_path / "older").exists() else 10  # one that it fell back to
        (run_dir / "evaluation.json").write_text(
            json.dumps({"step": step, "tokens": 1, "results": results})
        )
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", answer)
    return args, run_dir


def test_a_run_that_ended_without_its_evaluation_is_evaluated_by_the_next_call(
    ended, capsys
):
    args, run_dir = ended
    parity.main(args)
    assert not (run_dir / "checkpoints").exists()
    assert (
        json.loads((run_dir.parent.parent.parent / "parity.json").read_text())["runs"][
            0
        ]["elsewhere"]
        == 1.0
    )
    assert "not evaluated" not in capsys.readouterr().out
    # what is left of them when the study is killed while it removes them
    (run_dir / "removed").mkdir()
    (run_dir.parent.parent.parent / "fails").touch()
    parity.main(args)
    assert not (run_dir / "removed").exists()


def test_somebodys_evaluation_of_other_batches_or_weights_is_not_taken_for_the_final_one(
    ended,
):
    args, run_dir = ended
    results = [{"precision": name, "loss": 7.0} for name in ("as trained", "fp32")]
    theirs = {"step": 10, "tokens": 1, "results": results}
    (run_dir / "evaluation.json").write_text(json.dumps(theirs))
    assert parity.read_outcome(run_dir, 10, "fp32").elsewhere is None
    parity.main(args)
    assert parity.read_outcome(run_dir, 10, "fp32").elsewhere == 1.0
    (run_dir / "evaluation.json").write_text(json.dumps(theirs | {"step": 5}))
    assert parity.read_outcome(run_dir, 10, "fp32").elsewhere is None


def test_a_run_that_was_killed_before_its_last_checkpoint_is_continued(
    ended, monkeypatch
):
    args, run_dir = ended
    (run_dir / "checkpoints" / "10").rename(run_dir / "checkpoints" / "5")

    continued = []

    def train(commands, folders, count, wanted):
        for job in commands:
            (folders[job] / "checkpoints" / "10").mkdir()
            continued.append(job)
            yield job

    monkeypatch.setattr(runs, "in_turn", train)
    parity.main(args)
    assert continued == [Trial(1.0, "fp32", 0)]
    assert parity.read_outcome(run_dir, 10, "fp32").elsewhere == 1.0


def test_a_last_checkpoint_that_cannot_be_read_is_said_and_none_is_removed(
    ended, capsys
):
    args, run_dir = ended
    (run_dir.parent.parent.parent / "older").touch()
    parity.main(args)
    assert (run_dir / "checkpoints" / "10").exists()
    assert (
        "is not evaluated: its checkpoint of step 10 cannot be read"
        in capsys.readouterr().out
    )


def test_a_run_that_is_still_saving_keeps_its_checkpoints(ended):
    args, run_dir = ended
    with RunDir(run_dir):
        parity.main(args)
        assert (run_dir / "checkpoints").exists()


def test_weights_that_cannot_be_evaluated_stay_and_the_study_goes_on(ended, capsys):
    args, run_dir = ended
    (run_dir.parent.parent.parent / "fails").touch()
    parity.main(args)
    assert (run_dir / "checkpoints").exists()
    assert "is not evaluated: it is damaged" in capsys.readouterr().out


def test_a_failed_run_ends_the_study_with_its_last_words(tmp_path):
    job = Trial(1.0, "bf16", 0)
    with pytest.raises(UserError, match=r"ended with exit code 2: unknown key trian"):
        list(
            runs.in_turn(
                {
                    job: [
                        *runs.command(Arguments("bf16"), job, tmp_path / "r", 1e-3),
                        "trian.steps=1",
                    ]
                },
                {job: tmp_path / "r"},
                1,
            )
        )


TWICE = """
import pathlib, signal, sys
from scripts.studies.runs import Trial, in_turn
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
job, out = Trial(1.0, "fp32", 0), pathlib.Path(sys.argv[1])
child = [sys.executable, "-c", sys.argv[2], str(out / "saved"), str(out / "ready")]
list(in_turn({job: child}, {job: out / "run"}, 1))
"""
# As the trainer: the first signal is a request, the second one the end.
ONCE = """
import os, pathlib, signal, sys, time
caught = []
def catch(number, _):
    caught.append(number)
    if len(caught) > 1:
        os._exit(1)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, catch)
pathlib.Path(sys.argv[2]).touch()
while not caught:
    time.sleep(0.01)
time.sleep(0.5)
pathlib.Path(sys.argv[1]).touch()
"""


def test_ctrl_c_in_a_terminal_is_one_signal_for_the_runs(tmp_path):
    study = subprocess.Popen(
        [sys.executable, "-c", TWICE, tmp_path, ONCE],
        start_new_session=True,
        stderr=subprocess.PIPE,
    )
    while not (tmp_path / "ready").exists():
        assert study.poll() is None
        time.sleep(0.02)
    os.killpg(study.pid, signal.SIGINT)
    study.communicate(timeout=60)
    assert (tmp_path / "saved").exists()
