"""The guard, in processes whose main thread works, or is inside of a call that never
returns."""

import contextlib
import signal
import subprocess
import sys
import time

import pytest

from trainer.run import shutdown
from trainer.run.shutdown import HUNG_EXIT_CODE, EarlyInterrupt, Guard, Timeouts

CODE = """
import ctypes, os, sys, time
from pathlib import Path
from trainer.run.shutdown import Guard, Timeouts
folder, stop, stall, hang, doing = sys.argv[1:]
timeouts = Timeouts(float(stop), float(stall), float(hang))
say = lambda text: print(text, flush=True)
announce = lambda text: sys.argv[5] == "tells" and say(text)
with Guard(timeouts, Path(folder), say, announce) as guard:
    guard.beat("in step 3")
    print("ready", flush=True)
    if doing == "hangs on a full disk":
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, 1), os.dup2(full, 2)
    if doing.startswith("hangs"):
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)  # the second time for ever, signals or not
    while not guard.signal or doing == "tells":
        time.sleep(0.01)
        if doing == "works":
            guard.beat("in step 4")
print("left by", guard.signal)
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def one(doing, *, stop=0.0, stall=0.0, hang=0.0):
        limits = map(str, (stop, stall, hang))
        command = [sys.executable, "-c", CODE, str(tmp_path), *limits, doing]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield one
    for process in started:
        process.kill()
        process.communicate()


def ended(process):
    output, errors = process.communicate(timeout=30)
    return process.returncode, output, errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_seen_by_a_loop_that_works(start, number):
    process = start("works", stop=30, stall=0.5, hang=1)
    process.send_signal(number)
    assert ended(process) == (0, f"left by {int(number)}\n", "")


def test_a_signal_is_answered_at_once_and_says_what_a_second_one_does(start):
    process = start("tells", stop=30)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == (
        "SIGINT (in step 3): stopping after this step and saving a checkpoint within"
        " 30 s; a second Ctrl-C ends the process at once, without that checkpoint\n"
    )


def test_past_its_deadline_a_signal_ends_a_process_that_hangs(start, tmp_path):
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    (tmp_path / "checkpoints" / "40.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "hang.txt").hardlink_to(tmp_path / "precious")
    process = start("hangs", stop=1.2)
    for _ in range(3):  # schedulers repeat it, which changes nothing
        process.terminate()
        time.sleep(0.2)
        assert process.poll() is None
    code, output, errors = ended(process)
    assert code == 128 + signal.SIGTERM
    assert errors == (
        "error: not stopped within 1.2 s of the signal; the run was still in step 3;"
        " ended; checkpoints: 20; re-run the same command to resume\n"
    )
    assert output == errors.removeprefix("error: ")  # reported, too
    assert 'File "<string>", line 18 in <module>' in (tmp_path / "hang.txt").read_text()
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_process_that_hangs_is_reported_once_and_then_ended(start):
    code, output, errors = ended(start("hangs", stall=0.2, hang=1.2))
    assert code == HUNG_EXIT_CODE
    assert output.count("stalled: no progress for ") == 1
    assert errors.startswith(
        "error: no progress for 1 s, in step 3; ended; checkpoints: none;"
    )
    assert errors.count("\n") == 1


def test_on_a_full_disk_a_process_that_hangs_is_ended_too(start):
    process = start("hangs on a full disk", stall=0.2, hang=0.5)
    assert process.wait(timeout=10) == HUNG_EXIT_CODE


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_ctrl_c_ends_a_process_that_hangs_at_once(start, tmp_path, first):
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    process = start("hangs", stop=30)
    process.send_signal(first)
    time.sleep(0.5)  # two at once arrive in any order
    process.send_signal(signal.SIGINT)
    code, output, errors = ended(process)
    assert (code, output) == (128 + signal.SIGINT, "")
    ended_in = (
        "error: second Ctrl-C: process ended in step 3; checkpoints of steps: 20;"
    )
    assert errors.startswith(ended_in)


def test_a_ctrl_c_that_was_swallowed_before_the_first_step_stops_the_run_there(
    tmp_path, monkeypatch
):
    early = EarlyInterrupt()
    monkeypatch.setattr(shutdown, "EARLY_INTERRUPT", early)
    handler = signal.getsignal(signal.SIGINT)
    try:
        early.install()
        early.imported = True
        with contextlib.suppress(KeyboardInterrupt):  # as a library may
            signal.raise_signal(signal.SIGINT)
        for expected in (signal.SIGINT, 0):
            with Guard(Timeouts(30, 0, 0), tmp_path, print, print) as guard:
                assert guard.signal == expected
    finally:
        signal.signal(signal.SIGINT, handler)


def test_a_ctrl_c_during_the_imports_ends_the_process_without_an_exception():
    code = """
import signal
from trainer.run.shutdown import EARLY_INTERRUPT
EARLY_INTERRUPT.install()
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("swallowed, or an abort by nanobind")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    error = "error: interrupted before the first step; nothing was trained\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", error)
