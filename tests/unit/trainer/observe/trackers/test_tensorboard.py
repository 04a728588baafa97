"""TensorBoard's files, read back record by record."""

import os
import signal
import subprocess
import sys

from tensorboardX.proto import event_pb2

from trainer.observe.trackers import tensorboard
from trainer.observe.trackers.choose import make_tracker
from trainer.observe.trackers.protocol import TrackerStart

PNG = bytes.fromhex(  # one white pixel
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8ffff3f0005fe02fe0def46b8"
    "0000000049454e44ae426082"
)


def events_of(path):
    records = tensorboard.read_records(path.read_bytes())
    return [event_pb2.Event.FromString(content) for _, content in records]


def shown(run_dir):
    """Return all values in the files, by tag and step."""
    values = {}
    for path in sorted((run_dir / "tensorboard").iterdir()):
        for event in events_of(path):
            for value in event.summary.value:
                content = value.simple_value if value.HasField("simple_value") else None
                if value.HasField("tensor"):
                    content = value.tensor.string_val[0].decode()
                if value.HasField("image"):
                    content = value.image
                values.setdefault((value.tag, event.step), []).append(content)
    return values


def start(run_dir, step=0, **settings):
    return make_tracker("tensorboard", TrackerStart(run_dir, step, {}, **settings))


def test_rows_events_samples_and_pictures_are_shown_once_each(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    tracker = start(tmp_path)
    figures = {"exponent": 0.0, "rms": 2.0, "underflow": 0.0, "saturated": 0.0}
    numerics = {f"numerics/weights/wte/{name}": x for name, x in figures.items()}
    tracker.row(1, {"train/loss": 0.5} | numerics)
    tracker.event(1, "went back")
    tracker.sample(1, "samples", "first\n# second")
    tracker.picture(1, "numerics/weights/picture", tmp_path / "a.png")
    tracker.finish()
    actual = shown(tmp_path)
    [image] = actual.pop(("numerics/weights/picture", 1))
    assert (image.width, image.height, image.encoded_image_string) == (1, 1, PNG)
    assert actual[("train/loss", 1)] == [0.5]
    assert actual[("numerics/weights/rms_max", 1)] == [2.0]
    assert actual[("events/text_summary", 1)] == ["went back"]
    assert actual[("samples/text_summary", 1)] == ["    first\n    # second\n"]
    assert len(actual) == 1 + 6 + 2


RUN = """
import os, signal, sys
from pathlib import Path
from trainer.observe.trackers.choose import make_tracker
from trainer.observe.trackers.protocol import TrackerStart

start, stop, kill_at, again = map(int, sys.argv[2:])
tracker = make_tracker("tensorboard", TrackerStart(Path(sys.argv[1]), start, {}, bool(again)))
for step in range(start + 1 - again, stop + 1):
    tracker.row(step, {"train/loss": 1 / 2**step})
    tracker.sample(step, "samples", f"text of {step}")
    if step % 10 == 0:
        tracker.flush()  # as before a checkpoint
    if step == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
tracker.finish()
"""


def run(run_dir, *steps):
    """Run from one step to another; return the exit code."""
    command = [sys.executable, "-c", RUN, str(run_dir), *map(str, steps)]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    return subprocess.run(command, env=environment, check=False).returncode


def test_tensorboard_shows_every_step_once_across_kills_and_resumes(tmp_path):
    assert run(tmp_path, 0, 60, 33, 0) == -signal.SIGKILL
    # its newer checkpoints were damaged
    assert run(tmp_path, 10, 60, 55, 0) == -signal.SIGKILL
    assert run(tmp_path, 50, 60, -1, 1) == 0
    expected = {}
    for step in range(1, 61):
        expected["train/loss", step] = [1 / 2**step]
        expected["samples/text_summary", step] = [f"    text of {step}\n"]
    assert shown(tmp_path) == expected
    _, *resumed = sorted((tmp_path / "tensorboard").iterdir())
    assert len(resumed) == 2
    [mark] = [e for e in events_of(resumed[-1]) if e.HasField("session_log")]
    assert mark.session_log.status == event_pb2.SessionLog.START


def test_an_event_before_a_row_that_is_sent_again_stays(tmp_path):
    for settings in ({"step": 0}, {"step": 1, "redo_row": True}):
        tracker = start(tmp_path, **settings)
        if settings["step"] == 0:
            tracker.event(1, "rolled back")
        tracker.row(1, {"train/loss": 0.5})
        tracker.event(1, "saved")
        tracker.finish()
    assert shown(tmp_path) == {
        ("events/text_summary", 1): ["rolled back", "saved"],
        ("train/loss", 1): [0.5],
    }


def test_a_fork_does_not_show_an_earlier_attempt_in_its_directory(tmp_path):
    for step, loss in ((0, 0.5), (2, 0.25)):
        tracker = start(tmp_path, step, is_fork=step > 0)
        tracker.row(step + 1, {"train/loss": loss})
        tracker.finish()
    assert shown(tmp_path) == {("train/loss", 3): [0.25]}


def test_a_damaged_length_drops_no_records_without_a_warning(tmp_path, caplog):
    tracker = start(tmp_path)
    for step in range(9):
        tracker.row(step, {"train/loss": 0.5})
    tracker.finish()
    [file] = (tmp_path / "tensorboard").iterdir()
    data = file.read_bytes()
    records = [record for record, _ in tensorboard.read_records(data)]
    damaged = bytearray(data)
    damaged[len(b"".join(records[:5])) + 3] ^= 1
    file.write_bytes(damaged)
    tensorboard.remove_later_events(file, 99, event_pb2.Event.FromString)
    assert "is damaged after 5 events" in caplog.text
    assert file.read_bytes() == b"".join(records[:5])
    # a torn last record is removed without one
    caplog.clear()
    file.write_bytes(data[:-3])
    tensorboard.remove_later_events(file, 99, event_pb2.Event.FromString)
    assert file.read_bytes() == b"".join(records[:-1])
    assert not caplog.text
