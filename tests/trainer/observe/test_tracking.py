import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.errors import UserError
from trainer.observe.records import Sample, cut_rows, decode_row, encode_row, encode_sample, read_rows, read_samples
from trainer.observe.tracking import (
    JsonlTracker,
    MultiTracker,
    Tracker,
    last_local_step,
    make_tracker,
    read_history,
    wandb_files,
    without_layers,
)

pytestmark = pytest.mark.xdist_group(__name__)  # its tests share what one of them has made


def loss(step):
    return {"train/loss": 1 / step, "tokens": step * 10}


# --- metrics.jsonl and samples.txt ---


def test_a_row_is_a_line_with_its_step_and_is_on_disk_at_once(tmp_path):
    tracker = JsonlTracker(tmp_path, start=0)
    tracker.log(1, {"train/loss": 0.1 + 0.2, "tokens": 3})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "train/loss": 0.30000000000000004, "tokens": 3}\n'
    tracker.close()


def test_what_is_not_finite_is_valid_json_that_float_reads_back(tmp_path):
    line = encode_row(1, {"a": float("nan"), "b": float("inf"), "c": -float("inf")})
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert str([float(row[k]) for k in "abc"]) == "[nan, inf, -inf]"


def test_a_step_cannot_be_logged_twice(tmp_path):
    tracker = JsonlTracker(tmp_path, start=0)
    tracker.log(2, loss(2))
    with pytest.raises(ValueError, match="row of step 2 after the row of step 2"):
        tracker.log(2, loss(2))
    tracker.close()


def test_a_resumed_run_goes_on_after_its_step_as_if_never_stopped(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for directory, pieces in ((whole, [(0, 9)]), (parts, [(0, 5), (3, 8), (0, 1), (1, 9)])):
        directory.mkdir()
        for start, stop in pieces:
            tracker = JsonlTracker(directory, start=start)
            for step in range(start + 1, stop + 1):
                if step % 2:
                    tracker.event(step, "odd")
                tracker.log(step, loss(step))
                tracker.text(step, "sample", f"text of {step}")
            tracker.close()
    for name in ("metrics.jsonl", "samples.txt"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()


@pytest.mark.parametrize("kept", range(1, 30))
def test_a_line_torn_anywhere_is_repaired(tmp_path, kept):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode_row(1, {}) + encode_row(2, {"x": 123456789012})[:kept])
    tracker = JsonlTracker(tmp_path, start=2)
    tracker.log(3, {})
    tracker.close()
    assert [row["step"] for row in read_rows(path)] == [1, 3]


def test_a_damaged_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode_row(1, {}) + b"{not json}\n" + encode_row(3, {}))
    with pytest.raises(UserError, match=r"metrics.jsonl:2 is not a row of metrics"):
        JsonlTracker(tmp_path, start=3)


def test_of_a_row_that_comes_again_the_events_before_it_stay(tmp_path):
    path, event = tmp_path / "metrics.jsonl", {"event": "x"}
    lines = [encode_row(1, {"a": 1}), encode_row(2, event), encode_row(2, {"a": 2}), encode_row(2, event)]
    path.write_bytes(b"".join(lines))
    assert cut_rows(path, 2) == 2
    assert cut_rows(path, 2, again=True) == 1
    assert path.read_bytes() == b"".join(lines[:2])
    tracker = JsonlTracker(tmp_path, start=2, again=True)
    tracker.log(2, {"a": 2})
    tracker.close()
    assert path.read_bytes() == b"".join(lines[:3])


def test_a_row_is_read_back_with_what_is_not_finite():
    row = {"train/loss": float("nan"), "lr": 0.1, "tokens": 3}
    assert str(decode_row(encode_row(7, row).decode())) == str(row)


def test_cutting_says_which_step_is_the_last(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert cut_rows(path, 5) == -1
    path.write_bytes(b"".join(encode_row(step, {}) for step in (1, 4, 7)))
    assert cut_rows(path, 5) == 4
    assert cut_rows(path, 0) == -1
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "text",
    ["", "\n", "a\n\nb", 'step 9 | "x"\n  y', " indented", "ends\n", "\r\n\x0b\x0c\x85\u2028", "日本 \x00 ü", '\\ "'],
)
def test_no_text_can_break_the_samples(tmp_path, text):
    path = tmp_path / "samples.txt"
    samples = [Sample(1, "first", "before"), Sample(2, 'a "name" | x', text), Sample(3, "last", "after")]
    path.write_bytes(b"".join(map(encode_sample, samples)))
    assert read_samples(path) == samples


def test_a_full_disk_is_an_error_in_a_line(tmp_path):
    tracker = JsonlTracker(tmp_path, start=0)
    full = open("/dev/full", "ab", buffering=0)  # noqa: SIM115 - the tracker closes it
    tracker._rows.close()
    tracker._rows = full
    with pytest.raises(UserError, match=r"cannot write /dev/full: No space left on device; make room, then continue"):
        tracker.log(1, loss(1))


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"cannot write to .*; choose another run_dir"):
        JsonlTracker(tmp_path, start=0)


# --- several, none ---


class Recorder(Tracker):
    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if name in ("calls", "id", "__class__"):
            return object.__getattribute__(self, name)
        return lambda *args: self.calls.append((name, *args))


def test_every_call_reaches_every_tracker(tmp_path):
    recorders = [Recorder(), Recorder()]
    both = MultiTracker(recorders)
    calls = [
        ("log", 1, {}),
        ("event", 1, "e"),
        ("text", 1, "n", "t"),
        ("image", 1, "n", tmp_path),
        ("summary", {}),
        ("alert", "a", "t"),
        ("flush",),
        ("close", 3),
    ]
    for name, *args in calls:
        getattr(both, name)(*args)
    assert [r.calls for r in recorders] == [calls, calls]
    assert {name for name, *_ in calls} == {n for n in vars(Tracker) if not n.startswith("_") and n != "id"}


def test_no_tracker_writes_nothing(tmp_path):
    tracker = make_tracker("none", tmp_path, start=0, config={})
    tracker.log(1, loss(1))
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_wandb_is_not_imported_without_need(tmp_path):
    program = (
        "import sys; from pathlib import Path; from trainer.observe.tracking import make_tracker; "
        "make_tracker('jsonl', Path(sys.argv[1]), start=0, config={}).close(); assert 'wandb' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True, env=os.environ | {"PYTHONPATH": os.getcwd()})


# --- What W&B gets of the numerics ---


def numerics(layer, exponent, rms, underflow=0.0, saturated=0.0):
    figures = {"exponent": exponent, "rms": rms, "underflow": underflow, "saturated": saturated}
    return {f"numerics/weights/{layer}/{name}": value for name, value in figures.items()}


def test_of_each_class_the_extremes_over_the_layers_are_left_and_zeros_set_none():
    row = {"train/loss": 2.0, "tokens": 7}
    layers = numerics("wte.embedding", -5, 1.5, 0.25, 1e-3) | numerics("h.0.mlp.c_fc.kernel", -3.0, 0.5)
    layers |= numerics("h.0.mlp.c_fc.bias", -126, 0.0)
    assert without_layers(row | layers) == row | {
        "numerics/weights/underflow_max": 0.25,
        "numerics/weights/saturated_max": 1e-3,
        "numerics/weights/rms_min": 0.5,
        "numerics/weights/rms_max": 1.5,
        "numerics/weights/exponent_min": -5,
        "numerics/weights/exponent_max": -3,
    }
    assert without_layers(numerics("h.0.mlp.c_fc.bias", -126, 0.0)) == {
        "numerics/weights/underflow_max": 0,
        "numerics/weights/saturated_max": 0,
    }
    assert without_layers(row) == row


@pytest.mark.parametrize("order", [1, -1])
def test_a_layer_that_is_not_a_number_is_not_hidden_by_the_others(order):
    lost = numerics("wte.embedding", -5, "NaN")  # as metrics.jsonl has it
    first, second = [lost, numerics("wpe.embedding", -5, 1.0)][::order]
    found = without_layers(first | second)
    assert str(found["numerics/weights/rms_min"]) == str(found["numerics/weights/rms_max"]) == "nan"
    assert found["numerics/weights/exponent_min"] == -5


# --- W&B, in processes of its own: it leaves threads, hooks and another process behind ---

RUN = """
import json, logging, os, signal, sys, time
from pathlib import Path
from trainer.observe.tracking import make_tracker

run_dir, start, stop, kill_at = Path(sys.argv[1]), *map(int, sys.argv[2:5])
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
config = {"train": {"batch_tokens": 64}, "data": {"hf_token": "hidden-secret"}}
tracker = make_tracker("wandb", run_dir, start=start, config=config, init={"project": "p", "tags": ("t",)})
for step in range(start + 1, stop + 1):
    tracker.log(step, {"train/loss": 1 / step, "tokens": 10 * step})
    if step % 50 == 0:
        tracker.text(step, "samples", f"text of {step}")
    if step % 70 == 0:
        tracker.event(step, f"event of {step}")
    if step == kill_at:
        time.sleep(float(sys.argv[5]))
        os.kill(os.getpid(), signal.SIGKILL)
tracker.alert("rollback", "went back")
tracker.summary({"final": 7.0})
tracker.close()
"""


def environment_of(run_dir):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return clean | {"PYTHONPATH": os.getcwd(), "NETRC": str(run_dir / "no-netrc"), "HOME": str(run_dir)}


def run(run_dir, start, stop, kill_at=-1, delay=0.0, **environment):
    command = [sys.executable, "-c", RUN, *map(str, (run_dir, start, stop, kill_at, delay))]
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
    """A run of 900 steps, killed at 333 (checkpoint 300), 340 (checkpoint 0: its newest were damaged) and 700."""
    run_dir = tmp_path_factory.mktemp("killed")
    for start, kill_at, delay in ((0, 333, 0.0), (300, 340, 0.2), (0, 700, 0.0)):
        assert run(run_dir, start, 900, kill_at, delay).returncode == -signal.SIGKILL
    done = run(run_dir, 650, 900)
    assert done.returncode == 0, done.stderr
    (listed,) = re.findall(r"W&B run, offline; to upload it, its parts in order: \S+ -m wandb sync (.*)", done.stdout)
    parts = [str(path.parent) for path in wandb_files(run_dir, (run_dir / "wandb" / "run_id").read_text())]
    assert listed.split() == parts
    assert len(parts) == 4
    return run_dir


def test_wandb_holds_every_step_exactly_once_across_kills_and_resumes(killed_thrice):
    rows = [row for history in histories(killed_thrice) for row in history]
    assert Counter(row["_step"] for row in rows) == Counter(range(1, 901))
    for row in rows:
        assert row["step"] == row["_step"]
        assert row["train/loss"] == 1 / row["step"]
        assert row["tokens"] == 10 * row["step"]


def test_the_steps_of_wandb_grow_from_file_to_file(killed_thrice):
    """Or a server would drop the later ones."""
    steps = [row["_step"] for history in histories(killed_thrice) for row in history]
    assert steps == sorted(steps)
    assert sum(bool(history) for history in histories(killed_thrice)) > 1


def test_wandb_holds_every_text_and_event_once(killed_thrice):
    rows = [row for history in histories(killed_thrice) for row in history]
    assert {row["_step"]: row["events"] for row in rows if "events" in row} == {
        step: f"event of {step}" for step in range(70, 901, 70)
    }
    assert [row["_step"] for row in rows if row.get("samples/_type") == "table-file"] == list(range(50, 901, 50))


def test_metrics_jsonl_is_that_of_a_run_never_killed(killed_thrice, tmp_path):
    tracker = JsonlTracker(tmp_path, start=0)
    for step in range(1, 901):
        tracker.log(step, loss(step))
        if step % 50 == 0:
            tracker.text(step, "samples", f"text of {step}")
        if step % 70 == 0:
            tracker.event(step, f"event of {step}")
    tracker.close()
    for name in ("metrics.jsonl", "samples.txt"):
        assert (killed_thrice / name).read_bytes() == (tmp_path / name).read_bytes()


def test_no_secret_is_in_any_file_of_wandb(killed_thrice):
    files = [path for path in (killed_thrice / "wandb").rglob("*") if path.is_file() and not path.is_symlink()]
    text = b"".join(path.read_bytes() for path in files)
    assert b"batch_tokens" in text
    assert b"hidden-secret" not in text


def test_the_last_step_is_found_in_a_file_torn_anywhere(killed_thrice, tmp_path):
    run_id = (killed_thrice / "wandb" / "run_id").read_text()
    first = next(path for path in wandb_files(killed_thrice, run_id) if any(read_history(path)))
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
    done = run(tmp_path, 0, 20, WANDB_API_KEY="a" * 40, WANDB_BASE_URL="http://127.0.0.1:9", WANDB_INIT_TIMEOUT="3")
    assert done.returncode == 0, done.stderr
    assert "W&B cannot be reached" in done.stdout
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(range(1, 21))
    assert [row["step"] for history in histories(tmp_path) for row in history] == list(range(1, 21))


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


def test_when_the_process_of_wandb_dies_the_training_goes_on_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "RUN", KILL_SERVICE)
    done = run(tmp_path, 0, 20)
    assert done.returncode == 0, done.stderr
    assert "going on without; metrics.jsonl has it all" in done.stdout
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(range(1, 21))


FREEZE_SERVICE = KILL_SERVICE.replace(
    "signal.SIGKILL)\ntime", "signal.SIGSTOP); print('frozen', stat.parent.name)\ntime"
)
FREEZE_SERVICE = (
    "import trainer.observe.tracking as t; t.WAITING, t.PATIENCE, t.FINISH_SECONDS = 5, 0.5, 1\n" + FREEZE_SERVICE
)


def test_when_the_process_of_wandb_hangs_the_training_goes_on_and_ends(tmp_path):
    output = tmp_path / "output.txt"  # a pipe would be held open by what hangs
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", FREEZE_SERVICE, str(tmp_path), "0", "4000", "-1", "0"],
            env=environment_of(tmp_path),
            stdout=file,
            stderr=file,
        )
        try:
            assert process.wait(timeout=60) == 0
        finally:
            for pid in re.findall(r"frozen (\d+)", output.read_text()):
                os.kill(int(pid), signal.SIGKILL)
    assert "going on without; metrics.jsonl has it all" in output.read_text()
    steps = [row["step"] for row in read_rows(tmp_path / "metrics.jsonl") if "event" not in row]
    assert steps == list(range(1, 4001))


def test_an_alert_reaches_wandb(killed_thrice):
    run_id = (killed_thrice / "wandb" / "run_id").read_text()
    assert any(b"went back" in path.read_bytes() for path in wandb_files(killed_thrice, run_id))


def test_what_is_told_late_leaves_the_row_whole_that_is_being_collected(tmp_path, monkeypatch):
    """As a stall, which a thread reports of the last whole step while the loop is at the next one."""
    rows = []
    run = SimpleNamespace(
        dir=str(tmp_path),
        define_metric=lambda *_, **__: None,
        log=lambda row, **_: rows.append(row),
        finish=lambda **_: None,
    )
    errors = SimpleNamespace(Error=RuntimeError)
    fake = SimpleNamespace(Settings=lambda **_: None, init=lambda **_: run, Image=str, errors=errors)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("trainer.observe.tracking.logged_in", lambda: False)
    monkeypatch.setattr(logging, "raiseExceptions", True)  # put back
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("ERROR_REPORTING", "false"), ("INIT_TIMEOUT", "1")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    tracker = make_tracker("wandb", tmp_path, start=0, config={}, init={})
    tracker.log(1, loss(1))
    tracker.log(2, loss(2))
    tracker.event(1, "stalled")
    tracker.image(2, "picture", tmp_path)
    tracker.close()
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1] | {"events": "stalled", "picture": str(tmp_path)} == rows[1]


def test_wandb_that_is_disabled_leaves_the_files(tmp_path):
    done = run(tmp_path, 0, 3, WANDB_MODE="disabled")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert not (tmp_path / "wandb").exists()
