"""`python -m trainer` as users run it: real processes, killed and resumed, on one
device and on eight."""

import random
import re
import signal
import subprocess
import time

import pytest
from command import environment, finish, parameters, trainer, values, wait_for_row

from trainer.observe.trackers.wandb_files import read_history, wandb_files


def test_a_run_killed_several_times_is_bitwise_the_run_that_was_not(tmp_path):
    args = [
        "train.steps=40",
        "checkpoint.every=10",
        "tracker=wandb",
        f"compile_cache={tmp_path}/cache",
    ]
    finish(trainer(tmp_path, "A", *args, XLA_FLAGS=""))  # compiled as for users
    rng = random.Random(0)
    for kill_at in (3, 31):
        process = trainer(tmp_path, "B", *args, "resume=auto", XLA_FLAGS="")
        wait_for_row(tmp_path / "B", kill_at, process)
        time.sleep(rng.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    output = finish(trainer(tmp_path, "B", *args, "resume=auto", XLA_FLAGS=""))
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


@pytest.mark.smoke
def test_a_run_goes_on_bitwise_after_sigkill_and_after_sigterm_which_saves_and_exits_143(
    tmp_path,
):
    args = [
        "train.steps=30",
        "checkpoint.every=4",
        "tracker=jsonl",
        "sample.max_new_tokens=0",
    ]
    finish(trainer(tmp_path, "A", *args))
    process = trainer(tmp_path, "B", *args)
    wait_for_row(tmp_path / "B", 7, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process = trainer(tmp_path, "B", *args, "checkpoint.every=0")
    wait_for_row(tmp_path / "B", 15, process)
    process.terminate()
    output = finish(process, code=143)
    assert "run_dir=" in output
    (stopped,) = re.findall(r"stopped after step (\d+) of", output)
    assert (tmp_path / "B" / "checkpoints" / stopped).is_dir()
    assert f"resuming after step {stopped}" in finish(trainer(tmp_path, "B", *args))
    assert values(tmp_path / "A") == values(tmp_path / "B")
    assert parameters(tmp_path / "A", 30) == parameters(tmp_path / "B", 30)


@pytest.mark.smoke
def test_the_farewell_suggests_commands_that_work_as_they_stand(tmp_path):
    output = finish(trainer(tmp_path, "H", "train.steps=2", "tracker=jsonl"))
    for start, seen in (
        ("sample more: ", "And God said"),
        ("train longer: ", "done: 4 steps"),
    ):
        (command,) = [
            line.removeprefix(start)
            for line in output.splitlines()
            if line.startswith(start)
        ]
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert seen in done.stdout
        # A slow machine is told what it waits for, and no more.
        assert [
            line
            for line in done.stderr.splitlines()
            if not line.startswith("compiling, ")
        ] == []
