"""Faults in real runs of a tiny model, and that nothing is lost but what had to be left
out.

`python -m scripts.faults.chaos` throws many more of them at one run, at random moments.
"""

import json
import resource
import time

import jax
import pytest
from command import (
    CACHE,
    TINY,
    finish,
    parameters,
    several,
    trainer,
    values,
    wait_for_row,
)

from scripts.faults import faulty
from trainer.assembly import training as build
from trainer.cli.train import main
from trainer.observe.records import read_rows

STEPS = 60
# a batch with ids that no token has; weights that turn large
BAD = {"nan": [12], "corrupt": [38]}
ARGS = [
    *TINY,
    "model.n_layer=2",  # of which what is corrupted is a spike
    f"train.steps={STEPS}",
    "parallel.data=1",
    "sample.max_new_tokens=8",
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
    rows = read_rows(run_dir / "metrics.jsonl")
    return {row["step"]: row["event"] for row in rows if "event" in row}


def saved_steps(run_dir):
    names = [path.name for path in (run_dir / "checkpoints").iterdir()]
    return sorted(int(name) for name in names if name.isdigit())


def errors_in(text):
    return [line for line in text.splitlines() if line.startswith("error: ")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run on bad data that nobody stops."""
    folder = tmp_path_factory.mktemp("faults")
    assert train(folder, "A", BAD) == 0
    return folder


@pytest.mark.smoke
def test_a_bad_batch_is_skipped_and_after_a_spike_the_run_goes_back(undisturbed):
    run_dir = undisturbed / "A"
    rows, told = values(run_dir), events(run_dir)
    assert "step 12 skipped (loss nan" in told[12]
    assert [path.name for path in (run_dir / "skipped").iterdir()] == ["12.npy"]
    assert [row["watchdog/skipped"] for row in rows[10:13]] == [0, 1, 1]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))  # steps go on
    assert "step 38: spike" in told[38]
    left_out = "skipping the batches of steps 31 to 40 (rollback 1 of 3)"
    assert f"rolled back to step 30; {left_out}" in told[40]
    before, spike, after = (
        sum(row["train/loss"] for row in rows[a:b]) / (b - a)
        for a, b in ((20, 37), (37, 40), (40, STEPS))
    )
    assert spike > before + 1
    assert after < before
    assert rows[-1]["watchdog/rollbacks"] == 1
    assert saved_steps(run_dir) == [10, 20, 30, 40, 50, 60]
    report = (run_dir / "report.html").read_text()
    assert "1 rolled back, 1 spiking" in report
    assert left_out in report


def test_a_signal_breaks_off_the_final_validation_which_is_taken_up_again_bitwise(
    undisturbed,
):
    """A clock that jumps changes nothing either."""
    undisturbed_run, run_dir = undisturbed / "A", undisturbed / "B"
    faults = BAD | {"terminate": True, "clock": [11, 15, 33]}
    assert train(undisturbed, "B", faults) == 143
    assert [row["step"] for row in values(run_dir)] == list(range(1, STEPS))
    assert train(undisturbed, "B", BAD) == 0
    assert values(undisturbed_run) == values(run_dir)
    assert events(undisturbed_run) == events(run_dir)
    assert parameters(undisturbed_run, STEPS) == parameters(run_dir, STEPS)
    texts = [
        (folder / "samples.txt").read_bytes() for folder in (undisturbed_run, run_dir)
    ]
    assert texts[0] == texts[1]
    rows = read_rows(run_dir / "metrics.jsonl")
    assert min(row.get("perf/step_ms", 1) for row in rows) > 0


def test_a_spike_without_end_stops_the_run_when_it_went_back_often_enough(
    undisturbed, capfd
):
    faults = {"corrupt": [38, 50, 51, 52]}
    assert train(undisturbed, "C", faults, "watchdog.max_rollbacks=1") == 3
    (error,) = errors_in(capfd.readouterr().err)
    assert "losses in a row were spikes" in error
    assert "after 1 rollbacks" in error
    assert "The watchdog stopped it" in (undisturbed / "C" / "report.html").read_text()


def test_a_full_disk_ends_the_run_in_a_line_and_with_room_it_goes_on(undisturbed):
    """W&B's own log, in the run directory, is no traceback either."""
    process = trainer(
        undisturbed, "D", *ARGS[len(TINY) :], "train.steps=100000", "tracker=wandb"
    )
    wait_for_row(undisturbed / "D", 15, process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, 1000))
    output = finish(process, code=2)
    (error,) = errors_in(output)
    assert "Traceback" not in output
    assert "Logging error" not in output
    assert "make room, then continue with the same run_dir" in error
    steps = saved_steps(undisturbed / "D")[-1] + 5
    assert train(undisturbed, "D", {}, f"train.steps={steps}") == 0
    assert [row["step"] for row in values(undisturbed / "D")] == [*range(1, steps + 1)]


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
    (error,) = errors_in(capsys.readouterr().err)
    assert "cannot write" in error
    assert "make room" in error
    assert not (undisturbed / "F" / ".lock").exists()


def test_an_error_while_restoring_ends_a_process_of_several_in_bounded_time(
    undisturbed, monkeypatch
):
    """The other processes may wait for it, and it for them."""
    ended = []

    def starting_point(*_, **__):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        raise RuntimeError("this process cannot read")

    monkeypatch.chdir(undisturbed)
    monkeypatch.setattr(build, "starting_point", starting_point)
    monkeypatch.setattr(build, "leave_within", lambda *args: ended.append(args))
    with pytest.raises(RuntimeError, match="cannot read") as raised:
        main([*ARGS, "run_dir=G", "watchdog.stop_seconds=7", CACHE])
    assert ended == [(7, raised.value)]


def test_when_one_process_dies_the_others_end_in_bounded_time_and_the_run_goes_on(
    tmp_path,
):
    args = [
        "train.steps=100000",
        "checkpoint.every=10",
        "checkpoint.keep=9",
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
    run_dir = tmp_path / "A"
    finish(trainer(tmp_path, "A", *args, "train.steps=40", devices=4))
    assert [row["step"] for row in values(run_dir)] == list(range(1, 41))

    # All read that a checkpoint is damaged; one of them moves it.
    for path in (run_dir / "checkpoints" / "40" / "manifest").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    more = [*args, "train.steps=42"]
    outputs = [finish(process) for process in several(tmp_path, "A", *more)]
    assert ["checkpoint 40 is damaged" in output for output in outputs] == [True, False]
    assert (run_dir / "checkpoints" / "damaged" / "40-0").is_dir()
    assert [row["step"] for row in values(run_dir)] == list(range(1, 43))
