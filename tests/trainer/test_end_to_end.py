"""`python -m trainer` as users run it: real processes, killed and resumed, on one device and on eight."""

import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from trainer.__main__ import main
from trainer.checkpoint import Checkpointer
from trainer.records import read_rows
from trainer.tracking import read_history, wandb_files

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = [
    "model.n_layer=2",
    "model.n_head=2",
    "model.d_model=32",
    "model.context=32",
    "model.dropout=0.1",
    "train.batch_tokens=512",
    "optimizer.lr=6e-4",
    "train.eval_every=15",
    "train.eval_batches=2",
    "train.final_eval_batches=2",
    "sample.max_new=8",
]


def environment(devices: int = 1, **extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "XLA_", "JAX_"))}
    flags = f"--xla_force_host_platform_device_count={devices}"
    return kept | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)} | extra


def trainer(tmp_path: Path, run_dir: str, *args: str, devices: int = 1, **variables: str) -> subprocess.Popen[str]:
    """A trainer at work in `tmp_path`, where it finds the data prepared by the one before it."""
    command = [sys.executable, "-m", "trainer", *TINY, f"run_dir={run_dir}", f"compile_cache={tmp_path}/cache", *args]
    return subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(devices, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def values(run_dir: Path) -> list[dict]:
    """The rows without what a clock or the machine's memory decides."""
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if "event" not in row]
    return [{k: v for k, v in row.items() if not k.startswith(("perf/", "memory/"))} for row in rows]


def parameters(run_dir: Path, step: int) -> dict[str, dict]:
    """Names, shapes, dtypes and checksums of every leaf of the state, as the checkpoint's manifest has them."""
    manifest = json.loads(next((run_dir / "checkpoints" / str(step) / "manifest").rglob("*")).read_text())
    return manifest["leaves"]


def wait_for_row(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until the run has logged `step`, or has ended."""
    path = run_dir / "metrics.jsonl"
    while process.poll() is None:
        if path.exists() and f'"step": {step},' in path.read_text(errors="replace"):
            return
        time.sleep(0.02)


def test_a_run_killed_several_times_is_bitwise_the_run_that_was_not(tmp_path):
    args = ["train.steps=40", "checkpoint.every=10", "tracker=wandb"]
    finish(trainer(tmp_path, "A", *args))
    rng = random.Random(0)
    for kill_at in (3, 12, 17, 31):
        process = trainer(tmp_path, "B", *args, "resume=auto")
        wait_for_row(tmp_path / "B", kill_at, process)
        time.sleep(rng.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    output = finish(trainer(tmp_path, "B", *args, "resume=auto"))
    assert "done: 40 steps" in output

    assert values(tmp_path / "A") == values(tmp_path / "B")
    assert [row["step"] for row in values(tmp_path / "B")] == list(range(1, 41))
    assert parameters(tmp_path / "A", 40) == parameters(tmp_path / "B", 40)
    logged = [
        row["step"]
        for run_id in [(tmp_path / "B" / "wandb" / "run_id").read_text()]
        for path in wandb_files(tmp_path / "B", run_id)
        for row in read_history(path)
    ]
    assert sorted(logged) == list(range(1, 41))


def test_sigterm_saves_exits_143_and_the_run_goes_on_bitwise(tmp_path):
    args = ["train.steps=30", "checkpoint.every=0", "tracker=jsonl"]
    finish(trainer(tmp_path, "A", *args))
    process = trainer(tmp_path, "B", *args)
    wait_for_row(tmp_path / "B", 5, process)
    process.terminate()
    output = finish(process, code=143)
    assert "run_dir=" in output
    assert len(list((tmp_path / "B" / "checkpoints").glob("[0-9]*"))) == 1
    finish(trainer(tmp_path, "B", *args))
    assert values(tmp_path / "A") == values(tmp_path / "B")
    assert parameters(tmp_path / "A", 30) == parameters(tmp_path / "B", 30)


def test_one_two_and_eight_devices_see_the_same_batches_and_losses(tmp_path):
    runs = {}
    for devices in (1, 2, 8):
        args = ["train.steps=10", "tracker=jsonl", "model.dropout=0", "sample.max_new=0"]
        finish(trainer(tmp_path, f"D{devices}", *args, devices=devices))
        runs[devices] = [row["train/loss"] for row in values(tmp_path / f"D{devices}")]
    for devices in (2, 8):
        # Ten updates amplify the reduction order of the first; another batch would be 1e-1 off.
        np.testing.assert_allclose(runs[devices], runs[1], rtol=1e4 * np.finfo(np.float32).eps)


def test_two_processes_see_the_batches_of_one_and_write_once(tmp_path):
    args = ["train.steps=6", "checkpoint.every=3", "tracker=jsonl", "model.dropout=0", "sample.max_new=0"]
    finish(trainer(tmp_path, "one", *args, devices=4))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    variables = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    processes = [
        trainer(tmp_path, "two", *args, "parallel.distributed=true", devices=2, JAX_PROCESS_ID=str(i), **variables)
        for i in range(2)
    ]
    outputs = [finish(process) for process in processes]
    assert ["done: 6 steps" in output for output in outputs] == [True, False]
    one, two = values(tmp_path / "one"), values(tmp_path / "two")
    assert [row["step"] for row in two] == list(range(1, 7))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(b["train/loss"], a["train/loss"], rtol=1e4 * np.finfo(np.float32).eps)
    finish(trainer(tmp_path, "two", *args, "train.steps=8", devices=4))  # what two processes saved, one goes on with


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["train.steps=10"], ["train.steps=10", "20"]),
        (["seed=1"], ["belongs to another configuration", "seed=1 (was 0)"]),
        (["resume=none"], ["holds checkpoints", "resume=none"]),
        (["run_dir=new", "resume=nowhere"], ["nowhere", "no checkpoints"]),
        (["run_dir=new", "init_from=nowhere"], ["init_from=nowhere", "does not exist"]),
        (["run_dir=new", "model.vocab_size=100"], ["model.vocab_size=100", "256"]),
        (["run_dir=new", "model.remat=x"], ["remat='x'", "dots_saveable"]),
        (["run_dir=new", "parallel.data=9"], ["parallel.data=9", "8 devices"]),
        (["run_dir=new", "parallel.data=3"], ["16 sequences", "3 devices", "train.batch_tokens"]),
        (["run_dir=new", "parallel.distributed=true"], ["processes", "JAX_COORDINATOR_ADDRESS"]),
        (["run_dir=new", "data.tokenizer=gpt3"], ["gpt3", "gpt2"]),
        (["run_dir=new", "data=text", "data.tokenizer=byte", "data.paths=[none.txt]"], ["none.txt"]),
        (["run_dir=new", "data=text", "data.tokenizer=byte", "data.paths=[empty.txt]"], ["empty.txt"]),
        (["run_dir=new", "data=text", "data.tokenizer=byte", "data.paths=[short.txt]"], ["33"]),
        (["run_dir=new", "data=text", "data.tokenizer=byte", "data.paths=[binary.txt]"], ["binary.txt"]),
        (["run_dir=new", "data=prepared", "data.prepared_dir=none"], ["none"]),
    ],
)
def test_what_cannot_run_is_one_line_exit_code_2_and_nothing_is_lost(finished_run, monkeypatch, capfd, args, names):
    directory, before = finished_run
    monkeypatch.chdir(directory)
    monkeypatch.setattr(logging.root, "handlers", [])  # Hydra's, which would outlive this test's captured output
    code = main([*TINY, "run_dir=A", "parallel.data=1", "train.steps=30", "compile_cache=null", *args])
    errors = capfd.readouterr().err.strip().splitlines()
    assert code == 2
    assert len(errors) == 1, errors
    assert errors[0].startswith("error: ")
    for name in names:
        assert name in errors[0]
    assert values(directory / "A") == before
    assert not (directory / "new").exists()


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A directory with the run A of 20 steps, and its rows."""
    tmp_path = tmp_path_factory.mktemp("finished")
    finish(trainer(tmp_path, "A", "train.steps=20", "checkpoint.every=10", "tracker=jsonl", "parallel.data=1"))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "binary.txt").write_bytes(b"text, then \xff\xfe")
    return tmp_path, values(tmp_path / "A")


def test_a_finished_run_is_left_alone_extended_or_forked(finished_run):
    tmp_path, rows = finished_run
    finish(trainer(tmp_path, "F", "train.steps=25", "resume=A", "tracker=jsonl"))
    assert [row["step"] for row in values(tmp_path / "F")] == list(range(21, 26))
    finish(trainer(tmp_path, "G", "train.steps=2", "init_from=A", "tracker=jsonl"))
    first = values(tmp_path / "G")[0]
    assert first["step"] == 1
    fresh, trained = rows[0]["train/loss"], rows[-1]["train/loss"]
    assert abs(first["train/loss"] - trained) < abs(first["train/loss"] - fresh)


def test_dry_run_describes_and_leaves_nothing(tmp_path):
    output = finish(trainer(tmp_path, "none", "dry_run=true"))
    assert "parameters" in output
    assert "memory per device" in output
    assert not (tmp_path / "none").exists()


def test_the_restored_checkpoint_is_the_one_saved(finished_run):
    tmp_path, _ = finished_run
    with Checkpointer.reading(tmp_path / "A" / "checkpoints") as checkpointer:
        assert checkpointer.steps() == [10, 20]


def test_a_diverging_run_skips_then_stops_with_exit_code_3_and_names_the_first_bad_tensor(tmp_path):
    args = ["optimizer=sgd", "optimizer.lr=1e30", "optimizer.clip_norm=0", "watchdog.max_skips=3", "tracker=jsonl"]
    output = finish(trainer(tmp_path, "A", "train.steps=20", *args), code=3)
    error = next(line for line in output.splitlines() if line.startswith("error: "))
    assert "3 steps in a row were not finite" in error
    assert "divergence.txt" in error
    assert "Traceback" not in output
    report = (tmp_path / "A" / "divergence.txt").read_text()
    assert "float32" in report
    skipped = [int(path.stem) for path in (tmp_path / "A" / "skipped").glob("*.npy")]
    assert len(skipped) == 3
    tokens = np.load(tmp_path / "A" / "skipped" / f"{skipped[0]}.npy")
    assert tokens.shape == (16, 33)
    assert any("event" in row for row in read_rows(tmp_path / "A" / "metrics.jsonl"))


def test_a_profile_is_written(tmp_path):
    finish(trainer(tmp_path, "A", "train.steps=4", "profile.steps=[2,4]", "tracker=none"))
    assert list((tmp_path / "A" / "profile").rglob("*.xplane.pb"))
