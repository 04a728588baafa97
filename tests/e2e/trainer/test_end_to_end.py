"""`python -m trainer` as users run it: real processes, killed, stopped and resumed."""

import re
import signal
import subprocess

import pytest
from command import environment, finish, parameters, trainer, values, wait_for_row


@pytest.mark.smoke
def test_a_run_goes_on_bitwise_after_sigkill_and_sigterm_and_suggests_commands_that_work(
    tmp_path,
):
    args = ["train.steps=30", "checkpoint.every=4", "tracker=jsonl"]
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
    output = finish(trainer(tmp_path, "B", *args))
    assert f"resuming after step {stopped}" in output
    assert values(tmp_path / "A") == values(tmp_path / "B")
    assert parameters(tmp_path / "A", 30) == parameters(tmp_path / "B", 30)
    for start, seen in (
        ("sample more: ", "And God said"),
        ("train longer: ", "done: 60 steps"),
    ):
        done = run_suggested(output, start, tmp_path)
        assert done.returncode == 0, done.stderr
        assert seen in done.stdout
        # A slow machine is told what it waits for, and no more.
        waits = [line.startswith("compiling, ") for line in done.stderr.splitlines()]
        assert all(waits), done.stderr


def run_suggested(output, start, folder):
    """What comes of a command that a run suggests at its end."""
    lines = output.splitlines()
    (command,) = [x.removeprefix(start) for x in lines if x.startswith(start)]
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
    )
