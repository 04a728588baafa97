"""W&B, in processes of its own where it is real: it leaves threads, hooks and another
process behind."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from wandb.proto import wandb_internal_pb2

from scripts.faults.chaos import read_wandb_rows
from trainer.observe.records import read_rows
from trainer.observe.trackers import wandb
from trainer.observe.trackers.choose import make_tracker
from trainer.observe.trackers.protocol import TrackerStart
from trainer.observe.trackers.wandb import choose_run_id, has_login
from trainer.observe.trackers.wandb_files import HEADER, wandb_files

GIT = shutil.which("git")
RUN = """
import logging, os, signal, sys, time
from pathlib import Path
from trainer.observe.trackers.choose import make_tracker
from trainer.observe.trackers.protocol import TrackerStart

run_dir, start, stop, kill_at = Path(sys.argv[1]), *map(int, sys.argv[2:5])
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
tracker = make_tracker("wandb", TrackerStart(run_dir, start, {}), init={"project": "p"})
for stat in Path("/proc").glob("[0-9]*/stat") if kill_at == 0 else ():
    name, _, rest = stat.read_text().partition(")")
    if int(rest.split()[1]) == os.getpid() and "wandb-core" in name:
        os.kill(int(stat.parent.name), signal.SIGKILL)
        time.sleep(0.5)
for step in range(start + 1, stop + 1):
    tracker.row(step, {"train/loss": 1 / step})
    if step % 50 == 0:
        tracker.event(step, f"event of {step}")
    if step == kill_at:
        [file] = run_dir.glob("wandb/*run-*/*.wandb")
        while file.stat().st_size < 40_000:  # the last block of 32 KiB will be lost
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
tracker.finish()
"""


def run(run_dir, start, stop, kill_at=-1, **environment):
    """Run from one step to another; at `kill_at` the trainer is killed, where that is 0
    W&B's process."""
    command = [sys.executable, "-c", RUN, *map(str, (run_dir, start, stop, kill_at))]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    clean |= {"PYTHONPATH": os.getcwd(), "HOME": str(run_dir)}
    clean |= {"NETRC": str(run_dir / "no-netrc")} | environment
    return subprocess.run(
        command, env=clean, capture_output=True, text=True, timeout=120, check=False
    )


def logged_steps(run_dir):
    return [row["step"] for row in read_rows(run_dir / "metrics.jsonl")]


def wandb_rows(run_dir):
    files = wandb_files(run_dir, (run_dir / "wandb" / "run_id").read_text())
    return [list(read_wandb_rows(path)) for path in files]


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory):
    """A run's directory, the part before its kill, and what the later start printed.

    The directory is a repository of git, which lists its calls in a file beside it.
    """
    run_dir = tmp_path_factory.mktemp("killed") / "run"
    git = run_dir.parent / "bin" / "git"
    git.parent.mkdir()
    calls = run_dir.parent / "calls"
    git.write_text(f'#!/bin/sh\necho "$PWD $*" >> {calls}\nexec {GIT} "$@"\n')
    git.chmod(0o755)
    subprocess.run([GIT, "init", "-q", run_dir], check=True)
    path = f"{git.parent}:{os.environ['PATH']}"
    saving = {"PATH": path, "WANDB_SAVE_CODE": "true"}
    assert run(run_dir, 0, 900, 700, **saving).returncode == -signal.SIGKILL
    [earlier] = (run_dir / "wandb").glob("offline-run-*")
    resumed = run(run_dir, 650, 900, **saving)
    assert resumed.returncode == 0, resumed.stderr
    return run_dir, earlier, resumed.stdout


def test_wandb_holds_every_step_and_event_once_across_a_kill(killed_and_resumed):
    run_dir, *_ = killed_and_resumed
    first, second = wandb_rows(run_dir)
    assert first
    # They grow from file to file, or a server would drop the later ones.
    rows = first + second
    assert [row["_step"] for row in rows] == list(range(1, 901))
    assert all(row["train/loss"] == 1 / row["_step"] for row in rows)
    events = {row["_step"]: row["events"] for row in rows if "events" in row}
    assert events == {step: f"event of {step}" for step in range(50, 901, 50)}


def test_the_printed_command_uploads_only_the_part_of_this_start(killed_and_resumed):
    """An earlier part may be a stranger's: its log may name an entity of theirs, and
    any file of the user as an artifact."""
    run_dir, earlier, printed = killed_and_resumed
    [line] = [x for x in printed.splitlines() if "W&B run, offline" in x]
    [own] = set((run_dir / "wandb").glob("offline-run-*")) - {earlier}
    assert line.endswith(f"-m wandb sync {own}")


def test_an_unreachable_server_is_said_and_everything_is_kept(tmp_path):
    server = {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    done = run(tmp_path, 0, 20, WANDB_INIT_TIMEOUT="1", **server)
    assert done.returncode == 0, done.stderr
    assert "W&B refused or did not answer (" in done.stdout
    assert "): continuing offline" in done.stdout
    steps = list(range(1, 21))
    assert logged_steps(tmp_path) == steps
    rows = [row for part in wandb_rows(tmp_path) for row in part]
    assert [row["step"] for row in rows] == steps


def test_when_the_process_of_wandb_dies_the_training_goes_on_and_says_so(tmp_path):
    done = run(tmp_path, 0, 20, kill_at=0)
    assert done.returncode == 0, done.stderr
    assert "continuing without it; metrics.jsonl has all rows" in done.stdout
    assert logged_steps(tmp_path) == list(range(1, 21))


def test_git_never_runs_in_the_run_directory(killed_and_resumed):
    """Its .git/config may be a stranger's: git runs the programs named there."""
    run_dir, *_ = killed_and_resumed
    calls = run_dir.parent / "calls"
    assert str(run_dir) not in (calls.read_text() if calls.exists() else "")


def test_a_part_of_a_record_is_read_once(tmp_path):
    """Else a log of parts without a beginning takes a time that grows with its
    square."""
    record = wandb_internal_pb2.Record()
    item = record.history.item.add()
    item.key, item.value_json = "loss", "1.5"
    whole = record.SerializeToString()
    half = len(whole) // 2
    log = bytes(HEADER.size)
    for kind, part in ((1, whole), (2, whole[:half]), (4, whole[half:])):
        log += HEADER.pack(0, len(part), kind) + part
    path = tmp_path / "run-x.wandb"
    for kind in (3, 4):
        stray = HEADER.pack(0, len(whole), kind) + whole
        path.write_bytes(log + stray * 3 + log)
        assert list(read_wandb_rows(path)) == [{"loss": 1.5}] * 2


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """W&B, whose run is a namespace; it collects rows and the arguments of `init`."""
    rows, given = [], {}
    run = SimpleNamespace(
        dir=str(tmp_path),
        define_metric=lambda *_, **__: None,
        log=lambda row, **_: rows.append(row),
        finish=lambda **_: None,
    )

    def init(**settings):
        given.update(settings)
        return run

    module = SimpleNamespace(
        Settings=lambda **_: None,
        init=init,
        Image=str,
        errors=SimpleNamespace(Error=RuntimeError),
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(wandb, "logged_in", lambda: False)
    monkeypatch.setattr(logging, "raiseExceptions", True)  # put back
    for name in ("SILENT", "ERROR_REPORTING", "INIT_TIMEOUT"):
        monkeypatch.setenv(f"WANDB_{name}", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    return SimpleNamespace(module=module, run=run, rows=rows, given=given)


def test_a_late_event_leaves_the_row_whole_that_is_being_collected(tmp_path, fake):
    """A stall, for example, which a thread reports of the last complete step while the
    loop is at the next one."""
    config = {"train": {"batch_tokens": 64}, "data": {"hf_token": "hidden-secret"}}
    tracker = make_tracker("wandb", TrackerStart(tmp_path, 0, config), init={})
    assert "hidden-secret" not in str(fake.given["config"])
    assert fake.given["config"]["train"] == config["train"]
    tracker.row(1, {"train/loss": 1.0})
    tracker.row(2, {"train/loss": 0.5})
    tracker.event(1, "stalled")
    tracker.picture(2, "picture", tmp_path)
    tracker.finish()
    assert fake.rows == [
        {"step": 1, "train/loss": 1.0},
        {"step": 2, "train/loss": 0.5, "events": "stalled", "picture": str(tmp_path)},
    ]


def test_two_alerts_within_a_minute_are_both_sent(tmp_path, fake):
    """W&B takes a `wait_duration` of 0 for its default, a minute."""
    alerts = []
    fake.run.alert = lambda **alert: alerts.append(alert)
    tracker = make_tracker("wandb", TrackerStart(tmp_path, 0, {}), init={})
    tracker.alert("diverged", "step 1")
    tracker.alert("diverged", "step 2")
    tracker.finish()
    assert [alert["text"] for alert in alerts] == ["step 1", "step 2"]
    assert all(0 < alert["wait_duration"] < 1 for alert in alerts)


def test_when_wandb_hangs_the_training_goes_on_and_ends(
    tmp_path, fake, monkeypatch, caplog
):
    hanging, exits = threading.Event(), []
    fake.run.log = lambda row, **_: hanging.wait()
    monkeypatch.setattr(wandb, "QUEUE_SIZE", 5)
    monkeypatch.setattr(wandb, "ENQUEUE_SECONDS", 0.05)
    monkeypatch.setattr(wandb.atexit, "register", lambda *call: exits.append(call))
    tracker = make_tracker("wandb", TrackerStart(tmp_path, 0, {}), init={})
    for step in range(1, 101):
        tracker.row(step, {"train/loss": 1 / step})
    tracker.finish(3)
    assert caplog.text.count("continuing without it; metrics.jsonl has all rows") == 1
    assert logged_steps(tmp_path) == list(range(1, 101))
    assert exits == [(wandb.exit_at_once, 3)]
    hanging.set()


def test_a_fork_does_not_go_on_in_the_wandb_run_of_an_earlier_attempt(tmp_path):
    earlier = choose_run_id(tmp_path, None)
    assert choose_run_id(tmp_path, None) == earlier
    fork = choose_run_id(tmp_path, None, is_fork=True)
    assert fork != earlier
    assert choose_run_id(tmp_path, fork) == fork  # its checkpoint's


@pytest.mark.parametrize("run_id", ["myBestRun1", "../a1b2c3", "baseline", "a1b2c3d4 "])
def test_an_id_that_wandb_does_not_make_is_not_taken_from_a_run(tmp_path, run_id):
    is_made = run_id == "baseline"  # eight letters, as W&B's ids
    assert (choose_run_id(tmp_path, run_id) == run_id) == is_made
    (tmp_path / "wandb" / "run_id").write_text(run_id)
    assert (choose_run_id(tmp_path, None) == run_id) == is_made


@pytest.mark.parametrize(
    ("content", "has"),
    [
        (b"machine w login user password secret", True),
        (b"machine w login user password two secret", None),
        (b"\xff", None),
    ],
    ids=["a login", "a space in a password", "no text"],
)
def test_a_netrc_that_cannot_be_read_is_a_warning(tmp_path, caplog, content, has):
    path = tmp_path / "netrc"
    path.write_bytes(content)
    assert has_login(path, "w") is bool(has)
    assert (f"cannot read {path}" in caplog.text) == (has is None)
    assert "secret" not in caplog.text
