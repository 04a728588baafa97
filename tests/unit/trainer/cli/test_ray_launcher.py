"""`launcher=ray` without Ray, and from Python."""

import importlib
import sys
from types import SimpleNamespace

import pytest

import trainer
from trainer.cli.train import main
from trainer.errors import UserError


def test_without_the_extra_one_line_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "trainer.cli.ray_launcher", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    code = main(["launcher=ray", "launcher.workers=[1,2]", "run_dir=A"])
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert "error: launcher=ray needs ray[train] 2.60" in line
    assert "pip install '.[ray]', on all machines" in line


def test_without_a_cluster_one_line_says_how_to_start_one(monkeypatch):
    def fail(*args, **kwargs):  # as Ray does, where no node runs on the machine
        raise ConnectionError("Could not find any running Ray instance.")

    launcher = importlib.import_module("trainer.cli.ray_launcher")
    monkeypatch.setattr(launcher.ray, "init", fail)
    with pytest.raises(UserError, match="no Ray cluster on this machine; start one"):
        launcher.connect()


def test_a_shortage_is_printed_once_for_each_start_of_workers(capsys):
    launcher = importlib.import_module("trainer.cli.ray_launcher")
    callbacks = launcher.WorkerCallbacks(None, stop_seconds=None)
    worker = SimpleNamespace(metadata=SimpleNamespace(hostname="one", pid=7))
    group = SimpleNamespace(get_workers=lambda: [worker])
    for _ in range(2):
        callbacks.before_controller_execute_resize_decision(
            SimpleNamespace(num_workers=2)
        )
        for _ in range(3):  # Ray retries
            callbacks.after_controller_state_update(
                None, launcher.ReschedulingState(RuntimeError())
            )
        output = capsys.readouterr().out
        assert output.count("no free resources for 2 workers") == 1
        callbacks.after_worker_group_start(group)
        assert "workers: 0 on one, process 7" in capsys.readouterr().out


def test_a_launcher_is_refused_where_the_process_is_the_programs():
    config = trainer.compose(["launcher=ray", "launcher.workers=[1,2]", "run_dir=A"])
    with pytest.raises(UserError, match="launcher=ray is for the command"):
        trainer.train(config)
