"""First contact, rehearsed: every stage runs on a CPU at a toy's size, and goes on
where it was."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.studies import gpu
from trainer.errors import UserError

ROOT = Path(__file__).resolve().parents[3]


def arguments(out, stage, **more):
    cache = os.environ["SCALIFY_TEST_CACHE"]
    return gpu.Arguments(
        stage=stage,
        out=str(out),
        size="toy",
        platform="cpu",
        compile_cache=cache,
        **more,
    )


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """All stages share it, as on a GPU."""
    return tmp_path_factory.mktemp("gpu")


def ends(out, stage):
    return json.loads((out / f"{stage}_jobs.json").read_text())


@pytest.mark.parametrize(
    "stage",
    [
        "precompile",
        pytest.param("bench124", marks=pytest.mark.slow),  # the same cases, run
        pytest.param("profile", marks=pytest.mark.slow),  # test_kernel_times.py
        pytest.param("parity", marks=pytest.mark.slow),  # test_parity.py
        # tests and runs that others here are
        pytest.param("smoke", marks=pytest.mark.slow),
    ],
)
def test_a_stage_runs_and_is_not_run_again(out, stage, monkeypatch, capsys):
    gpu.main(arguments(out, stage))
    assert all(job["ok"] for job in ends(out, stage).values())
    if stage == "smoke":
        assert set(ends(out, stage)) == {
            "tests",
            "whole",
            "again",
            "resumed",
            gpu.FLAGSHIP,
        }
        assert ends(out, stage)["resumed"]["said"] == "the same bits in 20 steps"
    if stage.startswith("bench"):
        assert (
            json.loads((out / f"{stage}.json").read_text())["rows"][0]["tokens_per_s"]
            > 0
        )
    if stage == "parity":
        assert (out / "parity" / "parity.md").exists()
    monkeypatch.setattr(gpu.subprocess, "Popen", None)  # nothing may be started
    capsys.readouterr()
    gpu.main(arguments(out, stage))
    assert "done before" in capsys.readouterr().out


@pytest.mark.slow  # plans and runs that others here are, one after another
def test_memory_is_held_beside_the_plan(out):
    with pytest.raises(UserError, match=r"plan_fp32.txt is missing: first stage=plan"):
        gpu.main(arguments(out, "memory"))
    gpu.main(arguments(out, "plan"))
    assert ends(out, "plan")["plan_fp32"]["ok"]
    plan = gpu.Study(arguments(out, "memory")).planned("fp32")
    assert plan["micro_batch"] == 1
    assert plan["predicted"]["seconds"] > plan["roofline_seconds"] > 0
    # a toy's plan does not search
    plan |= {"max_micro_batch": 2, "max_micro_batch_bound": 2}
    (out / "plan_fp32.txt").write_text(
        "compiling ...\n" + json.dumps(plan, indent=1) + "\nmore\n"
    )
    gpu.main(arguments(out, "memory"))
    assert list(ends(out, "memory")) == [
        "memory_fp32_1",
        "memory_fp32_2",
        "memory_fp32_3",
    ]


def test_other_bits_are_named_by_their_first_step(tmp_path):
    study = gpu.Study(arguments(tmp_path, "smoke"))
    for name, second in (("whole", 2.5), ("again", 2.25)):
        (tmp_path / "smoke" / name).mkdir(parents=True)
        rows = [
            {"step": step, "train/loss": loss, "grad_norm": 1.0}
            for step, loss in ((1, 3.0), (2, second))
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "smoke" / name / "metrics.jsonl").write_text(text)
    with pytest.raises(
        UserError, match="again: other bits than the run as a whole, from step 2 on"
    ):
        study.same_rows("again")


def test_a_job_that_fails_or_takes_too_long_is_named_and_begun_again(
    tmp_path, monkeypatch
):
    study = gpu.Study(arguments(tmp_path, "bench124", seconds=20.0))
    commands = {
        "slow": "import time; time.sleep(60)",
        "broken": "raise SystemExit('no such thing')",
        "good": "",
    }
    jobs = [[gpu.GpuCommand(name, ("-c", code))] for name, code in commands.items()]
    monkeypatch.setitem(study.stages, "bench124", lambda: jobs[1:])
    assert study.run() == ["broken"]
    assert ends(tmp_path, "bench124")["broken"]["said"] == "no such thing"
    monkeypatch.setitem(study.stages, "bench124", lambda: jobs)
    study.args = arguments(tmp_path, "bench124", seconds=1.0)
    assert study.run() == ["slow", "broken"]
    assert "the same command goes on" in ends(tmp_path, "bench124")["slow"]["said"]


def test_wrong_words_are_named(tmp_path):
    with pytest.raises(UserError, match="stage=smok; did you mean 'smoke'"):
        gpu.Study(arguments(tmp_path, "smok"))
    with pytest.raises(UserError, match="platform=tpu"):
        gpu.Study(gpu.Arguments(stage="smoke", platform="tpu"))


def test_every_case_of_the_full_size_is_one():
    from scripts.bench.cases import parse_case

    for size in gpu.SIZES.values():
        for texts in size.bench.values():
            assert len({parse_case(text).model for text in texts}) == 1


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_a_command_finds_the_wheels_that_were_brought(tmp_path):
    """Unpacked once; they come before what is installed."""
    folder = tmp_path / "wheels"
    (folder / "site").mkdir(parents=True)
    (folder / "site" / "hydra.py").write_text("brought = True\n")
    (folder / "site" / ".whole").touch()
    command = [
        ROOT / "scripts" / "gpu" / "with.sh",
        folder,
        "python3",
        "-c",
        "import hydra, trainer; print(hydra.brought)",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.stdout.strip() == "True", done.stderr
