"""TensorBoard's files, read back record by record."""

import os
import re
import signal
import struct
import subprocess
import sys

import pytest
from tensorboardX.proto import event_pb2

from trainer.cli.train import main
from trainer.errors import UserError
from trainer.observe.trackers import tensorboard
from trainer.observe.trackers.choose import make_tracker
from trainer.observe.trackers.protocol import TrackerStart

PNG = bytes.fromhex(  # one white pixel
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8ffff3f0005fe02fe0def46b8"
    "0000000049454e44ae426082"
)


def events_of(path):
    """The whole records of an event file."""
    data, position = path.read_bytes(), 0
    while position + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        record = data[position + 12 : position + 12 + length]
        if len(record) < length:
            return
        yield event_pb2.Event.FromString(record)
        position += 16 + length


def shown(run_dir):
    """Tag and step to all values in the files; each but the first begins with the mark
    of a start."""
    kept = []
    for number, path in enumerate(sorted((run_dir / "tensorboard").iterdir())):
        events = list(events_of(path))
        marks = [e.session_log.status for e in events if e.HasField("session_log")]
        # later starts may have cut it
        assert marks in ([event_pb2.SessionLog.START] * (number > 0), [])
        kept += [
            (event.step, value) for event in events for value in event.summary.value
        ]
    actual = {}
    for step, value in kept:
        content = value.simple_value if value.HasField("simple_value") else None
        if value.HasField("tensor"):
            content = value.tensor.string_val[0].decode()
        if value.HasField("image"):
            content = value.image
        actual.setdefault((value.tag, step), []).append(content)
    return actual


def test_rows_events_samples_and_pictures_are_shown_once_each(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    tracker = make_tracker("tensorboard", tmp_path, start=0, config={})
    tracker.row(
        1,
        {"train/loss": 0.5, "numerics/weights/wte/rms": 2.0}
        | dict.fromkeys(FIGURES, 0.0),
    )
    tracker.event(1, "went back")
    tracker.sample(1, "samples", "first\n# second")
    tracker.picture(1, "numerics/weights/picture", tmp_path / "a.png")
    tracker.finish()
    actual = shown(tmp_path)
    image = actual.pop(("numerics/weights/picture", 1))[0]
    assert (image.width, image.height, image.encoded_image_string) == (1, 1, PNG)
    assert actual == {
        ("train/loss", 1): [0.5],
        ("numerics/weights/rms_min", 1): [2.0],
        ("numerics/weights/rms_max", 1): [2.0],
        ("numerics/weights/exponent_min", 1): [0.0],
        ("numerics/weights/exponent_max", 1): [0.0],
        ("numerics/weights/underflow_max", 1): [0.0],
        ("numerics/weights/saturated_max", 1): [0.0],
        ("events/text_summary", 1): ["went back"],
        ("samples/text_summary", 1): ["    first\n    # second\n"],
    }


FIGURES = [
    f"numerics/weights/wte/{name}" for name in ("exponent", "underflow", "saturated")
]

RUN = """
import os, signal, sys
from pathlib import Path
from trainer.observe.trackers.choose import make_tracker

start, stop, kill_at, again = map(int, sys.argv[2:])
tracker = make_tracker("tensorboard", Path(sys.argv[1]), start=start, redo_row=bool(again), config={})
for step in range(start + 1 - again, stop + 1):
    tracker.row(step, {"train/loss": 1 / 2**step})
    tracker.sample(step, "samples", f"text of {step}")
    if step % 10 == 0:
        tracker.flush()  # as before a checkpoint
    if step == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
tracker.finish()
"""


def part(run_dir, start, stop, kill_at=-1, again=0):
    command = [
        sys.executable,
        "-c",
        RUN,
        *map(str, (run_dir, start, stop, kill_at, again)),
    ]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": os.getcwd()}, check=False
    ).returncode


def test_tensorboard_shows_every_step_once_across_kills_and_resumes(tmp_path):
    assert part(tmp_path, 0, 60, kill_at=33) == -signal.SIGKILL
    assert part(tmp_path, 30, 60, kill_at=45) == -signal.SIGKILL
    # its newer checkpoints were damaged
    assert part(tmp_path, 10, 60, kill_at=55) == -signal.SIGKILL
    assert part(tmp_path, 50, 60, again=1) == 0
    rows = {("train/loss", step): [1 / 2**step] for step in range(1, 61)}
    texts = {
        ("samples/text_summary", step): [f"    text of {step}\n"]
        for step in range(1, 61)
    }
    assert shown(tmp_path) == rows | texts
    assert len(list((tmp_path / "tensorboard").iterdir())) == 4


def test_a_run_that_was_tracked_otherwise_before_is_shown_from_its_first_step_on(
    tmp_path,
):
    tracker = make_tracker("jsonl", tmp_path, start=0, config={})
    tracker.row(1, {"train/loss": 0.5})
    tracker.event(1, "went back")
    tracker.row(2, {"train/loss": 0.25})
    tracker.finish()
    tracker = make_tracker("tensorboard", tmp_path, start=1, config={})
    tracker.row(2, {"train/loss": 0.125})
    tracker.finish()
    assert shown(tmp_path) == {
        ("train/loss", 1): [0.5],
        ("events/text_summary", 1): ["went back"],
        ("train/loss", 2): [0.125],
    }


def test_a_damaged_file_keeps_the_events_before_the_damage(tmp_path, caplog):
    tracker = make_tracker("tensorboard", tmp_path, start=0, config={})
    for step in (1, 2, 3):
        tracker.row(step, {"train/loss": 1 / 2**step})
    tracker.finish()
    [path] = (tmp_path / "tensorboard").iterdir()
    data = path.read_bytes()
    middle = data.index(struct.pack("<f", 1 / 4))  # of step 2
    start = data.rindex(b"\x09", 0, middle)  # the field wall_time of its event
    path.write_bytes(data[:start] + b"\xff" * (middle - start) + data[middle:])
    tracker = make_tracker("tensorboard", tmp_path, start=3, config={})
    tracker.row(4, {"train/loss": 1 / 2**4})
    tracker.finish()
    assert shown(tmp_path) == {("train/loss", step): [1 / 2**step] for step in (1, 4)}
    # the first says the version of the file
    assert f"{path} is damaged after 2 events" in caplog.text


def test_a_fork_does_not_show_an_earlier_attempt_in_its_directory(tmp_path):
    for start, loss in ((0, 0.5), (2, 0.25)):
        tracker = make_tracker(
            "tensorboard", tmp_path, start=start, is_fork=start > 0, config={}
        )
        for step in (start + 1, start + 2):
            tracker.row(step, {"train/loss": loss})
        tracker.finish()
    assert shown(tmp_path) == {("train/loss", 3): [0.25], ("train/loss", 4): [0.25]}


def test_a_directory_that_is_not_there_is_an_error_in_a_line(tmp_path):
    tracker = tensorboard.TensorboardTracker()
    with pytest.raises(
        UserError, match=re.escape(str(tmp_path / "none" / "tensorboard"))
    ):
        tracker.start(TrackerStart(tmp_path / "none", 0, False, {}, None, None))


def test_without_the_package_it_is_one_line_and_exit_code_2(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(tensorboard, "PACKAGE", "tensorboard_that_is_not_there")
    monkeypatch.chdir(tmp_path)
    assert main(["tracker=tensorboard", "run_dir=A"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        "error: tracker=tensorboard needs package tensorboard_that_is_not_there"
    )
    assert not list(tmp_path.iterdir())
