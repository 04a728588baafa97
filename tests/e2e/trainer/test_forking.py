"""A program in a fork is the program that users start."""

import signal
import subprocess

import pytest
from command import environment
from forking import Forked, fresh, started


@pytest.mark.parametrize("args", [["model.n_head=5"], ["--help"]])
def test_a_fork_says_and_answers_what_a_started_program_does(tmp_path, args):
    forked = started("trainer", args, tmp_path, environment())
    assert isinstance(forked, Forked)
    plain = fresh("trainer", args, tmp_path, environment())
    assert forked.communicate(timeout=60)[0] == plain.communicate(timeout=60)[0]
    assert forked.returncode == forked.poll() == plain.returncode


def test_a_fork_takes_signals_and_time_runs_out(tmp_path):
    forked = started("trainer", ["train.steps=100000", "compile_cache=null"], tmp_path, environment())
    assert forked.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        forked.communicate(timeout=0.1)
    forked.kill()
    forked.communicate(timeout=60)
    assert forked.returncode == -signal.SIGKILL
    forked.terminate()  # of a program that has ended: nothing


def test_what_is_read_at_import_takes_a_start(tmp_path):
    variables = environment(JAX_LOG_COMPILES="1")
    plain = started("trainer", ["model.n_head=5"], tmp_path, variables)
    assert isinstance(plain, subprocess.Popen)
    plain.communicate(timeout=60)
    assert plain.returncode == 2
