"""W&B, in processes of its own: it leaves threads, hooks and another process behind."""

import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.observe.records import read_rows
from trainer.observe.trackers.choose import make_tracker
from trainer.observe.trackers.wandb import choose_run_id, has_login
from trainer.observe.trackers.wandb_files import (
    last_local_step,
    read_history,
    wandb_files,
)


def loss(step):
    return {"train/loss": 1 / step, "tokens": step * 10}


RUN = """
import json, logging, os, signal, sys, time
from pathlib import Path
from trainer.observe.trackers.choose import make_tracker

run_dir, start, stop, kill_at = Path(sys.argv[1]), *map(int, sys.argv[2:5])
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
tracker = make_tracker("wandb", run_dir, start=start, config={}, init={"project": "p", "tags": (os.environ.get("TAG", "t"),)})
for step in range(start + 1, stop + 1):
    tracker.row(step, {"train/loss": 1 / step, "tokens": 10 * step})
    if step % 50 == 0:
        tracker.sample(step, "samples", f"text of {step}")
    if step % 70 == 0:
        tracker.event(step, f"event of {step}")
    if step == kill_at:
        time.sleep(float(sys.argv[5]))
        os.kill(os.getpid(), signal.SIGKILL)
tracker.alert("rollback", "went back")
tracker.summary({"final": 7.0})
tracker.finish()
"""


def environment_of(run_dir):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return clean | {
        "PYTHONPATH": os.getcwd(),
        "NETRC": str(run_dir / "no-netrc"),
        "HOME": str(run_dir),
    }


def run(run_dir, start, stop, kill_at=-1, delay=0.0, **environment):
    command = [
        sys.executable,
        "-c",
        RUN,
        *map(str, (run_dir, start, stop, kill_at, delay)),
    ]
    return subprocess.run(
        command,
        env=environment_of(run_dir) | environment,
        cwd=Path.cwd(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def histories(run_dir):
    run_id = (run_dir / "wandb" / "run_id").read_text()
    return [list(read_history(path)) for path in wandb_files(run_dir, run_id)]


@pytest.fixture(scope="module")
def killed_thrice(tmp_path_factory):
    """A run of 900 steps, killed at 333 (checkpoint 300), 340 (checkpoint 0: its newest
    were damaged) and 700."""
    run_dir = tmp_path_factory.mktemp("killed")
    for start, kill_at, delay in ((0, 333, 0.0), (300, 340, 0.2), (0, 700, 0.0)):
        assert run(run_dir, start, 900, kill_at, delay).returncode == -signal.SIGKILL
    done = run(run_dir, 650, 900)
    assert done.returncode == 0, done.stderr
    (listed,) = re.findall(
        r"W&B run, offline; to upload it, its parts in order: \S+ -m wandb sync (.*)",
        done.stdout,
    )
    parts = [
        str(path.parent)
        for path in wandb_files(run_dir, (run_dir / "wandb" / "run_id").read_text())
    ]
    assert listed.split() == parts
    assert len(parts) == 4
    return run_dir


# test_tensorboard.py has such kills, and test_jsonl.py rows that are there already
@pytest.mark.slow
def test_wandb_holds_every_step_text_and_event_once_across_kills(killed_thrice):
    rows = [row for history in histories(killed_thrice) for row in history]
    steps = [row["_step"] for row in rows]
    # They grow from file to file, or a server would drop the later ones.
    assert steps == list(range(1, 901))
    assert sum(bool(history) for history in histories(killed_thrice)) > 1
    for row in rows:
        assert row["step"] == row["_step"]
        assert row["train/loss"] == 1 / row["step"]
        assert row["tokens"] == 10 * row["step"]
    events = {row["_step"]: row["events"] for row in rows if "events" in row}
    assert events == {step: f"event of {step}" for step in range(70, 901, 70)}
    tables = [row for row in rows if row.get("samples/_type") == "table-file"]
    assert [row["_step"] for row in tables] == list(range(50, 901, 50))
    run_id = (killed_thrice / "wandb" / "run_id").read_text()
    files = [path.read_bytes() for path in wandb_files(killed_thrice, run_id)]
    assert any(b"went back" in data for data in files)  # an alert


# test_tensorboard.py has such kills, and test_jsonl.py rows that are there already
@pytest.mark.slow
def test_the_last_step_is_found_in_a_file_torn_anywhere(killed_thrice, tmp_path):
    run_id = (killed_thrice / "wandb" / "run_id").read_text()
    first = next(
        path for path in wandb_files(killed_thrice, run_id) if any(read_history(path))
    )
    whole = first.read_bytes()
    path = tmp_path / "wandb" / f"offline-run-1-{run_id}" / f"run-{run_id}.wandb"
    path.parent.mkdir(parents=True)
    before = -1
    for size in range(0, len(whole), 1009):
        path.write_bytes(whole[:size])
        last = last_local_step(tmp_path, run_id)
        assert [row["_step"] for row in read_history(path)] == list(range(1, last + 1))
        assert last >= before
        before = last
    assert before > 0


def test_an_unreachable_server_is_said_and_everything_is_kept(tmp_path):
    done = run(
        tmp_path,
        0,
        20,
        WANDB_API_KEY="a" * 40,
        WANDB_BASE_URL="http://127.0.0.1:9",
        WANDB_INIT_TIMEOUT="3",
    )
    assert done.returncode == 0, done.stderr
    assert "W&B cannot be reached" in done.stdout
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(
        range(1, 21)
    )
    assert [row["step"] for history in histories(tmp_path) for row in history] == list(
        range(1, 21)
    )


KILL_SERVICE = RUN.replace(
    "for step in",
    """
for stat in Path("/proc").glob("[0-9]*/stat"):
    name, _, rest = stat.read_text().partition(")")
    if int(rest.split()[1]) == os.getpid() and "wandb-core" in name:
        os.kill(int(stat.parent.name), signal.SIGKILL)
time.sleep(0.5)
for step in""",
    1,
)


def test_when_the_process_of_wandb_dies_the_training_goes_on_and_says_so(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys.modules[__name__], "RUN", KILL_SERVICE)
    done = run(tmp_path, 0, 20)
    assert done.returncode == 0, done.stderr
    assert "continuing without it; metrics.jsonl has all rows" in done.stdout
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(
        range(1, 21)
    )


FREEZE_SERVICE = KILL_SERVICE.replace(
    "signal.SIGKILL)\ntime", "signal.SIGSTOP); print('frozen', stat.parent.name)\ntime"
)
FREEZE_SERVICE = (
    "import trainer.observe.trackers.wandb as t; t.QUEUE_SIZE, t.ENQUEUE_SECONDS,"
    " t.FINISH_SECONDS = 5, 0.5, 1\n" + FREEZE_SERVICE
)


# of one that dies, above: the same way out
@pytest.mark.slow
def test_when_the_process_of_wandb_hangs_the_training_goes_on_and_ends(tmp_path):
    output = tmp_path / "output.txt"  # a pipe would be held open by what hangs
    with output.open("w") as file:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                FREEZE_SERVICE,
                str(tmp_path),
                "0",
                "4000",
                "-1",
                "0",
            ],
            env=environment_of(tmp_path),
            stdout=file,
            stderr=file,
        )
        try:
            assert process.wait(timeout=60) == 0
        finally:
            for pid in re.findall(r"frozen (\d+)", output.read_text()):
                os.kill(int(pid), signal.SIGKILL)
    assert "continuing without it; metrics.jsonl has all rows" in output.read_text()
    steps = [
        row["step"]
        for row in read_rows(tmp_path / "metrics.jsonl")
        if "event" not in row
    ]
    assert steps == list(range(1, 4001))


def test_what_is_told_late_leaves_the_row_whole_that_is_being_collected(
    tmp_path, monkeypatch
):
    """As a stall, which a thread reports of the last whole step while the loop is at
    the next one."""
    rows = []
    run = SimpleNamespace(
        dir=str(tmp_path),
        define_metric=lambda *_, **__: None,
        log=lambda row, **_: rows.append(row),
        finish=lambda **_: None,
    )
    errors = SimpleNamespace(Error=RuntimeError)
    given = {}
    fake = SimpleNamespace(
        Settings=lambda **_: None,
        init=lambda **settings: given.update(settings) or run,
        Image=str,
        errors=errors,
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("trainer.observe.trackers.wandb.logged_in", lambda: False)
    monkeypatch.setattr(logging, "raiseExceptions", True)  # put back
    for name, value in (
        ("MODE", "offline"),
        ("SILENT", "true"),
        ("ERROR_REPORTING", "false"),
        ("INIT_TIMEOUT", "1"),
    ):
        monkeypatch.setenv(f"WANDB_{name}", value)
    config = {"train": {"batch_tokens": 64}, "data": {"hf_token": "hidden-secret"}}
    tracker = make_tracker("wandb", tmp_path, start=0, config=config, init={})
    assert "hidden-secret" not in str(given["config"])
    assert given["config"]["train"] == config["train"]
    tracker.row(1, loss(1))
    tracker.row(2, loss(2))
    tracker.event(1, "stalled")
    tracker.picture(2, "picture", tmp_path)
    tracker.finish()
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1] | {"events": "stalled", "picture": str(tmp_path)} == rows[1]


def test_a_fork_does_not_go_on_in_the_wandb_run_of_an_earlier_attempt(tmp_path):
    earlier = choose_run_id(tmp_path, None)
    assert choose_run_id(tmp_path, None) == earlier
    fork = choose_run_id(tmp_path, None, is_fork=True)
    assert fork != earlier
    assert choose_run_id(tmp_path, fork) == fork  # its checkpoint's


def test_wandb_that_is_disabled_leaves_the_files(tmp_path):
    done = run(tmp_path, 0, 3, WANDB_MODE="disabled")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert not (tmp_path / "wandb").exists()


def test_what_wandb_refuses_is_a_line(tmp_path):
    done = run(tmp_path, 0, 1, TAG="t" * 65, WANDB_MODE="offline")
    assert re.search(
        r"UserError: cannot start W&B: .*64 characters.*; set tracker=jsonl",
        done.stderr,
    )


@pytest.mark.parametrize(
    ("content", "has"),
    [
        (b"machine w login user password secret", True),
        (b"machine other login user password secret", False),
        (b"machine w login user password two secret", None),
        (b"\xff", None),
    ],
    ids=["a login", "of another host", "a space in a password", "no text"],
)
def test_a_netrc_that_cannot_be_read_is_a_warning(tmp_path, caplog, content, has):
    path = tmp_path / "netrc"
    path.write_bytes(content)
    assert has_login(path, "w") is bool(has)
    assert (f"cannot read {path}" in caplog.text) == (has is None)
    assert "secret" not in caplog.text
