"""Parity runs whose first steps are the base's."""

import dataclasses
import json
import sys

import pytest

from scripts.studies import parity
from scripts.studies.pairs import Outcome
from scripts.studies.parity import Arguments
from scripts.studies.runs import Trial
from trainer.errors import UserError

TINY = "model.n_layer=1 model.n_head=1 model.d_model=16 model.context=16"


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

    monkeypatch.setattr(parity, "check_items", lambda args, items: 1.0)
    monkeypatch.setattr(parity, "command", writing)
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


def test_runs_are_compared_with_another_item_than_the_base_too():
    losses = {
        "fp32": (2.0, 2.2),
        "fp8_current": (2.001, 2.202),
        "scalify_fp8": (2.002, 2.203),
    }
    outcomes = {
        Trial(1.0, item, seed): Outcome({10: loss}, 0, False)
        for item, both in losses.items()
        for seed, loss in enumerate(both)
    }
    args = Arguments(
        "scalify_fp8,fp8_current", seeds=2, steps=10, last=1, against="fp8_current"
    )
    assert parity.second_table(dataclasses.replace(args, against=""), outcomes) == ""
    title, table = parity.second_table(args, outcomes).strip().split("\n\n")
    assert title == "The same runs, differences to fp8_current:"
    rows = {
        row.split(" | ")[1]: row.split(" | ")[6:8] for row in table.splitlines()[2:]
    }
    assert rows == {
        "fp32": ["-0.0015 ± 0.0064", "-0.07"],
        "fp8_current": ["-", "-"],
        "scalify_fp8": ["+0.0010 ± 0.0000", "+0.05"],
    }


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
