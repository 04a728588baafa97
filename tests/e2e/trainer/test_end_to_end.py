"""`python -m trainer` as users run it: a real process, killed and resumed."""

import shlex
import signal
import time

import pytest
from command import finish, here, parameters, trainer, values

from trainer.cli.commands import run
from trainer.cli.train import main


@pytest.mark.smoke
def test_a_run_resumes_bitwise_after_a_kill_and_suggests_commands_that_work(
    tmp_path, monkeypatch, capsys
):
    """Resumption after SIGTERM: faults/test_faults.py."""
    args = ["train.steps=24", "checkpoint.every=4", "parallel.data=1"]
    here(tmp_path, "A", *args)
    # with the devices of this process, so that it runs what that compiled
    process = trainer(tmp_path, "B", *args, devices=8)
    while not (tmp_path / "B" / "checkpoints" / "4").is_dir():
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    output = finish(trainer(tmp_path, "B", *args, devices=8))
    assert "resuming after step " in output
    assert values(tmp_path / "A") == values(tmp_path / "B")
    assert parameters(tmp_path / "A", 24) == parameters(tmp_path / "B", 24)

    monkeypatch.chdir(tmp_path)
    suggested = dict(line.split(": ", 1) for line in output.splitlines()[-2:])
    sample, longer = (
        shlex.split(suggested[name].partition("trainer ")[2])
        for name in ("sample more", "train longer")
    )
    assert sample[0] == "generate"
    assert run("generate", sample[1:]) == 0
    assert "And God said" in capsys.readouterr().out
    assert main([*longer, "parallel.data=1"]) == 0
    assert "done: 48 steps" in capsys.readouterr().out
