"""Parity runs: what is asked for, what is run, and what is taken for its end."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest

from scripts.studies import parity, runs
from scripts.studies.parity import Arguments
from scripts.studies.runs import Trial
from trainer.errors import UserError
from trainer.observe.records import encode_row

TINY = "model.n_layer=1 model.n_head=1 model.d_model=16 model.context=16"


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


def test_a_run_has_ended_with_its_last_validation_or_where_it_was_stopped(tmp_path):
    write(
        tmp_path / "a",
        {"step": 5, "val/loss": 2.0, "watchdog/skipped": 1},
        {"step": 10, "watchdog/skipped": 1},
    )
    assert parity.read_outcome(tmp_path / "a", 10) is None
    assert parity.read_outcome(tmp_path / "never started", 10) is None
    assert parity.read_outcome(tmp_path / "a", 5) == ({5: 2.0}, 1, False, None)
    (tmp_path / "a" / "divergence.txt").touch()
    write(tmp_path / "b", {"step": 10, "val/loss": float("nan")})
    for name in "ab":
        actual = parity.read_outcome(tmp_path / name, 10)
        assert actual is not None
        assert actual.diverged


def test_a_run_that_ended_is_evaluated_once_and_an_evaluation_that_fails_is_repeated(
    tmp_path, monkeypatch, capsys
):
    run_dir = runs.folder(tmp_path, Trial(1.0, "fp32", 0))
    write(run_dir, {"step": 10, "val/loss": 1.0})
    (run_dir / "checkpoints" / "10").mkdir(parents=True)
    # somebody's, of other batches
    results = [{"precision": name, "loss": 7.0} for name in ("as trained", "fp32")]
    evaluation = {"step": 10, "tokens": 1, "results": results}
    (run_dir / "evaluation.json").write_text(json.dumps(evaluation))
    assert parity.read_outcome(run_dir, 10, "fp32").elsewhere is None
    answers = iter(("error: it is damaged\n", ""))
    really = subprocess.run

    def answer(command, **settings):
        if "evaluate" not in command:
            return really(command, **settings)
        error = next(answers)
        if not error:
            results[1]["loss"] = 1.5
            (run_dir / "evaluation.json").write_text(json.dumps(evaluation))
        return subprocess.CompletedProcess(command, 2 if error else 0, "", error)

    monkeypatch.setattr(subprocess, "run", answer)
    monkeypatch.setattr(runs, "check_items", lambda args, items: 1.0)
    usual = {"seeds": 1, "steps": 10, "evaluations": 1, "last": 1}
    args = Arguments("fp32", evaluate_in="fp32", out=str(tmp_path), **usual)
    parity.main(args)
    assert (run_dir / "checkpoints").exists()
    assert "is not evaluated: it is damaged" in capsys.readouterr().out
    parity.main(args)
    assert not (run_dir / "checkpoints").exists()
    (run,) = json.loads((tmp_path / "parity.json").read_text())["runs"]
    assert run["elsewhere"] == 1.5
    (run_dir / "removed").mkdir()  # of a study that was killed while it removed them
    parity.main(args)
    assert not (run_dir / "removed").exists()


def test_a_failed_run_ends_the_study_with_its_last_words(tmp_path):
    job = Trial(1.0, "bf16", 0)
    command = [sys.executable, "-c", "raise SystemExit('error: unknown key')"]
    with pytest.raises(UserError, match="ended with exit code 1: unknown key"):
        list(runs.in_turn({job: command}, {job: tmp_path / "r"}, 1))


def test_runs_without_a_trunk_to_start_from_are_not_run_and_that_is_said(
    tmp_path, monkeypatch, capsys
):
    args = Arguments(
        "bf16", seeds=2, steps=10, evaluations=1, last=1, trunk=4, out=str(tmp_path)
    )

    # the base of seed 1 diverges before it has saved
    def writing(args, job, run_dir, model_lr):
        trunk = (
            "pathlib.Path('checkpoints/4').mkdir(parents=True);"
            " pathlib.Path('config.yaml').touch();"
        )
        row = (
            f"pathlib.Path('metrics.jsonl').write_text({json.dumps({'step': 10, 'val/loss': 1.0})!r}"
            " + chr(10))"
        )
        ending = (
            "pathlib.Path('divergence.txt').touch()"
            if job == (1.0, "fp32", 1)
            else f"{trunk} {row}"
        )
        return [
            sys.executable,
            "-c",
            f"import os, pathlib; os.chdir({str(run_dir)!r}); {ending}",
        ]

    monkeypatch.setattr(runs, "check_items", lambda args, items: 1.0)
    monkeypatch.setattr(runs, "command", writing)
    parity.main(args)
    assert [path.parent.name for path in tmp_path.glob("1x/bf16/*/metrics.jsonl")] == [
        "0"
    ]
    assert (
        "1 runs were not begun: the base's of their seed has no checkpoint of step 4"
        in capsys.readouterr().out
    )
    assert (tmp_path / "1x/fp32/0/trunk/checkpoints/4").is_dir()
    assert not (tmp_path / "1x/fp32/0/checkpoints").exists()
    with pytest.raises(UserError, match="other trunk=0 \\(was 4\\)"):
        parity.main(dataclasses.replace(args, trunk=0))


# what starts from it is test_runs_without_a_trunk's, a fork test_resume.py's
@pytest.mark.slow
def test_runs_of_a_seed_share_the_trunk_and_go_on_from_it_in_their_own_precision(
    tmp_path, capsys
):
    out = tmp_path / "out"
    places = f"data.cache_dir={tmp_path}/data compile_cache={tmp_path}/cache"
    args = Arguments(
        "scalify_fp8_fp16",
        seeds=1,
        steps=6,
        batch_tokens=32,
        evaluations=3,
        eval_batches=2,
        last=1,
        trunk=2,
        overrides=f"{TINY} {places}",
        out=str(out),
    )
    parity.main(args)
    base, other = (
        (
            {
                run["item"]: run["curve"]
                for run in json.loads((out / "parity.json").read_text())["runs"]
            }
        )["fp32"],
        json.loads((out / "parity.json").read_text())["runs"][1]["curve"],
    )
    assert list(base) == ["2", "4", "6"]
    assert list(other) == ["4", "6"]  # its first steps are the base's
    # the same weights, moments and batches, rounded
    assert 0 < abs(other["4"] - base["4"]) < 1e-3
    assert [path.name for path in (out / "1x/fp32/0/trunk/checkpoints").iterdir()] == [
        "2"
    ]
    assert not list(out.glob("1x/*/0/checkpoints"))
    # later
    parity.main(
        dataclasses.replace(args, presets="scalify_fp8_fp16,fp32+optimizer.eps=1.01e-8")
    )
    assert "3 of 3: fp32+optimizer.eps=1.01e-8" in capsys.readouterr().out
