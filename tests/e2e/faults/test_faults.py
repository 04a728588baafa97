"""Faults in real runs of a tiny model, and that nothing is lost but what had to be left
out.

`python -m scripts.faults.chaos` throws many more of them at one run, at random moments.
"""

import json
import os
import resource
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import (
    CACHE,
    TINY,
    environment,
    finish,
    parameters,
    several,
    trainer,
    values,
    wait_for_row,
)

from scripts.faults import faulty
from trainer.assembly import run as build
from trainer.cli.train import main
from trainer.data import Batch
from trainer.observe.records import read_rows
from trainer.run.rundir import RunDir
from trainer.step.state import TrainState
from trainer.text import merge_overrides

STEPS = 60
# a batch with ids that no token has; weights that turn large
BAD = {"nan": [12], "corrupt": [38]}
ARGS = [
    *TINY,
    "model.n_layer=2",  # of which what is corrupted is a spike
    f"train.steps={STEPS}",
    "parallel.data=1",
    "tracker=jsonl",
    "checkpoint.every=10",
    "checkpoint.keep=9",
    "watchdog.spike_window=16",
    "watchdog.spike_steps=3",
]


def train(folder, name, faults, *args):
    """In this process, as a test runs much sooner that way. The exit code."""
    file = folder / f"{name}.json"
    file.write_text(json.dumps(faults))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(build, "train", build.train)  # what `faulty` replaces is put back
        patch.setattr(time, "time", time.time)
        return faulty.main(file, [*ARGS, f"run_dir={name}", CACHE, *args])


def events(run_dir):
    return {
        row["step"]: row["event"]
        for row in read_rows(run_dir / "metrics.jsonl")
        if "event" in row
    }


def test_no_new_step_takes_an_injected_corruption_away(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", time.time)
    state = TrainState({"w": jnp.ones(2)}, (), jax.random.key(0))
    batch = Batch(np.zeros((1, 2), np.int32), None)
    run = SimpleNamespace(
        data=SimpleNamespace(
            batches=lambda start: ((i, batch) for i in range(start, 3))
        ),
        state=state,
        session=SimpleNamespace(run_dir=tmp_path),
    )
    weights = []
    for _ in faulty.with_faults(run, {"corrupt": [2], "nan": [3]}, tmp_path / "hung")(
        0
    ):
        run.train_step = object()  # compiled anew, as for new scales
        weights.append(float(run.state.params["w"][0]))
    assert weights == [1.0, 4.0, 4.0]
    assert (tmp_path / faulty.HAPPENED).read_text().splitlines() == [
        "corrupt 2",
        "nan 3",
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run on bad data that nobody stops."""
    folder = tmp_path_factory.mktemp("faults")
    assert train(folder, "A", BAD) == 0
    return folder


@pytest.mark.smoke
def test_a_bad_batch_is_skipped_kept_and_told(undisturbed):
    run_dir = undisturbed / "A"
    assert "step 12 skipped (loss nan" in events(run_dir)[12]
    assert [path.name for path in (run_dir / "skipped").iterdir()] == ["12.npy"]
    rows = values(run_dir)
    assert [row["watchdog/skipped"] for row in rows[10:13]] == [0, 1, 1]


@pytest.mark.smoke
def test_after_a_spike_the_run_goes_back_and_leaves_the_window_out(undisturbed):
    run_dir = undisturbed / "A"
    rows, told = values(run_dir), events(run_dir)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))  # steps go on
    assert "step 38: spike" in told[38]
    assert (
        "rolled back to step 30; skipping the batches of steps 31 to 40 (rollback 1"
        " of 3)" in told[40]
    )
    before, spike, after = (
        sum(row["train/loss"] for row in rows[a:b]) / (b - a)
        for a, b in ((20, 37), (37, 40), (40, 60))
    )
    assert spike > before + 1
    assert after < before
    assert rows[-1]["watchdog/rollbacks"] == 1
    assert sorted(int(p.name) for p in (run_dir / "checkpoints").glob("[0-9]*")) == [
        10,
        20,
        30,
        40,
        50,
        60,
    ]
    report = (run_dir / "report.html").read_text()
    assert "1 rolled back, 1 spiking" in report
    assert "skipping the batches of steps 31 to 40 (rollback 1 of 3)" in report


def test_a_signal_breaks_off_the_final_validation_which_is_taken_up_again_bitwise(
    undisturbed,
):
    """With a clock that jumps on top."""
    run_dir = undisturbed / "B"
    assert (
        train(undisturbed, "B", BAD | {"terminate": True, "clock": [11, 15, 33]}) == 143
    )
    assert [row["step"] for row in values(run_dir)] == list(range(1, STEPS))
    assert train(undisturbed, "B", BAD) == 0
    assert values(undisturbed / "A") == values(run_dir)
    assert events(undisturbed / "A") == events(run_dir)
    assert parameters(undisturbed / "A", STEPS) == parameters(run_dir, STEPS)
    assert (undisturbed / "A" / "samples.txt").read_bytes() == (
        run_dir / "samples.txt"
    ).read_bytes()
    assert (
        min(
            row["perf/step_ms"]
            for row in read_rows(run_dir / "metrics.jsonl")
            if "perf/step_ms" in row
        )
        > 0
    )


def test_a_spike_without_end_stops_the_run_when_it_went_back_often_enough(
    undisturbed, capfd
):
    assert (
        train(
            undisturbed, "C", {"corrupt": [38, 50, 51, 52]}, "watchdog.max_rollbacks=1"
        )
        == 3
    )
    error = [
        line
        for line in capfd.readouterr().err.splitlines()
        if line.startswith("error: ")
    ]
    assert len(error) == 1
    assert "losses in a row were spikes" in error[0]
    assert "after 1 rollbacks" in error[0]
    assert "The watchdog stopped it" in (undisturbed / "C" / "report.html").read_text()


def test_a_second_trainer_on_the_directory_is_refused_in_a_line(
    undisturbed, monkeypatch, capfd
):
    monkeypatch.chdir(undisturbed)
    with RunDir(undisturbed / "A"):
        assert main([*ARGS, "run_dir=A"]) == 2
    errors = capfd.readouterr().err.splitlines()
    assert len(errors) == 1
    assert f"run_dir=A is in use by process {os.getpid()}" in errors[0]


def test_a_full_disk_ends_the_run_in_a_line_and_with_room_it_goes_on(undisturbed):
    """W&B's own log, in the run directory, is no traceback either."""
    process = trainer(
        undisturbed, "D", *ARGS[len(TINY) :], "train.steps=100000", "tracker=wandb"
    )
    wait_for_row(undisturbed / "D", 15, process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, 1000))
    output = finish(process, code=2)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in output
    assert "Logging error" not in output
    assert "make room, then continue with the same run_dir" in errors[0]
    steps = [
        int(path.name) for path in (undisturbed / "D" / "checkpoints").glob("[0-9]*")
    ]
    assert train(undisturbed, "D", {}, f"train.steps={max(steps) + 5}") == 0
    assert [row["step"] for row in values(undisturbed / "D")] == list(
        range(1, max(steps) + 6)
    )


def test_a_full_disk_that_takes_no_log_either_ends_with_the_exit_code_it_has(
    undisturbed,
):
    """As `python -m trainer ... > log 2>&1`, with log on the disk that is full."""
    args = merge_overrides(ARGS, ["train.steps=100000", "run_dir=E"], [CACHE])
    with (undisturbed / "E.log").open("w") as log:
        command = [sys.executable, "-m", "trainer", *args]
        process = subprocess.Popen(
            command, cwd=undisturbed, env=environment(), stdout=log, stderr=log
        )
        wait_for_row(undisturbed / "E", 15, process)
        log.write("." * 2000)  # no room for a line, however short the log was
        log.flush()
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, 1000))
        assert process.wait(timeout=300) == 2


# Of programs that take long to compile, which depends on the machine and on what is in
# the cache already.
@pytest.mark.filterwarnings(
    "ignore:Error writing persistent compilation cache entry:UserWarning"
)
def test_a_start_on_a_full_disk_ends_in_a_line(undisturbed, monkeypatch, capsys):
    monkeypatch.chdir(undisturbed)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        assert main([*ARGS, "run_dir=F", CACHE]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (error,) = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("error: ")
    ]
    assert "cannot write" in error
    assert "make room" in error
    assert not (undisturbed / "F" / ".lock").exists()


def test_an_error_while_restoring_ends_a_process_of_several_in_bounded_time(
    undisturbed, monkeypatch
):
    """The others may wait for it in what they do together, and it for them."""
    ended = []

    def starting_point(*_, **__):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        raise RuntimeError("others read what this one cannot")

    monkeypatch.chdir(undisturbed)
    monkeypatch.setattr(build, "starting_point", starting_point)
    monkeypatch.setattr(
        build,
        "leave_within",
        lambda seconds, error: ended.append((seconds, str(error))),
    )
    with pytest.raises(RuntimeError, match="others read"):
        main([*ARGS, "run_dir=G", "watchdog.stop_seconds=7", CACHE])
    assert ended == [(7, "others read what this one cannot")]


def test_when_one_process_dies_the_others_end_in_bounded_time_and_the_run_goes_on(
    tmp_path,
):
    args = [
        "train.steps=100000",
        "checkpoint.every=10",
        "tracker=jsonl",
        "sample.max_new_tokens=0",
        "train.eval_every=0",
    ]
    processes = several(
        tmp_path, "A", *args, "watchdog.hang_seconds=8", "watchdog.stop_seconds=8"
    )
    wait_for_row(tmp_path / "A", 12, processes[0])
    processes[1].kill()
    started = time.monotonic()
    processes[0].communicate(timeout=60)
    assert processes[0].returncode != 0
    # 8 until it is noticed, 8 until it is closed, and what it takes to end
    assert time.monotonic() - started < 30
    processes[1].communicate()
    run_dir, more = tmp_path / "A", ["checkpoint.keep=9", "train.steps=42"]
    finish(trainer(tmp_path, "A", *args, *more, "train.steps=40", devices=4))
    assert [row["step"] for row in values(run_dir)] == list(range(1, 41))

    # All read that a checkpoint is damaged; one of them moves it.
    for path in (run_dir / "checkpoints" / "40" / "manifest").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    outputs = [finish(process) for process in several(tmp_path, "A", *args, *more)]
    assert ["checkpoint 40 is damaged" in output for output in outputs] == [True, False]
    assert (run_dir / "checkpoints" / "damaged" / "40-0").is_dir()
    assert [row["step"] for row in values(run_dir)] == list(range(1, 43))
